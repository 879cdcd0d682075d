"""TF32 for what is computed in fp32 on GPUs: one switch for matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.models.registry import ModelFamily


def apply(model: nn.Module, config: OptimizationConfig, family: ModelFamily, report: Callable[[str], None]) -> nn.Module:
    """Set the process's TF32 switches to --allow-tf32; the model itself is not touched."""
    # Set in both directions: torch lets convolutions use TF32 unless told otherwise.
    torch.backends.cuda.matmul.allow_tf32 = config.allow_tf32
    torch.backends.cudnn.allow_tf32 = config.allow_tf32
    if config.allow_tf32:
        effect = "" if torch.cuda.is_available() else " (no effect: no GPU)"
        report(f"TF32 allowed in fp32 matrix products and convolutions{effect}")
    return model
