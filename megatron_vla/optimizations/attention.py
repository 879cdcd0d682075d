"""The attention backend is chosen when a model is built; here its device and dtype are checked, and `auto` is printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.findings import Finding, error
from megatron_vla.models.common.attention_mask import LENGTH_BACKENDS, resolve_backend
from megatron_vla.models.common.vision_encoder import VisionAttention
from megatron_vla.models.registry import ModelFamily

FLAG = "--attention-backend"


def attention_findings(config: OptimizationConfig, *, on_gpu: bool, in_bf16: bool) -> Iterator[Finding]:
    """What kernels need of the device and of the weights' dtype."""
    backend = resolve_backend(config.attention_backend)
    if backend == "flex" and not on_gpu:
        yield error(f"{FLAG} {backend}", "torch computes no backward of flex attention on the CPU", f"use {FLAG} sdpa")
    elif backend == "flash_attn" and not on_gpu:
        yield error(f"{FLAG} {backend}", "the package has no CPU kernels", f"use {FLAG} sdpa")
    elif backend in LENGTH_BACKENDS and on_gpu and not in_bf16:
        yield error(f"{FLAG} {backend}", "the kernel computes in bf16", f"add --bf16, or use {FLAG} sdpa")
    if config.unmasked_attention == "flash" and not (on_gpu and in_bf16):
        yield error("--unmasked-attention flash", "the kernel computes in bf16 on GPUs", "add --bf16, or use sdpa")


def apply(model: nn.Module, config: OptimizationConfig, family: ModelFamily, report: Callable[[str], None]) -> nn.Module:
    """Returns `model` as it is. Raises ValueError for a backend that cannot train this model on its device."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    on_gpu, in_bf16 = any(p.is_cuda for p in matrices), any(p.dtype == torch.bfloat16 for p in matrices)
    for finding in attention_findings(config, on_gpu=on_gpu, in_bf16=in_bf16):
        raise ValueError(f"{finding.where}: {finding.what} -> {finding.fix}")
    if config.unmasked_attention == "flash":
        towers = [m for m in model.modules() if isinstance(m, VisionAttention) and m.backend == "sdpa"]
        for module in towers:
            module.backend = "flash"
        report(f"unmasked attention: FlashAttention-2 in {len(towers)} modules")
    if config.attention_backend == "auto":
        report(f"attention backend: {resolve_backend(config.attention_backend)} (auto)")
    return model
