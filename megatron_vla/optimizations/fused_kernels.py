"""The project's own kernels in place of PyTorch operations: one switch for all that do not change the optimizer or FP8."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.kernels import SELECTION
from megatron_vla.kernels.masked_softmax import op as masked_softmax
from megatron_vla.models.registry import ModelFamily

FLAG = "--no-fused-kernels"
# What is computed, by which kernel, whether that was built, and which models can use it. Kernels of single optimizations are in
# those optimizations' lines.
KERNELS: tuple[tuple[str, str, bool, Callable[[nn.Module, OptimizationConfig], bool]], ...] = (
    (
        "softmax of attention",
        "masked_softmax",
        masked_softmax.IS_BUILT,
        lambda model, config: config.attention_backend == "matmul",
    ),
)


def apply(model: nn.Module, config: OptimizationConfig, family: ModelFamily, report: Callable[[str], None]) -> nn.Module:
    """Set the process's switch to --fused-kernels; the model itself is not touched."""
    # Set in both directions, as a process may build several models.
    SELECTION.enabled = config.fused_kernels
    if not config.fused_kernels:
        report(f"fused kernels: none, PyTorch operations instead ({FLAG})")
        return model
    for what, kernel, is_built, can_use in KERNELS:
        if can_use(model, config):
            report(f"{what}: {code_of(kernel, is_built)}")
    return model


def code_of(kernel: str, is_built: bool) -> str:
    """Which code runs, of a kernel that takes what its conditions allow."""
    if not SELECTION.enabled:
        return f"PyTorch operations ({FLAG})"
    return "the fused kernel" if is_built else f"PyTorch operations (kernels/{kernel} was not built)"
