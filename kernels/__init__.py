"""Fused kernels, one folder each: csrc/, op.py, reference.py, test_*.py, benchmark.py, README.md."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

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


def check_launch(name: str, code: int) -> None:
    """Raise RuntimeError when a launcher of kernel `name` has returned a CUDA error."""
    if code:
        raise RuntimeError(f"the {name} kernel was not launched: CUDA error {code}")
