"""A tiny Pi0.5 on mock data, built as pretrain_vla.py builds it, for tests of single parts of training."""

from __future__ import annotations

from pathlib import Path

from megatron_vla.config.run import RunConfig, parse_args
from megatron_vla.data.build import build_data
from megatron_vla.models.registry import model_family
from megatron_vla.optimizations.apply import apply_optimizations
from megatron_vla.optimizations.fp8_linear import delayed_scaling_of
from megatron_vla.parallel.data_parallel import wrap
from megatron_vla.parallel.failure import RankWatch
from megatron_vla.parallel.groups import ParallelGroups
from megatron_vla.runner.build import build_runner
from megatron_vla.training.checkpoint import TrainState
from megatron_vla.training.ema import ParameterAverage
from megatron_vla.training.loop import TrainingRun
from megatron_vla.training.optimizer import AdamW
from megatron_vla.training.schedule import build_schedule

TINY = (
    *("--model-variant", "tiny", "--image-size", "28", "--num-layers", "2", "--vision-num-layers", "1"),
    *("--mock-data", "--mock-num-samples", "40", "--mock-num-cameras", "1", "--mock-prompt-length", "8"),
    *("--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", "20", "--lr-warmup-iters", "4"),
    *("--lr", "1e-3", "--ema-decay", "0.9", "--num-workers", "0", "--log-interval", "5", "--no-first-batch-report"),
)


def tiny_config(*extra: str) -> RunConfig:
    """TINY plus `extra` (a repeated flag: the last one counts)."""
    return parse_args([*TINY, *extra])


def build_run(config: RunConfig, groups: ParallelGroups, *, with_buffers: bool = False) -> TrainingRun:
    """Everything but the loop, from random weights. with_buffers: gradient buffers also where a step could do without."""
    family = model_family(config.model.model_name)
    supply = build_data(config, family)
    module = family.build(config, groups)
    module = apply_optimizations(module, config.optimization, family, lambda line: None)
    num_microbatches = None if with_buffers else config.num_microbatches(groups.world_size)
    model = wrap(module, config.parallel, groups, family.block_names, num_microbatches)
    may_be_empty = config.parallel.pipeline_model_parallel_size > 1
    optimizer = AdamW(module.named_parameters(), config.optimizer, model.owned_part, may_be_empty=may_be_empty)
    average = None if config.optimizer.ema_decay is None else ParameterAverage(optimizer, config.optimizer.ema_decay)
    schedule = build_schedule(config.optimizer, config.training.train_iters, config.global_batch_size(groups.world_size))
    state = TrainState(module, optimizer, average, schedule, delayed_scaling_of(module))
    runner = build_runner(family, model, optimizer, average, groups, config, state.fp8_scaling)
    return TrainingRun(config, family, groups, supply, runner, state, RankWatch(groups.rank, groups.world_size))


def take_steps(run: TrainingRun, count: int) -> list[float]:
    """`count` optimizer steps by hand; returns the losses."""
    state, losses = run.state, []
    batches = run.supply.iterator(state.consumed_samples, 0, 1, count, False)
    for _ in range(count):
        metrics = run.runner.step(batches, state.schedule.learning_rate(state.consumed_samples))
        state.iteration += 1
        state.consumed_samples += run.config.global_batch_size(1)
        losses.append(float(metrics.loss))
    return losses


def config_saving_to(folder: Path, *extra: str) -> RunConfig:
    """TINY with --save."""
    return tiny_config("--save", str(folder), *extra)
