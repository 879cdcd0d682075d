"""Launching the square-sum kernel over a list of tensors that keeps its shapes from call to call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_vla.kernels import launch, load_launcher
from megatron_vla.kernels.tensor_table import AddressTable, BlockMap

# Elements of one block. The base model's 3.2e9 gradients then give 50,000 partial sums.
CHUNK = 65536
ALIGNMENT_BYTES = 16


def can_run(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernel takes these tensors: CUDA, contiguous, fp32 or bf16, at least one element."""
    return (
        load_launcher("square_sum") is not None
        and any(t.numel() for t in tensors)
        and all(t.is_cuda and t.is_contiguous() and t.dtype in (torch.float32, torch.bfloat16) for t in tensors)
    )


class SquareSum:
    """Sum of squares of tensors of fixed sizes; they may lie elsewhere at every call."""

    def __init__(self, sizes: Sequence[int], device: torch.device):
        launcher = load_launcher("square_sum")
        assert launcher is not None
        self._launcher = launcher.square_sum_launch
        self._launcher.argtypes = [
            *[ctypes.c_void_p] * 3,
            ctypes.c_int,
            ctypes.c_int64,
            *[ctypes.c_void_p] * 2,
        ]
        self.sizes = tuple(sizes)
        self._blocks = BlockMap(sizes, CHUNK, device)
        self._table = AddressTable()

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Shape [], fp64."""
        assert tuple(t.numel() for t in tensors) == self.sizes
        table = self._table.of(tensors, lambda: [word for tensor in tensors for word in _row(tensor)])
        partial = torch.empty(self._blocks.num_blocks, dtype=torch.float64, device=table.device)
        launch(self._launcher, table.device, table.data_ptr(), *self._blocks.arguments(), partial.data_ptr())
        return partial.sum()


def _row(tensor: Tensor) -> tuple[int, int, int, int]:
    """One row of the table, as `struct Row` of csrc/square_sum.cu."""
    is_aligned = tensor.data_ptr() % ALIGNMENT_BYTES == 0
    return tensor.data_ptr(), tensor.numel(), tensor.dtype == torch.bfloat16, is_aligned
