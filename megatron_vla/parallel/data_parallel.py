"""Gradient reduction over data-parallel ranks: megatron-core's contiguous buckets, or torch's DistributedDataParallel.

The sharded strategies build on this file: `sharded_optimizer.py` (ZeRO-1 on megatron-core's buckets) and `fsdp.py`. All give
the SUM over ranks of the un-normalised gradients. The division by the global number of valid elements is one device scalar
that the optimizer folds into its update, so no rank ever divides by its own share of the batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.models.common.merged_linear import forget_moved_weights
from megatron_vla.parallel.groups import ParallelGroups
from megatron_vla.parallel.owned_part import OwnedPart, OwnerRule, gradient_of, whole_part
from megatron_vla.parallel.partial_gradients import NormScope, PartialSums, norm_scope
from megatron_vla.parallel.partial_model import PartialModel

# torch's own default; a few of them keep a link busy without delaying the first one much.
TORCH_BUCKET_MEGABYTES = 25.0


class DataParallelModel(Protocol):
    """What the runner and the optimizer need of a wrapped model.

    module: the bare model, whose parameter names are the project's names. forward_module: what forward_step calls.
    """

    module: nn.Module
    forward_module: nn.Module
    norm_scope: NormScope

    def owned_part(self, parameter: nn.Parameter) -> OwnedPart | None:
        """Which elements this rank updates (None: none)."""

    def zero_gradients(self) -> None:
        """Start of a step."""

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one micro-batch; only the last one communicates."""

    def finish_gradients(self) -> None:
        """After the last backward: owned parts' gradients are complete sums when this returns (on the stream)."""

    def mask_gradients(self, keep: Tensor) -> None:
        """Set every gradient to zero where `keep` (bool, shape []) is False, without asking the device."""

    def publish_parameters(self) -> None:
        """After the update of the owned parts: every rank will see every new parameter in its next forward pass."""

    def gather_parameters(self) -> None:
        """Bring the model's parameters up to date now, for readers other than forward (all ranks call it)."""

    def after_replay(self) -> None:
        """Bring this object's host state to what an eager step would have left: a replayed graph runs none of its code."""


def named_parts(module: nn.Module, owned_part: OwnerRule) -> list[tuple[str, OwnedPart]]:
    """This rank's parts of all parameters that receive gradients, by name."""
    found = ((name, owned_part(p)) for name, p in module.named_parameters() if p.requires_grad)
    return [(name, part) for name, part in found if part is not None]


class _WithoutShards:
    """What a strategy answers whose ranks all hold, and update alike, every parameter that they train."""

    def owned_part(self, parameter: nn.Parameter) -> OwnedPart | None:
        """Everything."""
        return whole_part(parameter)

    def publish_parameters(self) -> None:
        """Nothing to do: every rank has updated everything."""

    def gather_parameters(self) -> None:
        """Nothing to do: every rank has updated everything."""

    def after_replay(self) -> None:
        """Nothing to do: what backward's hooks count starts anew with every step."""


