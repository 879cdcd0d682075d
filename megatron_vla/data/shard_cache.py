"""Decoded shards in host memory: slots of fixed size, filled by one pass over each episode and camera.

A slot is memory shared with forked workers, without a name in any file system: it cannot be left behind, and the size limit of
/dev/shm does not hold for it.

Shape legend: as data/batch.py; M samples that fit into a slot.
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


def build_piece(job: PieceJob, order: LaneOrder, samples: DrawnSamples, slot: Slot) -> StageTimes:
    """Decode the samples of a piece in storage order and put each where it will be read. Raises SampleError."""
    wanted_M = order.piece_samples(job.epoch, job.piece)[job.first_place :]
    place_M = np.argsort(wanted_M, kind="stable")
    # Storage order: every camera of every episode is decoded in one forward pass.
    for place, arrays in zip(place_M.tolist(), samples.in_storage_order(wanted_M[place_M], job.epoch), strict=True):
        for name, value in arrays.items():
            slot.arrays[name][place] = value
    samples.board.note("idle")
    return samples.take_times()
