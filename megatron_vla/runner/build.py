"""Which iteration runner a run gets."""

from __future__ import annotations

from megatron_vla.config.run import RunConfig
from megatron_vla.models.registry import ModelFamily
from megatron_vla.parallel.data_parallel import DataParallelModel
from megatron_vla.parallel.groups import ParallelGroups
from megatron_vla.runner.eager import EagerRunner
from megatron_vla.training.ema import ParameterAverage
from megatron_vla.training.optimizer import AdamW


def build_runner(
    family: ModelFamily,
    model: DataParallelModel,
    optimizer: AdamW,
    average: ParameterAverage | None,
    groups: ParallelGroups,
    config: RunConfig,
) -> EagerRunner:
    """The runner that the flags choose (only eager so far)."""
    return EagerRunner(
        family,
        model,
        optimizer,
        average,
        groups,
        num_microbatches=config.num_microbatches(groups.world_size),
        clip_grad=config.optimizer.clip_grad,
        check_finite=config.training.check_for_nan_in_loss_and_grad,
    )
