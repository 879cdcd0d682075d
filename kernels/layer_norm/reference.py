"""The norm and its backward in PyTorch, in the kernel's order of roundings.

Sums and statistics are fp32 (fp64 for fp64 input). Rounded to the input's dtype, once each: the parameters, the sum of a
residual addition before anything is computed from it, the output, and the input's gradient. `extra`, the gradient that reaches
the sum, or the input, on its other way, is added before that one rounding; autograd's own addition rounds the norm's gradient
first, then the sum of both, and errs more. Gradients of parameters are rounded once to their own dtype: those of fp32
parameters keep the sums' fp32 bits, which a cast outside of the norm would round to the input's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype rows of `dtype` are summed."""
    return torch.promote_types(dtype, torch.float32)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., N] -> (output [..., N], mean and 1 / deviation of the rows [...])."""
    wide = x.to(wide_dtype(x.dtype))
    mean = wide.mean(dim=-1, keepdim=True)
    deviation = wide - mean
    rstd = torch.rsqrt(deviation.square().mean(dim=-1, keepdim=True) + eps)
    output = deviation * rstd * weight.to(x.dtype).to(wide.dtype) + bias.to(x.dtype).to(wide.dtype)
    return output.to(x.dtype), mean.squeeze(-1), rstd.squeeze(-1)


def layer_norm_backward_reference(
    gradient: Tensor, extra: Tensor | None, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (x, weight, bias), `extra` added to the first."""
    wide = wide_dtype(x.dtype)
    gradient = gradient.to(wide)
    normalized = (x.to(wide) - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    scaled = gradient * weight.to(x.dtype).to(wide)
    share = scaled.mean(dim=-1, keepdim=True) + normalized * (scaled * normalized).mean(dim=-1, keepdim=True)
    input_gradient = (scaled - share) * rstd.unsqueeze(-1)
    if extra is not None:
        input_gradient = input_gradient + extra.to(wide)
    weight_gradient = (gradient * normalized).flatten(0, -2).sum(dim=0)
    bias_gradient = gradient.flatten(0, -2).sum(dim=0)
    return input_gradient.to(x.dtype), weight_gradient.to(weight.dtype), bias_gradient.to(weight.dtype)
