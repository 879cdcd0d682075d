"""Which sample is read when, if episodes are decoded once: shards are shuffled, then the samples inside them.

A pure function of (seed, position), as sampler.py: no rank, worker or world size enters. All samples of an epoch are laid out
shard by shard in a random order; the row, and each shard in itself, is turned by a random amount, so that every sample is
equally likely at every place, wherever the row is cut. It is cut into L equal lanes which are read side by side: position p
belongs to lane p mod L. The part of a shard that lies in one lane is a piece: it is decoded together and its samples are
permuted. So L pieces are mixed at a time, and the L / ranks lanes that one rank reads are decoded by that rank alone.

Shape legend: N samples, K shards, L lanes, Q pieces of one epoch, P positions.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from megatron_vla.data.locator import ShardTable
from megatron_vla.data.sampler import UINT64, MicroBatchSampler, SampleOrder

SHARD_STREAM = 0x7368617264
PIECE_STREAM = 0x7069656365
CACHED_EPOCHS = 3  # two are read at their border, a third may be looked ahead into
CACHED_PIECES = 64


@dataclass(frozen=True)
class EpochPlan:
    """Layout of one epoch. `turn`: places of the row that moved from the front to the end; turn_K: the same in each shard.

    shard_K: shard at each place of the row; bound_K: int64 [K + 1] first place of each. lane_start_L, first_place_L: where a
    lane starts in the turned row, and its first place in the epoch. cut_Q: int64 [Q + 1], where pieces start in the turned row.
    """

    shard_K: np.ndarray
    bound_K: np.ndarray
    turn: int
    turn_K: np.ndarray
    lane_start_L: np.ndarray
    first_place_L: np.ndarray
    cut_Q: np.ndarray


@dataclass(frozen=True)
class Places:
    """Where positions lie: epoch_P, lane_P, piece_P (number in its epoch), place_P (in the piece), all int64."""

    epoch_P: np.ndarray
    lane_P: np.ndarray
    piece_P: np.ndarray
    place_P: np.ndarray


@dataclass(frozen=True)
class ShardOrder:
    """Order of the samples in `table`. Without shuffling: storage order, in one lane."""

    table: ShardTable
    seed: int
    shuffle: bool
    num_lanes: int
    _plans: OrderedDict[int, EpochPlan] = field(default_factory=OrderedDict, repr=False, compare=False)
    _pieces: OrderedDict[tuple[int, int], np.ndarray] = field(default_factory=OrderedDict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.table.num_samples < 1:
            raise ValueError("no sample is left; look at --action-horizon-policy, --drop-nonfinite, --exclude-episodes-file")
        if not self.shuffle and self.num_lanes != 1:
            raise ValueError("storage order needs one lane: several lanes would mix shards")

    @property
    def num_samples(self) -> int:
        """N, per epoch."""
        return self.table.num_samples

    @property
    def num_shards(self) -> int:
        """K."""
        return self.table.num_shards

    @property
    def largest_piece(self) -> int:
        """Samples of the largest shard; a piece is never larger."""
        return int(self.table.count_K.max())

    def lanes(self, position_P: np.ndarray) -> np.ndarray:
        """Lane of each position."""
        return position_P % self.num_lanes

    def has_own_lanes(self, data_parallel_size: int, global_batch_size: int) -> bool:
        """Every rank has lanes of its own; else lanes change ranks from batch to batch, and shards are decoded by several."""
        return self.num_lanes % data_parallel_size == 0 and global_batch_size % self.num_lanes == 0

    def _generator(self, stream: int, epoch: int, item: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=[self.seed & UINT64, stream], counter=[0, 0, item, epoch]))

    def plan(self, epoch: int) -> EpochPlan:
        """Layout of `epoch`."""
        known = self._plans.get(epoch)
        if known is not None:
            return known
        total, lanes = self.num_samples, self.num_lanes
        shard_K, turn, turn_K = np.arange(self.table.num_shards), 0, np.zeros(self.table.num_shards, dtype=np.int64)
        if self.shuffle:
            generator = self._generator(SHARD_STREAM, epoch, 0)
            generator.shuffle(shard_K)
            turn = int(generator.integers(total))
            turn_K = generator.integers(self.table.count_K)
        bound_K = np.concatenate([[0], np.cumsum(self.table.count_K[shard_K])])
        # Lanes go on across epochs: any L positions in a row touch every lane once, so ranks always have equal shares.
        first_place_L = (np.arange(lanes) - epoch * total) % lanes
        count_L = np.maximum(0, -(-(total - first_place_L) // lanes))
        lane_start_L = np.cumsum(count_L) - count_L
        cut_Q = np.unique(np.concatenate([[0, total], lane_start_L, (bound_K - turn) % total]))
        self._plans[epoch] = plan = EpochPlan(shard_K, bound_K, turn, turn_K, lane_start_L, first_place_L, cut_Q)
        while len(self._plans) > CACHED_EPOCHS:
            self._plans.popitem(last=False)
        return plan

    def places(self, position_P: np.ndarray) -> Places:
        """Epoch, lane, piece and place of global positions."""
        epoch_P = position_P // self.num_samples
        lane_P = position_P % self.num_lanes
        piece_P, place_P = np.empty_like(position_P), np.empty_like(position_P)
        for epoch in np.unique(epoch_P).tolist():
            plan, here = self.plan(epoch), epoch_P == epoch
            lane, place = lane_P[here], position_P[here] - epoch * self.num_samples
            turned = plan.lane_start_L[lane] + (place - plan.first_place_L[lane]) // self.num_lanes
            piece_P[here] = np.searchsorted(plan.cut_Q, turned, side="right") - 1
            place_P[here] = turned - plan.cut_Q[piece_P[here]]
        return Places(epoch_P, lane_P, piece_P, place_P)

    def piece_samples(self, epoch: int, piece: int) -> np.ndarray:
        """Sample numbers of a piece in the order they are read, int64."""
        known = self._pieces.get((epoch, piece))
        if known is not None:
            return known
        plan = self.plan(epoch)
        start, stop = int(plan.cut_Q[piece]), int(plan.cut_Q[piece + 1])
        first = (start + plan.turn) % self.num_samples
        rank = int(np.searchsorted(plan.bound_K, first, side="right")) - 1
        shard = int(plan.shard_K[rank])
        count = int(self.table.count_K[shard])
        inside = (first - int(plan.bound_K[rank]) + int(plan.turn_K[shard])) % count
        # The part beyond the shard's end comes from its front.
        beyond = max(0, inside + stop - start - count)
        parts = (self.table.samples(shard, inside, inside + stop - start - beyond), self.table.samples(shard, 0, beyond))
        samples = np.concatenate(parts)
        if self.shuffle:
            self._generator(PIECE_STREAM, epoch, start).shuffle(samples)
        self._pieces[epoch, piece] = samples
        while len(self._pieces) > CACHED_PIECES:
            self._pieces.popitem(last=False)
        return samples

    def at(self, position: int) -> tuple[int, int]:
        """(epoch, sample number) at a global position."""
        places = self.places(np.array([position], dtype=np.int64))
        epoch, piece = int(places.epoch_P[0]), int(places.piece_P[0])
        return epoch, int(self.piece_samples(epoch, piece)[places.place_P[0]])

    def order_hash(self) -> str:
        """16 hex digits that change with the samples' grouping, the seed, the lanes or the shuffling."""
        digest = hashlib.sha256(f"decode_once {self.num_samples} {self.seed} {self.shuffle} {self.num_lanes}".encode())
        plan = self.plan(0)
        for array in (self.table.first_sample_R, self.table.count_R, self.table.first_run_K, plan.shard_K, plan.cut_Q):
            digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return digest.hexdigest()[:16]


