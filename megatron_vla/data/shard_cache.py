"""Decoded shards in host memory: slots of fixed size, filled by one pass over each episode and camera.

Slots are memory without a name in any file system, shared with forked workers where there are any: it cannot be left behind,
and the size limit of /dev/shm does not hold for it.

Shape legend: as data/batch.py; M samples of a slot.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_vla.data.shard_order import LaneOrder
from megatron_vla.data.watch import StageTimes

if TYPE_CHECKING:
    from megatron_vla.data.loader import DrawnSamples

ALIGNMENT = 64


@dataclass(frozen=True)
class SampleLayout:
    """Name -> (dtype, shape) of one sample's arrays."""

    fields: dict[str, tuple[np.dtype[Any], tuple[int, ...]]]

    @staticmethod
    def of(arrays: Mapping[str, Any]) -> SampleLayout:
        """Layout of a made sample; all samples of a run have the same."""
        made = {name: np.asarray(value) for name, value in arrays.items()}
        return SampleLayout({name: (array.dtype, array.shape) for name, array in made.items()})

    def field_bytes(self, name: str, num_samples: int) -> int:
        """Bytes of one field of that many samples, padded."""
        dtype, shape = self.fields[name]
        size = num_samples * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT

    def slot_bytes(self, num_samples: int) -> int:
        """Bytes of a slot for M samples."""
        return sum(self.field_bytes(name, num_samples) for name in self.fields)


class Slots:
    """S slots with room for M samples each, field by field: arrays [S * M, ...], filled by writers and copied from by readers.

    `shared`: with processes that are forked later.
    """

    def __init__(self, layout: SampleLayout, num_slots: int, num_samples: int, shared: bool) -> None:
        self.num_slots, self.num_samples = num_slots, num_samples
        total = num_slots * num_samples
        kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
        self._memory = mmap.mmap(-1, layout.slot_bytes(total), flags=kind | mmap.MAP_ANONYMOUS)
        # A page of 4 KiB costs a fault when it is first touched: 100 of them for a sample of two cameras.
        if (huge := getattr(mmap, "MADV_HUGEPAGE", None)) is not None:
            with suppress(OSError):  # a kernel without huge pages
                self._memory.madvise(huge)
        self.arrays: dict[str, np.ndarray] = {}
        offset = 0
        for name, (dtype, shape) in layout.fields.items():
            count = total * int(np.prod(shape, dtype=np.int64))
            flat = np.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)
            self.arrays[name] = flat.reshape((total, *shape))
            offset += layout.field_bytes(name, total)

    def first_row(self, slot: int) -> int:
        """Where a slot starts in `arrays`."""
        return slot * self.num_samples

    def of(self, slot: int, num_samples: int) -> dict[str, np.ndarray]:
        """The first rows of one slot: arrays [M, ...]."""
        first = self.first_row(slot)
        return {name: array[first : first + num_samples] for name, array in self.arrays.items()}


@dataclass(frozen=True)
class PieceJob:
    """Build piece `piece` of `epoch` into slot `slot`, from place `first_place` on (a resume starts inside a piece)."""

    epoch: int
    piece: int
    first_place: int
    slot: int


def storage_rows(job: PieceJob, order: LaneOrder) -> tuple[np.ndarray, np.ndarray]:
    """(sample numbers of the job in storage order, as its slot holds them; row in the slot of each place): int64 [M]."""
    wanted_M = order.piece_samples(job.epoch, job.piece)[job.first_place :]
    place_M = np.argsort(wanted_M, kind="stable")
    row_M = np.empty_like(place_M)
    row_M[place_M] = np.arange(len(place_M))
    return wanted_M[place_M], row_M


def build_piece(job: PieceJob, order: LaneOrder, samples: DrawnSamples, slots: Slots) -> StageTimes:
    """Decode the samples of a piece in storage order, straight into its slot where possible. Raises SampleError."""
    # Storage order: every camera of every episode is decoded in one forward pass.
    index_M, _ = storage_rows(job, order)
    room = slots.of(job.slot, len(index_M))
    room = slots.of(job.slot, len(index_M))
    start = 0
    for block in samples.in_storage_order(index_M, job.epoch, room):
        stop = start + len(block["sample_index_B"])
        for name, array in block.items():
            stored = room[name][start:stop]
            if not np.may_share_memory(stored, array):
                stored[...] = array
        start = stop
    samples.board.note("idle")
    return samples.take_times()
