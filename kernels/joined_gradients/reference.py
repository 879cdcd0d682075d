"""The join and the sums in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def joined_gradients_reference(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """[..., N_i] each -> ([..., sum N_i], sums over all rows [sum N_i]). Sums in fp32 at least, rounded once."""
    joined = torch.cat(list(parts), dim=-1)
    return joined, joined.flatten(0, -2).sum(dim=0)
