"""What the launchers of both norms ask of their rows (csrc/rows.cuh)."""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes of the kernels' loads
UNIT = 128  # widths are multiples of it,
MAX_WIDTH = 16 * UNIT  # for a warp holds a row in its registers
MAX_ROWS = 2**30


def has_width(width: int) -> bool:
    """Whether rows of this width have a kernel."""
    return 0 < width <= MAX_WIDTH and width % UNIT == 0


def are_rows(x: Tensor, weight: Tensor, residual: Tensor | None) -> bool:
    """What is known while tracing: x, and what is added to it, are rows of a kernel's width on a GPU; so is their weight."""
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and weight.dtype in (torch.bfloat16, torch.float32)
        and x.is_contiguous()
        and has_width(x.shape[-1])
        and weight.shape == x.shape[-1:]
        and (residual is None or (residual.dtype == x.dtype and residual.shape == x.shape and residual.is_contiguous()))
    )


def can_load(x: Tensor, *others: Tensor | None) -> bool:
    """What is not known while tracing: there are rows, on a GPU, at addresses that a kernel can load from."""
    return (
        x.is_cuda
        and 0 < x.numel() <= MAX_ROWS * x.shape[-1]
        and all(t.data_ptr() % ALIGNMENT == 0 for t in (x, *others) if t is not None)
    )


def address(tensor: Tensor | None) -> int | None:
    """For a launcher; None is its null."""
    return None if tensor is None else tensor.data_ptr()


def processors_of(tensor: Tensor) -> int:
    """Multiprocessors of the GPU that it is on."""
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count
