"""Layouts that tensor parallelism cannot give are refused from flags alone, each with the flag and a size that works."""

from __future__ import annotations

import pytest

from megatron_vla.config.check import check
from megatron_vla.config.run import parse_args
from megatron_vla.models.registry import model_family
from megatron_vla.parallel.parameter_shard import ParameterShard

BASE = [
    "--mock-data",
    "--model-variant",
    "tiny",
    "--vision-num-attention-heads",
    "8",
    "--train-iters",
    "9",
    "--lr-warmup-iters",
    "1",
]
SIZE = "--tensor-model-parallel-size"


def errors_of(*extra: str, world_size: int) -> dict[str, str]:
    config = parse_args([*BASE, *extra])
    findings = check(config, model_family("pi05"), world_size)
    return {f.where: f"{f.what} {f.fix}" for f in findings if f.severity == "error"}


@pytest.mark.parametrize(
    ("words", "world_size", "where", "says"),
    [
        (["2"], 3, f"{SIZE} x --pipeline-model-parallel-size", f"use {SIZE} 1 "),
        (["8", "--pipeline-model-parallel-size", "3"], 4, f"{SIZE} x --pipeline-model-parallel-size", f"use {SIZE} 4 "),
        (["-2"], 2, SIZE, "1 or more"),
        (["4", "--vision-num-attention-heads", "2"], 4, f"{SIZE}, --vision-num-attention-heads", f"use {SIZE} 2"),
        (["3", "--num-query-groups", "8"], 3, f"{SIZE}, --num-attention-heads", f"use {SIZE} 2"),
        (["4", "--num-attention-heads", "6"], 4, f"{SIZE}, --num-attention-heads", f"use {SIZE} 2"),
        (["2", "--ffn-hidden-size", "129"], 2, f"{SIZE}, --ffn-hidden-size", f"use {SIZE} 1"),
        (["8", "--vision-ffn-hidden-size", "60"], 8, f"{SIZE}, --vision-ffn-hidden-size", f"use {SIZE} 4"),
        (["4", "--expert-ffn-hidden-size", "62"], 4, f"{SIZE}, --expert-ffn-hidden-size", f"use {SIZE} 2"),
        (
            ["4", "--num-attention-heads", "12", "--num-query-groups", "6"],
            4,
            f"{SIZE}, --num-query-groups",
            f"use {SIZE} 2",
        ),
        (["8", "--action-horizon", "4", "--sequence-parallel"], 8, f"{SIZE}, --action-horizon", "or --no-sequence-parallel"),
        (["4", "--vocab-size", "3"], 4, f"{SIZE}, --vocab-size", f"use {SIZE} 2"),
        (["2", "--vocab-size", "67", "--use-distributed-optimizer"], 2, f"{SIZE}, --vocab-size", "equal parts"),
        (["2", "--context-parallel-size", "2"], 4, "--context-parallel-size", "too short"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_size_that_does_not_fit_is_refused_with_one_that_does(
    words: list[str], world_size: int, where: str, says: str
) -> None:
    found = errors_of(SIZE, *words, world_size=world_size)
    assert says in found[where], found


@pytest.mark.parametrize(
    ("words", "world_size"),
    [
        (["2"], 2),
        (["8", "--sequence-parallel"], 16),
        (["4", "--num-query-groups", "2"], 4),
        (["2", "--vocab-size", "67"], 2),
    ],
    ids=str,
)
def test_a_size_that_fits_has_no_finding(words: list[str], world_size: int) -> None:
    assert errors_of(SIZE, *words, world_size=world_size) == {}


def test_the_suggested_size_works() -> None:
    words = ("--num-attention-heads", "12", "--vision-ffn-hidden-size", "60", "--num-query-groups", "3")
    found = errors_of(SIZE, "8", *words, world_size=8)
    suggested = {text.rsplit(" ", 1)[1] for text in found.values()}
    assert suggested == {"1"}, found  # 2 and 4 do not go with three key/value heads
    assert errors_of(SIZE, "1", *words, world_size=8) == {}


def test_parts_of_a_length_that_does_not_divide_cover_it_once() -> None:
    parts = [ParameterShard((7, 3), dim=0, rank=rank, size=4) for rank in range(4)]
    assert [(p.start, p.stop) for p in parts] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert [p.local_shape for p in parts] == [(2, 3), (2, 3), (2, 3), (1, 3)]
    assert ParameterShard((7, 3), dim=1, rank=1, size=3).offsets == (0, 1)
