"""`rms_norm`, `add_rms_norm`, `rms_norm_and_input`: custom ops, because compiled layers call them, with their backward.

All give gradients to x and weight; `add_rms_norm` hands one gradient to both of the tensors that it adds.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from megatron_vla.kernels import FALLBACKS, SELECTION, launch, load_launcher
from megatron_vla.kernels.layer_norm import rows
from megatron_vla.kernels.layer_norm.reference import wide_dtype
from megatron_vla.kernels.layer_norm.rows import address, are_rows, can_load, processors_of
from megatron_vla.kernels.rms_norm.reference import rms_norm_backward_reference, rms_norm_reference

_LAUNCHER = load_launcher("rms_norm")
# Read while tracing: a constant, not a call.
IS_BUILT = _LAUNCHER is not None
# Norms of attention heads are narrower: the compiler joins them with the rotation that follows.
MIN_WIDTH = 512

if _LAUNCHER is not None:
    _LAUNCHER.rms_norm_forward.argtypes = [
        *([ctypes.c_void_p] * 3),
        ctypes.c_int,
        ctypes.c_float,
        *([ctypes.c_void_p] * 3),
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_float,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    _LAUNCHER.rms_norm_backward.argtypes = [
        *([ctypes.c_void_p] * 5),
        ctypes.c_int,
        ctypes.c_float,
        *([ctypes.c_void_p] * 3),
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
    ]


def _launch_forward(x: Tensor, residual: Tensor | None, weight: Tensor, offset: float, eps: float) -> tuple[Tensor, ...]:
    """(sum if there is a residual, output, rstd)."""
    assert _LAUNCHER is not None
    total = None if residual is None else torch.empty_like(x)
    output = torch.empty_like(x)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    launch(
        _LAUNCHER.rms_norm_forward,
        x.device,
        *map(address, (x, residual, weight)),
        weight.dtype == torch.float32,
        offset,
        *map(address, (total, output, rstd)),
        rstd.numel(),
        x.shape[-1],
        eps,
        processors_of(x),
    )
    return (output, rstd) if total is None else (total, output, rstd)


@torch.library.custom_op("megatron_vla::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor, offset: float, eps: float) -> tuple[Tensor, Tensor]:
    """See rms_norm_reference, which runs where the kernel's conditions do not hold."""
    x = x.contiguous()
    if not (IS_BUILT and can_load(x)):
        FALLBACKS.note("rms_norm", _LAUNCHER, x)
        return rms_norm_reference(x, weight, offset, eps)
    output, rstd = _launch_forward(x, None, weight, offset, eps)
    return output, rstd


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor, offset: float, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=wide_dtype(x.dtype))


@torch.library.custom_op("megatron_vla::add_rms_norm", mutates_args=())
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, offset: float, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x + residual, and what rms_norm gives for it)."""
    x, residual = x.contiguous(), residual.contiguous()
    if not (IS_BUILT and can_load(x, residual)):
        FALLBACKS.note("rms_norm", _LAUNCHER, x, residual)
        total = x + residual
        return total, *rms_norm_reference(total, weight, offset, eps)
    total, output, rstd = _launch_forward(x, residual, weight, offset, eps)
    return total, output, rstd


@_add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, offset: float, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=wide_dtype(x.dtype))


@torch.library.custom_op("megatron_vla::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    gradient: Tensor, extra: Tensor | None, x: Tensor, rstd: Tensor, weight: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """See rms_norm_backward_reference, which runs where the kernel's conditions do not hold."""
    gradient, x = gradient.contiguous(), x.contiguous()
    extra = None if extra is None else extra.contiguous()
    if not (IS_BUILT and can_load(gradient, x, extra)):
        FALLBACKS.note("rms_norm", _LAUNCHER, gradient, x, extra)
        return rms_norm_backward_reference(gradient, extra, x, rstd, weight, offset)
    assert _LAUNCHER is not None
    width, processors = x.shape[-1], processors_of(x)
    input_gradient, weight_gradient = torch.empty_like(x), torch.empty_like(weight)
    partial = torch.empty(processors, width, dtype=torch.float32, device=x.device)
    launch(
        _LAUNCHER.rms_norm_backward,
        x.device,
        *map(address, (gradient, extra, x, rstd, weight)),
        weight.dtype == torch.float32,
        offset,
        *map(address, (input_gradient, partial, weight_gradient)),
        rstd.numel(),
        width,
        processors,
    )
    return input_gradient, weight_gradient


@_rms_norm_backward.register_fake
def _(gradient: Tensor, extra: Tensor | None, x: Tensor, rstd: Tensor, weight: Tensor, offset: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offset: float, eps: float) -> Tensor:
        output, rstd = torch.ops.megatron_vla.rms_norm(x, weight, offset, eps)
        ctx.save_for_backward(x, rstd, weight)
        ctx.offset = offset
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return *torch.ops.megatron_vla.rms_norm_backward(gradient, None, *ctx.saved_tensors, ctx.offset), None, None


class _StreamAndRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, offset: float, eps: float
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            stream = x.view_as(x)
            output, rstd = torch.ops.megatron_vla.rms_norm(x, weight, offset, eps)
            ctx.save_for_backward(x, rstd, weight)
        else:
            stream, output, rstd = torch.ops.megatron_vla.add_rms_norm(x, residual, weight, offset, eps)
            ctx.save_for_backward(stream, rstd, weight)
        ctx.adds, ctx.offset = residual is not None, offset
        return stream, output

    @staticmethod
    def backward(ctx: Any, stream_gradient: Tensor, gradient: Tensor) -> Any:  # type: ignore[override]
        both, weight_gradient = torch.ops.megatron_vla.rms_norm_backward(
            gradient, stream_gradient, *ctx.saved_tensors, ctx.offset
        )
        return both, both if ctx.adds else None, weight_gradient, None, None


def has_width(width: int) -> bool:
    """Whether rows of this width are the kernel's."""
    return width >= MIN_WIDTH and rows.has_width(width)


def can_run(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> bool:
    """Whether the kernel can take this norm, with the addition of `residual` if that is given."""
    return IS_BUILT and SELECTION.enabled and has_width(x.shape[-1]) and are_rows(x, weight, residual)


def rms_norm(x: Tensor, weight: Tensor, offset: float, eps: float) -> Tensor:
    """x / its root mean square * (offset + weight)."""
    output: Tensor = _RmsNorm.apply(x, weight, offset, eps)
    return output


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, offset: float, eps: float) -> tuple[Tensor, Tensor]:
    """(x + residual, its rms_norm)."""
    both: tuple[Tensor, Tensor] = _StreamAndRmsNorm.apply(x, residual, weight, offset, eps)
    return both


def rms_norm_and_input(x: Tensor, weight: Tensor, offset: float, eps: float) -> tuple[Tensor, Tensor]:
    """(x, its rms_norm). Who goes on with this x, not with its own, has both gradients of it added in backward's one pass."""
    both: tuple[Tensor, Tensor] = _StreamAndRmsNorm.apply(x, None, weight, offset, eps)
    return both
