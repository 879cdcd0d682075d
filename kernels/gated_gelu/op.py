"""`gated_gelu`: the custom op where its conditions hold (CUDA, bf16, contiguous, widths of eight), else the reference.

A custom op, because compiled layers call it: torch.compile sees one node with known shapes and keeps its graph whole.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from megatron_vla.kernels import SELECTION, launch, load_launcher
from megatron_vla.kernels.gated_gelu.reference import gated_gelu_reference

_LAUNCHER = load_launcher("gated_gelu")
# Read while tracing: a constant, not a call.
IS_BUILT = _LAUNCHER is not None
VECTOR = 8
MAX_ROWS = 65535  # of one launch: the grid's second dimension

if _LAUNCHER is not None:
    _LAUNCHER.gated_gelu_forward.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2, ctypes.c_void_p]
    _LAUNCHER.gated_gelu_backward.argtypes = [*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2, ctypes.c_void_p]


def _launch(function: Any, tensors: list[tuple[Tensor, int]], rows: int, width: int) -> None:
    """Call `function` on at most MAX_ROWS rows at a time; tensors come with their elements per row."""
    for start in range(0, rows, MAX_ROWS):
        count = min(MAX_ROWS, rows - start)
        addresses = [t.data_ptr() + start * per_row * t.element_size() for t, per_row in tensors]
        launch(function, tensors[0][0].device, *addresses, count, width)


@torch.library.custom_op("megatron_vla::gated_gelu", mutates_args=(), device_types="cuda")
def _gated_gelu(gate_up: Tensor) -> Tensor:
    assert _LAUNCHER is not None
    width = gate_up.shape[-1] // 2
    output = gate_up.new_empty(*gate_up.shape[:-1], width)
    _launch(_LAUNCHER.gated_gelu_forward, [(gate_up, 2 * width), (output, width)], output.numel() // width, width)
    return output


@_gated_gelu.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@torch.library.custom_op("megatron_vla::gated_gelu_backward", mutates_args=(), device_types="cuda")
def _gated_gelu_backward(gradient: Tensor, gate_up: Tensor) -> Tensor:
    assert _LAUNCHER is not None
    gradient = gradient.contiguous()
    width = gradient.shape[-1]
    output = torch.empty_like(gate_up)
    tensors = [(gradient, width), (gate_up, 2 * width), (output, 2 * width)]
    _launch(_LAUNCHER.gated_gelu_backward, tensors, gradient.numel() // width, width)
    return output


@_gated_gelu_backward.register_fake
def _(gradient: Tensor, gate_up: Tensor) -> Tensor:
    return torch.empty_like(gate_up)


def _setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _backward(ctx: Any, gradient: Tensor) -> Tensor:
    (gate_up,) = ctx.saved_tensors
    return torch.ops.megatron_vla.gated_gelu_backward(gradient, gate_up)


_gated_gelu.register_autograd(_backward, setup_context=_setup_context)


def can_run(gate_up: Tensor) -> bool:
    """Whether the kernel takes this tensor."""
    return (
        IS_BUILT
        and SELECTION.enabled
        and gate_up.is_cuda
        and gate_up.dtype == torch.bfloat16
        and gate_up.is_contiguous()
        and gate_up.shape[-1] % (2 * VECTOR) == 0
    )


def gated_gelu(gate_up: Tensor) -> Tensor:
    """gelu_tanh(gate) * up: [..., 2 * F] -> [..., F]; the first half of the last dimension is the gate."""
    return torch.ops.megatron_vla.gated_gelu(gate_up) if can_run(gate_up) else gated_gelu_reference(gate_up)
