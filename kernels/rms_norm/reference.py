"""The norm and its backward in PyTorch, in the kernel's order of roundings.

Sums and statistics are fp32 (fp64 for fp64 input), and so is `offset + weight`. Rounded to the input's dtype, once each: the
sum of a residual addition before anything is computed from it, the output, and the input's gradient. `extra`, the gradient that
reaches the input, or the sum, on its other way, is added before that one rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_vla.kernels.layer_norm.reference import wide_dtype


def rms_norm_reference(x: Tensor, weight: Tensor, offset: float, eps: float) -> tuple[Tensor, Tensor]:
    """x [..., N] -> (output [..., N], 1 / root mean square of the rows [...])."""
    wide = x.to(wide_dtype(x.dtype))
    rstd = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    output = wide * rstd * (offset + weight.to(wide.dtype))
    return output.to(x.dtype), rstd.squeeze(-1)


def rms_norm_backward_reference(
    gradient: Tensor, extra: Tensor | None, x: Tensor, rstd: Tensor, weight: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """Gradients of (x, weight), `extra` added to the first."""
    wide = wide_dtype(x.dtype)
    gradient = gradient.to(wide)
    normalized = x.to(wide) * rstd.unsqueeze(-1)
    scaled = gradient * (offset + weight.to(wide))
    share = normalized * (scaled * normalized).mean(dim=-1, keepdim=True)
    input_gradient = (scaled - share) * rstd.unsqueeze(-1)
    if extra is not None:
        input_gradient = input_gradient + extra.to(wide)
    weight_gradient = (gradient * normalized).flatten(0, -2).sum(dim=0)
    return input_gradient.to(x.dtype), weight_gradient.to(weight.dtype)
