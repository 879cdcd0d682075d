"""Train a Vision-Language-Action model: parse -> check -> data -> initialize -> build -> load -> optimize -> wrap -> train."""

from __future__ import annotations

import os
import sys

from megatron_vla.config.check import check
from megatron_vla.config.run import RunConfig, parse_args
from megatron_vla.data.build import build_data
from megatron_vla.findings import CheckError, raise_errors
from megatron_vla.models.registry import ModelFamily, model_family
from megatron_vla.optimizations.apply import apply_optimizations
from megatron_vla.parallel.data_parallel import wrap
from megatron_vla.parallel.failure import ends_all_ranks
from megatron_vla.parallel.groups import initialize, shut_down, world_size_from_environment
from megatron_vla.runner.build import build_runner
from megatron_vla.training.checkpoint import TrainState, load_checkpoint
from megatron_vla.training.ema import ParameterAverage
from megatron_vla.training.loop import TrainingRun, train
from megatron_vla.training.optimizer import AdamW
from megatron_vla.training.resume import find_resume, order_findings, resume_findings
from megatron_vla.training.schedule import build_schedule


def print_once(*lines: object) -> None:
    """Print on rank 0; works before the process group exists."""
    if os.environ.get("RANK", "0") == "0":
        for line in lines:
            print(line, flush=True)


def run(config: RunConfig, family: ModelFamily) -> None:
    """One training run on this rank."""
    world_size = world_size_from_environment()
    resume, lines = find_resume(config.checkpoint)
    findings = check(config, family, world_size)
    if resume is not None:
        changes, changed_lines = resume_findings(resume, config, world_size)
        findings, lines = findings + changes, lines + changed_lines
    print_once(*lines, *(f for f in findings if f.severity == "warning"))
    raise_errors(findings)

    supply = build_data(config, family, resume.preprocessor if resume else None)
    late = order_findings(resume, supply.order_hash, config) if resume else []
    print_once(*supply.findings, *late)
    raise_errors(late)

    groups = initialize(config.parallel)
    with ends_all_ranks(groups.rank, groups.world_size):
        module = family.build(config, groups)
        if config.model.pretrained_checkpoint is not None and resume is None:
            print_once(family.load_pretrained(module, config))
        module = apply_optimizations(module, config, family)
        model = wrap(module, config.parallel, groups)
        optimizer = AdamW(module.named_parameters(), config.optimizer)
        average = None if config.optimizer.ema_decay is None else ParameterAverage(optimizer, config.optimizer.ema_decay)
        schedule = build_schedule(config.optimizer, config.training.train_iters, config.global_batch_size(world_size))
        state = TrainState(module, optimizer, average, schedule)
        if resume is not None:
            print_once(*load_checkpoint(resume, state, groups))
        runner = build_runner(family, model, optimizer, average, groups, config)
        train(TrainingRun(config, family, groups, supply, runner, state))
    supply.close()
    shut_down()


def main() -> None:
    """Command line entry; what a user can cause ends with status 2 and the findings alone."""
    config = parse_args()
    try:
        run(config, model_family(config.model.model_name))
    except CheckError as exception:
        print_once(exception)
        sys.exit(2)


if __name__ == "__main__":
    main()
