"""--report-memory: measure what recomputation saves and costs, recommend patterns for --micro-batch-size, and end."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from megatron_vla.config.run import RunConfig
from megatron_vla.data.batch import Batch
from megatron_vla.data.packed_batch import PackedBatch
from megatron_vla.models.registry import ModelFamily
from megatron_vla.optimizations.apply import apply_optimizations
from megatron_vla.optimizations.recompute_cost import GIB, Cost, candidate_patterns, costs, recommend, table
from megatron_vla.parallel.fsdp import replicate_size
from megatron_vla.parallel.groups import initialize, shut_down, world_size_from_environment
from megatron_vla.training.logging import print_once
from megatron_vla.training.preparation import prepare

# Of a GPU's memory: what fragmentation, libraries and the largest temporary tensors of a layer leave.
USABLE_SHARE = 0.92


def state_bytes(module: nn.Module, world_size: int, config: RunConfig) -> int:
    """Weights, gradients, fp32 main parameters, two moments and the average, as far as this rank holds them.

    With fsdp2 the first rank's shards, which are the largest; what is gathered of one layer at a time is not counted.
    """
    parallel = config.parallel
    is_fsdp = parallel.data_parallel_strategy == "fsdp2"
    shards = config.data_parallel_size(world_size) if is_fsdp or parallel.use_distributed_optimizer else 1
    if is_fsdp:
        shards //= replicate_size(parallel, world_size)
    is_one_pass = config.num_microbatches(world_size) == 1
    # Buffers of several ranks or micro-batches add up in fp32, unless that is switched off. fsdp2 has none: it adds up
    # several micro-batches in whole gradients, and rounds what is reduced to the weight's dtype.
    adds_up = not is_one_pass or (world_size > 1 and parallel.gradient_buffers and not is_fsdp)
    in_fp32 = adds_up and parallel.accumulate_allreduce_grads_in_fp32
    total = 0
    for parameter in module.parameters():
        count, size = parameter.numel(), parameter.element_size()
        # fsdp2 cuts the first dimension.
        held = -(-parameter.shape[0] // shards) * (count // parameter.shape[0]) if is_fsdp else count
        total += held * size
        if is_fsdp and not parallel.fsdp_reshard_after_forward:
            total += count * size
        if parameter.requires_grad:
            total += (held if is_one_pass else count) * (max(size, 4) if in_fp32 else size)
            copies = 2 + (size < 4) + (config.optimizer.ema_decay is not None)
            total += held * 4 * copies if is_fsdp else count * 4 * copies // shards
    return total


def first_samples(batch: Batch, count: int) -> Batch:
    """The first `count` samples."""
    return dataclasses.replace(batch, **{name: tensor[:count] for name, tensor in batch.tensors().items()})


def measured_costs(module: nn.Module, family: ModelFamily, batch: Batch) -> tuple[list[Cost], int]:
    """(costs, samples they were measured on): the whole batch, or the largest half, quarter, ... that fits."""
    count = batch.size
    # The kinds of modules are the same for any number of samples.
    candidates = candidate_patterns(module, family, first_samples(batch, 1))
    while True:
        try:
            return costs(module, family, first_samples(batch, count), candidates, print_once), count
        except torch.OutOfMemoryError:
            if count == 1:
                raise
        # Outside of the handler: while it runs, the traceback holds the activations of the pass that failed.
        print_once(f"{count} samples do not fit into the memory of the device: measuring {count // 2}")
        module.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        count //= 2


def report_memory(config: RunConfig, family: ModelFamily) -> None:
    """Build the model of these flags without recomputation, measure, print. Raises CheckError as a training run does."""
    _, supply = prepare(config, family, world_size_from_environment())
    groups = initialize(config.parallel)
    optimization = dataclasses.replace(config.optimization, activation_checkpoint_module_patterns=())
    module = apply_optimizations(family.build(config, groups), optimization, family, print_once)
    batch = supply.example(groups.data_parallel_rank, groups.data_parallel_size).to(groups.device)
    if isinstance(batch, PackedBatch):
        raise ValueError("--report-memory measures padded batches, whose samples can be split: use --no-packing")
    if not isinstance(batch, Batch):
        raise ValueError(f"--report-memory cannot split the samples of {family.name}'s micro-batches; it measures pi05 only")
    measured, count = measured_costs(module, family, batch)
    print_once(table(measured, count))
    if groups.device.type == "cuda":
        total = torch.cuda.get_device_properties(groups.device).total_memory
        print_once(advice(measured, count, config, total, state_bytes(module, groups.world_size, config)))
    supply.close()
    shut_down()


def advice(measured: list[Cost], count: int, config: RunConfig, total_bytes: int, fixed_bytes: int) -> str:
    """What to recompute for --micro-batch-size on a device of `total_bytes`, `fixed_bytes` of which are the training state."""
    size = config.training.micro_batch_size
    found = recommend(measured, size / count, USABLE_SHARE * total_bytes - fixed_bytes)
    needed = f"{fixed_bytes / GIB:.1f} GiB of weights and optimizer + {found.held_bytes / GIB:.1f} GiB of activations"
    have = f"--micro-batch-size {size}: {needed}, {USABLE_SHARE:.0%} of {total_bytes / GIB:.1f} GiB usable"
    if not found.fits:
        return f"{have}: does not fit even with everything recomputed; use a smaller --micro-batch-size"
    if not found.patterns:
        return f"{have}: recompute nothing"
    flag = f"--activation-checkpoint-module-patterns {' '.join(found.patterns)}"
    return f"{have}: use {flag} (about {found.extra_milliseconds:.0f} ms more per micro-batch)"
