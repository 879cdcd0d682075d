"""Worker side of data supply: one sample, its draws, one micro-batch, and errors that say which sample.

Shape legend: as data/batch.py.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from megatron_vla.data.batch import Batch, collate_tensors
from megatron_vla.data.draws import flow_draws
from megatron_vla.data.preprocess import Preprocessor
from megatron_vla.data.sampler import MicroBatchSampler

if TYPE_CHECKING:
    from megatron_vla.data.dataset import RobotDataset

PromptPadding = Literal["max", "longest", "bucket"]


class SampleError(RuntimeError):
    """A sample could not be made; the text names its index, episode, frame and files.

    Built from one string, as workers need.
    """


class SampleSource(Protocol):
    """Arrays of one sample, named as the fields of Batch, without noise and time."""

    def __call__(self, index: int, epoch: int) -> dict[str, Any]:
        """Sample number `index` (0 ... num_samples - 1)."""
        ...


@dataclass
class StageTimes:
    """What samples cost and what was cut: read includes video decoding."""

    num_samples: int = 0
    read_seconds: float = 0.0
    transform_seconds: float = 0.0
    num_truncated_prompts: int = 0

    def add(self, other: StageTimes) -> None:
        """Sum up."""
        for name in (f.name for f in dataclasses.fields(self)):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class RobotSource:
    """Samples of a robot dataset, preprocessed. `rows` maps sample number -> dataset index when samples were left out."""

    def __init__(self, dataset: RobotDataset, preprocessor: Preprocessor, rows: np.ndarray | None) -> None:
        self.dataset = dataset
        self.preprocessor = preprocessor
        self.rows = rows
        self.times = StageTimes()

    def __call__(self, index: int, epoch: int) -> dict[str, Any]:
        """Raises SampleError naming sample, episode and frame; the cause's own text names file or camera."""
        row = index if self.rows is None else int(self.rows[index])
        try:
            start = time.perf_counter()
            raw = self.dataset[row]
            middle = time.perf_counter()
            cut_before = self.preprocessor.num_truncated_prompts
            arrays = self.preprocessor(raw, epoch)
        except Exception as problem:
            raise SampleError(f"{self._where(row)}: {type(problem).__name__}: {problem}") from problem
        cut = self.preprocessor.num_truncated_prompts - cut_before
        self.times.add(StageTimes(1, middle - start, time.perf_counter() - middle, cut))
        return arrays

    def _where(self, row: int) -> str:
        dataset = self.dataset
        episode = int(dataset.episode_of_N[row])
        # Searched only when something went wrong.
        table_row = int(np.flatnonzero(dataset.table.episode_index_E == episode)[0])
        file = dataset.table.data.path_of(table_row)
        return f"sample {row} (episode {episode}, frame {int(dataset.frame_of_N[row])}, {file})"


class DrawnSamples(Dataset[tuple[dict[str, Any], StageTimes]]):
    """Map-style dataset keyed by (epoch, sample number): the sample with its noise and flow time."""

    def __init__(self, source: SampleSource, seed: int, horizon: int, dim: int) -> None:
        self.source = source
        self.seed = seed
        self.horizon = horizon
        self.dim = dim

    def __getitem__(self, key: tuple[int, int]) -> tuple[dict[str, Any], StageTimes]:
        epoch, index = key
        arrays = self.source(index, epoch)
        # The source's own clock is read and reset here, so that each sample's cost is reported once.
        times = StageTimes(1)
        if isinstance(self.source, RobotSource):
            times, self.source.times = self.source.times, StageTimes()
        # Draws are keyed by the dataset index, which stays the same when other samples are left out.
        noise_TA, time_value = flow_draws(self.seed, epoch, int(arrays["sample_index_B"]), self.horizon, self.dim)
        return {**arrays, "noise_BTA": noise_TA, "time_B": time_value}, times


@dataclass
class LoadedBatch:
    """A micro-batch and what it cost."""

    batch: Batch
    times: StageTimes

    def pin_memory(self) -> LoadedBatch:
        """Called by torch's DataLoader."""
        return LoadedBatch(self.batch.pin_memory(), self.times)


def prompt_slots(longest: int, padding: PromptPadding, bucket_size: int, max_length: int) -> int:
    """Prompt slots of a micro-batch whose longest prompt has `longest` tokens (at least one slot)."""
    if padding == "max":
        return max_length
    if padding == "longest":
        return max(1, longest)
    return min(max_length, max(1, -(-longest // bucket_size)) * bucket_size)


def collate(items: list[tuple[dict[str, Any], StageTimes]], padding: PromptPadding, bucket_size: int) -> LoadedBatch:
    """Samples -> one Batch; prompts are trimmed on the right, where only padding is."""
    times = StageTimes()
    for _, sample_times in items:
        times.add(sample_times)
    tensors = collate_tensors([arrays for arrays, _ in items])
    is_valid_BL = tensors["token_is_valid_BL"]
    slots = prompt_slots(int(is_valid_BL.sum(dim=1).max()), padding, bucket_size, is_valid_BL.shape[1])
    for name in ("tokens_BL", "token_is_valid_BL"):
        # Contiguous: pinned memory and graph buffers are copied whole.
        tensors[name] = tensors[name][:, :slots].contiguous()
    return LoadedBatch(Batch(**tensors), times)


def _initialise_worker(worker: int) -> None:
    # Workers are the parallelism; more threads in each only fight for cores.
    torch.set_num_threads(1)


def load_micro_batches(
    samples: DrawnSamples,
    sampler: MicroBatchSampler,
    *,
    num_workers: int,
    prefetch_factor: int,
    padding: PromptPadding,
    bucket_size: int,
    pin_memory: bool,
    report: Callable[[StageTimes], None],
) -> Iterator[Batch]:
    """Micro-batches in the sampler's order. At most num_workers x prefetch_factor wait in memory.

    A worker's error is raised here, in the training process. `report` gets the cost of each micro-batch.
    """
    loader = DataLoader(
        samples,
        batch_sampler=sampler,
        num_workers=num_workers,
        # torch refuses a prefetch factor without workers.
        prefetch_factor=prefetch_factor if num_workers else None,
        collate_fn=partial(collate, padding=padding, bucket_size=bucket_size),
        pin_memory=pin_memory,
        worker_init_fn=_initialise_worker,
        # A generator of its own: the default would draw a seed from torch's global stream.
        generator=torch.Generator().manual_seed(samples.seed),
    )
    micro_batches: Any = iter(loader)
    try:
        for loaded in micro_batches:
            report(loaded.times)
            yield loaded.batch
    finally:
        # An error's traceback keeps the iterator alive: its workers would stop whenever the garbage collector comes by, and
        # then wait for each other's queues. torch has no public way to stop them.
        if num_workers:
            micro_batches._shutdown_workers()
