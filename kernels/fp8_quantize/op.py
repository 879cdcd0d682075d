"""FP8 operands in both layouts as custom ops: the kernels where they were built, else the reference.

Every operand has a slot, fp32 [4] at a multiple of 16 bytes: the reciprocal of the factor that it is multiplied by (first, as
cuBLASLt refuses a scale at any other address), the factor, the largest magnitude met since somebody last looked, and whether
the factor is known. The ops write to it without saying so: nothing in a compiled graph
depends on what they write (the products' `scale` arguments read the slot when they run, which is after the op that made their
operand), and a declared mutation would put copies around every call.

Factors come from outside (optimizations/fp8_scaling.py). While `CALIBRATION.active`, an op whose slot has none takes it from
the data at hand: more passes over the data, so only for a run's first step.

Shape legend: M rows, K columns (features), F width of a gated MLP; multiples of 16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_vla.kernels import FALLBACKS, launch, load_launcher
from megatron_vla.kernels.fp8_quantize.reference import (
    gated_gelu_backward_reference,
    largest_magnitude,
    quantized_reference,
)
from megatron_vla.kernels.gated_gelu.reference import gated_gelu_reference

ACTIVATION_DTYPE = torch.float8_e4m3fn
GRADIENT_DTYPE = torch.float8_e5m2
RECIPROCAL, SCALE, LARGEST, IS_KNOWN = range(4)

_LAUNCHER = load_launcher("fp8_quantize")
IS_BUILT = _LAUNCHER is not None
if _LAUNCHER is not None:
    _POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
    _LAUNCHER.fp8_quantize.argtypes = [*[_POINTER] * 3, *[_SIZE] * 3, _POINTER, ctypes.c_int, _POINTER]
    _LAUNCHER.fp8_gated_gelu.argtypes = [*[_POINTER] * 3, *[_SIZE] * 2, *[_POINTER] * 2]
    _LAUNCHER.fp8_gated_gelu_backward.argtypes = [*[_POINTER] * 4, *[_SIZE] * 2, *[_POINTER] * 2]


@dataclass
class Calibration:
    """Whether factors that are not known are taken from the data."""

    active: bool = False


CALIBRATION = Calibration()


def power_of_two_scale(largest: Tensor, dtype: torch.dtype | Tensor) -> tuple[Tensor, Tensor]:
    """(factor, reciprocal), fp32: the largest power of two that keeps `largest` (positive, finite) within `dtype`'s range.

    dtype: an FP8 type, or a tensor of largest finite values, one per element. Powers of two make the scaling itself exact.
    """
    limit = dtype if isinstance(dtype, Tensor) else torch.full_like(largest, torch.finfo(dtype).max)
    _, exponent = torch.frexp(limit / largest)
    # frexp's mantissa is below one. By the bits: exp2 may round. Within what fp32 holds as a normal number, both ways.
    power = (exponent - 1).clamp(-120, 120)
    return ((power + 127) << 23).to(torch.int32).view(torch.float32), ((127 - power) << 23).to(torch.int32).view(torch.float32)


def _calibrate(slot: Tensor, parts: list[Tensor], dtype: torch.dtype) -> None:
    """Give `slot` a factor if it has none; without host synchronisation."""
    largest = largest_magnitude(parts)
    usable = largest.isfinite() & (largest > 0)
    scale, reciprocal = power_of_two_scale(torch.where(usable, largest, 1.0), dtype)
    is_new = usable & (slot[IS_KNOWN] == 0)
    for column, value in ((SCALE, scale), (RECIPROCAL, reciprocal), (IS_KNOWN, torch.ones_like(scale))):
        slot[column] = torch.where(is_new, value, slot[column])


def _quantize_by_reference(parts: list[Tensor], slot: Tensor, dtype: torch.dtype, transposed: bool) -> tuple[Tensor, Tensor]:
    # NaN compares as larger in torch.maximum, as in the kernel.
    slot[LARGEST] = torch.maximum(slot[LARGEST], largest_magnitude(parts))
    rows = torch.cat([quantized_reference(part, slot[SCALE], dtype).view(torch.uint8) for part in parts]).view(dtype)
    return rows, rows.t().contiguous() if transposed else rows.new_empty(0)


def _address(tensor: Tensor) -> int | None:
    return tensor.data_ptr() if tensor.numel() else None


def _can_launch(*tensors: Tensor) -> bool:
    return IS_BUILT and all(t.is_cuda and t.dtype == torch.bfloat16 and t.data_ptr() % 16 == 0 for t in tensors)


@torch.library.custom_op("megatron_vla::fp8_quantize", mutates_args=())
def _fp8_quantize(parts: Sequence[Tensor], slot: Tensor, is_gradient: bool, transposed: bool) -> tuple[Tensor, Tensor]:
    dtype = GRADIENT_DTYPE if is_gradient else ACTIVATION_DTYPE
    parts = [part.contiguous() for part in parts]
    slot = slot.data  # without autograd's count of changes: it guards tensors saved for backward, and the slot may be one
    if CALIBRATION.active:
        _calibrate(slot, parts, dtype)
    if not _can_launch(*parts):
        FALLBACKS.note("fp8_quantize", _LAUNCHER, *parts)
        return _quantize_by_reference(parts, slot, dtype, transposed)
    assert _LAUNCHER is not None
    num_rows, width = sum(part.shape[0] for part in parts), parts[0].shape[1]
    rows, columns = _empty_outputs(parts[0], num_rows, width, dtype, transposed)
    first = 0
    for part in parts:
        launch(
            _LAUNCHER.fp8_quantize,
            part.device,
            part.data_ptr(),
            rows.data_ptr() + first * width,
            columns.data_ptr() + first if transposed else None,
            part.shape[0],
            width,
            num_rows,
            slot.data_ptr(),
            int(is_gradient),
        )
        first += part.shape[0]
    return rows, columns


def _empty_outputs(like: Tensor, num_rows: int, width: int, dtype: torch.dtype, transposed: bool) -> tuple[Tensor, Tensor]:
    rows = like.new_empty(num_rows, width, dtype=dtype)
    return rows, like.new_empty((width, num_rows) if transposed else 0, dtype=dtype)


@_fp8_quantize.register_fake
def _(parts: Sequence[Tensor], slot: Tensor, is_gradient: bool, transposed: bool) -> tuple[Tensor, Tensor]:
    dtype = GRADIENT_DTYPE if is_gradient else ACTIVATION_DTYPE
    return _empty_outputs(parts[0], sum(part.shape[0] for part in parts), parts[0].shape[1], dtype, transposed)


@torch.library.custom_op("megatron_vla::fp8_gated_gelu", mutates_args=())
def _fp8_gated_gelu(gate_up: Tensor, slot: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    gate_up, slot = gate_up.contiguous(), slot.data
    if CALIBRATION.active:
        _calibrate(slot, [gated_gelu_reference(gate_up)], ACTIVATION_DTYPE)
    if not _can_launch(gate_up):
        FALLBACKS.note("fp8_quantize", _LAUNCHER, gate_up)
        return _quantize_by_reference([gated_gelu_reference(gate_up)], slot, ACTIVATION_DTYPE, transposed)
    assert _LAUNCHER is not None
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    rows, columns = _empty_outputs(gate_up, num_rows, width, ACTIVATION_DTYPE, transposed)
    launch(
        _LAUNCHER.fp8_gated_gelu,
        gate_up.device,
        gate_up.data_ptr(),
        rows.data_ptr(),
        _address(columns),
        num_rows,
        width,
        slot.data_ptr(),
    )
    return rows, columns


@_fp8_gated_gelu.register_fake
def _(gate_up: Tensor, slot: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    return _empty_outputs(gate_up, gate_up.shape[0], gate_up.shape[1] // 2, ACTIVATION_DTYPE, transposed)


@torch.library.custom_op("megatron_vla::fp8_gated_gelu_backward", mutates_args=())
def _fp8_gated_gelu_backward(gradient: Tensor, gate_up: Tensor, slot: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    gradient, gate_up, slot = gradient.contiguous(), gate_up.contiguous(), slot.data
    if CALIBRATION.active:
        _calibrate(slot, [gated_gelu_backward_reference(gradient, gate_up)], GRADIENT_DTYPE)
    if not _can_launch(gradient, gate_up):
        FALLBACKS.note("fp8_quantize", _LAUNCHER, gradient, gate_up)
        made = gated_gelu_backward_reference(gradient, gate_up)
        return _quantize_by_reference([made], slot, GRADIENT_DTYPE, transposed)
    assert _LAUNCHER is not None
    num_rows, width = gradient.shape
    rows, columns = _empty_outputs(gradient, num_rows, 2 * width, GRADIENT_DTYPE, transposed)
    launch(
        _LAUNCHER.fp8_gated_gelu_backward,
        gate_up.device,
        gradient.data_ptr(),
        gate_up.data_ptr(),
        rows.data_ptr(),
        _address(columns),
        num_rows,
        width,
        slot.data_ptr(),
    )
    return rows, columns


@_fp8_gated_gelu_backward.register_fake
def _(gradient: Tensor, gate_up: Tensor, slot: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    return _empty_outputs(gradient, gradient.shape[0], 2 * gradient.shape[1], GRADIENT_DTYPE, transposed)


def fp8_quantize(parts: Sequence[Tensor], slot: Tensor, *, is_gradient: bool, transposed: bool) -> tuple[Tensor, Tensor]:
    """Matrices [M_i, K], one below the other, in FP8: [M, K], and [K, M] if `transposed` (else an empty tensor)."""
    return torch.ops.megatron_vla.fp8_quantize(list(parts), slot, is_gradient, transposed)


def fp8_gated_gelu(gate_up: Tensor, slot: Tensor, *, transposed: bool) -> tuple[Tensor, Tensor]:
    """gelu_tanh(gate) * up of [M, 2 F] in E4M3: [M, F], and [F, M] if `transposed`."""
    return torch.ops.megatron_vla.fp8_gated_gelu(gate_up, slot, transposed)


def fp8_gated_gelu_backward(gradient: Tensor, gate_up: Tensor, slot: Tensor, *, transposed: bool) -> tuple[Tensor, Tensor]:
    """Gradient of [M, 2 F] from that of gelu_tanh(gate) * up [M, F] in E5M2: [M, 2 F], and [2 F, M] if `transposed`."""
    return torch.ops.megatron_vla.fp8_gated_gelu_backward(gradient, gate_up, slot, transposed)
