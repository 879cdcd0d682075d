"""One run on this rank, put together: check -> data -> initialize -> build -> load -> optimize -> wrap -> runner.

The entry script trains it, the benchmark tool times it: both work on the same objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_vla.config.run import RunConfig
from megatron_vla.models.registry import ModelFamily
from megatron_vla.optimizations.apply import apply_optimizations
from megatron_vla.optimizations.fp8_linear import delayed_scaling_of
from megatron_vla.parallel.data_parallel import wrap
from megatron_vla.parallel.failure import ends_all_ranks
from megatron_vla.parallel.groups import initialize, shut_down, world_size_from_environment
from megatron_vla.parallel.stage_plan import plan_stages
from megatron_vla.parallel.tensor_parallel import seed_forward_draws
from megatron_vla.runner.build import build_runner, prepare_device, prepare_environment
from megatron_vla.runner.warm_up import warm_up
from megatron_vla.training.checkpoint import TrainState, load_checkpoint
from megatron_vla.training.ema import ParameterAverage
from megatron_vla.training.logging import print_once
from megatron_vla.training.loop import TrainingRun
from megatron_vla.training.optimizer import AdamW
from megatron_vla.training.preparation import prepare
from megatron_vla.training.schedule import build_schedule


@contextmanager
def training_session(config: RunConfig, family: ModelFamily) -> Iterator[TrainingRun]:
    """A run ready for its first step; closes the data supply and the process groups when the block ends well.

    Raises CheckError before any process group exists. An exception inside the block ends all ranks with its message.
    """
    world_size = world_size_from_environment()
    resume, supply = prepare(config, family, world_size)
    prepare_environment(config, world_size)
    groups = initialize(config.parallel)
    with ends_all_ranks(groups.rank, groups.world_size) as watch:
        watch.enter("building the model")
        prepare_device(config, groups)
        if groups.pipeline_model_parallel_size > 1:
            print_once(plan_stages(family.pipeline_units(config), config.parallel).table())
        seed_forward_draws(config.training.seed, groups)
        module = family.build(config, groups)
        if config.model.pretrained_checkpoint is not None and resume is None:
            reinitialize = config.model.pretrained_reinitialize
            family.converter.load(config.model.pretrained_checkpoint, module, reinitialize, print_once)
        module = apply_optimizations(module, config.optimization, family, print_once)
        num_microbatches = config.num_microbatches(world_size)
        model = wrap(module, config.parallel, groups, family.block_names, num_microbatches)
        may_be_empty = groups.pipeline_model_parallel_size > 1
        optimizer = AdamW(module.named_parameters(), config.optimizer, model.owned_part, may_be_empty=may_be_empty)
        print_once(f"AdamW: {optimizer.kernel_name}")
        average = None if config.optimizer.ema_decay is None else ParameterAverage(optimizer, config.optimizer.ema_decay)
        schedule = build_schedule(config.optimizer, config.training.train_iters, config.global_batch_size(world_size))
        state = TrainState(module, optimizer, average, schedule, delayed_scaling_of(module))
        if resume is not None:
            print_once(*load_checkpoint(resume, state, groups))
        runner = build_runner(family, model, optimizer, average, groups, config, state.fp8_scaling)
        if config.optimization.compile and config.optimization.compile_warmup:
            watch.enter("compiling")
            batch = supply.example(groups.data_parallel_rank, groups.data_parallel_size)
            warm_up(model, family, groups, config, batch, print_once, supply.longest_prompt)
            if state.fp8_scaling is not None:
                state.fp8_scaling.forget_passes()
        yield TrainingRun(config, family, groups, supply, runner, state, watch)
        runner.release()
    supply.close()
    shut_down()
