"""Worker side of data supply: one sample, its draws, one micro-batch, and errors that say which sample.

Shape legend: as data/batch.py; M samples of a piece.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from megatron_vla.data.batch import Batch, TensorFields, collate_tensors
from megatron_vla.data.pack_sampler import PackSampler
from megatron_vla.data.packed_batch import PackedBatch, pack_samples
from megatron_vla.data.packing import PackLimits, SampleSize
from megatron_vla.data.sampler import MicroBatchSampler
from megatron_vla.data.watch import DataWatch, StageTimes, StatusBoard, end_processes

# Random draws of one training sample as arrays, by (seed, epoch, sample index).
Draws = Callable[[int, int, int], dict[str, Any]]
# A family's own way from samples to a micro-batch, or to a LoadedBatch where more than that is to be handed on.
Assemble = Callable[[Sequence[Mapping[str, Any]]], Any]
# A family's own last change of a training sample, by (arrays, seed, epoch).
Change = Callable[[dict[str, Any], int, int], dict[str, Any]]
PromptPadding = Literal["max", "longest", "bucket"]
AUGMENTATION_FIELD = "augmentation_BVP"  # parameters that travel with a sample when the device augments


class SampleError(RuntimeError):
    """A sample could not be made; the text names its index, episode, frame and files.

    Built from one string, as workers need.
    """


class SampleSource(Protocol):
    """Arrays of one sample, named as the fields of Batch, without noise and time."""

    def __call__(self, index: int, epoch: int) -> dict[str, Any]:
        """Sample number `index` (0 ... num_samples - 1)."""
        ...

    def size_of(self, index: int) -> SampleSize:
        """What the sample needs of a pack, without reading pictures."""
        ...

    def take_times(self) -> StageTimes:
        """Costs since the last call, in this process."""
        ...

    def where(self, index: int) -> str:
        """Sample, episode, frame and files, for messages."""
        ...

    def use_board(self, board: StatusBoard, first_sample: int = 0) -> None:
        """Note there what is being done; sample numbers on the board start at `first_sample`."""
        ...


class EpisodeSource(SampleSource, Protocol):
    """Samples that come out of episodes."""

    def in_storage_order(
        self, index_M: np.ndarray, epoch: int, room: Mapping[str, np.ndarray]
    ) -> Iterator[dict[str, np.ndarray]]:
        """Samples with ascending numbers in blocks: arrays with a dimension of samples in front, decoding forward only.

        room: name -> memory for all M samples, which the arrays of a block may be made in.
        """
        ...


class SampleAugmentation(Protocol):
    """Random changes of a sample's pictures, as pure functions of (seed, epoch, sample)."""

    def parameters(self, arrays: dict[str, Any], epoch: int) -> np.ndarray:
        """What is drawn for one sample."""
        ...

    def apply_to_sample(self, arrays: dict[str, Any], epoch: int) -> dict[str, Any]:
        """The arrays with changed pictures."""
        ...


