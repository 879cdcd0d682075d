"""One rank's failure ends all ranks, with the first cause in every log.

A rank that raises writes its message into the run's store. A thread on every rank looks there once a second and ends its
process: a peer that waits inside a collective cannot be reached by a Python signal handler, and would sit out the collective's
timeout (minutes) and then report that timeout and not the cause.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

FAILURE_KEY = "megatron_vla/failure"
POLL_SECONDS = 1.0
# The failing peer may have published its cause a moment after its closed connection was noticed here.
GRACE_SECONDS = 2.0


def _cause(store: Any) -> str | None:
    """The published failure, or None. A store that is gone counts as none: its owner's exit is reported elsewhere."""
    try:
        return store.get(FAILURE_KEY).decode() if store.check([FAILURE_KEY]) else None
    except (RuntimeError, dist.DistError):
        return None


def _watch(store: Any, rank: int, done: threading.Event) -> None:
    """Body of the watching thread."""
    while not done.wait(POLL_SECONDS):
        cause = _cause(store)
        # Give the main thread the chance to fail by itself with its own clean-up; then end the process.
        if cause is not None and not cause.startswith(f"rank {rank} ") and not done.wait(GRACE_SECONDS):
            print(f"rank {rank} stops: {cause}", file=sys.stderr, flush=True)
            os._exit(1)


def end_all_ranks(message: str) -> None:
    """End every rank with `message` from any thread of a rank whose main thread does not answer."""
    rank = os.environ.get("RANK", "0")
    print(f"rank {rank} stops: {message}", file=sys.stderr, flush=True)
    if dist.is_initialized() and dist.get_world_size() > 1:
        store: Any = dist.distributed_c10d._get_default_store()
        # A clone has its own connection: the original may be blocked by the main thread.
        store.clone().set(FAILURE_KEY, f"rank {rank} failed first: {message}")
        # Rank 0 may own the store: the others have to read it first.
        threading.Event().wait(POLL_SECONDS + GRACE_SECONDS)
    os._exit(1)


@contextmanager
def ends_all_ranks(rank: int, world_size: int) -> Iterator[None]:
    """Inside this block an exception on one rank ends every rank, each naming the first cause."""
    if world_size == 1:
        yield
        return
    store: Any = dist.distributed_c10d._get_default_store()
    done = threading.Event()
    # A clone has its own connection: the original may be blocked by the main thread.
    watcher = threading.Thread(target=_watch, args=(store.clone(), rank, done), name="failure-watch", daemon=True)
    watcher.start()
    try:
        yield
    except BaseException as exception:
        reporter = store.clone()
        cause = _cause(reporter)
        message = "".join(traceback.format_exception_only(exception)).strip()
        if cause is None:
            reporter.set(FAILURE_KEY, f"rank {rank} failed first: {message}")
        elif not cause.endswith(message):
            # What all ranks find together (a checkpoint that does not fit, say) stays the error that it is.
            raise RuntimeError(f"rank {rank} stops: {cause}") from exception
        raise
    finally:
        done.set()
