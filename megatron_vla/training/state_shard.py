"""What one rank holds of the optimizer's state, described without its layout: the unit that a checkpoint saves and loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

StateKind = Literal["main", "exp_avg", "exp_avg_sq", "ema"]
STATE_KINDS: tuple[StateKind, ...] = ("main", "exp_avg", "exp_avg_sq", "ema")


@dataclass(frozen=True)
class StateShard:
    """Elements `flat_range` (start, stop) of one state tensor of one parameter.

    The range counts in the row-major flattened *rank-local* parameter: the whole parameter without tensor parallelism, else
    this rank's part of it (`parallel/parameter_shard.py` says where that part lies in the global tensor).

    tensor: the live state, of stop - start elements: 1-D when it is a true part, of `local_shape` when the range is everything.
        Loading copies into it in place.
    local_shape: shape of the rank-local parameter (not of `tensor`).

    Ranks that hold the same elements (plain data parallelism, HSDP replicas, decay-only parameters) all yield them, with equal
    values: a writer takes one copy.
    """

    kind: StateKind
    parameter_name: str
    tensor: Tensor
    flat_range: tuple[int, int]
    local_shape: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether this is all of the rank-local parameter's state."""
        return self.flat_range == (0, self.local_numel)

    @property
    def local_numel(self) -> int:
        """Elements of the rank-local parameter."""
        count = 1
        for length in self.local_shape:
            count *= length
        return count
