"""`masked_softmax`: attention weights from the logits of a product in one pass, where the kernel's conditions hold.

A custom op, because compiled layers call it. It has no derivative of its own: models/common/matmul_attention.py writes out the
backward of the whole attention. Fully masked rows are NaN in both codes; masks never contain one (attention_mask.key_mask).

Shape legend: B samples, M query rows, K keys (padded to KEY_ALIGNMENT), N keys that exist.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from megatron_vla.kernels import FALLBACKS, SELECTION, launch, load_launcher
from megatron_vla.kernels.masked_softmax.reference import masked_softmax_reference

_LAUNCHER = load_launcher("masked_softmax")
# Read while tracing: a constant, not a call.
IS_BUILT = _LAUNCHER is not None
VECTOR = 8
# Of a row, which a warp keeps in registers.
MAX_KEYS = 1024
ALIGNMENT = 16  # bytes

if _LAUNCHER is not None:
    _LAUNCHER.masked_softmax_launch.argtypes = [
        *([ctypes.c_void_p] * 2),
        ctypes.c_int,
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_void_p,
        *([ctypes.c_int64] * 2),
        ctypes.c_int,
        ctypes.c_float,
        ctypes.c_void_p,
    ]


@torch.library.custom_op("megatron_vla::masked_softmax", mutates_args=())
def _masked_softmax(logits_BMK: Tensor, scale: float, mask_B1N: Tensor | None, num_keys: int, dtype: torch.dtype) -> Tensor:
    """masked_softmax_reference runs where the kernel cannot."""
    logits_BMK = logits_BMK.contiguous()
    if not (logits_BMK.is_cuda and IS_BUILT and logits_BMK.data_ptr() % ALIGNMENT == 0 and logits_BMK.numel()):
        FALLBACKS.note("masked_softmax", _LAUNCHER, logits_BMK)
        return masked_softmax_reference(logits_BMK, scale, mask_B1N, num_keys, dtype)
    assert _LAUNCHER is not None and dtype == torch.bfloat16
    mask_B1N = None if mask_B1N is None else mask_B1N.contiguous()
    weights_BMK = torch.empty_like(logits_BMK, dtype=dtype)
    launch(
        _LAUNCHER.masked_softmax_launch,
        logits_BMK.device,
        logits_BMK.data_ptr(),
        None if mask_B1N is None else mask_B1N.data_ptr(),
        mask_B1N is not None and mask_B1N.dtype == torch.bfloat16,
        0 if mask_B1N is None or mask_B1N.shape[0] == 1 else num_keys,
        num_keys,
        weights_BMK.data_ptr(),
        *logits_BMK.shape,
        scale,
    )
    return weights_BMK


@_masked_softmax.register_fake
def _(logits_BMK: Tensor, scale: float, mask_B1N: Tensor | None, num_keys: int, dtype: torch.dtype) -> Tensor:
    return logits_BMK.new_empty(logits_BMK.shape, dtype=dtype)


def can_run(logits_BMK: Tensor, mask_B1N: Tensor | None, num_keys: int, dtype: torch.dtype) -> bool:
    """Whether the kernel takes these tensors. Autocast does not matter: the dtypes of the logits and the result are given."""
    num_samples, _, width = logits_BMK.shape
    return (
        IS_BUILT
        and SELECTION.enabled
        and logits_BMK.is_cuda
        and logits_BMK.dtype == torch.float32
        and dtype == torch.bfloat16
        and logits_BMK.is_contiguous()
        and width % VECTOR == 0
        and width <= MAX_KEYS
        and (mask_B1N is None or _is_readable(mask_B1N, num_samples, num_keys))
    )


def _is_readable(mask_B1N: Tensor, num_samples: int, num_keys: int) -> bool:
    return (
        mask_B1N.is_cuda
        and mask_B1N.dtype in (torch.float32, torch.bfloat16)
        and mask_B1N.shape[0] in (1, num_samples)
        and mask_B1N.shape[1] == 1
        and mask_B1N.shape[2] == num_keys
    )


def masked_softmax(logits_BMK: Tensor, scale: float, mask_B1N: Tensor | None, num_keys: int, dtype: torch.dtype) -> Tensor:
    """softmax(logits * scale + mask) -> [B, M, K] in `dtype`; the keys from `num_keys` on are hidden. No derivative."""
    if can_run(logits_BMK, mask_B1N, num_keys, dtype):
        return torch.ops.megatron_vla.masked_softmax(logits_BMK, scale, mask_B1N, num_keys, dtype)
    return masked_softmax_reference(logits_BMK, scale, mask_B1N, num_keys, dtype)
