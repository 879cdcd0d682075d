"""Parameter dtypes: one dtype for the matrices, and fp32 for what a family declares too sensitive for bf16."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron_vla.config.model import ModelConfig
from megatron_vla.optimizations.patterns import covers


def parameter_dtype(config: ModelConfig) -> torch.dtype:
    """The dtype that --bf16 / --fp64 ask for (fp32 otherwise)."""
    if config.bf16 and config.fp64:
        raise ValueError("--bf16 and --fp64 exclude each other; give one")
    if config.bf16:
        return torch.bfloat16
    return torch.float64 if config.fp64 else torch.float32


def dtype_of(module: nn.Module) -> torch.dtype:
    """Dtype of a module's first parameter."""
    return next(module.parameters()).dtype


def set_parameter_dtypes(model: nn.Module, dtype: torch.dtype, fp32_patterns: Sequence[str]) -> None:
    """Give every parameter `dtype`; in a bf16 model those under `fp32_patterns` stay fp32. Keeps the Parameter objects."""
    unused = set(fp32_patterns)
    for name, parameter in model.named_parameters():
        declared = [pattern for pattern in fp32_patterns if covers(pattern, name)]
        unused.difference_update(declared)
        keep_wide = declared and dtype == torch.bfloat16
        parameter.data = parameter.data.to(torch.float32 if keep_wide else dtype)
    assert not unused, f"fp32 patterns that describe no parameter: {sorted(unused)}"
