"""Builds the next shards while the current ones are read, in processes of their own, and hands results over in order.

Which piece is built next, into which slot it goes and when the slot is free again follow from the order of samples alone;
workers only differ in when they are done. So batches are bit-equal for any number of workers and of shards ahead, or none.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing import connection
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_vla.data.loader import DrawnSamples, SampleError
from megatron_vla.data.shard_cache import PieceJob, SampleLayout, Slots, build_piece, storage_rows
from megatron_vla.data.shard_order import LaneOrder
from megatron_vla.data.watch import POLL_SECONDS, DataWatch, StageTimes, end_processes

ORPHAN_CHECK_SECONDS = 2.0
STOP_SECONDS = 5.0
Item = TypeVar("Item")


class _Stopped(Exception):
    """The run ends while somebody waits for a piece."""


class PositionSampler(Protocol):
    """Which positions a rank reads, and in how many pieces at a time: a LaneSampler or a PackLaneSampler."""

    @property
    def order(self) -> LaneOrder:
        """Of all samples."""
        ...

    @property
    def num_open_pieces(self) -> int:
        """Pieces that this rank reads at a time."""
        ...

    def positions(self) -> Iterator[np.ndarray]:
        """Global positions, some at a time; in each lane ascending. Walking twice gives the same twice."""
        ...


class PieceBuilder(Protocol):
    """Fills slots, in this process or in others."""

    def submit(self, job: PieceJob) -> None:
        """Ask for a piece."""

    def wait(self, job: PieceJob) -> StageTimes:
        """Return when the piece is in its slot. Raises SampleError, DataWorkerError or DataStallError."""

    def close(self) -> None:
        """Stop."""


class InlineBuilder:
    """Builds a piece when it is waited for, in this process."""

    def __init__(self, order: LaneOrder, samples: DrawnSamples, slots: Slots) -> None:
        self._order, self._samples, self._slots = order, samples, slots

    def submit(self, job: PieceJob) -> None:
        """Nothing: see `wait`."""

    def wait(self, job: PieceJob) -> StageTimes:
        """See `PieceBuilder`."""
        return build_piece(job, self._order, self._samples, self._slots)

    def close(self) -> None:
        """Nothing to stop."""


def _work(worker: int, link: Any, parent: int, order: LaneOrder, samples: DrawnSamples, slots: Slots) -> None:
    """Body of a worker process."""
    # Ctrl-C is the training process's to handle; a plain SIGTERM ends a worker whatever handlers it inherited.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    samples.board.place = worker + 1
    while True:
        samples.board.note("idle")
        # Siblings hold copies of this pipe's other end, so its closing is not seen when the training process is killed.
        while not link.poll(ORPHAN_CHECK_SECONDS):
            if os.getppid() != parent:
                os._exit(1)
        job = link.recv()
        if job is None:
            return
        try:
            link.send((job, build_piece(job, order, samples, slots), None))
        except SampleError as problem:
            link.send((job, StageTimes(), str(problem)))


class WorkerBuilder:
    """`num_workers` forked processes, each with its own decoders; a piece goes to the one with the fewest waiting."""

    def __init__(self, order: LaneOrder, samples: DrawnSamples, slots: Slots, num_workers: int, watch: DataWatch) -> None:
        self._watch = watch
        self._done: dict[PieceJob, tuple[StageTimes, str | None]] = {}
        self._waiting: list[set[PieceJob]] = [set() for _ in range(num_workers)]
        self._stopped = threading.Event()
        context = multiprocessing.get_context("fork")  # slots are inherited, not sent
        self._links: list[Any] = []
        self._processes: list[Any] = []
        for worker in range(num_workers):
            mine, theirs = context.Pipe()
            arguments = (worker, theirs, os.getpid(), order, samples, slots)
            process = context.Process(target=_work, args=arguments, name=f"data-worker-{worker}", daemon=True)
            process.start()
            theirs.close()
            self._links.append(mine)
            self._processes.append(process)
        watch.worker_pids = [process.pid for process in self._processes]

    def submit(self, job: PieceJob) -> None:
        """See `PieceBuilder`."""
        worker = min(range(len(self._links)), key=lambda number: len(self._waiting[number]))
        self._waiting[worker].add(job)
        try:
            self._links[worker].send(job)
        except OSError as problem:
            raise self._died(worker) from problem

    def wait(self, job: PieceJob) -> StageTimes:
        """See `PieceBuilder`."""
        started = time.monotonic()
        while job not in self._done:
            if self._stopped.is_set():
                raise _Stopped
            self._receive()
            if time.monotonic() - started > self._watch.stall_seconds:
                raise self._watch.stalled(time.monotonic() - started)
        times, problem = self._done.pop(job)
        if problem is not None:
            raise SampleError(problem)
        return times

    def _receive(self) -> None:
        """Take what is ready; wait a moment if nothing is. Raises DataWorkerError when a worker is gone."""
        sentinels = {process.sentinel: worker for worker, process in enumerate(self._processes)}
        waited: list[Any] = [*self._links, *sentinels]
        ready: Any
        for ready in connection.wait(waited, timeout=POLL_SECONDS):
            if ready in sentinels:
                raise self._died(sentinels[ready])
            worker = self._links.index(ready)
            try:
                job, times, problem = ready.recv()
            except (EOFError, OSError) as broken:
                raise self._died(worker) from broken
            self._waiting[worker].discard(job)
            self._done[job] = times, problem

    def _died(self, worker: int) -> Exception:
        process = self._processes[worker]
        process.join(1.0)
        code = process.exitcode
        how = (
            f"was killed by signal {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"exited with code {code}"
        )
        return self._watch.died(worker, f"data worker {worker} (pid {process.pid}) {how}")

    def close(self) -> None:
        """See `PieceBuilder`. A worker that is stuck in a read is killed."""
        self._stopped.set()
        end_processes(self._processes, STOP_SECONDS)
        for link in self._links:
            link.close()
        self._watch.worker_pids = []


class ShardReader:
    """Tensors of one rank's micro-batches, read out of the slots that `builder` fills."""

    def __init__(self, sampler: PositionSampler, builder: PieceBuilder, slots: Slots) -> None:
        self._sampler, self._builder, self._slots = sampler, builder, slots
        self._order = sampler.order
        self._free = deque(range(slots.num_slots))
        self._jobs = self._schedule()
        self._submitted: deque[PieceJob] = deque()
        self._open: dict[int, PieceJob] = {}  # lane -> piece that is read
        self._row_of_place: dict[int, list[int]] = {}  # lane -> rows of the slots with the samples of the piece's places

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], StageTimes]]:
        for position_P in self._sampler.positions():
            yield self._read(position_P)

    def _schedule(self) -> Iterator[PieceJob]:
        """Pieces in the order of their first sample, found by walking the positions ahead of the reader; slots come later."""
        last: dict[int, tuple[int, int]] = {}
        for position_P in self._sampler.positions():
            for lane, key, place in self._keys(position_P):
                if last.get(lane) != key:
                    last[lane] = key
                    yield PieceJob(*key, first_place=place, slot=-1)

    def _keys(self, position_P: np.ndarray) -> Iterator[tuple[int, tuple[int, int], int]]:
        places = self._order.places(position_P)
        keys = zip(places.epoch_P.tolist(), places.piece_P.tolist(), strict=True)
        return zip(places.lane_P.tolist(), keys, places.place_P.tolist(), strict=True)

    def _submit(self) -> None:
        """Give every free slot the next piece."""
        while self._free:
            job = next(self._jobs, None)
            if job is None:
                return
            job = PieceJob(job.epoch, job.piece, job.first_place, self._free.popleft())
            self._submitted.append(job)
            self._builder.submit(job)

    def _enter(self, lane: int, key: tuple[int, int]) -> StageTimes:
        """Leave the lane's old piece and open the next one: pieces are opened exactly in the order they were scheduled."""
        old = self._open.pop(lane, None)
        if old is not None:
            self._free.append(old.slot)
        self._submit()
        job = self._submitted.popleft()
        assert (job.epoch, job.piece) == key, "reader and schedule walk the same positions"
        self._open[lane] = job
        row_M = self._slots.first_row(job.slot) + storage_rows(job, self._order)[1]
        self._row_of_place[lane] = row_M.tolist()
        return self._builder.wait(job)

    def _read(self, position_P: np.ndarray) -> tuple[dict[str, Tensor], StageTimes]:
        times = StageTimes()
        stored = self._slots.arrays
        arrays = {name: np.empty((len(position_P), *array.shape[1:]), dtype=array.dtype) for name, array in stored.items()}
        rows: list[int] = []
        first, copy_seconds = 0, 0.0
        for target, (lane, key, place) in enumerate(self._keys(position_P)):
            current = self._open.get(lane)
            if current is None or (current.epoch, current.piece) != key:
                # What was read so far is copied before the next piece may take a slot.
                copy_seconds += self._copy(rows, arrays, first)
                rows, first = [], target
                times.add(self._enter(lane, key))
            rows.append(self._row_of_place[lane][place - self._open[lane].first_place])
        copy_seconds += self._copy(rows, arrays, first)
        times.add(StageTimes(copy_seconds=copy_seconds))
        return {name: torch.from_numpy(array) for name, array in arrays.items()}, times

    def _copy(self, rows: list[int], arrays: dict[str, np.ndarray], first: int) -> float:
        """Rows of the slots into the micro-batch, from its sample `first` on; returns seconds."""
        started = time.perf_counter()
        if rows:
            for name, array in arrays.items():
                # Clipping rows, none of which is outside, lets numpy write to the result without a copy in between.
                np.take(self._slots.arrays[name], rows, axis=0, out=array[first : first + len(rows)], mode="clip")
        return time.perf_counter() - started


