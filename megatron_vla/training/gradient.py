"""Norm, clip factor and finite check of gradients: device scalars, never read by the host inside a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """L2 norm over all tensors, shape []; accumulated in fp32 at least (a bf16 norm has three digits)."""
    dtype = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
    norms = torch._foreach_norm(list(gradients), 2, dtype=dtype)
    return torch.linalg.vector_norm(torch.stack(list(norms)))


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """min(1, limit / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_; 1 when `limit` is 0 (clipping off)."""
    if limit <= 0:
        return torch.ones_like(norm)
    return (limit / (norm + 1e-6)).clamp(max=1.0)
