"""What loading costs, what every worker is doing, and the end of a run whose data does not come.

A worker notes (time, stage, sample) in memory shared with the training process: cheap enough for every sample, and readable
when the worker itself no longer answers.
"""

from __future__ import annotations

import dataclasses
import multiprocessing.process
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

Stage = Literal["idle", "read", "decode", "transform"]
STAGES: tuple[Stage, ...] = ("idle", "read", "decode", "transform")
TRAINING_PROCESS = 0  # its place on the board; worker w has place w + 1
POLL_SECONDS = 0.5
# Workers' stalls are found by whoever waits for them; what is found is handed over, and the others are ended, in this time.
HANDOVER_SECONDS = 15.0


class DataStallError(RuntimeError):
    """No batch came in time; the text names rank, worker, file and stage."""


class DataWorkerError(RuntimeError):
    """A worker process is gone; the text names rank, worker, and what it was reading."""


@dataclass
class StageTimes:
    """What samples cost: seconds of worker time (read: opening and reading files; decode: pictures; copy: into batches).

    num_decoded_frames: pictures asked of the decoders; num_visits: passes over one camera of one episode; num_metadata_*: asked
    of the caches of positions, and answered by them (families that have such caches).
    """

    num_samples: int = 0
    read_seconds: float = 0.0
    decode_seconds: float = 0.0
    transform_seconds: float = 0.0
    copy_seconds: float = 0.0
    num_truncated_prompts: int = 0
    num_decoded_frames: int = 0
    num_visits: int = 0
    num_metadata_requests: int = 0
    num_metadata_hits: int = 0

    def add(self, other: StageTimes) -> None:
        """Sum up."""
        for name in _TIME_FIELDS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def metrics(self) -> dict[str, float]:
        """Milliseconds per sample by stage, cut prompts, and decoded frames per sample."""
        samples = max(1, self.num_samples)
        stages = {
            "data_read_ms": self.read_seconds,
            "data_decode_ms": self.decode_seconds,
            "data_transform_ms": self.transform_seconds,
            "data_copy_ms": self.copy_seconds,
        }
        metadata = (
            {"metadata_hit_rate": self.num_metadata_hits / self.num_metadata_requests} if self.num_metadata_requests else {}
        )
        return {
            **{name: 1e3 * seconds / samples for name, seconds in stages.items()},
            "num_truncated_prompts": float(self.num_truncated_prompts),
            "data_decoded_frames_per_sample": self.num_decoded_frames / samples,
            **metadata,
        }


_TIME_FIELDS = tuple(field.name for field in dataclasses.fields(StageTimes))


class StatusBoard:
    """Last note of the training process and of each worker: (monotonic nanoseconds, stage, sample number)."""

    def __init__(self, num_workers: int) -> None:
        # A tensor: torch hands its shared memory to forked and spawned workers alike.
        self._notes = torch.zeros((num_workers + 1, 3), dtype=torch.int64).share_memory_()
        self.place = TRAINING_PROCESS
        self._owner = os.getpid()

    def note(self, stage: Stage, sample: int = 0) -> None:
        """Called by whoever loads, in its own process."""
        row = self._notes[self.place].numpy()
        row[0], row[1], row[2] = time.monotonic_ns(), STAGES.index(stage), sample

    def busy(self) -> list[tuple[int, float, Stage, int]]:
        """(place, seconds since the note, stage, sample) of everybody who is not idle, the longest silent first."""
        now = time.monotonic_ns()
        rows = [
            (place, (now - at) / 1e9, STAGES[stage], sample) for place, (at, stage, sample) in enumerate(self._notes.tolist())
        ]
        return sorted((row for row in rows if row[2] != "idle"), key=lambda row: -row[1])

    def one(self, place: int) -> tuple[float, Stage, int]:
        """(seconds since the note, stage, sample) of one place."""
        at, stage, sample = self._notes[place].tolist()
        return (time.monotonic_ns() - at) / 1e9, STAGES[stage], sample


