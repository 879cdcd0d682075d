"""Runs with a graph runner beside eager ones, and batches of several prompt widths, for CPU and GPU tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_vla.data.batch import Batch
from megatron_vla.runner.eager import EagerRunner
from megatron_vla.runner.full_iteration_graph import FullIterationGraphRunner
from megatron_vla.runner.recorder import Recorder
from megatron_vla.training.loop import TrainingRun


def with_graphs(run: TrainingRun, recorder: Recorder, warmup: int = 2, max_buckets: int = 4) -> FullIterationGraphRunner:
    """Give an eager run a graph runner."""
    assert isinstance(run.runner, EagerRunner)
    run.runner = FullIterationGraphRunner(run.runner, recorder, num_warmup_steps=warmup, max_buckets=max_buckets)
    return run.runner


def narrowed(batch: Batch, width: int) -> Batch:
    """`batch` with `width` prompt slots."""
    prompt = {"tokens_BL": batch.tokens_BL, "token_is_valid_BL": batch.token_is_valid_BL}
    return dataclasses.replace(batch, **{name: value[:, :width].contiguous() for name, value in prompt.items()})


def take_steps_of_widths(run: TrainingRun, widths: Sequence[int | Sequence[int]], pin: bool = False) -> list[dict[str, float]]:
    """One optimizer step per entry (a width for all micro-batches, or one for each), every step at another learning rate."""
    groups, state = run.groups, run.state
    count = run.config.num_microbatches(groups.world_size)
    supply: Iterator[Any] = run.supply.iterator(
        state.consumed_samples, groups.data_parallel_rank, groups.data_parallel_size, len(widths), False
    )
    kept = []
    for entry in widths:
        of_step = [entry] * count if isinstance(entry, int) else list(entry)
        batches = [narrowed(next(supply), width) for width in of_step]
        if pin:
            batches = [batch.pin_memory() for batch in batches]
        kept.append(run.runner.step(iter(batches), 1e-3 / (1 + state.iteration % 5)))
        state.iteration += 1
        state.consumed_samples += run.config.global_batch_size(groups.world_size)
    # Read at the end: a later step must not have changed an earlier one's numbers.
    return [
        {
            "loss": float(m.loss),
            "norm": float(m.gradient_norm),
            "valid": float(m.num_valid),
            "finite": float(m.is_finite),
            **{name: float(value) for name, value in m.extra.items()},
        }
        for m in kept
    ]


def everything(run: TrainingRun) -> dict[str, Tensor]:
    """Weights, main parameters, moments and average, and the step count."""
    run.runner.model.gather_parameters()
    found = {f"weight.{name}": tensor for name, tensor in run.state.module.state_dict().items()}
    shards = [*run.state.optimizer.state_shards(), *(run.state.average.state_shards() if run.state.average else ())]
    found.update({f"{shard.kind}.{shard.parameter_name}": shard.tensor for shard in shards})
    found["step"] = torch.tensor(run.state.optimizer.param_groups[0]["step"])
    return found


def assert_same_state(run: TrainingRun, other: TrainingRun) -> None:
    """Bit by bit."""
    mine, theirs = everything(run), everything(other)
    assert mine.keys() == theirs.keys()
    different = [name for name in mine if not torch.equal(mine[name], theirs[name])]
    assert not different, different[:5]
