"""Rectangles of global tensors against brute force: flat ranges, tensor-parallel shards, who writes what."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor, nn

from megatron_vla.parallel.parameter_shard import ParameterShard, mark_shard
from megatron_vla.training.state_shard import StateShard
from megatron_vla.training.tensor_parts import (
    Box,
    StoredTensor,
    assign_writers,
    flat_range_boxes,
    holdings,
    only_written,
    part_of_state,
    part_of_tensor,
)


def elements(shape: tuple[int, ...], box: Box) -> list[int]:
    """Flat numbers of a box's elements, in the box's own order."""
    numbers = torch.arange(math.prod(shape)).view(shape)
    for axis, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        numbers = numbers.narrow(axis, offset, size)
    return numbers.reshape(-1).tolist()


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (4, 1), (1, 5), (2, 3, 4), (3, 1, 2, 2)])
def test_every_flat_range_is_covered_in_order(shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    for start, stop in itertools.combinations_with_replacement(range(count + 1), 2):
        boxes = flat_range_boxes(shape, start, stop)
        covered = [number for box in boxes for number in elements(shape, box)]
        assert covered == list(range(start, stop)), (start, stop)
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
    with pytest.raises(ValueError, match="do not lie in"):
        flat_range_boxes(shape, 0, count + 1)


def parameter_part(whole: Tensor, dim: int | None, rank: int, size: int) -> nn.Parameter:
    shard = ParameterShard(tuple(whole.shape), dim, rank, size)
    parameter = nn.Parameter(shard.local_part(whole).clone())
    mark_shard(parameter, shard)
    return parameter


def assemble(parts: list[StoredTensor]) -> Tensor:
    """The global tensor from the pieces; every element must come exactly once."""
    shape = parts[0].global_shape
    whole, count = torch.zeros(shape), torch.zeros(shape, dtype=torch.int64)
    for part in parts:
        assert part.global_shape == shape
        for piece in part.pieces:
            where = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.tensor.shape, strict=True))
            whole[where] = piece.tensor
            count[where] += 1
    assert torch.equal(count, torch.ones_like(count)), "an element is written twice or never"
    return whole


@pytest.mark.parametrize(("shape", "dim"), [((6, 4), 0), ((5, 7), 1), ((4, 3, 2), 0), ((9,), 0), ((3, 5), None)])
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_zero_ranges_of_tensor_parallel_shards(shape: tuple[int, ...], dim: int | None, dp: int) -> None:
    """A ZeRO range counts in the shard; its rectangles lie in the global tensor."""
    whole = torch.randn(shape)
    parts = []
    for tp in range(1 if dim is None else 2):
        parameter = parameter_part(whole, dim, tp, 2)
        local = parameter.detach()
        cuts = [0, *sorted(random.Random(tp).sample(range(1, local.numel()), dp - 1)), local.numel()]
        for start, stop in itertools.pairwise(cuts):
            state = StateShard("exp_avg", "w", local.reshape(-1)[start:stop].clone(), (start, stop), tuple(local.shape))
            parts.append(part_of_state(state, parameter))
    assert {part.name for part in parts} == {"exp_avg.w"}
    assert torch.equal(assemble(parts), whole)
    shards = [part_of_tensor("model.w", parameter_part(whole, dim, tp, 2)) for tp in range(1 if dim is None else 2)]
    assert torch.equal(assemble(shards), whole)


def test_pieces_share_memory_with_the_state() -> None:
    parameter = nn.Parameter(torch.zeros(4, 5))
    flat = torch.zeros(11)
    part = part_of_state(StateShard("exp_avg", "w", flat, (3, 14), (4, 5)), parameter)
    for number, piece in enumerate(part.pieces, 1):
        piece.tensor.fill_(number)
    assert flat.tolist() == [1.0] * 2 + [2.0] * 5 + [3.0] * 4
    with pytest.raises(ValueError, match=r"shape \(5, 4\), which has \(4, 5\)"):
        part_of_state(StateShard("exp_avg", "w", flat, (3, 14), (5, 4)), parameter)


def ranks_of_a_run(wholes: dict[str, Tensor], tp_size: int, dp_size: int, zero: bool) -> list[list[StoredTensor]]:
    """Parts of (tp, dp) ranks in rank order: `cut*` are tensor-parallel, `late*` live on a second pipeline stage only."""
    ranks = []
    for stage, dp, tp in itertools.product(range(2), range(dp_size), range(tp_size)):
        parts = []
        for name, whole in wholes.items():
            if name.startswith("late") != (stage == 1) and not name.startswith("shared"):
                continue
            parameter = parameter_part(whole, 0 if name.startswith("cut") else None, tp, tp_size)
            parts.append(part_of_tensor(f"model.{name}", parameter))
            count = parameter.numel()
            # Buffers of different tensor-parallel ranks and stages are cut at different places.
            start = 0 if dp == 0 else min(count, dp * count // dp_size + tp + stage)
            stop = count if dp == dp_size - 1 else min(count, (dp + 1) * count // dp_size + tp + stage)
            span = (start, stop) if zero else (0, count)
            tensor = parameter.detach().reshape(-1)[span[0] : span[1]]
            parts.append(part_of_state(StateShard("ema", name, tensor, span, tuple(parameter.shape)), parameter))
        ranks.append(parts)
    return ranks


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_every_element_is_written_once_and_the_work_is_shared(tp: int, dp: int, zero: bool) -> None:
    sizes = {"cut.a": (8, 6), "cut.b": (6, 8), "whole.a": (6, 8), "whole.b": (7,), "late.a": (20, 3), "shared.a": (10, 4)}
    wholes = {name: torch.randn(size) for name, size in sizes.items()}
    ranks = ranks_of_a_run(wholes, tp, dp, zero)
    places = [(stage, t) for stage, _, t in itertools.product(range(2), range(dp), range(tp))]
    everyone = [holdings(parts, *place) for parts, place in zip(ranks, places, strict=True)]
    writers = assign_writers(everyone)
    written = [only_written(parts, mine) for parts, mine in zip(ranks, writers, strict=True)]
    for name, whole in wholes.items():
        for kind in ("model", "ema"):
            assert torch.equal(assemble([w[f"{kind}.{name}"] for w in written if f"{kind}.{name}" in w]), whole)
    if dp > 1:
        load = [sum(p.tensor.numel() for t in w.values() for p in t.pieces) for w in written[: tp * dp]]
        # What greedy assignment guarantees: nobody has more than the mean and one tensor.
        assert max(load) <= sum(load) / len(load) + max(w.numel() for w in wholes.values()), load
        assert min(load) > 0


def test_writers_depend_on_nothing_but_the_holdings() -> None:
    ranks = ranks_of_a_run({"cut.a": torch.zeros(8, 6), "whole.a": torch.zeros(5)}, 2, 2, False)
    everyone = [holdings(parts, 0, number % 2) for number, parts in enumerate(ranks)]
    reordered = [holdings(reversed(parts), 0, number % 2) for number, parts in enumerate(ranks)]
    assert assign_writers(everyone) == assign_writers(reordered)
