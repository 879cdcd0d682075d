"""The project's own kernels in place of PyTorch operations: one switch for all that do not change the optimizer or FP8."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.kernels import SELECTION
from megatron_vla.kernels.biased_gelu import op as biased_gelu
from megatron_vla.kernels.layer_norm import op as layer_norm
from megatron_vla.kernels.layer_norm import rows as norm_rows
from megatron_vla.kernels.masked_softmax import op as masked_softmax
from megatron_vla.kernels.rms_norm import op as rms_norm
from megatron_vla.models.common.feed_forward import FeedForward
from megatron_vla.models.common.normalization import LayerNorm, RMSNorm
from megatron_vla.models.registry import ModelFamily

FLAG = "--no-fused-kernels"


def _has_biased_gelu(model: nn.Module, config: OptimizationConfig) -> bool:
    layers = (m for m in model.modules() if isinstance(m, FeedForward) and m.can_fuse_bias)
    return any(m.fc1.weight.is_cuda and m.fc1.weight.dtype == torch.bfloat16 for m in layers)


def _has_norms(
    kind: type[LayerNorm | RMSNorm], has_width: Callable[[int], bool]
) -> Callable[[nn.Module, OptimizationConfig], bool]:
    """The condition that a model has norms of this kind, of a width that the kernel has."""

    def of(model: nn.Module, config: OptimizationConfig) -> bool:
        is_bf16 = any(p.is_cuda and p.dtype == torch.bfloat16 for p in model.parameters())
        return is_bf16 and any(has_width(len(module.weight)) for module in model.modules() if isinstance(module, kind))

    return of


# What is computed, by which kernel, whether that was built, and which models can use it. Kernels of single optimizations are in
# those optimizations' lines.
KERNELS: tuple[tuple[str, str, bool, Callable[[nn.Module, OptimizationConfig], bool]], ...] = (
    (
        "softmax of attention",
        "masked_softmax",
        masked_softmax.IS_BUILT,
        lambda model, config: config.attention_backend == "matmul",
    ),
    ("GELU of biased layers", "biased_gelu", biased_gelu.IS_BUILT, _has_biased_gelu),
    ("layer norms", "layer_norm", layer_norm.IS_BUILT, _has_norms(LayerNorm, norm_rows.has_width)),
    ("RMS norms", "rms_norm", rms_norm.IS_BUILT, _has_norms(RMSNorm, rms_norm.has_width)),
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
            report(f"{what}: {code_of(kernel, is_built, config)}")
    return model


def code_of(kernel: str, is_built: bool, config: OptimizationConfig) -> str:
    """Which code runs, of a kernel that takes what its conditions allow."""
    if not config.fused_kernels:
        return f"PyTorch operations ({FLAG})"
    return "the fused kernel" if is_built else f"PyTorch operations (kernels/{kernel} was not built)"
