"""The project's own kernels in place of PyTorch operations: one switch for all that do not change the optimizer or FP8."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.kernels import SELECTION
from megatron_vla.models.registry import ModelFamily

FLAG = "--no-fused-kernels"


def apply(model: nn.Module, config: OptimizationConfig, family: ModelFamily, report: Callable[[str], None]) -> nn.Module:
    """Set the process's switch to --fused-kernels; the model itself is not touched."""
    # Set in both directions, as a process may build several models.
    SELECTION.enabled = config.fused_kernels
    if not config.fused_kernels:
        report(f"fused kernels: none, PyTorch operations instead ({FLAG})")
    return model
