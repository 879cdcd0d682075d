"""`gelu_with_bias`: gelu_tanh of a product, whose backward also sums the product's gradient for the bias, in the same pass.

Custom ops, because compiled layers call them.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from megatron_vla.kernels import FALLBACKS, SELECTION, launch, load_launcher
from megatron_vla.kernels.biased_gelu.reference import gelu_backward_reference, gelu_reference

_LAUNCHER = load_launcher("biased_gelu")
# Read while tracing: a constant, not a call.
IS_BUILT = _LAUNCHER is not None
VECTOR = 8
# Slabs of rows that are summed apart: 9 x 256 blocks of two warps for the 4304 columns of a vision layer, all of which an H200
# runs at once. Half as many cannot hide their arithmetic behind their loads: 151 us instead of the 105 that it takes alone.
SLABS = 256

if _LAUNCHER is not None:
    _LAUNCHER.biased_gelu_forward.argtypes = [*([ctypes.c_void_p] * 2), ctypes.c_int64, ctypes.c_void_p]
    _LAUNCHER.biased_gelu_backward.argtypes = [
        *([ctypes.c_void_p] * 5),
        ctypes.c_int64,
        *([ctypes.c_int] * 2),
        ctypes.c_void_p,
    ]


def _takes(*tensors: Tensor) -> bool:
    """What is not known while tracing, and what `can_run` has found out."""
    return IS_BUILT and all(
        t.is_cuda and t.dtype == torch.bfloat16 and t.shape[-1] % VECTOR == 0 and t.numel() > 0 and t.data_ptr() % 16 == 0
        for t in tensors
    )


@torch.library.custom_op("megatron_vla::biased_gelu", mutates_args=())
def biased_gelu(values: Tensor) -> Tensor:
    """See gelu_reference, which runs where the kernel's conditions do not hold."""
    values = values.contiguous()
    if not _takes(values):
        FALLBACKS.note("biased_gelu", _LAUNCHER, values)
        return gelu_reference(values)
    assert _LAUNCHER is not None
    output = torch.empty_like(values)
    launch(_LAUNCHER.biased_gelu_forward, values.device, values.data_ptr(), output.data_ptr(), values.numel())
    return output


@biased_gelu.register_fake
def _(values: Tensor) -> Tensor:
    return values.new_empty(values.shape)


@torch.library.custom_op("megatron_vla::biased_gelu_backward", mutates_args=())
def biased_gelu_backward(gradient: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """See gelu_backward_reference, which runs where the kernel's conditions do not hold."""
    gradient, values = gradient.contiguous(), values.contiguous()
    if not _takes(gradient, values):
        FALLBACKS.note("biased_gelu", _LAUNCHER, gradient, values)
        return gelu_backward_reference(gradient, values)
    assert _LAUNCHER is not None
    width = values.shape[-1]
    inner, sums = torch.empty_like(values), values.new_empty(width)
    partial = torch.empty(SLABS, width, dtype=torch.float32, device=values.device)
    launch(
        _LAUNCHER.biased_gelu_backward,
        values.device,
        *(t.data_ptr() for t in (gradient, values, inner, partial, sums)),
        values.numel() // width,
        width,
        SLABS,
    )
    return inner, sums


@biased_gelu_backward.register_fake
def _(gradient: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return values.new_empty(values.shape), values.new_empty(values.shape[-1])


class _GeluWithBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(output)
        activated: Tensor = torch.ops.megatron_vla.biased_gelu(output)
        return activated

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (output,) = ctx.saved_tensors
        return torch.ops.megatron_vla.biased_gelu_backward(gradient, output)


def can_run(hidden: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether the kernels can do gelu_tanh of the product of `hidden` and `weight`, and its backward."""
    return (
        IS_BUILT
        and SELECTION.enabled
        and hidden.is_cuda
        and hidden.dtype == weight.dtype == bias.dtype == torch.bfloat16
        # Autocast may give the product another dtype.
        and not torch.is_autocast_enabled("cuda")
        and bias.shape[0] % VECTOR == 0
        and hidden.numel() > 0
    )


def gelu_with_bias(output: Tensor, bias: Tensor) -> Tensor:
    """gelu_tanh of `output` [..., N], to which `bias` [N] was added without autograd: its gradient comes from here."""
    activated: Tensor = _GeluWithBias.apply(output, bias)
    return activated
