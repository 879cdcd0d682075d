"""Quantising with a given scale in PyTorch: what csrc/fp8_quantize.cu computes, bit for bit.

Shape legend: M rows, K columns (features), F width of a gated MLP.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def quantized_reference(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`values * scale` in an FP8 `dtype`: what exceeds its range becomes its largest value, but infinity and NaN become NaN."""
    largest = torch.finfo(dtype).max
    scaled = values.float() * scale
    return torch.where(values.isfinite(), scaled.clamp(-largest, largest), torch.nan).to(dtype)


def largest_magnitude(parts: list[Tensor]) -> Tensor:
    """fp32 []: of all elements of all parts; NaN and infinity pass through."""
    return torch.stack([part.abs().amax().float() for part in parts]).amax()


def gated_gelu_backward_reference(gradient: Tensor, gate_up: Tensor) -> Tensor:
    """[M, F], [M, 2 F] -> [M, 2 F]: gradients of gate and up, side by side, rounded as torch's backward rounds them."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate_gradient = torch.ops.aten.gelu_backward(gradient * up, gate, approximate="tanh")
    return torch.cat([gate_gradient, gradient * F.gelu(gate, approximate="tanh")], dim=-1)
