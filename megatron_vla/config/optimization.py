"""Speed and memory switches. Applied in one place: megatron_vla/optimizations/apply.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class OptimizationConfig:
    """Speed and memory: nothing here changes the mathematics beyond rounding"""

    skip_dead_compute: bool = True
    """Do not compute what the action loss never reads (last prefix layer beyond its keys and values, unused norms)."""

    attention_backend: Literal["sdpa", "eager"] = "sdpa"
    """Attention kernel: torch's fused scaled-dot-product attention, or explicit matmul and fp32 softmax (the reference)."""

    activation_checkpoint_module_patterns: tuple[str, ...] = ()
    """Modules whose activations are recomputed in backward: dotted names, '*' stands for one segment."""

    allow_tf32: bool = False
    """Let fp32 matmuls and convolutions use TF32 on GPUs (openpi and LeRobot trainers do)."""

    fp8: Literal["torchao", "native", "transformer_engine"] | None = None
    """Compute linear layers in FP8 (H100 or newer, with --bf16; parameters stay bf16). torchao: the package's scaled products.
    native: this project's own on the same kernels, without any package. transformer_engine: the package's layers, not compiled."""

    fp8_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """One scale per tensor (fastest), or per row (torchao only); rowwise_with_gw_hp leaves weight gradients in bf16."""

    fp8_min_dim: int = 2048
    """Convert a linear layer when the larger of its input and output features is at least this."""

    fp8_skip_module_patterns: tuple[str, ...] = ()
    """Leave these modules in bf16, with everything inside them: dotted names, '*' stands for one segment."""

    fp8_module_list: str | None = None
    """JSON of tools/select_fp8.py: convert exactly these layers, whatever --fp8-min-dim and the family's own exceptions say."""

    fp8_fast_accumulation: Literal["none", "forward", "all"] = "forward"
    """Products that may be summed in the tensor cores' own precision, which is faster: forward is torchao's choice."""
