"""Cases of compiled models on several ranks."""

from __future__ import annotations

from unittest import mock

import torch
from sharded_cases import steps
from torch._dynamo.utils import counters
from training_fixtures import build_run, tiny_config

from megatron_vla.optimizations import compile as compile_optimization
from megatron_vla.parallel.groups import initialize, shut_down


def train(rank: int, flags: list[str], count: int) -> tuple[list[float], int]:
    """(losses, graphs) of `count` steps, compiled without generated code."""
    torch._dynamo.reset()
    counters.clear()
    config = tiny_config(*flags)
    groups = initialize(config.parallel)
    with mock.patch.object(compile_optimization, "BACKEND", "aot_eager"):
        run = build_run(config, groups)
        losses, _ = steps(run, count, groups.world_size)
    run.supply.close()
    shut_down()
    return losses, counters["stats"]["unique_graphs"]
