"""Rows of a tensor in another order, with a backward pass that is a selection too.

Autograd's own backward of an index adds into zeros, atomically on GPUs: slow, and refused in deterministic runs. Where no copy
but one is read, the gradient is the inverse selection.

Shape legend: M source rows, N taken rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _TakenRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, row_N: Tensor, place_M: Tensor) -> Tensor:
        ctx.save_for_backward(place_M)
        return source.index_select(0, row_N)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (place_M,) = ctx.saved_tensors
        taken = gradient.index_select(0, place_M.clamp(min=0))
        # Selected, not multiplied: the gradient of a row that nothing reads may be left-over memory.
        is_taken_M = (place_M >= 0).view(-1, *(1,) * (gradient.ndim - 1))
        return torch.where(is_taken_M, taken, 0.0), None, None


def take_rows(source: Tensor, row_N: Tensor, place_M: Tensor) -> Tensor:
    """`source[row_N]`, [N, ...]. place_M: where each source row was taken to, -1 for rows whose copies nobody reads.

    A row must not be read in two places (not checked): its gradient comes from `place_M` alone.
    """
    taken: Tensor = _TakenRows.apply(source, row_N, place_M)
    return taken
