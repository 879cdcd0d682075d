"""Products of a linear layer in FP8: quantise both operands with one scale per tensor, multiply, scale back.

Forward, input gradient and weight gradient are each one `torch._scaled_mm`, whose operands must both be contiguous along the
summed axis (the only layout of Hopper's FP8 tensor cores): hence the transposed copies in backward, which are made in FP8.
Activations and weights are E4M3, gradients E5M2 (arXiv:2209.05433). Plain torch operations, so that torch.compile fuses the
quantisation into the kernels before it. On CPUs the same quantised values are multiplied in fp32.

Shape legend: M rows (tokens), K input features, N output features (of all weights together).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_vla.kernels.fp8_quantize.op import ACTIVATION_DTYPE, GRADIENT_DTYPE
from megatron_vla.models.common.joined_parameters import needs_gradient

# Keeps the scale of an all-zero tensor finite.
SMALLEST_AMAX = 1e-12


@dataclass(frozen=True)
class Accumulation:
    """Which products may sum in the tensor cores' own precision (about 14 bits); others are summed in fp32 as they go."""

    fast_forward: bool = True
    fast_backward: bool = False


def scale_of(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The fp32 factor, shape [], that takes the largest magnitude of all `tensors` to the largest finite value of `dtype`.

    Rows first, then all: the row maxima can be computed by the kernel that produces the rows. NaN and infinity pass through.
    """
    amaxes = [tensor.abs().amax(dim=-1).amax().float() for tensor in tensors]
    amax = torch.stack(amaxes).amax() if len(amaxes) > 1 else amaxes[0]
    # A number divided by a tensor would be its reciprocal, rounded, times the number.
    return torch.full_like(amax, torch.finfo(dtype).max) / amax.clamp(min=SMALLEST_AMAX)


def quantized(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor * scale` in `dtype`. No clamp: with the tensor's own scale nothing exceeds the range by more than a rounding."""
    return (tensor.float() * scale).to(dtype)


def scaled_product(
    a_MK: Tensor, a_reciprocal: Tensor, b_NK: Tensor, b_reciprocal: Tensor, out_dtype: torch.dtype, fast: bool
) -> Tensor:
    """a @ b^T of quantised, contiguous matrices [M, K] and [N, K], times both scales' reciprocals: [M, N] in `out_dtype`."""
    if a_MK.device.type == "cpu":
        return ((a_MK.float() @ b_NK.float().t()) * (a_reciprocal * b_reciprocal)).to(out_dtype)
    return torch._scaled_mm(
        a_MK, b_NK.t(), scale_a=a_reciprocal, scale_b=b_reciprocal, out_dtype=out_dtype, use_fast_accum=fast
    )


def _joined(matrices: Sequence[Tensor]) -> Tensor:
    """Rows of all matrices, one below the other."""
    if len(matrices) == 1:
        return matrices[0]
    # `cat` has no FP8 kernel on GPUs; bytes are bytes.
    return torch.cat([matrix.view(torch.uint8) for matrix in matrices]).view(matrices[0].dtype)


def _forward_product(
    rows_MK: Tensor, weights: Sequence[Tensor], accumulation: Accumulation
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(product [M, N], rows in FP8, their scale, the weights' scale)."""
    rows_scale = scale_of([rows_MK], ACTIVATION_DTYPE)
    weight_scale = scale_of(weights, ACTIVATION_DTYPE)
    rows8_MK = quantized(rows_MK, rows_scale, ACTIVATION_DTYPE)
    weight8_NK = _joined([quantized(weight, weight_scale, ACTIVATION_DTYPE) for weight in weights])
    scales = rows_scale.reciprocal(), weight_scale.reciprocal()
    product_MN = scaled_product(rows8_MK, scales[0], weight8_NK, scales[1], rows_MK.dtype, accumulation.fast_forward)
    return product_MN, rows8_MK, rows_scale, weight_scale


class _Fp8Product(torch.autograd.Function):
    """rows [M, K] times the transposed weights [N, K], which share one scale. New memory for backward: rows in FP8.

    The weights are quantised again in backward: that needs no memory between the passes, and a compiled graph is free to keep
    them instead.
    """

    @staticmethod
    def forward(ctx: Any, rows_MK: Tensor, accumulation: Accumulation, *weights: Tensor) -> Tensor:
        product_MN, *saved = _forward_product(rows_MK, weights, accumulation)
        ctx.save_for_backward(*saved, *weights)
        ctx.accumulation = accumulation
        ctx.rows_dtype = rows_MK.dtype
        return product_MN

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient_MN = gradients[0]
        rows8_MK, rows_scale, weight_scale, *weights = ctx.saved_tensors
        fast = ctx.accumulation.fast_backward
        gradient_scale = scale_of([gradient_MN], GRADIENT_DTYPE)
        gradient_reciprocal = gradient_scale.reciprocal()
        gradient8_MN = quantized(gradient_MN, gradient_scale, GRADIENT_DTYPE)
        rows_gradient: Tensor | None = None
        weight_gradients: tuple[Tensor | None, ...] = (None,) * len(weights)
        if ctx.needs_input_grad[0]:
            weight8_NK = _joined([quantized(weight, weight_scale, ACTIVATION_DTYPE) for weight in weights])
            weight8_KN = weight8_NK.t().contiguous()
            rows_gradient = scaled_product(
                gradient8_MN.contiguous(), gradient_reciprocal, weight8_KN, weight_scale.reciprocal(), ctx.rows_dtype, fast
            )
        if any(ctx.needs_input_grad[2:]):
            gradient8_NM, rows8_KM = gradient8_MN.t().contiguous(), rows8_MK.t().contiguous()
            reciprocal = rows_scale.reciprocal()
            joined_NK = scaled_product(gradient8_NM, gradient_reciprocal, rows8_KM, reciprocal, weights[0].dtype, fast)
            weight_gradients = joined_NK.split([weight.shape[0] for weight in weights])
        return rows_gradient, None, *weight_gradients


def fp8_product(rows_MK: Tensor, weights: Sequence[Tensor], accumulation: Accumulation) -> Tensor:
    """rows [M, K] @ [weights [N_i, K] joined]^T -> [M, sum N_i] in the rows' dtype; M, K and every N_i multiples of 16."""
    if not needs_gradient([rows_MK, *weights]):
        return _forward_product(rows_MK, weights, accumulation)[0]
    result: Tensor = _Fp8Product.apply(rows_MK, accumulation, *weights)
    return result
