"""Sum of squares in PyTorch, in fp64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def square_sum_reference(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all elements, shape [], fp64."""
    norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float64)
    return torch.stack(list(norms)).square().sum()