class DirectGradients(_WithoutShards):
    """One process and one micro-batch per step: nothing to accumulate or reduce, so no gradient buffer.

    Backward's own tensors are what the optimizer reads. A buffer would hold the same numbers, for a kernel that zeroes and one
    that adds per parameter: with fp32 buffers 18 ms and 13 GiB at Pi0.5's 3.2e9 bf16 parameters on an H200.
    """

    def __init__(self, module: nn.Module, groups: ParallelGroups):
        self.module = module
        self.forward_module: nn.Module = module
        self.norm_scope = norm_scope(groups, sharded=False)
        self._live = [p for p in module.parameters() if p.requires_grad]

    def zero_gradients(self) -> None:
        """Drop the gradients; backward sets them anew."""
        self.module.zero_grad(set_to_none=True)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Nothing to do."""
        return nullcontext()

    def finish_gradients(self) -> None:
        """What this micro-batch did not reach has a gradient of zero, as in a buffer."""
        for parameter in self._live:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def mask_gradients(self, keep: Tensor) -> None:
        """One kernel per parameter."""
        _mask_each(self.module, keep)


def _mask_each(module: nn.Module, keep: Tensor) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad:
            gradient_of(parameter).masked_fill_(~keep, 0.0)


class MegatronDataParallel(_WithoutShards):
    """megatron-core DistributedDataParallel: one contiguous gradient buffer per dtype, reduced in buckets."""

    def __init__(self, module: nn.Module, parallel: ParallelConfig, groups: ParallelGroups):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
            from megatron.core.transformer import TransformerConfig

            # megatron-core reads one field of the transformer config here: with a per-token loss it sums over ranks
            # instead of averaging, which is the semantic of this project's loss.
            config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, calculate_per_token_loss=True)
        has_fp64 = any(p.dtype == torch.float64 for p in module.parameters())
        buckets = DistributedDataParallelConfig(
            # A fp64 model keeps fp64 gradients: "in fp32" would silently lower them.
            grad_reduce_in_fp32=parallel.accumulate_allreduce_grads_in_fp32 and not has_fp64,
            overlap_grad_reduce=parallel.overlap_grad_reduce,
            use_distributed_optimizer=parallel.use_distributed_optimizer,
            overlap_param_gather=parallel.overlap_param_gather,
            bucket_size=parallel.ddp_bucket_size,
            check_for_nan_in_grad=False,  # it synchronises with the host; the step has its own on-device check
        )
        self.module = module
        self.wrapped = DistributedDataParallel(config, buckets, module)
        self.forward_module: nn.Module = self.wrapped
        # Random initialisation and loading are the same on all ranks; this makes it certain.
        self.wrapped.broadcast_params()
        self._written: set[nn.Parameter] = set()
        for parameter in self.wrapped.params_with_grad:
            parameter.register_post_accumulate_grad_hook(self._write_first_gradient)
        self._partial = PartialSums(named_parts(module, self.owned_part), groups)
        self.norm_scope = norm_scope(
            groups, sharded=parallel.use_distributed_optimizer, skipped=self._partial.counted_elsewhere
        )

    def _write_first_gradient(self, parameter: nn.Parameter) -> None:
        """Runs before megatron-core's own hook, which adds what is not marked as added.

        The first gradient of a step takes the place of the last step's. Zeroing the buffers and adding to them would move 2.3
        times the bytes (twice with bf16 buffers): 6 ms (3 ms) of a step of Pi0.5's 3.2e9 parameters on an H200, by count.
        """
        is_first = parameter not in self._written
        if is_first:
            self._written.add(parameter)
            gradient_of(parameter).copy_(cast(Tensor, parameter.grad))
        parameter.grad_added_to_main_grad = is_first  # type: ignore[attr-defined]

    def zero_gradients(self) -> None:
        """Take the contiguous buffers for empty; their numbers stay until they are overwritten."""
        self._written.clear()
        for group in self.wrapped.bucket_groups:
            group.reset()

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Only the last micro-batch may start reductions."""
        return nullcontext() if is_last else self.wrapped.no_sync()

    def finish_gradients(self) -> None:
        """Reduce, or wait for the reductions that backward started. What no micro-batch reached has a gradient of zero."""
        for parameter in self.wrapped.params_with_grad:
            if parameter not in self._written:
                gradient_of(parameter).zero_()
        self.wrapped.finish_grad_sync()
        self._partial.complete()

    def mask_gradients(self, keep: Tensor) -> None:
        """One kernel per contiguous buffer."""
        for buffer in self.wrapped.buffers:
            buffer.grad_data.masked_fill_(~keep, 0.0)


