"""The project's own kernels in place of PyTorch operations: one switch for all that do not change the optimizer or FP8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.kernels import SELECTION
from megatron_vla.kernels.biased_gelu import op as biased_gelu
from megatron_vla.models.common.feed_forward import FeedForward
from megatron_vla.models.registry import ModelFamily

FLAG = "--no-fused-kernels"


def _has_biased_gelu(model: nn.Module) -> bool:
    layers = (m for m in model.modules() if isinstance(m, FeedForward) and m.can_fuse_bias)
    return any(m.fc1.weight.is_cuda and m.fc1.weight.dtype == torch.bfloat16 for m in layers)


@dataclass(frozen=True)
class ReportedKernel:
    """A kernel that no other optimization reports: what it computes, its folder, and which models can use it."""

    label: str
    folder: str
    is_built: bool
    can_use: Callable[[nn.Module], bool]


KERNELS = (ReportedKernel("GELU of biased layers", "biased_gelu", biased_gelu.IS_BUILT, _has_biased_gelu),)


def code_of(kernel: str, is_built: bool) -> str:
    """Which code runs, of a kernel that takes what its conditions allow."""
    if not SELECTION.enabled:
        return f"PyTorch operations ({FLAG})"
    return "the fused kernel" if is_built else f"PyTorch operations (kernels/{kernel} was not built)"


def apply(model: nn.Module, config: OptimizationConfig, family: ModelFamily, report: Callable[[str], None]) -> nn.Module:
    """Set the process's switch to --fused-kernels; the model itself is not touched."""
    # Set in both directions, as a process may build several models.
    SELECTION.enabled = config.fused_kernels
    if not config.fused_kernels:
        report(f"fused kernels: none, PyTorch operations instead ({FLAG})")
        return model
    for kernel in KERNELS:
        if kernel.can_use(model):
            report(f"{kernel.label}: {code_of(kernel.folder, kernel.is_built)}")
    return model
