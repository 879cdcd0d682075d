"""Fused kernels, one folder each: csrc/, op.py, reference.py, README.md, for some a benchmark.py. Their tests: tests/gpu."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BUILD_COMMAND = "python setup.py build_ext --inplace"


class Selection:
    """Process-wide, like torch.backends: whether kernels take the place of PyTorch operations (--fused-kernels)."""

    enabled = True


SELECTION = Selection()


@dataclass
class Fallbacks:
    """Calls on a GPU that a built kernel did not take and PyTorch operations computed: how many, and the first one's tensors.

    Counted where ops run, as addresses are not known while tracing. Replays of a CUDA graph do not count again.
    """

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    def note(self, kernel: str, launcher: ctypes.CDLL | None, *tensors: Tensor | None) -> None:
        """Count one call of `kernel`. Without a GPU, or without the kernel, nothing else was to be expected."""
        given = [tensor for tensor in tensors if tensor is not None]
        if launcher is None or not any(tensor.is_cuda for tensor in given):
            return
        self.counts[kernel] = self.counts.get(kernel, 0) + 1
        if kernel not in self.examples:
            self.examples[kernel] = "; ".join(
                f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)} at an address of {t.data_ptr() % 128} mod 128"
                for t in given
            )

    def news(self) -> list[str]:
        """A line for every kernel that has not been told of yet."""
        new = [kernel for kernel in self.counts if kernel not in self._told]
        self._told.update(new)
        return [
            f"WARNING kernels/{kernel}: {self.counts[kernel]} calls so far were computed by PyTorch operations instead, "
            f"tensors of the first: {self.examples[kernel]}"
            for kernel in new
        ]


FALLBACKS = Fallbacks()


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
