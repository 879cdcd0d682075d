"""Fused kernels, one folder each: csrc/, op.py, reference.py, benchmark.py, README.md. Their tests: tests/gpu."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

BUILD_COMMAND = "python setup.py build_ext --inplace"


class Selection:
    """Process-wide, like torch.backends: whether kernels take the place of PyTorch operations (--fused-kernels)."""

    enabled = True


SELECTION = Selection()


@cache
def load_launcher(name: str) -> ctypes.CDLL | None:
    """The compiled launchers of kernel `name`, loaded once; None where they were not built (no nvcc at install)."""
    built = sorted((Path(__file__).parent / name).glob("launcher*.so"))
    return ctypes.CDLL(str(built[0])) if built else None


def launch(launcher: Any, device: torch.device, *arguments: Any) -> None:
    """Call `launcher` (of load_launcher) with `arguments` and, as the last one, the current stream of `device`.

    A launcher uses the GPU that is current, which need not be that of the tensors (a policy on cuda:1): torch puts no guard
    around Python ops. Raises RuntimeError when the launcher returns a CUDA error.
    """
    with torch.cuda.device(device):
        code = launcher(*arguments, torch.cuda.current_stream(device).cuda_stream)
    if code:
        raise RuntimeError(f"the kernel {launcher.__name__} was not launched: CUDA error {code}")