class DataWatch:
    """Costs and health of one run's data on this rank. `where(sample)` names a sample's episode, frame and files."""

    def __init__(self, board: StatusBoard, where: Callable[[int], str], stall_seconds: float) -> None:
        self.board = board
        self.where = where
        self.stall_seconds = stall_seconds
        self.rank = int(os.environ.get("RANK", "0"))
        self.worker_pids: list[int] = []
        self._times = StageTimes()

    def add(self, times: StageTimes) -> None:
        """Costs of one micro-batch."""
        self._times.add(times)

    def take_times(self) -> StageTimes:
        """Costs since the last call."""
        times, self._times = self._times, StageTimes()
        return times

    def metrics(self) -> dict[str, float]:
        """Since the last call, with the workers' own memory in GiB (shared pages left out)."""
        times = self.take_times()
        memory = sum(private_bytes(pid) for pid in self.worker_pids) / 2**30
        return {**times.metrics(), "data_worker_memory_gib": memory}

    def stalled(self, seconds: float) -> DataStallError:
        """The error of a batch that did not come for `seconds`."""
        busy = [self.describe(place) for place, *_ in self.board.busy()]
        stuck = [f"worker {worker} (pid {pid}) {what}" for worker, pid, what in stuck_processes(self.worker_pids)]
        return DataStallError(
            f"rank {self.rank}: no batch for {seconds:.0f} s (--data-stall-timeout-seconds {self.stall_seconds:g}); "
            f"{'; '.join(busy + stuck) or 'no worker is at work'} -> look at that file and its storage"
        )

    def died(self, worker: int | None, what: str) -> DataWorkerError:
        """The error of a worker that ended by itself (None: which one is not known)."""
        places = [worker + 1] if worker is not None else [place for place, *_ in self.board.busy()]
        doing = "; ".join(self.describe(place) for place in places)
        return DataWorkerError(
            f"rank {self.rank}: {what}; {doing or 'no worker was at work'} -> if the host ran out of memory, lower "
            "--num-workers, --prefetch-factor, --prefetch-shards or --shard-bytes"
        )

    def describe(self, place: int) -> str:
        """What the one at `place` of the board did last."""
        seconds, stage, sample = self.board.one(place)
        who = "training process" if place == TRAINING_PROCESS else f"worker {place - 1}"
        return f"{who}: idle" if stage == "idle" else f"{who}: {stage} of {self.where(sample)} for {seconds:.0f} s"

    @contextmanager
    def ends_stalled_loading(
        self, on_stall: Callable[[str], Any], grace_seconds: float = 0.0
    ) -> Iterator[Callable[[bool], None]]:
        """For loading in the training process, which cannot time itself out of a blocked read.

        Yields a function to be called with True before each load and False after it. When a load takes longer than
        --data-stall-timeout-seconds and `grace_seconds`, a thread calls `on_stall(message)`, which must not return to training.
        """
        limit = self.stall_seconds + grace_seconds
        started_at: list[float] = [0.0]
        done = threading.Event()

        def watch() -> None:
            while not done.wait(min(POLL_SECONDS, self.stall_seconds / 4)):
                started = started_at[0]
                if started and time.monotonic() - started > limit:
                    on_stall(str(self.stalled(time.monotonic() - started)))
                    return

        def load(begins: bool) -> None:
            started_at[0] = time.monotonic() if begins else 0.0

        threading.Thread(target=watch, name="data-stall-watch", daemon=True).start()
        try:
            yield load
        finally:
            done.set()


STUCK_STATES = {"T": "is stopped by a signal", "D": "waits for a disk that does not answer", "Z": "has ended"}


def stuck_processes(pids: Sequence[int]) -> list[tuple[int, int, str]]:
    """(place in `pids`, process, what is wrong with it) of those that the kernel does not let run."""
    found = []
    for place, pid in enumerate(pids):
        try:
            with open(f"/proc/{pid}/stat") as file:
                # The name, in brackets, may hold anything.
                state = file.read().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state in STUCK_STATES:
            found.append((place, pid, STUCK_STATES[state]))
    return found


def end_processes(processes: Sequence[Any], seconds: float) -> None:
    """End processes of multiprocessing: asked for `seconds` together, then killed. Never waits longer than that and a moment.

    A process that cannot be killed (it waits for a disk) is left behind: multiprocessing would wait for it at the exit.
    """
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join(1.0)
        if process.is_alive():
            multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]


def private_bytes(pid: int) -> int:
    """Resident memory of a process without pages it shares with others; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, shared, *_ = file.read().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
