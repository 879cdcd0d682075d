"""Which hyper-rectangles of the global tensors this rank holds: the common language of saving and loading.

A tensor-parallel shard is one rectangle. A ZeRO range is a run of elements of the flattened (tensor-parallel local) parameter:
at most 2 * dimensions - 1 rectangles. An FSDP2 DTensor is one rectangle of the tensor-parallel local parameter. A pipeline
stage simply does not have the other stages' names. Nothing here knows how many ranks there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_vla.parallel.parameter_shard import ParameterShard, shard_of
from megatron_vla.training.state_shard import StateShard


@dataclass(frozen=True)
class Box:
    """A hyper-rectangle: where it begins and how long it is, one number per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def shifted(self, by: Sequence[int]) -> Box:
        """The same rectangle in a surrounding tensor."""
        return Box(tuple(o + s for o, s in zip(self.offsets, by, strict=True)), self.sizes)


@dataclass(frozen=True)
class Piece:
    """One rectangle of a global tensor and the memory that holds it (`tensor` has the rectangle's sizes)."""

    offsets: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint as one rank sees it.

    name: its key in the checkpoint. pieces: what this rank holds of it, sharing memory with the run.
    is_cut: whether tensor-parallel ranks hold different parts of it (else each of them could write all of it).
    """

    name: str
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    is_cut: bool = False


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Rectangles that cover elements [start, stop) of a row-major tensor of `shape`, each contiguous, in flat order."""
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"elements [{start}, {stop}) do not lie in a tensor of shape {tuple(shape)}")
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    boxes: list[Box] = []
    first_full, end_full = -(-start // row), stop // row
    if first_full > end_full:
        # Inside one row.
        return _in_row(shape, end_full, start - end_full * row, stop - end_full * row)
    if start % row:
        boxes += _in_row(shape, first_full - 1, start % row, row)
    if first_full < end_full:
        boxes.append(Box((first_full, *(0 for _ in shape[1:])), (end_full - first_full, *shape[1:])))
    if stop % row:
        boxes += _in_row(shape, end_full, 0, stop % row)
    return boxes


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    return [Box((row, *b.offsets), (1, *b.sizes)) for b in flat_range_boxes(shape[1:], start, stop)]


def _local_pieces(tensor: Tensor, shard: ParameterShard) -> tuple[Piece, ...]:
    """One piece: the whole tensor-parallel local tensor, or this rank's rectangle of it when it is a DTensor."""
    if tuple(tensor.shape) != shard.local_shape:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not the part {shard.local_shape} of its parameter")
    if not isinstance(tensor, DTensor):
        return (Piece(shard.offsets, tensor.detach()),) if tensor.numel() or not tensor.shape else ()
    local = tensor.to_local().detach()
    if not local.numel():
        return ()
    (chunk,) = tensor.__create_chunk_list__()
    box = Box(tuple(chunk.offsets), tuple(chunk.sizes)).shifted(shard.offsets)
    return (Piece(box.offsets, local),)


def part_of_tensor(name: str, tensor: Tensor) -> StoredTensor:
    """What this rank holds of a parameter or buffer; `tensor.shard` says which part it is."""
    shard = shard_of(tensor)
    return StoredTensor(name, shard.global_shape, tensor.dtype, _local_pieces(tensor, shard), shard.dim is not None)


def part_of_state(state: StateShard, parameter: Tensor) -> StoredTensor:
    """What this rank holds of a parameter's main copy, moment or average; stored as `KIND.PARAMETER`."""
    name = f"{state.kind}.{state.parameter_name}"
    shard = shard_of(parameter)
    if state.local_shape != shard.local_shape:
        raise ValueError(f"{name}: state of a parameter of shape {state.local_shape}, which has {shard.local_shape} here")
    boxes = flat_range_boxes(shard.local_shape, *state.flat_range)
    if state.is_whole:
        # Not flattened: a whole state need not be contiguous.
        pieces = tuple(Piece(b.shifted(shard.offsets).offsets, state.tensor.detach().view(b.sizes)) for b in boxes)
    else:
        runs = state.tensor.detach().view(-1).split([b.volume for b in boxes]) if boxes else ()
        pieces = tuple(Piece(b.shifted(shard.offsets).offsets, r.view(b.sizes)) for b, r in zip(boxes, runs, strict=True))
    return StoredTensor(name, shard.global_shape, state.tensor.dtype, pieces, shard.dim is not None)


@dataclass(frozen=True)
class Holdings:
    """What one rank could write: its place in the model, and the rectangles of every tensor that it has."""

    pipeline_rank: int
    tensor_parallel_rank: int
    boxes: Mapping[str, tuple[Box, ...]]
    cut: frozenset[str]
    itemsizes: Mapping[str, int]


def holdings(tensors: Iterable[StoredTensor], pipeline_rank: int, tensor_parallel_rank: int) -> Holdings:
    """This rank's entry of `assign_writers`."""
    listed = list(tensors)
    return Holdings(
        pipeline_rank,
        tensor_parallel_rank,
        {t.name: tuple(Box(p.offsets, tuple(p.tensor.shape)) for p in t.pieces) for t in listed},
        frozenset(t.name for t in listed if t.is_cut),
        {t.name: t.dtype.itemsize for t in listed},
    )


def assign_writers(everyone: Sequence[Holdings]) -> list[set[tuple[str, tuple[int, ...]]]]:
    """(name, offsets) of the rectangles that each rank writes, so that every element is written exactly once.

    Tensor-parallel ranks that hold a tensor whole may cut it differently among their data-parallel ranks (ZeRO buffers need
    not line up), and so may pipeline stages that share one: of such covers one is taken. Inside it equal rectangles (data
    parallelism) go to the least loaded holder. Largest tensors first; every rank computes the same result.
    """
    covers: dict[str, dict[tuple[int, int], dict[Box, list[int]]]] = {}
    bytes_of: dict[str, int] = {}
    for rank, one in enumerate(everyone):
        for name, boxes in one.boxes.items():
            key = (one.pipeline_rank, -1 if name in one.cut else one.tensor_parallel_rank)
            cover = covers.setdefault(name, {}).setdefault(key, {})
            for box in boxes:
                cover.setdefault(box, []).append(rank)
            bytes_of[name] = one.itemsizes[name]
    load = [0] * len(everyone)
    writes: list[set[tuple[str, tuple[int, ...]]]] = [set() for _ in everyone]
    sizes = {name: max(sum(b.volume for b in c) for c in by.values()) * bytes_of[name] for name, by in covers.items()}
    for name in sorted(covers, key=lambda n: (-sizes[n], n)):
        # The cover whose busiest unavoidable writer has the least to do.
        choice = min(
            covers[name].items(), key=lambda c: (max((min(load[r] for r in h) for h in c[1].values()), default=0), c[0])
        )
        for box, holders in sorted(choice[1].items(), key=lambda item: (item[0].offsets, item[0].sizes)):
            rank = min(holders, key=lambda r: load[r])
            load[rank] += box.volume * bytes_of[name]
            writes[rank].add((name, box.offsets))
    return writes


def only_written(tensors: Iterable[StoredTensor], mine: set[tuple[str, tuple[int, ...]]]) -> dict[str, StoredTensor]:
    """`tensors` by name, each with only the pieces that `assign_writers` gave to this rank."""
    return {t.name: replace(t, pieces=tuple(p for p in t.pieces if (t.name, p.offsets) in mine)) for t in tensors}
