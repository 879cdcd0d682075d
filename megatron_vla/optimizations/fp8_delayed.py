"""Products of linear layers in FP8 with delayed scaling: every operand is quantised once, into both layouts that are needed.

A gated MLP with merged gate and up is one function: the activation and the gradients of gate and up exist in FP8 only, made and
transposed by the kernel that computes them (kernels/fp8_quantize). Pi0.5 base, 18,432 prefix rows, one layer: 5.5 GB moved
around its products, against 12.6 GB with the scale of the tensor at hand.

Shape legend: M rows (tokens), K input features, N output features of all weights together, F width of a gated MLP, H its hidden
size. Operands in FP8 carry an 8: rows8_MK, and rows8_KM for the transposed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_vla.kernels.fp8_quantize.op import RECIPROCAL, fp8_gated_gelu, fp8_gated_gelu_backward, fp8_quantize
from megatron_vla.models.common.joined_parameters import needs_gradient
from megatron_vla.optimizations.fp8_product import Accumulation, scaled_product
from megatron_vla.optimizations.fp8_scaling import DelayedScaling, LayerSlots


@torch.library.custom_op("megatron_vla::fp8_delayed_product", mutates_args=())
def _product(a8: Tensor, a_slot: Tensor, b8: Tensor, b_slot: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """a @ b^T of [M, K] and [N, K]. A custom op: inductor (torch 2.11) cannot lower `_scaled_mm` whose scales are views."""
    return scaled_product(a8, a_slot[RECIPROCAL], b8, b_slot[RECIPROCAL], dtype, fast)


@_product.register_fake
def _(a8: Tensor, a_slot: Tensor, b8: Tensor, b_slot: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    return a8.new_empty(a8.shape[0], b8.shape[0], dtype=dtype)


def _forward_product(
    rows_MK: Tensor,
    weights: Sequence[Tensor],
    rows_slot: Tensor,
    weight_slot: Tensor,
    accumulation: Accumulation,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """(product [M, N], rows and weights in FP8 and transposed, where `needs` says that backward will read them)."""
    rows8_MK, rows8_KM = fp8_quantize([rows_MK], rows_slot, is_gradient=False, transposed=needs[1])
    weight8_NK, weight8_KN = fp8_quantize(weights, weight_slot, is_gradient=False, transposed=needs[0])
    product_MN = _product(rows8_MK, rows_slot, weight8_NK, weight_slot, rows_MK.dtype, accumulation.fast_forward)
    return product_MN, rows8_KM, weight8_KN


class _Product(torch.autograd.Function):
    """rows [M, K] times the transposed, joined weights [N, K]. `needs`: gradients of (rows, weights)."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_MK: Tensor,
        rows_slot: Tensor,
        weight_slot: Tensor,
        gradient_slot: Tensor,
        accumulation: Accumulation,
        needs: tuple[bool, bool],
        *weights: Tensor,
    ) -> Tensor:
        product_MN, rows8_KM, weight8_KN = _forward_product(rows_MK, weights, rows_slot, weight_slot, accumulation, needs)
        ctx.save_for_backward(rows8_KM, weight8_KN, rows_slot, weight_slot, gradient_slot)
        ctx.accumulation, ctx.needs, ctx.rows_dtype = accumulation, needs, rows_MK.dtype
        ctx.sizes = [weight.shape[0] for weight in weights]
        return product_MN

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows8_KM, weight8_KN, rows_slot, weight_slot, gradient_slot = ctx.saved_tensors
        fast, dtype = ctx.accumulation.fast_backward, ctx.rows_dtype
        gradient8_MN, gradient8_NM = fp8_quantize([gradients[0]], gradient_slot, is_gradient=True, transposed=ctx.needs[1])
        rows_gradient: Tensor | None = None
        weight_gradients: tuple[Tensor | None, ...] = (None,) * len(ctx.sizes)
        if ctx.needs[0]:
            rows_gradient = _product(gradient8_MN, gradient_slot, weight8_KN, weight_slot, dtype, fast)
        if ctx.needs[1]:
            weight_gradients = _product(gradient8_NM, gradient_slot, rows8_KM, rows_slot, dtype, fast).split(ctx.sizes)
        return rows_gradient, None, None, None, None, None, *weight_gradients


