"""Decode once in a mixture: the datasets' own orders are ShardOrders, and their lanes are read side by side.

Which dataset is at which position is MixtureOrder's; where that dataset's sample lies in its lanes and pieces is its own
order's. Lanes of all datasets are numbered one after the other, and a piece's number says its dataset.

Shape legend: M datasets, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_vla.data.mixture import MixtureOrder
from megatron_vla.data.shard_order import Places, ShardOrder


@dataclass(frozen=True)
class MixtureShardOrder:
    """What a LaneSampler and a ShardReader need of a mixture. shards: orders of the datasets, the same as in `mixture`."""

    mixture: MixtureOrder
    shards: tuple[ShardOrder, ...]

    @property
    def num_samples(self) -> int:
        """Per mixture epoch."""
        return self.mixture.num_samples

    @property
    def num_lanes(self) -> int:
        """Of all datasets."""
        return sum(order.num_lanes for order in self.shards)

    @property
    def num_shards(self) -> int:
        """Of all datasets."""
        return sum(order.num_shards for order in self.shards)

    @property
    def largest_piece(self) -> int:
        """Samples of the largest shard of any dataset."""
        return max(order.largest_piece for order in self.shards)

    @cached_property
    def _first_lane_M(self) -> list[int]:
        lanes = [order.num_lanes for order in self.shards]
        return (np.cumsum(lanes) - lanes).tolist()

    def at(self, position: int) -> tuple[int, int]:
        """(epoch of the sample's own dataset, sample number) at a global position."""
        return self.mixture.at(position)

    def places(self, position_P: np.ndarray) -> Places:
        """See ShardOrder; epochs are the dataset's own."""
        dataset_P, own_P = self.mixture.locate_all(position_P)
        parts = np.empty((4, len(position_P)), dtype=np.int64)
        for dataset in np.unique(dataset_P).tolist():
            here = dataset_P == dataset
            own = self.shards[dataset].places(own_P[here])
            piece = own.piece_P * len(self.shards) + dataset
            parts[:, here] = own.epoch_P, own.lane_P + self._first_lane_M[dataset], piece, own.place_P
        return Places(*parts)

    def lanes(self, position_P: np.ndarray) -> np.ndarray:
        """Lane of each position."""
        return self.places(position_P).lane_P

    def piece_samples(self, epoch: int, piece: int) -> np.ndarray:
        """Sample numbers of a piece in the order they are read, int64."""
        own_piece, dataset = divmod(piece, len(self.shards))
        return self.shards[dataset].piece_samples(epoch, own_piece) + int(self.mixture.first_sample_M[dataset])

    def has_own_lanes(self, data_parallel_size: int, global_batch_size: int) -> bool:
        """Only a single rank: datasets come at random, so the lanes' shares of a global batch vary."""
        return data_parallel_size == 1

    def order_hash(self) -> str:
        """See MixtureOrder."""
        return self.mixture.order_hash()
