"""Shims that let megatron-core run on CPU and gloo; inert when CUDA is present.

megatron-core asks torch.cuda for "the current device" even where a gloo group and CPU tensors would do. The few entry points
that our use reaches are answered for the CPU here, so that continuous integration exercises the real megatron-core code and
not a stand-in. Nothing in megatron-core is edited.
"""

from __future__ import annotations

from typing import Any

import torch


def _current_device() -> torch.device:
    """Stands for torch.cuda.current_device: factory functions take a torch.device as well as an index."""
    return torch.device("cpu")


def _synchronize(device: Any = None) -> None:
    """Stands for torch.cuda.synchronize: CPU operations are done when they return."""


def install_cpu_shims() -> bool:
    """Patch torch.cuda for a machine without CUDA; returns whether anything was patched. Safe to call more than once."""
    if torch.cuda.is_available():
        return False
    # DistributedDataParallel allocates its gradient buffers with device=torch.cuda.current_device().
    torch.cuda.current_device = _current_device  # type: ignore[assignment]
    # Changing a group's timeout and moving buffers synchronise first.
    torch.cuda.synchronize = _synchronize
    return True


class _TorchOnCpu:
    """Stands for the name `torch` inside one megatron-core module, where device="cuda" is written out."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, **options: Any) -> torch.Tensor:
        """torch.zeros on the CPU whatever device was asked for."""
        return torch.zeros(*size, **{**options, "device": "cpu"})


def install_schedule_shims(schedules: Any) -> None:
    """Let megatron-core's pipeline schedules (the module) keep their token counter on the CPU. Inert with CUDA."""
    if not torch.cuda.is_available():
        schedules.torch = _TorchOnCpu()