class DrawnSamples(Dataset[tuple[dict[str, Any], StageTimes]]):
    """Map-style dataset keyed by (epoch, sample number): the sample with its noise, flow time and augmentation.

    augment_here: workers augment; else the parameters travel with the sample, for one pass on the training device.
    """

    def __init__(
        self,
        source: SampleSource,
        seed: int,
        draws: Draws,
        augmentation: SampleAugmentation | None = None,
        augment_here: bool = True,
        board: StatusBoard | None = None,
        change: Change | None = None,
    ) -> None:
        self.source = source
        self.seed = seed
        self.draws = draws
        self.augmentation = augmentation
        self.augment_here = augment_here
        self.change = change
        self.board = board or StatusBoard(0)
        self._augment_seconds = 0.0

    def __getitem__(self, key: tuple[int, int]) -> tuple[dict[str, Any], StageTimes]:
        epoch, index = key
        arrays = self._drawn(self.source(index, epoch), epoch)
        self.board.note("idle")
        return arrays, self.take_times()

    def in_storage_order(
        self, index_M: np.ndarray, epoch: int, room: Mapping[str, np.ndarray]
    ) -> Iterator[dict[str, np.ndarray]]:
        """The same arrays as one by one, in the blocks of `EpisodeSource.in_storage_order`. Raises SampleError."""
        source = cast(EpisodeSource, self.source)  # decode_once is refused for sources without episodes
        # Arrays that change are not made where they are to stay.
        changes = self.change is not None or (self.augmentation is not None and self.augment_here)
        for block in source.in_storage_order(index_M, epoch, {} if changes else room):
            samples = ({name: array[place] for name, array in block.items()} for place in range(len(block["sample_index_B"])))
            if changes:
                for arrays in samples:
                    yield {name: np.asarray(value)[None] for name, value in self._drawn(arrays, epoch).items()}
            else:
                added = [self._additions(arrays, epoch) for arrays in samples]
                yield block | {name: np.stack([arrays[name] for arrays in added]) for name in added[0]}

    def _additions(self, arrays: dict[str, Any], epoch: int) -> dict[str, Any]:
        """Draws of one sample, and parameters of augmentation where the device does it."""
        # Keyed by the dataset index, which stays the same when other samples are left out.
        added = self.draws(self.seed, epoch, int(arrays["sample_index_B"]))
        if self.augmentation is None or self.augment_here:
            return added
        return {**added, AUGMENTATION_FIELD: self.augmentation.parameters(arrays, epoch)}

    def _drawn(self, arrays: dict[str, Any], epoch: int) -> dict[str, Any]:
        drawn = {**arrays, **self._additions(arrays, epoch)}
        drawn = drawn if self.change is None else self.change(drawn, self.seed, epoch)
        if self.augmentation is None or not self.augment_here:
            return drawn
        start = time.perf_counter()
        drawn = self.augmentation.apply_to_sample(drawn, epoch)
        self._augment_seconds += time.perf_counter() - start
        return drawn

    def take_times(self) -> StageTimes:
        """Costs since the last call, in this process."""
        times = self.source.take_times()
        times.transform_seconds += self._augment_seconds
        self._augment_seconds = 0.0
        return times


class PendingWork(Protocol):
    """What an assembler left to be done on the training device."""

    def pin_memory(self) -> PendingWork:
        """The same in page-locked memory."""
        ...

    def finish(self, batch: Any, device: torch.device) -> None:
        """Do it: fields of the batch are replaced."""
        ...


@dataclass
class LoadedBatch:
    """A micro-batch, what it cost, and what is still to be done.

    augmentation_BVP: parameters of augmentation, [B, V, P], of a pack [I, P]. pending: an assembler's own.
    """

    batch: TensorFields
    times: StageTimes
    augmentation_BVP: Tensor | None = None
    pending: PendingWork | None = None

    def pin_memory(self) -> LoadedBatch:
        """Called by torch's DataLoader."""
        parameters = None if self.augmentation_BVP is None else self.augmentation_BVP.pin_memory()
        pending = None if self.pending is None else self.pending.pin_memory()
        return LoadedBatch(self.batch.pin_memory(), self.times, parameters, pending)


