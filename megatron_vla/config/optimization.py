"""Speed and memory switches. Applied in one place: megatron_vla/optimizations/apply.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class OptimizationConfig:
    """Speed and memory: nothing here changes the mathematics beyond rounding"""

    skip_dead_compute: bool = True
    """Do not compute what the action loss never reads (last prefix layer beyond its keys and values, unused norms)."""

    attention_backend: Literal["auto", "varlen", "flex", "sdpa", "matmul", "flash_attn", "eager"] = "auto"
    """Attention kernel. sdpa: torch's fused attention with a key mask. matmul: matrix products with fp32 logits that keep the
    probabilities. varlen: torch's kernel for sequences of different lengths (GPU, bf16). flex: torch's flex attention with a
    block mask (GPU). flash_attn: the package of that name (GPU, bf16). eager: explicit products and fp32 softmax, the
    reference. auto: sdpa, which runs everywhere (printed); Pi0.5 on an H200 is faster with matmul, which takes 3 GiB more
    (docs/speed.md)."""

    unmasked_attention: Literal["sdpa", "flash"] = "sdpa"
    """Kernel of attention without a mask (vision towers), with --attention-backend auto, sdpa or matmul, on GPUs in bf16. sdpa:
    torch's choice (cuDNN on Hopper). flash: torch's own FlashAttention-2."""

    merge_projections: bool = False
    """Compute projections that read the same rows as one matrix product: q, k, v, and gate, up (parameters stay separate)."""

    neighbouring_weights: bool = True
    """With --merge-projections: lay the parameters of one product side by side in memory, so that no step copies them together.
    Has no effect where the layout moves parameters itself (--use-distributed-optimizer, fsdp2): that is printed."""

    fused_kernels: bool = True
    """Let the project's own CUDA kernels (kernels/README.md) take the place of PyTorch operations where they were built and can
    run. Without them the operations run whose roundings they keep."""

    compile: bool = False
    """Compile the model with torch.compile; what is compiled is decided by --compile-scope. A graph break is an error."""

    compile_scope: Literal["backbone", "per_layer", "multi_group"] = "per_layer"
    """backbone: each tower is one graph (no gradient is ready before a tower's whole backward). per_layer: each layer is one.
    multi_group: the layers and the small parts around them, each its own graph."""

    compile_mode: Literal["default", "tuned", "max-autotune-no-cudagraphs"] = "default"
    """default: torch's choices. tuned: try block sizes of every generated kernel while compiling (1-2 minutes more).
    max-autotune-no-cudagraphs: that, and Triton's matrix products against the library's."""

    compile_warmup: bool = True
    """Compile for every prompt width that can occur before the first step, instead of when a width first comes."""

    dynamo_optimize_ddp: bool = True
    """Let torch.compile split graphs along torch DDP's buckets (torch's default). --compile with --data-parallel-strategy
    torch_ddp needs it off: it compiles the compiled parts again from outside and crashes."""

    activation_checkpoint_module_patterns: tuple[str, ...] = ()
    """Modules whose activations are recomputed in backward: dotted names, '*' stands for one segment."""

    report_memory: bool = False
    """Do not train: measure what recomputing each kind of module saves and costs on one micro-batch, recommend patterns for
    --micro-batch-size, and end."""

    allow_tf32: bool = False
    """Let fp32 matmuls and convolutions use TF32 on GPUs (openpi and LeRobot trainers do)."""

    runner: Literal["eager", "full_iteration_graph"] = "eager"
    """eager: kernels are launched one by one. full_iteration_graph: forward, backward, reductions and update of a step are
    captured in one CUDA graph per batch shape and launched at once; same updates, no host time between kernels."""

    cuda_graph_warmup_steps: int = 3
    """With a graph runner: training steps that run eagerly before the first capture."""

    cuda_graph_max_buckets: int = 4
    """With a graph runner: batch shapes that get a graph of their own; steps of further shapes run eagerly, counted."""

    fp8: Literal["torchao", "native", "transformer_engine"] | None = None
    """Compute linear layers in FP8 (H100 or newer, with --bf16; parameters stay bf16). torchao: the package's products.
    native: this project's own on the same kernels, without a package. transformer_engine: the package's, never compiled."""

    fp8_recipe: Literal["tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """One scale per tensor, from the tensor itself or (delayed: native only, fastest) from the steps before; or one per row
    (torchao only). rowwise_with_gw_hp leaves weight gradients in bf16."""

    fp8_amax_history_len: int = 16
    """With --fp8-recipe delayed: steps whose largest magnitude decides the scale."""

    fp8_min_dim: int = 2048
    """Convert a linear layer when the larger of its input and output features is at least this."""

    fp8_skip_module_patterns: tuple[str, ...] = ()
    """Leave these modules in bf16, with everything inside them: dotted names, '*' stands for one segment."""

    fp8_module_list: str | None = None
    """JSON of tools/select_fp8.py: convert exactly these layers, whatever --fp8-min-dim and the family's own exceptions say."""

    fp8_fast_accumulation: Literal["none", "forward", "all"] = "forward"
    """Products that may be summed in the tensor cores' own precision, which is faster: forward is torchao's choice."""
