"""Which tensor-parallel sizes a model's dimensions allow, checked from flags before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.findings import Finding, error

SIZE_FLAG = "--tensor-model-parallel-size"


@dataclass(frozen=True, kw_only=True)
class SplitDimensions:
    """What the ranks share, as (flag, value) pairs.

    divisible: heads and MLP widths, of which every rank takes an equal part. key_value_heads: split when there are enough of
    them, otherwise several ranks read the same one. tokens: smallest number of tokens of each residual stream per sample
    (sequence parallelism finds samples by counting rows). vocabulary: rows of embedding tables; parts may differ by one.
    """

    divisible: tuple[tuple[str, int], ...]
    key_value_heads: tuple[tuple[str, int], ...] = ()
    tokens: tuple[tuple[str, int], ...] = ()
    vocabulary: tuple[tuple[str, int], ...] = ()


def tensor_parallel_findings(parallel: ParallelConfig, dimensions: SplitDimensions) -> Iterator[Finding]:
    """One finding per dimension that the size does not fit, with the largest smaller size that fits them all."""
    size = parallel.tensor_model_parallel_size
    if size <= 1:
        return
    rules = list(_rules(parallel, dimensions))
    working = next(s for s in range(size - 1, 0, -1) if all(rule.allows(s) for rule in rules))
    for rule in rules:
        if not rule.allows(size):
            yield error(f"{SIZE_FLAG}, {rule.flag}", f"{size} {rule.problem}", f"use {SIZE_FLAG} {working}{rule.or_else}")


@dataclass(frozen=True)
class _Rule:
    flag: str
    allows: Callable[[int], bool]
    problem: str
    or_else: str = ""


def _divides(value: int, size: int) -> bool:
    return value % size == 0


def _divides_or_is_multiple(value: int, size: int) -> bool:
    return value % size == 0 or size % value == 0


def _is_at_most(value: int, size: int) -> bool:
    return size <= value


def _rules(parallel: ParallelConfig, dimensions: SplitDimensions) -> Iterator[_Rule]:
    for flag, value in dimensions.divisible:
        yield _Rule(flag, partial(_divides, value), f"does not divide {flag} {value}")
    for flag, value in dimensions.key_value_heads:
        text = f"and {flag} {value}: one must be a multiple of the other, so that a rank's query heads share a key/value head"
        yield _Rule(flag, partial(_divides_or_is_multiple, value), text)
    for flag, value in dimensions.tokens if parallel.sequence_parallel else ():
        text = f"is more than the {value} tokens per sample of {flag}, which --sequence-parallel splits"
        yield _Rule(flag, partial(_is_at_most, value), text, ", or --no-sequence-parallel")
    for flag, value in dimensions.vocabulary:
        yield _Rule(flag, partial(_is_at_most, value), f"is more than the {value} rows of {flag}")
        if parallel.use_distributed_optimizer:
            # Ranks with one row more would cut their buffers elsewhere than their tensor-parallel neighbours.
            text = f"does not divide {flag} {value}, and --use-distributed-optimizer needs equal parts on all ranks"
            yield _Rule(flag, partial(_divides, value), text, ", or --no-use-distributed-optimizer")
