"""`layer_norm`, `add_layer_norm`, `layer_norm_and_input`: custom ops, because compiled layers call them, with their backward.

All give gradients to x, weight and bias; `add_layer_norm` hands one gradient to both of the tensors that it adds.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from megatron_vla.kernels import FALLBACKS, SELECTION, launch, load_launcher
from megatron_vla.kernels.layer_norm.reference import layer_norm_backward_reference, layer_norm_reference, wide_dtype
from megatron_vla.kernels.layer_norm.rows import address, are_rows, can_load, processors_of

_LAUNCHER = load_launcher("layer_norm")
# Read while tracing: a constant, not a call.
IS_BUILT = _LAUNCHER is not None

if _LAUNCHER is not None:
    _LAUNCHER.layer_norm_forward.argtypes = [
        *([ctypes.c_void_p] * 4),
        ctypes.c_int,
        *([ctypes.c_void_p] * 4),
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_float,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    _LAUNCHER.layer_norm_backward.argtypes = [
        *([ctypes.c_void_p] * 6),
        ctypes.c_int,
        *([ctypes.c_void_p] * 4),
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
    ]


def _launch_forward(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, ...]:
    """(sum if there is a residual, output, mean, rstd)."""
    assert _LAUNCHER is not None
    total = None if residual is None else torch.empty_like(x)
    output = torch.empty_like(x)
    mean, rstd = (torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) for _ in range(2))
    launch(
        _LAUNCHER.layer_norm_forward,
        x.device,
        *map(address, (x, residual, weight, bias)),
        weight.dtype == torch.float32,
        *map(address, (total, output, mean, rstd)),
        mean.numel(),
        x.shape[-1],
        eps,
        processors_of(x),
    )
    return (output, mean, rstd) if total is None else (total, output, mean, rstd)


@torch.library.custom_op("megatron_vla::layer_norm", mutates_args=())
def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """See layer_norm_reference, which runs where the kernel's conditions do not hold."""
    x = x.contiguous()
    if not (IS_BUILT and can_load(x)):
        FALLBACKS.note("layer_norm", _LAUNCHER, x)
        return layer_norm_reference(x, weight, bias, eps)
    output, mean, rstd = _launch_forward(x, None, weight, bias, eps)
    return output, mean, rstd


@_layer_norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=wide_dtype(x.dtype)) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


@torch.library.custom_op("megatron_vla::add_layer_norm", mutates_args=())
def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x + residual, and what layer_norm gives for it)."""
    x, residual = x.contiguous(), residual.contiguous()
    if not (IS_BUILT and can_load(x, residual)):
        FALLBACKS.note("layer_norm", _LAUNCHER, x, residual)
        total = x + residual
        return total, *layer_norm_reference(total, weight, bias, eps)
    total, output, mean, rstd = _launch_forward(x, residual, weight, bias, eps)
    return total, output, mean, rstd


@_add_layer_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=wide_dtype(x.dtype)) for _ in range(2))
    return x.new_empty(x.shape), x.new_empty(x.shape), mean, rstd


@torch.library.custom_op("megatron_vla::layer_norm_backward", mutates_args=())
def _layer_norm_backward(
    gradient: Tensor, extra: Tensor | None, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See layer_norm_backward_reference, which runs where the kernel's conditions do not hold."""
    gradient, x = gradient.contiguous(), x.contiguous()
    extra = None if extra is None else extra.contiguous()
    if not (IS_BUILT and can_load(gradient, x, extra)):
        FALLBACKS.note("layer_norm", _LAUNCHER, gradient, x, extra)
        return layer_norm_backward_reference(gradient, extra, x, mean, rstd, weight)
    assert _LAUNCHER is not None
    width, processors = x.shape[-1], processors_of(x)
    input_gradient, weight_gradient, bias_gradient = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    partial = torch.empty(processors, 2, width, dtype=torch.float32, device=x.device)
    launch(
        _LAUNCHER.layer_norm_backward,
        x.device,
        *map(address, (gradient, extra, x, mean, rstd, weight)),
        weight.dtype == torch.float32,
        *map(address, (input_gradient, partial, weight_gradient, bias_gradient)),
        mean.numel(),
        width,
        processors,
    )
    return input_gradient, weight_gradient, bias_gradient


@_layer_norm_backward.register_fake
def _(
    gradient: Tensor, extra: Tensor | None, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        output, mean, rstd = torch.ops.megatron_vla.layer_norm(x, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return *torch.ops.megatron_vla.layer_norm_backward(gradient, None, *ctx.saved_tensors), None


class _StreamAndLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            stream = x.view_as(x)
            output, mean, rstd = torch.ops.megatron_vla.layer_norm(x, weight, bias, eps)
            ctx.save_for_backward(x, mean, rstd, weight)
        else:
            stream, output, mean, rstd = torch.ops.megatron_vla.add_layer_norm(x, residual, weight, bias, eps)
            ctx.save_for_backward(stream, mean, rstd, weight)
        ctx.adds = residual is not None
        return stream, output

    @staticmethod
    def backward(ctx: Any, stream_gradient: Tensor, gradient: Tensor) -> Any:  # type: ignore[override]
        both, weight_gradient, bias_gradient = torch.ops.megatron_vla.layer_norm_backward(
            gradient, stream_gradient, *ctx.saved_tensors
        )
        return both, both if ctx.adds else None, weight_gradient, bias_gradient, None


def can_run(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> bool:
    """Whether the kernel can take this norm, with the addition of `residual` if that is given."""
    return (
        IS_BUILT
        and SELECTION.enabled
        and are_rows(x, weight, residual)
        and bias.dtype == weight.dtype
        and bias.shape == weight.shape
        # Autocast computes this norm in fp32, and gives fp32.
        and not torch.is_autocast_enabled("cuda")
    )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The norm of the last axis, times `weight`, plus `bias`."""
    output: Tensor = _LayerNorm.apply(x, weight, bias, eps)
    return output


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + residual, its layer_norm)."""
    both: tuple[Tensor, Tensor] = _StreamAndLayerNorm.apply(x, residual, weight, bias, eps)
    return both


def layer_norm_and_input(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x, its layer_norm). Who goes on with this x, not with its own, has both gradients of it added in backward's one pass."""
    both: tuple[Tensor, Tensor] = _StreamAndLayerNorm.apply(x, None, weight, bias, eps)
    return both
