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

    runner: Literal["eager", "full_iteration_graph"] = "eager"
    """eager: kernels are launched one by one. full_iteration_graph: forward, backward, reductions and update of a step are
    captured in one CUDA graph per batch shape and launched at once; same updates, no host time between kernels."""

    cuda_graph_warmup_steps: int = 3
    """With a graph runner: training steps that run eagerly before the first capture."""

    cuda_graph_max_buckets: int = 4
    """With a graph runner: batch shapes that get a graph of their own; steps of further shapes run eagerly, counted."""