def _sum_over_ranks(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Communication hook of torch DDP that sums; its default divides by the number of ranks."""
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


# torch compares a hook's annotations with its classes and takes no postponed (string) ones.
_sum_over_ranks.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}


class TorchDataParallel(_WithoutShards):
    """torch DistributedDataParallel with a summing hook."""

    def __init__(self, module: nn.Module, parallel: ParallelConfig, groups: ParallelGroups):
        low_precision = {p.dtype for p in module.parameters() if p.requires_grad} - {torch.float32, torch.float64}
        if low_precision and parallel.accumulate_allreduce_grads_in_fp32:
            raise ValueError(
                "--data-parallel-strategy torch_ddp accumulates and reduces bf16 gradients in bf16: "
                "say so with --no-accumulate-allreduce-grads-in-fp32, or use --data-parallel-strategy megatron_ddp"
            )
        self.module = module
        with warnings.catch_warnings():
            # torch 2.13 renames broadcast_buffers; 2.11 does not know the new name.
            warnings.simplefilter("ignore", FutureWarning)
            self.wrapped = nn.parallel.DistributedDataParallel(
                module,
                device_ids=[groups.device.index] if groups.device.type == "cuda" else None,
                process_group=groups.data_parallel_group,
                broadcast_buffers=False,  # nothing in the models changes a buffer during training
                gradient_as_bucket_view=True,
                # Without overlap there is one bucket, which is only full when backward is done.
                bucket_cap_mb=_bucket_megabytes(module, parallel),
            )
        self.wrapped.register_comm_hook(groups.data_parallel_group, _sum_over_ranks)
        self.forward_module: nn.Module = self.wrapped
        self._partial = PartialSums(named_parts(module, self.owned_part), groups)
        self.norm_scope = norm_scope(groups, sharded=False, skipped=self._partial.counted_elsewhere)

    def zero_gradients(self) -> None:
        """Drop the gradients; the first backward sets them anew."""
        self.module.zero_grad(set_to_none=True)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Only the last micro-batch reduces."""
        return nullcontext() if is_last else self.wrapped.no_sync()

    def finish_gradients(self) -> None:
        """torch DDP has waited for its reductions by the end of backward."""
        self._partial.complete()

    def mask_gradients(self, keep: Tensor) -> None:
        """One kernel per parameter."""
        _mask_each(self.module, keep)


class UntrainedStage(_WithoutShards):
    """A pipeline stage on which nothing is trained: it computes, and takes part in what all stages do together."""

    def __init__(self, module: nn.Module, parallel: ParallelConfig, groups: ParallelGroups):
        self.module = module
        self.forward_module = module
        self._partial = PartialSums([], groups)
        self.norm_scope = norm_scope(groups, sharded=parallel.use_distributed_optimizer)

    def owned_part(self, parameter: nn.Parameter) -> OwnedPart | None:
        """Nothing."""
        return None

    def zero_gradients(self) -> None:
        """There are none."""

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Nothing to reduce."""
        return nullcontext()

    def finish_gradients(self) -> None:
        """The other stages may sum gradients of shared parameters over all stages."""
        self._partial.complete()

    def mask_gradients(self, keep: Tensor) -> None:
        """There are none."""


def _bucket_megabytes(module: nn.Module, parallel: ParallelConfig) -> float:
    """torch DDP's bucket size in MiB: --ddp-bucket-size elements; everything at once without --overlap-grad-reduce."""
    live = [p for p in module.parameters() if p.requires_grad]
    if not parallel.overlap_grad_reduce:
        return sum(p.numel() * p.element_size() for p in live) / 2**20 + 1
    if parallel.ddp_bucket_size is None:
        return TORCH_BUCKET_MEGABYTES
    return parallel.ddp_bucket_size * max(p.element_size() for p in live) / 2**20


def wrap(
    module: nn.Module,
    parallel: ParallelConfig,
    groups: ParallelGroups,
    block_names: Sequence[str] = (),
    num_microbatches: int | None = None,
) -> DataParallelModel:
    """Wrap the finished (optimised) module by --data-parallel-strategy. Parameters with requires_grad=False stay outside.

    block_names: the family's layers, which fsdp2 gathers one at a time. num_microbatches: per step and rank (None: unknown).
    """
    model = _wrapped(module, parallel, groups, block_names, num_microbatches)
    moved = forget_moved_weights(module)
    if moved and groups.is_main:
        reason = "the data-parallel strategy has moved them (see --neighbouring-weights)"
        print(f"merged projections: {moved} products copy their weights together in every step: {reason}", flush=True)
    return model


def _wrapped(
    module: nn.Module,
    parallel: ParallelConfig,
    groups: ParallelGroups,
    block_names: Sequence[str],
    num_microbatches: int | None,
) -> DataParallelModel:
    if not any(p.requires_grad for p in module.parameters()):
        if isinstance(module, PartialModel):
            return UntrainedStage(module, parallel, groups)
        raise ValueError("the model has no trainable parameter")
    if parallel.data_parallel_strategy == "torch_ddp":
        return TorchDataParallel(module, parallel, groups)
    if parallel.data_parallel_strategy == "fsdp2":
        from megatron_vla.parallel.fsdp import FullyShardedModel

        return FullyShardedModel(module, parallel, groups, block_names)
    if parallel.use_distributed_optimizer:
        from megatron_vla.parallel.sharded_optimizer import ShardedMegatronDataParallel

        return ShardedMegatronDataParallel(module, parallel, groups)
    if groups.world_size == 1 and num_microbatches == 1:
        return DirectGradients(module, groups)
    if not parallel.gradient_buffers:
        if num_microbatches not in (None, 1):
            raise ValueError(f"--no-gradient-buffers: {num_microbatches} micro-batches per step add up, which needs buffers")
        from megatron_vla.parallel.unbuffered import UnbufferedDataParallel

        return UnbufferedDataParallel(module, parallel, groups)
    return MegatronDataParallel(module, parallel, groups)
