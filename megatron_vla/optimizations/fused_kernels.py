"""The project's own kernels in place of PyTorch operations: one switch for all that do not change the optimizer or FP8."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

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


def _has_fused_softmax(model: nn.Module, config: OptimizationConfig) -> bool:
    # By autocast fp32 weights make bf16 keys and values too.
    is_rounded = getattr(getattr(model, "config", None), "autocast_bf16", False)
    in_bf16 = any(p.is_cuda and (is_rounded or p.dtype == torch.bfloat16) for p in model.parameters())
    return config.attention_backend == "matmul" and in_bf16


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
    ("softmax of attention", "masked_softmax", masked_softmax.IS_BUILT, _has_fused_softmax),
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


def code_of(kernel: str, is_built: bool, config: OptimizationConfig, obstacle: str | None = None, but: str = "") -> str:
    """Which code runs, of a kernel that takes what its conditions allow.

    obstacle: why it takes nothing of this model (`obstacle_of`). but: where it does not run all the same.
    """
    if not config.fused_kernels:
        return f"PyTorch operations ({FLAG})"
    if obstacle is not None:
        return f"PyTorch operations ({obstacle})"
    return f"the fused kernel{but}" if is_built else f"PyTorch operations (kernels/{kernel} was not built)"


def obstacle_of(layers: Iterable[Sequence[Tensor]], multiple: int) -> str | None:
    """Why a kernel for bf16 on GPUs takes the outputs of none of `layers`; None where it takes those of one at least.

    layers: parameters [outputs, ...] of what one call of the kernel computes. multiple: what it needs outputs to be one of.
    """
    obstacles = [_obstacle(parameters, multiple) for parameters in layers]
    return None if None in obstacles else obstacles[0]


def _obstacle(parameters: Sequence[Tensor], multiple: int) -> str | None:
    for parameter in parameters:
        if not parameter.is_cuda:
            return f"the kernel needs a GPU, and the model is on {parameter.device.type}"
        if parameter.dtype != torch.bfloat16:
            return f"the kernel computes in bf16, and weights are {str(parameter.dtype).removeprefix('torch.')}"
        if parameter.shape[0] % multiple:
            return f"the kernel needs multiples of {multiple}, and layers have {parameter.shape[0]} outputs"
    return None
