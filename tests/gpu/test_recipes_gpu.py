"""Both small models of tools/close_the_loop.py: with every speed switch but the graph, each part has plain bf16's gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from loop_fixtures import parsed
from loop_recipes import RECIPES
from torch import Tensor
from training_fixtures import build_run

from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.config.run import RunConfig
from megatron_vla.models.common.initialization import initialize_parameters
from megatron_vla.models.registry import MODEL_FAMILIES
from megatron_vla.parallel.groups import ParallelGroups, initialize, shut_down
from tools.close_the_loop import LoopConfig, Training

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    yield initialize(ParallelConfig(), quiet=True)
    shut_down()


def opened(values: Tensor, generator: torch.Generator) -> None:
    """Fresh models start with closed branches, whose inner parts get no gradient."""
    if values.ndim > 1:
        values.normal_(0.0, values.shape[-1] ** -0.5, generator=generator)
    else:
        values.normal_(0.5, 0.2, generator=generator)


def recipe(name: str, *flags: str) -> RunConfig:
    """A run of the loop on mock data, taken apart step by step: without graph."""
    training = Training(Path("out/run"), (*flags, "--runner", "eager"), 100)
    return parsed(LoopConfig(model_name=name, micro_batch_size=8), training)


def gradients_of(config: RunConfig, groups: ParallelGroups) -> dict[str, Tensor]:
    """Gradients of one micro-batch by parameter name."""
    run = build_run(config, groups)
    module = run.state.module
    initialize_parameters(module, lambda name: opened, seed=3)
    output, loss = run.family.forward_step(iter([run.supply.first_batch().to(groups.device)]), module)
    total, count, _ = loss(output)
    (total / count).backward()
    return {name: p.grad.double() for name, p in module.named_parameters() if p.grad is not None}


def errors_by_part(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Relative errors of each part of the model: what shares the first three names of its path."""
    assert found.keys() == exact.keys()
    squares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, expected in exact.items():
        sums = squares[".".join(name.split(".")[:3])]
        sums[0] += float((found[name] - expected).square().sum())
        sums[1] += float(expected.square().sum())
    return {part: (error / norm) ** 0.5 for part, (error, norm) in squares.items()}


@pytest.mark.parametrize("name", MODEL_FAMILIES)
def test_every_part_has_its_gradient_with_all_switches(name: str, groups: ParallelGroups) -> None:
    plain_flags = RECIPES[name].no_switches
    exact = gradients_of(recipe(name, *plain_flags, "--no-bf16"), groups)
    plain = errors_by_part(gradients_of(recipe(name, *plain_flags), groups), exact)
    fast = errors_by_part(gradients_of(recipe(name, *RECIPES[name].all_switches), groups), exact)
    for part, error in fast.items():
        print(f"{part:40s} plain bf16 {plain[part]:.4f}, all switches {error:.4f}")
    # One H200: at most 0.079 (Pi0.5) and 0.059 (GR00T).
    assert max(plain.values()) < 0.1
    assert {part: error for part, error in fast.items() if error > 1.5 * plain[part] + 2e-3} == {}
