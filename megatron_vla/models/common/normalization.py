"""Norm layers. Statistics and affine maps are computed in fp32 (fp64 for fp64 input) and rounded once to the input's dtype.

Shape legend: B samples, S tokens, H hidden, C condition, M modulation (3 H), R token rows of this rank.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_vla.kernels.layer_norm import op as layer_norm_op
from megatron_vla.kernels.rms_norm import op as rms_norm_op
from megatron_vla.models.common.precision import dtype_of
from megatron_vla.parallel.linear import replicated_linear
from megatron_vla.parallel.sequence_parallel import RowOwners


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which reductions and rotations over `dtype` data are computed."""
    return torch.promote_types(dtype, torch.float32)


class LayerNorm(nn.LayerNorm):
    """LayerNorm that accepts fp32 parameters with bf16 input.

    torch's fused kernel wants one dtype and reduces in fp32 inside, so the parameters are rounded to the input's dtype here:
    the same roundings as openpi's bf16 mode, without an fp32 copy of the activations. The project's kernel does the same, but
    gives fp32 parameters their gradients unrounded.
    """

    @overload
    def forward(self, hidden_BSH: Tensor) -> Tensor: ...

    @overload
    def forward(self, hidden_BSH: Tensor, update_BSH: Tensor) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(self, hidden_BSH: Tensor, *, with_input: Literal[True]) -> tuple[Tensor, Tensor]: ...

    def forward(
        self, hidden_BSH: Tensor, update_BSH: Tensor | None = None, *, with_input: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise the last axis. With `update_BSH`: (hidden + update, that normalised), on GPUs in one kernel.

        `with_input`: (hidden, that normalised). A residual branch that goes on with this hidden has its gradient added in the
        norm's backward. Both are in here because whoever reads weights of this module must call it: sharding gathers them then.
        """
        if layer_norm_op.can_run(hidden_BSH, self.weight, self.bias, update_BSH):
            parameters = self.weight, self.bias, self.eps
            if update_BSH is not None:
                return layer_norm_op.add_layer_norm(hidden_BSH, update_BSH, *parameters)
            run = layer_norm_op.layer_norm_and_input if with_input else layer_norm_op.layer_norm
            return run(hidden_BSH, *parameters)
        if update_BSH is not None:
            hidden_BSH = hidden_BSH + update_BSH
        weight_H, bias_H = self.weight.to(hidden_BSH.dtype), self.bias.to(hidden_BSH.dtype)
        normalized_BSH = F.layer_norm(hidden_BSH, self.normalized_shape, weight_H, bias_H, self.eps)
        return (hidden_BSH, normalized_BSH) if with_input or update_BSH is not None else normalized_BSH


def _rms_normalized(hidden_BSH: Tensor, epsilon: float) -> Tensor:
    """hidden / rms(hidden) in at least fp32."""
    wide_BSH = hidden_BSH.to(at_least_fp32(hidden_BSH.dtype))
    return wide_BSH * torch.rsqrt(wide_BSH.square().mean(-1, keepdim=True) + epsilon)


class RMSNorm(nn.Module):
    """`x / rms(x) * (offset + weight)`.

    offset 1 is Gemma's form: the stored weight is the difference from one (zero = identity scale). offset 0 is the usual form.
    """

    def __init__(self, hidden_size: int, epsilon: float, offset: float = 1.0) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.offset = offset
        self.weight = nn.Parameter(torch.zeros(hidden_size))

    @overload
    def forward(self, hidden_BSH: Tensor) -> Tensor: ...

    @overload
    def forward(self, hidden_BSH: Tensor, update_BSH: Tensor) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(self, hidden_BSH: Tensor, *, with_input: Literal[True]) -> tuple[Tensor, Tensor]: ...

    def forward(
        self, hidden_BSH: Tensor, update_BSH: Tensor | None = None, *, with_input: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Same shape and dtype as the input. `update_BSH` and `with_input` as in LayerNorm."""
        if rms_norm_op.can_run(hidden_BSH, self.weight, update_BSH):
            parameters = self.weight, self.offset, self.epsilon
            if update_BSH is not None:
                return rms_norm_op.add_rms_norm(hidden_BSH, update_BSH, *parameters)
            run = rms_norm_op.rms_norm_and_input if with_input else rms_norm_op.rms_norm
            return run(hidden_BSH, *parameters)
        if update_BSH is not None:
            hidden_BSH = hidden_BSH + update_BSH
        normalized_BSH = _rms_normalized(hidden_BSH, self.epsilon)
        weight_H = self.weight.to(normalized_BSH.dtype)
        output_BSH = (normalized_BSH * (self.offset + weight_H if self.offset else weight_H)).to(hidden_BSH.dtype)
        return (hidden_BSH, output_BSH) if with_input or update_BSH is not None else output_BSH


class AdaptiveRMSNorm(nn.Module):
    """adaRMS: scale, shift and residual gate are linear in a condition vector (three chunks of `dense`, in this order).

    Under sequence parallelism `dense` still has a complete gradient on every rank: the modulation's gradient is summed.
    """

    def __init__(self, hidden_size: int, condition_size: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.dense = replicated_linear(condition_size, 3 * hidden_size, bias=True)

    def forward(self, hidden_BSH: Tensor, condition_BC: Tensor, owners: RowOwners | None = None) -> tuple[Tensor, Tensor]:
        """(normalised [B, S, H], gate [B, 1, H]), both in the dtype of `hidden_BSH`.

        With `owners` (sequence parallelism) hidden are this rank's rows [R, H], and so are both results.
        """
        modulation_BM = self.dense(condition_BC)
        modulation_B1M = modulation_BM.unsqueeze(1) if owners is None else owners.per_row(modulation_BM)
        scale_B1H, shift_B1H, gate_B1H = modulation_B1M.chunk(3, dim=-1)
        normalized_BSH = _rms_normalized(hidden_BSH, self.epsilon)
        wide = normalized_BSH.dtype
        adapted_BSH = normalized_BSH * (1.0 + scale_B1H.to(wide)) + shift_B1H.to(wide)
        return adapted_BSH.to(hidden_BSH.dtype), gate_B1H.to(hidden_BSH.dtype)


class AdaptiveLayerNorm(nn.Module):
    """LayerNorm without weights of its own; scale and shift are linear in a condition vector (two chunks of `dense`).

    shift_first: order of the chunks. Sequence parallelism as in AdaptiveRMSNorm.
    """

    def __init__(self, hidden_size: int, condition_size: int, epsilon: float, *, shift_first: bool) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.shift_first = shift_first
        self.dense = replicated_linear(condition_size, 2 * hidden_size, bias=True)

    def forward(self, hidden_BSH: Tensor, condition_BC: Tensor, owners: RowOwners | None = None) -> Tensor:
        """LN(hidden) * (1 + scale) + shift in the dtype of `hidden_BSH`; with `owners` hidden are this rank's rows [R, H]."""
        modulation_BM = self.dense(condition_BC.to(dtype_of(self.dense)))
        modulation_B1M = modulation_BM.unsqueeze(1) if owners is None else owners.per_row(modulation_BM)
        first_B1H, second_B1H = modulation_B1M.chunk(2, dim=-1)
        scale_B1H, shift_B1H = (second_B1H, first_B1H) if self.shift_first else (first_B1H, second_B1H)
        wide = at_least_fp32(hidden_BSH.dtype)
        normalized_BSH = F.layer_norm(hidden_BSH.to(wide), (hidden_BSH.shape[-1],), eps=self.epsilon)
        return (normalized_BSH * (1.0 + scale_B1H.to(wide)) + shift_B1H.to(wide)).to(hidden_BSH.dtype)


class PlainLayerNorm(nn.Module):
    """LayerNorm without weights."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        """Normalise the last axis."""
        return F.layer_norm(hidden_BSH, (hidden_BSH.shape[-1],), eps=self.epsilon).to(hidden_BSH.dtype)