class _GatedMlp(torch.autograd.Function):
    """down(gelu_tanh(gate(rows)) * up(rows)), rows [M, H] -> [M, H]. `needs`: gradients of (rows, weights).

    Slots: of the merged gate/up product (its rows, weight, output gradient), then of down's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows_MH: Tensor,
        rows_slot: Tensor,
        gate_up_slot: Tensor,
        gate_up_gradient_slot: Tensor,
        active_slot: Tensor,
        down_slot: Tensor,
        gradient_slot: Tensor,
        accumulation: Accumulation,
        needs: tuple[bool, bool],
        gate_FH: Tensor,
        up_FH: Tensor,
        down_HF: Tensor,
    ) -> Tensor:
        dtype, fast = rows_MH.dtype, accumulation.fast_forward
        rows8_MH, rows8_HM = fp8_quantize([rows_MH], rows_slot, is_gradient=False, transposed=needs[1])
        # G: gate and up side by side, 2 F.
        weight8_GH, weight8_HG = fp8_quantize([gate_FH, up_FH], gate_up_slot, is_gradient=False, transposed=needs[0])
        gate_up_MG = _product(rows8_MH, rows_slot, weight8_GH, gate_up_slot, dtype, fast)
        active8_MF, active8_FM = fp8_gated_gelu(gate_up_MG, active_slot, transposed=needs[1])
        down8_HF, down8_FH = fp8_quantize([down_HF], down_slot, is_gradient=False, transposed=any(needs))
        slots = rows_slot, gate_up_slot, gate_up_gradient_slot, active_slot, down_slot, gradient_slot
        ctx.save_for_backward(rows8_HM, weight8_HG, gate_up_MG, active8_FM, down8_FH, *slots)
        ctx.accumulation, ctx.needs, ctx.width = accumulation, needs, gate_FH.shape[0]
        return _product(active8_MF, active_slot, down8_HF, down_slot, dtype, fast)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        rows8_HM, weight8_HG, gate_up_MG, active8_FM, down8_FH, *slots = ctx.saved_tensors
        rows_slot, gate_up_slot, gate_up_gradient_slot, active_slot, down_slot, gradient_slot = slots
        dtype, fast = gate_up_MG.dtype, ctx.accumulation.fast_backward
        needs_rows, needs_weights = ctx.needs
        gradient8_MH, gradient8_HM = fp8_quantize([gradients[0]], gradient_slot, is_gradient=True, transposed=needs_weights)
        active_gradient_MF = _product(gradient8_MH, gradient_slot, down8_FH, down_slot, dtype, fast)
        gate_up8_MG, gate_up8_GM = fp8_gated_gelu_backward(
            active_gradient_MF, gate_up_MG, gate_up_gradient_slot, transposed=needs_weights
        )
        rows_gradient: Tensor | None = None
        weight_gradients: tuple[Tensor | None, ...] = (None, None, None)
        if needs_rows:
            rows_gradient = _product(gate_up8_MG, gate_up_gradient_slot, weight8_HG, gate_up_slot, dtype, fast)
        if needs_weights:
            joined_GH = _product(gate_up8_GM, gate_up_gradient_slot, rows8_HM, rows_slot, dtype, fast)
            down_gradient = _product(gradient8_HM, gradient_slot, active8_FM, active_slot, dtype, fast)
            weight_gradients = (*joined_GH.split(ctx.width), down_gradient)
        return rows_gradient, *(None,) * 8, *weight_gradients


class DelayedBackend:
    """See Fp8Backend. One object per layer: `slots` are the layer's own; a merged product uses those of its first layer.

    No dataclass: torch.compile would make one graph per instance of a frozen one.
    """

    def __init__(self, scaling: DelayedScaling, slots: LayerSlots, accumulation: Accumulation):
        self.scaling = scaling
        self.slots = slots
        self.accumulation = accumulation

    def product(self, rows_MK: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """See Fp8Backend."""
        slots = self.slots
        needs = _needs(rows_MK, weights)
        if not any(needs):  # see needs_gradient
            return _forward_product(rows_MK, weights, slots.rows, slots.weight, self.accumulation, needs)[0]
        result: Tensor = _Product.apply(rows_MK, slots.rows, slots.weight, slots.gradient, self.accumulation, needs, *weights)
        return result

    def gated_mlp(self, rows_MH: Tensor, gate_FH: Tensor, up_FH: Tensor, down_HF: Tensor, down: LayerSlots) -> Tensor:
        """down(gelu_tanh(gate(rows)) * up(rows)) [M, H] with this (gate's) layer's slots and those of `down`."""
        own = self.slots
        needs = _needs(rows_MH, (gate_FH, up_FH, down_HF))
        slots = own.rows, own.weight, own.gradient, down.rows, down.weight, down.gradient
        result: Tensor = _GatedMlp.apply(rows_MH, *slots, self.accumulation, needs, gate_FH, up_FH, down_HF)
        return result


def _needs(rows: Tensor, weights: Sequence[Tensor]) -> tuple[bool, bool]:
    """Whether backward will want gradients of rows, and of any weight: nothing is transposed for one that never comes."""
    return needs_gradient([rows]), needs_gradient(weights)
