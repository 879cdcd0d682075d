"""What all batches that one captured graph may run on have in common, read from host batches without touching a tensor's data.

A graph replays fixed kernels on fixed addresses. So every tensor must have the shape and the dtype that it had at capture, the
same optional fields must be there, and every plain number that the model's Python code may have read (a maximal length, an
image grid) must be equal: it is baked into the graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorForm:
    """Shape and dtype of one tensor field."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape)) or 'scalar'} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class MicroBatchContract:
    """Class of one micro-batch and its fields: a TensorForm, or the value of a plain field (None for an absent one)."""

    kind: str
    fields: tuple[tuple[str, Hashable], ...]


@dataclass(frozen=True)
class GraphContract:
    """One entry per micro-batch of the step, in order; their number is part of the contract. Hashable, and can be pickled."""

    micro_batches: tuple[MicroBatchContract, ...]

    def differences(self, other: GraphContract) -> list[str]:
        """What `other` has instead, for messages: "micro-batch 0: tokens_BL 2x8 int64 -> 2x6 int64"."""
        if len(self.micro_batches) != len(other.micro_batches):
            return [f"{len(self.micro_batches)} micro-batches -> {len(other.micro_batches)}"]
        lines = []
        for number, (mine, theirs) in enumerate(zip(self.micro_batches, other.micro_batches, strict=True)):
            before, after = dict(mine.fields), dict(theirs.fields)
            changed = [
                f"{name} {before.get(name, 'missing')} -> {after.get(name, 'missing')}"
                for name in dict.fromkeys((*before, *after))
                if before.get(name) != after.get(name)
            ]
            if changed:
                lines.append(f"micro-batch {number}: {', '.join(changed)}")
        return lines

    def __str__(self) -> str:
        first = self.micro_batches[0]
        forms = ", ".join(f"{name} {value}" for name, value in first.fields if isinstance(value, TensorForm))
        return f"{len(self.micro_batches)} micro-batch(es) of {forms}"


def _field(batch: Any, name: str) -> Hashable:
    value = getattr(batch, name)
    if isinstance(value, Tensor):
        return TensorForm(tuple(value.shape), value.dtype)
    try:
        hash(value)
    except TypeError as problem:
        raise ValueError(
            f"batch field {type(batch).__name__}.{name} is a {type(value).__name__}: with --runner full_iteration_graph a "
            "field is a tensor, a plain number or a tuple, so that it can be compared from step to step; use --runner eager"
        ) from problem
    return value


def contract_of(batches: Sequence[Any]) -> GraphContract:
    """The contract that a step's micro-batches (dataclasses of tensors and plain values) fulfil.

    Raises ValueError naming a field that cannot be part of one.
    """
    return GraphContract(
        tuple(
            MicroBatchContract(
                type(batch).__name__, tuple((field.name, _field(batch, field.name)) for field in dataclasses.fields(batch))
            )
            for batch in batches
        )
    )