class ShardStream:
    """Tensors of each micro-batch of one rank and the costs that fell due with it; owns the slots and the workers."""

    def __init__(
        self,
        samples: DrawnSamples,
        sampler: PositionSampler,
        layout: SampleLayout,
        num_workers: int,
        prefetch_shards: int,
        watch: DataWatch,
    ) -> None:
        capacity = sampler.order.largest_piece
        self.num_workers = min(num_workers, prefetch_shards)
        slots = Slots(layout, sampler.num_open_pieces + prefetch_shards, capacity, shared=self.num_workers > 0)
        self._builder: PieceBuilder = InlineBuilder(sampler.order, samples, slots)
        if self.num_workers:
            self._builder = WorkerBuilder(sampler.order, samples, slots, self.num_workers, watch)
        self._reader = ShardReader(sampler, self._builder, slots)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], StageTimes]]:
        return iter(self._reader)

    def close(self) -> None:
        """Stop the workers; whoever waits for a piece stops waiting."""
        self._builder.close()


def in_background(items: Iterator[Item], depth: int, device: int | None) -> Iterator[Item]:
    """`items`, made ahead by a thread, at most `depth` of them; errors are raised here. `device`: CUDA device to pin for."""
    ready: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(maxsize=depth)
    stopped = threading.Event()

    def put(item: Item | None, problem: BaseException | None) -> None:
        while not stopped.is_set():
            try:
                return ready.put((item, problem), timeout=POLL_SECONDS)
            except queue.Full:
                continue

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # else pinning would open a context on device 0
            for item in items:
                put(item, None)
                if stopped.is_set():
                    return
            put(None, StopIteration())
        except BaseException as problem:  # handed over, not swallowed
            put(None, problem)

    threading.Thread(target=run, name="data-assembly", daemon=True).start()
    try:
        while True:
            item, problem = ready.get()
            if isinstance(problem, StopIteration):
                return
            if problem is not None:
                raise problem
            yield item  # type: ignore[misc]
    finally:
        stopped.set()
