"""Stage plans against brute force, findings about impossible layouts, and the numbers of the released model."""

from __future__ import annotations

import itertools
import random

import pytest
from training_fixtures import tiny_config

from megatron_vla.config.check import check
from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.findings import Finding
from megatron_vla.models.pi05.config import Pi05Config
from megatron_vla.models.pi05.flops import model_units
from megatron_vla.models.registry import model_family
from megatron_vla.parallel.stage_plan import ModelUnits, Unit, balanced_layout, plan_stages


def random_units(generator: random.Random, num_layers: int) -> ModelUnits:
    def unit() -> Unit:
        return Unit("x", generator.choice([0.5, 1.0, 1.0, 2.0, 3.5]), generator.random() < 0.7)

    return ModelUnits(Unit("first", generator.choice([0.0, 1.0, 7.0])), tuple(unit() for _ in range(num_layers)), unit())


def cost_of(units: ModelUnits, layout: tuple[int, ...]) -> tuple[float, float]:
    """(largest chunk, sum of squares), computed the slow way."""
    costs, start = [], 0
    for number, size in enumerate(layout):
        cost = sum(u.forward_flops * (3 if u.is_trained else 1) for u in units.layers[start : start + size])
        cost += units.first.cost if number == 0 else 0
        cost += units.last.cost if number == len(layout) - 1 else 0
        costs.append(cost)
        start += size
    return max(costs), sum(c * c for c in costs)


def test_best_layout_equals_brute_force() -> None:
    generator = random.Random(3)
    for _ in range(150):
        num_layers = generator.randint(2, 9)
        count = generator.randint(2, min(4, num_layers))
        units = random_units(generator, num_layers)
        possible = [
            layout
            for layout in itertools.product(range(num_layers + 1), repeat=count)
            if sum(layout) == num_layers and min(layout[1:]) >= 1
        ]
        layout = balanced_layout(units, count)
        assert layout in possible
        best = min(cost_of(units, candidate) for candidate in possible)
        assert cost_of(units, layout) == pytest.approx(best, rel=1e-12)


def test_units_add_up_to_the_model() -> None:
    options = {"num_views": 3, "prompt_length": 200}
    units = model_units(Pi05Config(), **options)
    total = sum(u.forward_flops for u in (units.first, *units.layers, units.last))
    assert total == units.forward_flops
    assert units.layers[0].forward_flops == units.layers[16].forward_flops > 20 * units.layers[17].forward_flops


def test_released_model_gives_the_first_stage_fewer_layers() -> None:
    units = model_units(Pi05Config(), num_views=3, prompt_length=200)
    plan = plan_stages(units, ParallelConfig(pipeline_model_parallel_size=2))
    first, last = plan.chunks
    assert (first.num_layers, last.num_layers) == (7, 11)
    assert (
        max(first.cost, last.cost) == cost_of(units, (7, 11))[0] < min(cost_of(units, (6, 12))[0], cost_of(units, (8, 10))[0])
    )
    share = first.cost / (first.cost + last.cost)
    assert f"    0  inputs + layers 0-6   {share:>5.1%}" in plan.table().splitlines()
    assert "layers 7-17 + output" in plan.table()


def test_chunks_are_dealt_in_turn_and_frozen_units_have_no_backward() -> None:
    units = ModelUnits(
        Unit("first", 0.0), tuple(Unit(f"layers.{i}", 1.0, is_trained=i >= 4) for i in range(8)), Unit("last", 0.0)
    )
    assert units.layers[0].cost == 1.0 and units.layers[7].cost == 3.0
    assert balanced_layout(units, 2) == (5, 3)  # 4 + 3 against 9; (6, 2) is 10 against 6
    plan = plan_stages(
        units,
        ParallelConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, pipeline_layout=(1, 2, 3, 2)),
    )
    assert [(c.first_layer, c.end_layer) for c in plan.of_stage(1)] == [(1, 3), (6, 8)]
    assert plan.of_stage(0)[0].is_first and plan.of_stage(1)[1].is_last and not plan.of_stage(1)[0].is_last
    assert plan.of_stage(0)[1].cost == 1.0 + 2 * 3.0


def findings(*flags: str, world_size: int = 2) -> list[Finding]:
    config = tiny_config("--num-layers", "4", "--prompt-padding", "max", "--global-batch-size", "8", *flags)
    return [f for f in check(config, model_family("pi05"), world_size) if f.where != "--save"]


@pytest.mark.parametrize(
    ("flags", "where", "what", "fix"),
    [
        ("--pipeline-model-parallel-size 8", "--pipeline-model-parallel-size", "8 = 8 parts, but the model has 4 layers", "4"),
        ("--pipeline-layout 2 2 --pipeline-model-parallel-size 1", "--pipeline-layout", "no effect", "drop it"),
        ("--pipeline-layout 1 2", "--pipeline-layout", "1 2 adds up to 3 of 4 layers", "--pipeline-layout 2 2"),
        ("--pipeline-layout 1 1 2", "--pipeline-layout", "names 3 layer counts for 2 parts", "--pipeline-layout 2 2"),
        ("--pipeline-layout 4 0", "--pipeline-layout", "other than the first without a layer", "--pipeline-layout 2 2"),
        ("--virtual-pipeline-model-parallel-size 3", "--pipeline-model-parallel-size", "= 6 parts", "size 2"),
        ("--virtual-pipeline-model-parallel-size 1", "--virtual-pipeline-model-parallel-size", "no interleaving", "2"),
        ("--prompt-padding bucket", "--prompt-padding", "different lengths", "--prompt-padding max"),
        ("--data-parallel-strategy torch_ddp", "--data-parallel-strategy", "backward right after forward", "megatron_ddp"),
        (
            "--virtual-pipeline-model-parallel-size 2 --global-batch-size 6",
            "--global-batch-size",
            "gives 3 micro-batch(es) per step; the interleaved schedule needs a multiple of",
            "--global-batch-size 8",
        ),
    ],
)
def test_impossible_layouts_are_refused_with_a_working_value(flags: str, where: str, what: str, fix: str) -> None:
    size = [] if "--pipeline-model-parallel-size" in flags else ["--pipeline-model-parallel-size", "2"]
    (finding,) = findings(*size, *flags.split(), world_size=8 if "size 8" in flags else 2)
    assert finding.severity == "error" and finding.where == where
    assert what in finding.what and fix in finding.fix


def test_possible_layouts_are_accepted() -> None:
    size = ["--pipeline-model-parallel-size", "2"]
    for flags in ([], ["--pipeline-layout", "0", "4"], ["--virtual-pipeline-model-parallel-size", "2"]):
        assert findings(*size, *flags) == []
    (finding,) = findings(*size, "--global-batch-size", "2")
    assert finding.severity == "warning" and "gives 1 micro-batch(es) per step for 2 stages" in finding.what
