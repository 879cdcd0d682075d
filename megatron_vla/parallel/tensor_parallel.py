"""Tensor parallelism: who shares a layer's matrices, and what that asks of parameters and random numbers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.parallel.groups import ParallelGroups
from megatron_vla.parallel.parameter_shard import mark_partial

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """How a model's matrices are shared: `size` ranks of `group`, of which this is number `rank`.

    `sequence_parallel`: between the matrices (norms, residual additions) each rank holds its share of the token rows only.
    """

    size: int = 1
    rank: int = 0
    sequence_parallel: bool = False
    group: Any = None

    def __post_init__(self) -> None:
        if self.size == 1 and self.sequence_parallel:
            raise ValueError("--sequence-parallel needs --tensor-model-parallel-size 2 or more; drop one of them")
        if self.size > 1 and self.group is None:
            raise ValueError(f"--tensor-model-parallel-size {self.size}: no process group; build with initialized groups")


NOT_PARALLEL = TensorParallel()


def tensor_parallel_of(parallel: ParallelConfig, groups: ParallelGroups | None) -> TensorParallel:
    """The flags' tensor parallelism on this rank. Without groups (tools, single process) only size 1 is possible."""
    if groups is None:
        return TensorParallel(size=parallel.tensor_model_parallel_size, sequence_parallel=parallel.sequence_parallel)
    return TensorParallel(
        size=groups.tensor_model_parallel_size,
        rank=groups.tensor_model_parallel_rank,
        sequence_parallel=parallel.sequence_parallel,
        group=groups.tensor_model_parallel_group,
    )


def on_token_rows(module: Module, tensor_parallel: TensorParallel) -> Module:
    """`module`, marked as applied between the matrices: with sequence parallelism its gradients cover this rank's rows only."""
    if tensor_parallel.sequence_parallel:
        mark_partial(module)
    return module


def seed_forward_draws(seed: int, groups: ParallelGroups) -> None:
    """Seed torch's generators for what a forward pass draws, which is dropout and nothing else.

    Tensor-parallel ranks get equal streams (they repeat computations) and, on GPUs, megatron-core's tracker with different ones
    for what they share. Data-parallel ranks and stages differ: they see other samples and other layers.
    """
    place = groups.data_parallel_rank * groups.pipeline_model_parallel_size + groups.pipeline_model_parallel_rank
    # Apart by more than the offsets that the tracker adds.
    own_seed = (seed + 1_000_003 * place) % 2**63
    torch.manual_seed(own_seed)
    if groups.tensor_model_parallel_size == 1 or not torch.cuda.is_available():
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(own_seed)
