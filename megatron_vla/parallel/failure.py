"""One rank's failure ends all ranks, with the first cause in every log, and a wait that fails says whom it waited for.

A rank that raises writes its message into the run's store. A thread on every rank looks there once a second and ends its
process: a peer that waits inside a collective cannot be reached by a Python signal handler, and would sit out the collective's
timeout (minutes) and then report that timeout and not the cause. The same thread publishes what its rank is doing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

FAILURE_KEY = "megatron_vla/failure"
PHASE_KEY = "megatron_vla/phase"
POLL_SECONDS = 1.0
# The failing peer may have published its cause a moment after its closed connection was noticed here.
GRACE_SECONDS = 2.0
MAX_RANKS_SHOWN = 8


def _read(store: Any, key: str) -> str | None:
    """A published text, or None. A store that is gone counts as none: its owner's exit is reported elsewhere."""
    try:
        return store.get(key).decode() if store.check([key]) else None
    except (RuntimeError, dist.DistError):
        return None


class RankWatch:
    """What this rank is doing, for the others to read; publishing costs the training thread nothing."""

    def __init__(self, rank: int, world_size: int):
        self.rank = rank
        self.world_size = world_size
        self._phase = ("starting", time.time())

    def enter(self, phase: str) -> None:
        """Say what comes next, for example "waiting for data of iteration 12"."""
        self._phase = (phase, time.time())

    def publish(self, store: Any) -> None:
        """Called by the watching thread."""
        text, since = self._phase
        store.set(f"{PHASE_KEY}/{self.rank}", f"{since} {text}")

    def others(self, store: Any) -> str:
        """Ranks that were last heard of in another phase than this one: the first suspects when a collective fails."""
        mine, _ = self._phase
        lines = []
        for rank in range(self.world_size):
            published = _read(store, f"{PHASE_KEY}/{rank}") if rank != self.rank else None
            if published is None:
                continue
            since, text = published.split(" ", 1)
            if text != mine:
                lines.append(f"rank {rank}: {text} for {time.time() - float(since):.0f} s")
        shown = "; ".join(lines[:MAX_RANKS_SHOWN]) + ("; ..." if len(lines) > MAX_RANKS_SHOWN else "")
        return f" [while {mine}; {shown or 'no rank was elsewhere'}]"


def _watch(store: Any, watch: RankWatch, done: threading.Event) -> None:
    """Body of the watching thread."""
    while not done.wait(POLL_SECONDS):
        try:
            watch.publish(store)
        except (RuntimeError, dist.DistError):
            return  # the store's owner is gone, and torchrun is about to end this process too
        cause = _read(store, FAILURE_KEY)
        # Give the main thread the chance to fail by itself with its own clean-up; then end the process.
        if cause is not None and not cause.startswith(f"rank {watch.rank} ") and not done.wait(GRACE_SECONDS):
            print(f"rank {watch.rank} stops: {cause}", file=sys.stderr, flush=True)
            os._exit(1)


def _is_common(exception: BaseException) -> bool:
    """Whether this is an error of the collective and not of this rank's own work."""
    return isinstance(exception, dist.DistError) or "gloo" in str(exception) or "NCCL" in str(exception)


def end_all_ranks(message: str) -> None:
    """End every rank with `message` from any thread of a rank whose main thread does not answer."""
    rank = os.environ.get("RANK", "0")
    print(f"rank {rank} stops: {message}", file=sys.stderr, flush=True)
    if dist.is_initialized() and dist.get_world_size() > 1:
        store: Any = dist.distributed_c10d._get_default_store()
        # A thread of its own: without the store's owner, a new connection would be tried for minutes.
        threading.Thread(target=_publish, args=(store, f"rank {rank} failed first: {message}"), daemon=True).start()
        # Rank 0 may own the store: the others have to read it first.
        threading.Event().wait(POLL_SECONDS + GRACE_SECONDS)
    os._exit(1)


def _publish(store: Any, text: str) -> None:
    # A clone has its own connection: the original may be blocked by the main thread.
    with suppress(RuntimeError, dist.DistError):
        store.clone().set(FAILURE_KEY, text)


@contextmanager
def ends_all_ranks(rank: int, world_size: int) -> Iterator[RankWatch]:
    """Inside this block an exception on one rank ends every rank, each naming the first cause."""
    watch = RankWatch(rank, world_size)
    if world_size == 1:
        yield watch
        return
    store: Any = dist.distributed_c10d._get_default_store()
    done = threading.Event()
    # A clone has its own connection: the original may be blocked by the main thread. Both are made while the store's owner is
    # alive: a rank that fails after it would try to connect for minutes.
    reporting = store.clone()
    thread = threading.Thread(target=_watch, args=(store.clone(), watch, done), name="failure-watch", daemon=True)
    thread.start()
    try:
        yield watch
    except BaseException as exception:
        _report(reporting, watch, exception)
        raise
    finally:
        done.set()


def _report(store: Any, watch: RankWatch, exception: BaseException) -> None:
    """Publish this rank's failure, or raise with the earlier one of another rank."""
    message = "".join(traceback.format_exception_only(exception)).strip()
    if _is_common(exception) and _read(store, FAILURE_KEY) is None:
        # A closed connection is the consequence of another rank's failure: let that rank speak first.
        time.sleep(GRACE_SECONDS)
    cause = _read(store, FAILURE_KEY)
    if cause is None:
        where = watch.others(store) if _is_common(exception) else ""
        with suppress(RuntimeError, dist.DistError):  # the store's owner is gone; the exception says the rest
            store.set(FAILURE_KEY, f"rank {watch.rank} failed first: {message}{where}")
        if where:
            exception.add_note(f"rank {watch.rank}:{where}")
    elif message not in cause:
        # What all ranks find together (a checkpoint that does not fit, say) stays the error that it is.
        raise RuntimeError(f"rank {watch.rank} stops: {cause}") from exception
