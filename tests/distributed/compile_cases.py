"""Cases of compiled models on several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from sharded_cases import steps
from torch import Tensor
from torch._dynamo.utils import counters
from training_fixtures import build_run, tiny_config

from megatron_vla.optimizations import compile as compile_optimization
from megatron_vla.parallel.groups import initialize, shut_down
from megatron_vla.training.loop import TrainingRun


@dataclass(frozen=True)
class Compiled:
    """Losses, graphs, and the order of events of the last step's backward: "reduce" per bucket, one "layers done"."""

    losses: list[float]
    num_graphs: int
    events: list[str]


def train(rank: int, flags: list[str], count: int) -> Compiled:
    """`count` steps; --compile traces and differentiates as inductor does, without generating code."""
    torch._dynamo.reset()
    counters.clear()
    config = tiny_config(*flags)
    groups = initialize(config.parallel, quiet=True)
    with mock.patch.object(compile_optimization, "BACKEND", "aot_eager"):
        run = build_run(config, groups)
        events = recorded_events(run)
        losses, _ = steps(run, count - 1, groups.world_size)
        events.clear()
        losses += steps(run, 1, groups.world_size)[0]
    shut_down()
    return Compiled(losses, counters["stats"]["unique_graphs"], list(events))


def recorded_events(run: TrainingRun) -> list[str]:
    """Filled during backward: when the gradient has passed all joint layers, and when a bucket's reduction is issued."""
    events: list[str] = []
    model: Any = run.state.module
    honest = model.embed_prefix

    def embed_prefix(*arguments: Any) -> tuple[Tensor, Tensor]:
        hidden, is_valid = honest(*arguments)
        hidden.register_hook(lambda gradient: events.append("layers done"))
        return hidden, is_valid

    model.embed_prefix = embed_prefix
    parallel_model: Any = run.runner.model
    for group in parallel_model.wrapped.bucket_groups if run.config.parallel.overlap_grad_reduce else ():
        group.start_grad_sync = _recorded(group.start_grad_sync, events)
    return events


def _recorded(start: Any, events: list[str]) -> Any:
    def start_grad_sync(**options: Any) -> None:
        events.append("reduce")
        start(**options)

    return start_grad_sync
