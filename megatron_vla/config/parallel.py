"""How ranks share the model and the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism: sizes, strategies, timeouts"""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer's matrices."""

    pipeline_model_parallel_size: int = 1
    """Pipeline stages."""

    virtual_pipeline_model_parallel_size: int | None = None
    """Parts of the model on each pipeline stage (interleaved schedule: a smaller bubble, more communication). Not set: one."""

    pipeline_layout: tuple[int, ...] = ()
    """Layers of each pipeline part in order of depth, for example 7 11. Not set: balanced by FLOPs, with the vision tower."""

    context_parallel_size: int = 1
    """Ranks that share one sequence (only 1: sequences of robot models are short)."""

    sequence_parallel: bool = False
    """Split norm and residual regions over the tensor-parallel ranks."""

    data_parallel_strategy: Literal["megatron_ddp", "torch_ddp"] = "megatron_ddp"
    """Gradient reduction: megatron-core's contiguous buckets, or torch DistributedDataParallel."""

    overlap_grad_reduce: bool = False
    """Start each bucket's reduction while backward still runs."""

    accumulate_allreduce_grads_in_fp32: bool = True
    """Accumulate and reduce gradients in fp32 (bf16 otherwise, when the model is bf16)."""

    distributed_timeout_minutes: float = 10.0
    """Collective timeout after the first step; the first step may take --distributed-startup-timeout-minutes."""

    distributed_startup_timeout_minutes: float = 60.0
    """Collective timeout until the first step is done."""