class LaneOrder(SampleOrder, Protocol):
    """An order that is read in lanes, piece by piece: ShardOrder, or MixtureShardOrder."""

    @property
    def num_lanes(self) -> int:
        """L."""
        ...

    @property
    def num_shards(self) -> int:
        """K."""
        ...

    @property
    def largest_piece(self) -> int:
        """Bound on the samples of a piece."""
        ...

    def lanes(self, position_P: np.ndarray) -> np.ndarray:
        """Lane of each position."""
        ...

    def has_own_lanes(self, data_parallel_size: int, global_batch_size: int) -> bool:
        """Whether no lane is read by two ranks."""
        ...

    def places(self, position_P: np.ndarray) -> Places:
        """Epoch, lane, piece and place of global positions."""
        ...

    def piece_samples(self, epoch: int, piece: int) -> np.ndarray:
        """Sample numbers of a piece in the order they are read, int64."""
        ...


@dataclass(frozen=True)
class LaneSampler(MicroBatchSampler):
    """Micro-batches of one rank in a LaneOrder: the global batch is split by lane, so that ranks decode different shards.

    The set of samples of a global batch is the same for every world size, as with MicroBatchSampler.
    """

    order: LaneOrder

    @property
    def is_even(self) -> bool:
        """Every rank has lanes of its own."""
        return self.order.has_own_lanes(self.data_parallel_size, self.global_batch_size)

    @property
    def num_open_pieces(self) -> int:
        """Pieces that this rank reads at a time."""
        lanes = self.order.num_lanes
        return lanes // self.data_parallel_size if self.is_even else lanes

    def positions(self) -> Iterator[np.ndarray]:
        """Global positions of each micro-batch of this rank, int64 [micro_batch_size]."""
        share = self.global_batch_size // self.data_parallel_size
        for iteration in range(self.num_iterations):
            start = self.consumed_samples + iteration * self.global_batch_size
            position_P = np.arange(start, start + self.global_batch_size, dtype=np.int64)
            by_lane = position_P[np.argsort(self.order.lanes(position_P), kind="stable")]
            # Back in reading order, so that every micro-batch mixes all lanes of the rank.
            mine = np.sort(by_lane[self.data_parallel_rank * share : (self.data_parallel_rank + 1) * share])
            yield from mine.reshape(-1, self.micro_batch_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for position_P in self.positions():
            yield [self.order.at(int(position)) for position in position_P]
