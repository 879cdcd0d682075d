"""`split_with_bias`: parts of a merged output, whose backward joins their gradients and sums them for the bias in one pass.

The gradients come from an attention kernel as matrices of their own; the two products of backward want them side by side.
A custom op, because compiled layers call it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_vla.kernels import FALLBACKS, SELECTION, launch, load_launcher
from megatron_vla.kernels.joined_gradients.reference import joined_gradients_reference

_LAUNCHER = load_launcher("joined_gradients")
# Read while tracing: a constant, not a call.
IS_BUILT = _LAUNCHER is not None
VECTOR = 8
MAX_PARTS = 4
# Slabs of rows that are summed apart: 4 x 128 blocks for the 3 x 1152 columns of a vision layer.
SLABS = 128

if _LAUNCHER is not None:
    _LAUNCHER.joined_gradients_launch.argtypes = [
        *([ctypes.c_void_p] * 2),
        ctypes.c_int,
        *([ctypes.c_void_p] * 3),
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_void_p,
    ]


@torch.library.custom_op("megatron_vla::joined_gradients", mutates_args=())
def joined_gradients(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """See joined_gradients_reference, which runs where the kernel's conditions do not hold."""
    parts = [part.contiguous() for part in parts]
    if not (parts[0].is_cuda and IS_BUILT and all(part.data_ptr() % 16 == 0 for part in parts)):
        FALLBACKS.note("joined_gradients", _LAUNCHER, *parts)
        return joined_gradients_reference(parts)
    assert _LAUNCHER is not None
    widths = [part.shape[-1] for part in parts]
    joined = parts[0].new_empty(*parts[0].shape[:-1], sum(widths))
    sums = parts[0].new_empty(sum(widths))
    partial = torch.empty(SLABS, sum(widths), dtype=torch.float32, device=joined.device)
    launch(
        _LAUNCHER.joined_gradients_launch,
        joined.device,
        (ctypes.c_void_p * len(parts))(*(part.data_ptr() for part in parts)),
        (ctypes.c_int * len(parts))(*widths),
        len(parts),
        joined.data_ptr(),
        partial.data_ptr(),
        sums.data_ptr(),
        parts[0].numel() // widths[0],
        SLABS,
    )
    return joined, sums


@joined_gradients.register_fake
def _(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    width = sum(part.shape[-1] for part in parts)
    return parts[0].new_empty(*parts[0].shape[:-1], width), parts[0].new_empty(width)


class _SplitWithBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, bias: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return output.split(sizes, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        joined, sums = torch.ops.megatron_vla.joined_gradients(list(gradients))
        return joined, sums, None


def can_run(output: Tensor, bias: Tensor, sizes: Sequence[int]) -> bool:
    """Whether the kernel can do the backward of this split."""
    return (
        IS_BUILT
        and SELECTION.enabled
        and output.is_cuda
        and output.dtype == bias.dtype == torch.bfloat16
        and 1 < len(sizes) <= MAX_PARTS
        and all(size % VECTOR == 0 for size in sizes)
    )


def split_with_bias(output: Tensor, bias: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Parts of `output` [..., sum of sizes], to which `bias` was added without autograd: its gradient comes from here."""
    parts: tuple[Tensor, ...] = _SplitWithBias.apply(output, bias, tuple(sizes))
    return parts
