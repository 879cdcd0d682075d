"""Mixtures of datasets: which dataset and which of its samples is read when, and the sample itself.

A pure function of (seed, position), as sampler.py. A mixture epoch has as many samples as all datasets together; each dataset
gets a fixed number of them (its quota), at places that are shuffled anew each epoch. The places of a dataset are filled with
its own order, one sample after the other, through all mixture epochs: whatever the weights, every sample of a dataset is seen
once before any of them is seen again.

Shape legend: N samples of a mixture epoch, M datasets.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_vla.data.packing import SampleSize
from megatron_vla.data.robot_source import RobotSource
from megatron_vla.data.sampler import CACHED_EPOCHS, UINT64, GlobalOrder, SampleOrder
from megatron_vla.data.watch import StageTimes, StatusBoard

MIXTURE_STREAM = 0x6D6978
SEED_STRIDE = 0x9E3779B97F4A7C15  # keeps the orders of equally large datasets apart


def quotas(num_samples: Sequence[int], weights: Sequence[float] | None) -> np.ndarray:
    """int64 [M], sum N: samples of each dataset in one mixture epoch; by size without weights (then each sample once).

    Raises ValueError when a weight is so small that its dataset would never be read.
    """
    sizes_M = np.asarray(num_samples, dtype=np.int64)
    if weights is None:
        return sizes_M
    total = int(sizes_M.sum())
    wanted_M = np.asarray(weights, dtype=np.float64) / np.sum(weights) * total
    quota_M = np.floor(wanted_M).astype(np.int64)
    # Largest remainders get what rounding down left over; of equals the first.
    left = total - int(quota_M.sum())
    quota_M[np.argsort(quota_M - wanted_M, kind="stable")[:left]] += 1
    if (quota_M < 1).any():
        number = int(np.argmin(quota_M))
        raise ValueError(
            f"--data-weights: dataset number {number + 1} would get no sample in an epoch of {total} -> raise its weight, or "
            "leave the dataset out"
        )
    return quota_M


def dataset_seed(seed: int, dataset: int) -> int:
    """Seed of the own order of dataset number `dataset` of a mixture."""
    # Wraps like the generator's own 64-bit key.
    return (seed + dataset * SEED_STRIDE) & UINT64


def dataset_order(num_samples: int, seed: int, shuffle: bool, dataset: int) -> GlobalOrder:
    """The own order of dataset number `dataset` of a mixture."""
    return GlobalOrder(num_samples, dataset_seed(seed, dataset), shuffle)


@dataclass(frozen=True)
class MixtureOrder:
    """The order of a mixture. orders: each dataset's own; quota_M: its samples per mixture epoch.

    Samples are numbered dataset after dataset. The epoch of a sample is its dataset's, so a sample that comes twice in a
    mixture epoch gets other noise the second time.
    """

    orders: tuple[SampleOrder, ...]
    quota_M: np.ndarray
    seed: int
    shuffle: bool
    _epochs: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=OrderedDict, repr=False, compare=False)

    @property
    def num_samples(self) -> int:
        """N."""
        return int(self.quota_M.sum())

    @property
    def first_sample_M(self) -> np.ndarray:
        """Number of each dataset's first sample."""
        sizes_M = np.array([order.num_samples for order in self.orders])
        return np.cumsum(sizes_M) - sizes_M

    def _places(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(dataset of each place, how many places of that dataset come before it in this epoch): int16 and int32 or int64."""
        known = self._epochs.get(epoch)
        if known is not None:
            return known
        # int16 labels and a count: 6 bytes per sample, where a permutation of samples would need the datasets' own besides.
        dataset_N = np.repeat(np.arange(len(self.orders), dtype=np.int16), self.quota_M)
        if self.shuffle:
            key = [self.seed & UINT64, MIXTURE_STREAM]
            np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, epoch])).shuffle(dataset_N)
        before_N = np.empty(len(dataset_N), dtype=np.int32 if len(dataset_N) < 2**31 else np.int64)
        for dataset, quota in enumerate(self.quota_M.tolist()):
            before_N[dataset_N == dataset] = np.arange(quota)
        self._epochs[epoch] = dataset_N, before_N
        # Decoding ahead looks one epoch further than a global batch does.
        while len(self._epochs) > CACHED_EPOCHS + 1:
            self._epochs.popitem(last=False)
        return dataset_N, before_N

    def locate(self, position: int) -> tuple[int, int]:
        """(dataset, position in that dataset's own order) of a global position."""
        epoch, place = divmod(position, self.num_samples)
        dataset_N, before_N = self._places(epoch)
        dataset = int(dataset_N[place])
        # Quotas are the same in every epoch, so no earlier epoch has to be looked at.
        return dataset, epoch * int(self.quota_M[dataset]) + int(before_N[place])

    def locate_all(self, position_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`locate` of many positions: int64 [P] each."""
        epoch_P, place_P = np.divmod(position_P, self.num_samples)
        dataset_P, own_P = np.empty_like(position_P), np.empty_like(position_P)
        for epoch in np.unique(epoch_P).tolist():
            here = epoch_P == epoch
            dataset_N, before_N = self._places(epoch)
            dataset_P[here] = dataset_N[place_P[here]]
            own_P[here] = epoch * self.quota_M[dataset_P[here]] + before_N[place_P[here]]
        return dataset_P, own_P

    def at(self, position: int) -> tuple[int, int]:
        """(epoch of the sample's own dataset, sample number) at a global position."""
        dataset, own_position = self.locate(position)
        epoch, index = self.orders[dataset].at(own_position)
        return epoch, int(self.first_sample_M[dataset]) + index

    def order_hash(self) -> str:
        """16 hex digits that change with the datasets' orders, the quotas, the seed or the shuffling."""
        parts = [order.order_hash() for order in self.orders]
        digest = hashlib.sha256(f"mixture {parts} {self.quota_M.tolist()} {self.seed} {self.shuffle}".encode())
        digest.update(self._places(0)[0].astype("<i2").tobytes())
        return digest.hexdigest()[:16]


class MixtureSource:
    """Samples of all datasets, numbered dataset after dataset; each is made by its own dataset and preprocessor."""

    def __init__(self, sources: Sequence[RobotSource], num_samples: Sequence[int]) -> None:
        self.sources = tuple(sources)
        self.num_samples_M = np.asarray(num_samples)
        self.first_sample_M = np.cumsum(num_samples) - self.num_samples_M
        # Draws are keyed by dataset rows, which stay the same when samples are left out: rows of all datasets are numbered too.
        rows_M = np.array([len(source.dataset) for source in sources])
        self.first_row_M = np.cumsum(rows_M) - rows_M

    def take_times(self) -> StageTimes:
        """See `SampleSource`."""
        total = StageTimes()
        for source in self.sources:
            total.add(source.take_times())
        return total

    def where(self, index: int) -> str:
        """See `SampleSource`."""
        dataset = self.dataset_of(index)
        return self.sources[dataset].where(index - int(self.first_sample_M[dataset]))

    def size_of(self, index: int) -> SampleSize:
        """See `SampleSource`."""
        dataset = self.dataset_of(index)
        return self.sources[dataset].size_of(index - int(self.first_sample_M[dataset]))

    def use_board(self, board: StatusBoard, first_sample: int = 0) -> None:
        """See `SampleSource`."""
        for source, first in zip(self.sources, self.first_sample_M.tolist(), strict=True):
            source.use_board(board, first_sample + first)

    def parts(self) -> Iterator[tuple[RobotSource, int]]:
        """(samples, their number) of each dataset."""
        yield from zip(self.sources, self.num_samples_M.tolist(), strict=True)

    def dataset_of(self, index: int) -> int:
        """Number of the dataset that sample `index` belongs to."""
        return int(np.searchsorted(self.first_sample_M, index, side="right")) - 1

    def __call__(self, index: int, epoch: int) -> dict[str, Any]:
        """Raises SampleError naming dataset, sample, episode and frame."""
        dataset = self.dataset_of(index)
        return self._numbered(dataset, self.sources[dataset](index - int(self.first_sample_M[dataset]), epoch))

    def in_storage_order(
        self, index_M: np.ndarray, epoch: int, room: Mapping[str, np.ndarray]
    ) -> Iterator[dict[str, np.ndarray]]:
        """See RobotSource; all numbers are of one dataset, as a shard's are."""
        dataset = self.dataset_of(int(index_M[0]))
        for arrays in self.sources[dataset].in_storage_order(index_M - self.first_sample_M[dataset], epoch, room):
            yield self._numbered(dataset, arrays)

    def _numbered(self, dataset: int, arrays: dict[str, Any]) -> dict[str, Any]:
        # Unique over all datasets: it keys noise, flow time and augmentation.
        arrays["sample_index_B"] = arrays["sample_index_B"] + np.int64(self.first_row_M[dataset])
        return arrays
