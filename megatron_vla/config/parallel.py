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

    data_parallel_strategy: Literal["megatron_ddp", "torch_ddp", "fsdp2"] = "megatron_ddp"
    """megatron_ddp: megatron-core's contiguous buckets. torch_ddp: torch DistributedDataParallel. fsdp2: torch fully_shard cuts
    the parameters too and gathers them layer by layer (a bf16 model's reduced gradients are rounded to bf16 once)."""

    use_distributed_optimizer: bool = False
    """Cut optimizer state, fp32 parameters and their average over the data-parallel ranks (ZeRO-1, with megatron_ddp)."""

    overlap_grad_reduce: bool = False
    """Start each bucket's reduction while backward still runs (fsdp2 always does)."""

    overlap_param_gather: bool = False
    """With --use-distributed-optimizer: gather each bucket's new parameters just before the first module that reads them."""

    ddp_bucket_size: int | None = None
    """Elements per bucket with --overlap-grad-reduce. Not set: megatron_ddp 40 million or more, torch_ddp 25 MiB."""

    gradient_buffers: bool = True
    """Copy gradients into contiguous buffers to reduce them (off: reduce them where backward leaves them, which saves the copy
    and the buffers; for one micro-batch per step, without fp32 accumulation of bf16)."""

    data_parallel_sms: int | None = None
    """Multiprocessors for the reductions of --overlap-grad-reduce; matrix products leave them free. Not set: reductions take
    up to 32, and products wait for them."""

    fsdp_replicate_size: int | None = None
    """fsdp2: copies of the sharded model over the data-parallel ranks (HSDP). Not set: one per node."""

    fsdp_reshard_after_forward: bool = True
    """fsdp2: free a layer's gathered parameters after forward and gather them again in backward (off: more memory)."""

    accumulate_allreduce_grads_in_fp32: bool = True
    """Accumulate and reduce gradients in fp32 (bf16 otherwise, when the model is bf16)."""

    distributed_timeout_minutes: float = 10.0
    """Collective timeout after the first step; the first step may take --distributed-startup-timeout-minutes."""

    distributed_startup_timeout_minutes: float = 60.0
    """Collective timeout until the first step is done."""
