"""`layer_norm` and `add_layer_norm`: custom ops, because compiled layers call them, with their backward.

Both give gradients to x, weight and bias; `add_layer_norm` hands one gradient to both of the tensors that it adds.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from megatron_vla.kernels import SELECTION, check_launch, load_launcher
from megatron_vla.kernels.layer_norm.reference import layer_norm_backward_reference, layer_norm_reference, wide_dtype

_LAUNCHER = load_launcher("layer_norm")
# Read while tracing: a constant, not a call.
IS_BUILT = _LAUNCHER is not None
ALIGNMENT = 16  # bytes of the kernel's loads
UNIT = 128  # widths are multiples of it,
MAX_WIDTH = 16 * UNIT  # for a warp holds a row in its registers
MAX_ROWS = 2**30

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


def _fits(*tensors: Tensor) -> bool:
    """What is not known while tracing: there are rows, on a GPU, at addresses that the kernel can load from."""
    first = tensors[0]
    return (
        IS_BUILT
        and first.is_cuda
        and 0 < first.numel() <= MAX_ROWS * first.shape[-1]
        and all(t.data_ptr() % ALIGNMENT == 0 for t in tensors)
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _processors(tensor: Tensor) -> int:
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


def _launch_forward(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, ...]:
    """(sum if there is a residual, output, mean, rstd)."""
    assert _LAUNCHER is not None
    total = None if residual is None else torch.empty_like(x)
    output = torch.empty_like(x)
    mean, rstd = (torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) for _ in range(2))
    code = _LAUNCHER.layer_norm_forward(
        *map(_address, (x, residual, weight, bias)),
        weight.dtype == torch.float32,
        *map(_address, (total, output, mean, rstd)),
        mean.numel(),
        x.shape[-1],
        eps,
        _processors(x),
        torch.cuda.current_stream().cuda_stream,
    )
    check_launch("layer_norm", code)
    return (output, mean, rstd) if total is None else (total, output, mean, rstd)


@torch.library.custom_op("megatron_vla::layer_norm", mutates_args=())
def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """See layer_norm_reference, which runs where the kernel's conditions do not hold."""
    x = x.contiguous()
    if not _fits(x):
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
    if not _fits(x, residual):
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
    if not _fits(gradient, x, *(() if extra is None else (extra,))):
        return layer_norm_backward_reference(gradient, extra, x, mean, rstd, weight)
    assert _LAUNCHER is not None
    width, processors = x.shape[-1], _processors(x)
    input_gradient, weight_gradient, bias_gradient = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    partial = torch.empty(processors, 2, width, dtype=torch.float32, device=x.device)
    code = _LAUNCHER.layer_norm_backward(
        *map(_address, (gradient, extra, x, mean, rstd, weight)),
        weight.dtype == torch.float32,
        *map(_address, (input_gradient, partial, weight_gradient, bias_gradient)),
        mean.numel(),
        width,
        processors,
        torch.cuda.current_stream().cuda_stream,
    )
    check_launch("layer_norm", code)
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


class _AddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, output, mean, rstd = torch.ops.megatron_vla.add_layer_norm(x, residual, weight, bias, eps)
        ctx.save_for_backward(total, mean, rstd, weight)
        return total, output

    @staticmethod
    def backward(ctx: Any, total_gradient: Tensor, gradient: Tensor) -> Any:  # type: ignore[override]
        both, weight_gradient, bias_gradient = torch.ops.megatron_vla.layer_norm_backward(
            gradient, total_gradient, *ctx.saved_tensors
        )
        return both, both, weight_gradient, bias_gradient, None


def has_width(width: int) -> bool:
    """Whether rows of this width have a kernel."""
    return 0 < width <= MAX_WIDTH and width % UNIT == 0


def can_run(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> bool:
    """Whether the kernel can take this norm, with the addition of `residual` if that is given."""
    return (
        IS_BUILT
        and SELECTION.enabled
        and x.is_cuda
        and x.dtype == torch.bfloat16
        and weight.dtype == bias.dtype
        and weight.dtype in (torch.bfloat16, torch.float32)
        and x.is_contiguous()
        and has_width(x.shape[-1])
        and weight.shape == bias.shape == x.shape[-1:]
        and (residual is None or (residual.dtype == x.dtype and residual.shape == x.shape and residual.is_contiguous()))
        # Autocast computes this norm in fp32, and gives fp32.
        and not torch.is_autocast_enabled("cuda")
    )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The norm of the last axis, times `weight`, plus `bias`."""
    output: Tensor = _LayerNorm.apply(x, weight, bias, eps)
    return output


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + residual, its layer_norm)."""
    both: tuple[Tensor, Tensor] = _AddLayerNorm.apply(x, residual, weight, bias, eps)
    return both
