"""The attention backend is chosen when a model is built; here its device and dtype are checked, and `auto` is printed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.models.common.attention_mask import LENGTH_BACKENDS, resolve_backend
from megatron_vla.models.common.vision_encoder import VisionAttention
from megatron_vla.models.registry import ModelFamily

FLAG = "--attention-backend"


def apply(model: nn.Module, config: OptimizationConfig, family: ModelFamily, report: Callable[[str], None]) -> nn.Module:
    """Returns `model` as it is. Raises ValueError for a backend that cannot train this model on its device."""
    backend = resolve_backend(config.attention_backend)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    on_gpu = any(p.is_cuda for p in matrices)
    if backend == "flex" and not on_gpu:
        raise ValueError(f"{FLAG} flex: torch computes no backward of flex attention on the CPU; use {FLAG} sdpa")
    if backend == "flash_attn" and not on_gpu:
        raise ValueError(f"{FLAG} flash_attn: the package has no CPU kernels; use {FLAG} sdpa")
    if backend in LENGTH_BACKENDS and on_gpu and not any(p.dtype == torch.bfloat16 for p in matrices):
        raise ValueError(f"{FLAG} {backend}: the kernel computes in bf16; add --bf16, or use {FLAG} sdpa")
    if config.unmasked_attention == "flash":
        if not on_gpu or not any(p.dtype == torch.bfloat16 for p in matrices):
            raise ValueError("--unmasked-attention flash: the kernel computes in bf16 on GPUs; add --bf16, or use sdpa")
        towers = [m for m in model.modules() if isinstance(m, VisionAttention) and m.backend == "sdpa"]
        for module in towers:
            module.backend = "flash"
        report(f"unmasked attention: FlashAttention-2 in {len(towers)} modules")
    if config.attention_backend == "auto":
        report(f"attention backend: {backend} (auto)")
    return model
