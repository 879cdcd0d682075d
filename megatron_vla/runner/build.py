"""Which iteration runner a run gets, and what the training loop may ask of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Protocol

import torch

from megatron_vla.config.run import RunConfig
from megatron_vla.data.batch import Batch
from megatron_vla.models.registry import ModelFamily
from megatron_vla.optimizations.fp8_scaling import DelayedScaling
from megatron_vla.parallel.data_parallel import DataParallelModel
from megatron_vla.parallel.groups import ParallelGroups
from megatron_vla.parallel.pipeline import Schedule
from megatron_vla.runner.check import NCCL_REGISTER
from megatron_vla.runner.eager import EagerRunner
from megatron_vla.training.ema import ParameterAverage
from megatron_vla.training.metrics import StepMetrics
from megatron_vla.training.optimizer import AdamW


class Runner(Protocol):
    """Runs optimizer steps."""

    @property
    def model(self) -> DataParallelModel:
        """The wrapped model."""

    @property
    def schedule(self) -> Schedule:
        """Forward and backward of single batches, for diagnosis."""

    def step(self, batches: Iterator[Batch], learning_rate: float) -> StepMetrics:
        """One optimizer step on the next host batches."""

    def poll(self) -> list[str]:
        """Lines to print since the last call."""

    def counters(self) -> dict[str, float]:
        """Numbers for the log record, counted from the start."""

    def summary(self) -> list[str]:
        """Lines to print at the end."""

    def release(self) -> None:
        """Free what the runner holds on the device beside parameters and state; before process groups are destroyed."""


def prepare_environment(config: RunConfig, world_size: int) -> None:
    """Before the first process group: settings that NCCL reads when a communicator is made."""
    if config.optimization.runner == "full_iteration_graph" and world_size > 1:
        # Ranks may replay graphs of different shapes in one step. Buffers that NCCL registers at capture would be those of one
        # graph only, and registration does not know expandable segments either.
        os.environ.setdefault(NCCL_REGISTER, "0")


def prepare_device(config: RunConfig, groups: ParallelGroups) -> None:
    """After `initialize`, before the model is built: the stream on which the main thread works from now on."""
    if config.optimization.runner == "full_iteration_graph" and groups.device.type == "cuda":
        # The default stream cannot be captured, and autograd accumulates gradients on the stream where a parameter was wrapped.
        torch.cuda.synchronize(groups.device)
        torch.cuda.set_stream(torch.cuda.Stream(groups.device))


def build_runner(
    family: ModelFamily,
    model: DataParallelModel,
    optimizer: AdamW,
    average: ParameterAverage | None,
    groups: ParallelGroups,
    config: RunConfig,
    fp8_scaling: DelayedScaling | None = None,
) -> Runner:
    """The runner that --runner chooses. Raises ValueError for a graph runner without a GPU."""
    eager = EagerRunner(
        family,
        model,
        optimizer,
        average,
        groups,
        num_microbatches=config.num_microbatches(groups.world_size),
        clip_grad=config.optimizer.clip_grad,
        check_finite=config.training.check_for_nan_in_loss_and_grad,
        fp8_scaling=fp8_scaling,
    )
    if config.optimization.runner == "eager":
        return eager
    if groups.device.type != "cuda":
        raise ValueError("--runner full_iteration_graph captures CUDA graphs, and there is no GPU: use --runner eager")
    from megatron_vla.runner.full_iteration_graph import FullIterationGraphRunner
    from megatron_vla.runner.recorder import CudaGraphRecorder

    return FullIterationGraphRunner(
        eager,
        CudaGraphRecorder(groups.device),
        num_warmup_steps=config.optimization.cuda_graph_warmup_steps,
        max_buckets=config.optimization.cuda_graph_max_buckets,
    )
