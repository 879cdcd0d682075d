"""Decoded shards in host memory: slots of fixed size, filled by one pass over each episode and camera.

A slot is memory shared with forked workers, without a name in any file system: it cannot be left behind, and the size limit of
/dev/shm does not hold for it.

Shape legend: as data/batch.py; M samples of a slot.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
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
        """Bytes of one field of a slot, padded."""
        dtype, shape = self.fields[name]
        size = num_samples * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT

    def slot_bytes(self, num_samples: int) -> int:
        """Bytes of a slot for M samples."""
        return sum(self.field_bytes(name, num_samples) for name in self.fields)


class Slot:
    """Room for M samples, field by field: arrays [M, ...], which the writer fills and the reader copies from."""

    def __init__(self, layout: SampleLayout, num_samples: int) -> None:
        self._memory = mmap.mmap(-1, layout.slot_bytes(num_samples))
        self.arrays: dict[str, np.ndarray] = {}
        offset = 0
        for name, (dtype, shape) in layout.fields.items():
            count = num_samples * int(np.prod(shape, dtype=np.int64))
            flat = np.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)
            self.arrays[name] = flat.reshape((num_samples, *shape))
            offset += layout.field_bytes(name, num_samples)


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


def build_piece(job: PieceJob, order: LaneOrder, samples: DrawnSamples, slot: Slot) -> StageTimes:
    """Decode the samples of a piece in storage order, straight into the slot where possible. Raises SampleError."""
    # Storage order: every camera of every episode is decoded in one forward pass.
    index_M, _ = storage_rows(job, order)
    room = {name: array[: len(index_M)] for name, array in slot.arrays.items()}
    start = 0
    for block in samples.in_storage_order(
        index_M, job.epoch, {name: array[: len(index_M)] for name, array in slot.arrays.items()}
    ):
        stop = start + len(block["sample_index_B"])
        for name, array in block.items():
            stored = room[name][start:stop]
            if not np.may_share_memory(stored, array):
                stored[...] = array
        start = stop
    samples.board.note("idle")
    return samples.take_times()
