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
