"""The masked softmax in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def masked_softmax_reference(
    logits_BMK: Tensor, scale: float, mask_B1N: Tensor | None, num_keys: int, dtype: torch.dtype
) -> Tensor:
    """softmax(logits * scale + mask) in the logits' dtype, rounded once to `dtype`; keys from `num_keys` (N) on are hidden."""
    logits_BMK = logits_BMK * scale
    missing = logits_BMK.shape[-1] - num_keys
    if missing:
        if mask_B1N is None:
            mask_B1N = logits_BMK.new_zeros(1, 1, num_keys)
        mask_B1N = F.pad(mask_B1N, (0, missing), value=float("-inf"))
    if mask_B1N is not None:
        logits_BMK = logits_BMK + mask_B1N.to(logits_BMK.dtype)
    return logits_BMK.softmax(dim=-1).to(dtype)
