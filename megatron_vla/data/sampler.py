"""Which sample is read when: pure functions of (seed, position), split over ranks, never drawn by them.

One infinite sequence of positions runs through all epochs; every global batch is full, so an epoch may end inside one.
Position p is sample p mod N of epoch p div N. Nothing here touches a global random generator.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

UINT64 = (1 << 64) - 1
ORDER_STREAM = 0x6F72646572  # keeps the order's random stream apart from the streams in draws.py
CACHED_EPOCHS = 2  # a global batch touches at most two epochs unless the dataset is smaller than a batch


class SampleOrder(Protocol):
    """Which sample is at which global position."""

    @property
    def num_samples(self) -> int:
        """Per epoch."""
        ...

    def at(self, position: int) -> tuple[int, int]:
        """(epoch, sample number) at a global position."""
        ...

    def order_hash(self) -> str:
        """Changes with everything that changes the order."""
        ...


@dataclass(frozen=True)
class GlobalOrder:
    """The order in which `num_samples` samples are seen, over all ranks together."""

    num_samples: int
    seed: int
    shuffle: bool
    _permutations: OrderedDict[int, np.ndarray] = field(default_factory=OrderedDict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(
                "the dataset has no samples left; look at --empty-instruction, --drop-nonfinite, --exclude-episodes-file"
            )

    def permutation(self, epoch: int) -> np.ndarray:
        """int32 (int64 above 2^31 samples) [N]: dataset index at each place of `epoch`; 4 bytes per sample, two epochs kept."""
        known = self._permutations.get(epoch)
        if known is not None:
            return known
        # Half the memory of int64, and every rank holds a copy.
        dtype = np.int32 if self.num_samples < 2**31 else np.int64
        order_N = np.arange(self.num_samples, dtype=dtype)
        if self.shuffle:
            # A counter-based generator needs no state to be carried from epoch to epoch.
            generator = np.random.Generator(np.random.Philox(key=[self.seed & UINT64, ORDER_STREAM], counter=[0, 0, 0, epoch]))
            generator.shuffle(order_N)
        self._permutations[epoch] = order_N
        while len(self._permutations) > CACHED_EPOCHS:
            self._permutations.popitem(last=False)
        return order_N

    def at(self, position: int) -> tuple[int, int]:
        """(epoch, dataset index) of the sample at a global position."""
        # Epochs flow into each other: no short last batch, so no rank ever waits for another.
        epoch, place = divmod(position, self.num_samples)
        return epoch, int(self.permutation(epoch)[place])

    def order_hash(self) -> str:
        """16 hex digits that change with the number of samples, the seed, or the shuffling."""
        digest = hashlib.sha256(f"{self.num_samples} {self.seed} {self.shuffle}".encode())
        digest.update(self.permutation(0).astype("<i8").tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class MicroBatchSampler:
    """Micro-batches of one data-parallel rank, in order; iterating twice gives the same twice.

    The global batch that starts at position c consists of positions c ... c + global_batch_size - 1; micro-batch m of rank
    r takes c + (m * data_parallel_size + r) * micro_batch_size onwards. So the samples of a global batch do not depend on
    the split.
    """

    order: SampleOrder
    consumed_samples: int
    micro_batch_size: int
    global_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int
    num_iterations: int

    def __post_init__(self) -> None:
        per_pass = self.micro_batch_size * self.data_parallel_size
        if self.global_batch_size % per_pass:
            raise ValueError(
                f"--global-batch-size {self.global_batch_size} is not a multiple of --micro-batch-size {self.micro_batch_size} "
                f"times {self.data_parallel_size} data-parallel ranks"
            )

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of this rank per iteration."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    def __len__(self) -> int:
        return self.num_iterations * self.num_microbatches

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for iteration in range(self.num_iterations):
            # Counted in samples, so a resume with another batch size goes on where it stopped.
            start = self.consumed_samples + iteration * self.global_batch_size
            for micro_batch in range(self.num_microbatches):
                first = start + (micro_batch * self.data_parallel_size + self.data_parallel_rank) * self.micro_batch_size
                yield [self.order.at(first + i) for i in range(self.micro_batch_size)]
