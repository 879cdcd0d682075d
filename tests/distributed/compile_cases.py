"""Cases of compiled models on several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from sharded_cases import steps
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from training_fixtures import build_run, tiny_config

from megatron_vla.optimizations import compile as compile_optimization
from megatron_vla.parallel.groups import initialize, shut_down
from megatron_vla.training.loop import TrainingRun


@dataclass(frozen=True)
class Compiled:
    """Losses, graphs, and the last step's backward: "product" per matrix product computed, "reduce" per reduction issued."""

    losses: list[float]
    num_graphs: int
    events: list[str]


def train(rank: int, flags: list[str], count: int, backend: str = "aot_eager") -> Compiled:
    """`count` steps. With aot_eager --compile traces and differentiates as inductor does, without generating code."""
    torch._dynamo.reset()
    counters.clear()
    config = tiny_config(*flags)
    groups = initialize(config.parallel, quiet=True)
    events: list[str] = []
    with mock.patch.object(compile_optimization, "BACKEND", backend):
        run = build_run(config, groups)
        losses, _ = steps(run, count - 1, groups.world_size)
        record_reductions(run, events)
        # Graphs exist by now; with a dispatch mode active in forward they would not be used.
        with mock.patch.object(torch.autograd, "backward", watched_backward(events)):
            losses += steps(run, 1, groups.world_size)[0]
    shut_down()
    return Compiled(losses, counters["stats"]["unique_graphs"], events)


class ProductWatch(TorchDispatchMode):
    """Notes every matrix product when it is computed."""

    def __init__(self, events: list[str]):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            self.events.append("product")
        return func(*args, **(kwargs or {}))


def watched_backward(events: list[str]) -> Any:
    """torch.autograd.backward under a ProductWatch."""
    honest = torch.autograd.backward

    def backward(*arguments: Any, **options: Any) -> None:
        with ProductWatch(events):
            honest(*arguments, **options)

    return backward


def record_reductions(run: TrainingRun, events: list[str]) -> None:
    """Note when a bucket's reduction is issued (megatron-core's buckets, overlapped)."""
    model: Any = run.runner.model
    for group in model.wrapped.bucket_groups if run.config.parallel.overlap_grad_reduce else ():
        group.start_grad_sync = _recorded(group.start_grad_sync, events)


def _recorded(start: Any, events: list[str]) -> Any:
    def start_grad_sync(**options: Any) -> None:
        events.append("reduce")
        start(**options)

    return start_grad_sync
