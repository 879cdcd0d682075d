"""Everything before the first process group: the checkpoint to resume, all checks, the data, the first-batch report."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_vla.config.check import check
from megatron_vla.config.run import RunConfig
from megatron_vla.data.build import DataSupply, build_data
from megatron_vla.data.mixture_data import acting_part
from megatron_vla.data.report import first_batch_report
from megatron_vla.evaluation.plan import plan_findings
from megatron_vla.findings import CheckError, Finding, error, raise_errors
from megatron_vla.models.registry import ModelFamily
from megatron_vla.optimizations.attention import attention_findings
from megatron_vla.runner.check import runner_device_findings
from megatron_vla.training.checkpoint_folder import CheckpointFolder
from megatron_vla.training.logging import log_folder, print_once
from megatron_vla.training.resume import find_resume, order_findings, resume_findings, with_stored_preprocessing


def device_findings(config: RunConfig, has_gpu: bool) -> Iterator[Finding]:
    """What depends on this machine."""
    yield from runner_device_findings(config, has_gpu)
    yield from attention_findings(config.optimization, on_gpu=has_gpu, in_bf16=config.model.bf16)


def prepare(config: RunConfig, family: ModelFamily, world_size: int) -> tuple[CheckpointFolder | None, DataSupply]:
    """The checkpoint to resume from (None: start afresh) and the data supply; prints on rank 0.

    Raises CheckError with every finding about flags and checkpoint, then with every finding about the data.
    """
    findings = [*check(config, family, world_size), *device_findings(config, torch.cuda.is_available())]
    try:
        resume, lines = find_resume(config.checkpoint)
    except ValueError as problem:
        raise CheckError([*findings, error("--load", str(problem), "choose another folder or --load-iteration")]) from problem
    changes, changed_lines = resume_findings(resume, config, world_size)
    findings += changes
    print_once(*lines, *changed_lines, *(f for f in findings if f.severity == "warning"))
    raise_errors(findings)
    supply = build_data(with_stored_preprocessing(config, resume), family)
    if resume is not None:
        supply.restore_packs(resume.state.get("packing"))
    if config.evaluation.eval_interval is not None:
        assert config.checkpoint.save is not None, "checked above"
        acting = acting_part(supply.preprocessor, config.evaluation.eval_dataset)
        planned = list(plan_findings(config.evaluation, acting, Path(config.checkpoint.save)))
        print_once(*(f for f in planned if f.severity == "warning"))
        raise_errors(planned)
    order = order_findings(resume, supply.order_hash, config)
    print_once(*(f for f in order if f.severity == "warning"))
    raise_errors(order)
    if config.logging.first_batch_report and os.environ.get("RANK", "0") == "0":
        consumed_samples = resume.consumed_samples if resume else 0
        first_batch_report(
            supply.first_batch(consumed_samples, 0, config.data_parallel_size(world_size), resume.iteration if resume else 0),
            supply.preprocessor,
            log_folder(config),
            order_hash=supply.order_hash,
            expected_padded_fraction=supply.expected_padded_fraction,
            report_fields=family.samples.report_fields,
        )
    return resume, supply