def prompt_slots(longest: int, padding: PromptPadding, bucket_size: int, max_length: int) -> int:
    """Prompt slots of a micro-batch whose longest prompt has `longest` tokens (at least one slot)."""
    if padding == "max":
        return max_length
    if padding == "longest":
        return max(1, longest)
    return min(max_length, max(1, -(-longest // bucket_size)) * bucket_size)


@dataclass(frozen=True)
class PromptWidth:
    """How wide the prompts of a micro-batch are padded: --prompt-padding and --prompt-bucket-size."""

    padding: PromptPadding
    bucket_size: int

    def trim(self, tensors: dict[str, Tensor]) -> None:
        """Cut prompts on the right, where only padding is."""
        is_valid_BL = tensors["token_is_valid_BL"]
        slots = prompt_slots(int(is_valid_BL.sum(dim=1).max()), self.padding, self.bucket_size, is_valid_BL.shape[1])
        for name in ("tokens_BL", "token_is_valid_BL"):
            # Contiguous: pinned memory and graph buffers are copied whole.
            tensors[name] = tensors[name][:, :slots].contiguous()


def loaded_batch(tensors: dict[str, Tensor], times: StageTimes, width: PromptWidth) -> LoadedBatch:
    """Stacked samples -> one micro-batch."""
    parameters_BVP = tensors.pop(AUGMENTATION_FIELD, None)
    width.trim(tensors)
    return LoadedBatch(Batch(**tensors), times, parameters_BVP)


def assembled_batch(samples: Sequence[Mapping[str, Any]], times: StageTimes, assemble: Assemble) -> LoadedBatch:
    """Samples -> one micro-batch, by the family's own assembler; its costs go to `times`."""
    made = assemble(samples)
    if not isinstance(made, LoadedBatch):
        return LoadedBatch(made, times)
    times.add(made.times)
    return LoadedBatch(made.batch, times, made.augmentation_BVP, made.pending)


def collate_padded(
    items: list[tuple[dict[str, Any], StageTimes]], width: PromptWidth, assemble: Assemble | None = None
) -> LoadedBatch:
    """Samples -> one micro-batch, by `assemble` where the family brings its own."""
    times, started = StageTimes(), time.perf_counter()
    for _, sample_times in items:
        times.add(sample_times)
    samples = [arrays for arrays, _ in items]
    if assemble is None:
        loaded = loaded_batch(collate_tensors(samples), times, width)
    else:
        loaded = assembled_batch(samples, times, assemble)
    times.copy_seconds += time.perf_counter() - started
    return loaded


def collate_pack(items: list[tuple[dict[str, Any], StageTimes]], limits: PackLimits) -> LoadedBatch:
    """Samples -> one pack."""
    times = StageTimes()
    for _, sample_times in items:
        times.add(sample_times)
    return packed_batch([arrays for arrays, _ in items], times, limits)


def packed_batch(samples: list[dict[str, Any]], times: StageTimes, limits: PackLimits) -> LoadedBatch:
    """Samples of one pack -> the pack."""
    started = time.perf_counter()
    extra = (AUGMENTATION_FIELD,) if AUGMENTATION_FIELD in samples[0] else ()
    tensors = pack_samples(samples, limits, extra)
    parameters_IP = tensors.pop(AUGMENTATION_FIELD, None)
    batch = PackedBatch(**tensors, longest_sequence=limits.longest_prefix)  # type: ignore[arg-type]
    times.copy_seconds += time.perf_counter() - started
    return LoadedBatch(batch, times, parameters_IP)


def _initialise_worker(worker: int) -> None:
    # Workers are the parallelism; more threads in each only fight for cores.
    torch.set_num_threads(1)
    information = get_worker_info()
    assert information is not None
    information.dataset.board.place = worker + 1  # type: ignore[attr-defined]


def load_micro_batches(
    samples: DrawnSamples,
    sampler: MicroBatchSampler | PackSampler,
    *,
    num_workers: int,
    prefetch_factor: int,
    collate: Callable[[list[tuple[dict[str, Any], StageTimes]]], LoadedBatch],
    pin_memory: bool,
    watch: DataWatch,
) -> Iterator[LoadedBatch]:
    """Micro-batches in the sampler's order. At most num_workers x prefetch_factor wait in memory.

    A worker's error is raised here, in the training process: SampleError, or DataStallError and DataWorkerError from `watch`.
    """
    loader = DataLoader(
        samples,
        batch_sampler=sampler,
        num_workers=num_workers,
        # torch refuses a prefetch factor without workers.
        prefetch_factor=prefetch_factor if num_workers else None,
        collate_fn=collate,
        pin_memory=pin_memory,
        worker_init_fn=_initialise_worker,
        # Without workers a thread watches instead (DataWatch.ends_stalled_loading).
        timeout=watch.stall_seconds if num_workers else 0,
        # A generator of its own: the default would draw a seed from torch's global stream.
        generator=torch.Generator().manual_seed(samples.seed),
    )
    micro_batches: Any = iter(loader)
    watch.worker_pids = [process.pid for process in micro_batches._workers] if num_workers else []
    try:
        while True:
            try:
                loaded = next(micro_batches, None)
            except SampleError:
                raise
            except RuntimeError as problem:
                # torch's own words for both, without file or rank.
                if "timed out after" in str(problem):
                    raise watch.stalled(watch.stall_seconds) from problem
                if "DataLoader worker" in str(problem):
                    raise watch.died(None, str(problem).strip().split("\n")[0]) from problem
                raise
            except (EOFError, OSError) as problem:
                # Samples' own errors are SampleErrors: this is the pipe of a worker that ended while it handed over a batch.
                if not num_workers:
                    raise
                raise watch.died(None, f"a data worker ended ({type(problem).__name__}: {problem})") from problem
            if loaded is None:
                return
            yield loaded
    finally:
        watch.worker_pids = []
        # An error's traceback keeps the iterator alive: its workers would stop whenever the garbage collector comes by, and
        # then wait for each other's queues. torch has no public way to stop them.
        if num_workers:
            micro_batches._shutdown_workers()
            # It asks them to end; one that is stopped or waits for a disk does not, and the exit would wait for it.
            end_processes(micro_batches._workers, 0.0)
