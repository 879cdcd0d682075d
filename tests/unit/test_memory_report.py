"""--report-memory: bytes held by forward, patterns worth recomputing, and what they are recommended for."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pi05_fixtures import gradients, tiny_batch, tiny_model
from training_fixtures import TINY, tiny_config

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.data.batch import Batch
from megatron_vla.kernels.fp8_quantize.op import CALIBRATION
from megatron_vla.models.pi05.family import FAMILY
from megatron_vla.optimizations import recompute_cost
from megatron_vla.optimizations.apply import apply_optimizations
from megatron_vla.optimizations.fp8_linear import delayed_scaling_of
from megatron_vla.optimizations.recompute_cost import (
    GIB,
    HEADER,
    Cost,
    candidate_patterns,
    costs,
    measure,
    recommend,
    row,
    table,
)
from megatron_vla.training.memory_report import advice, measured_costs, state_bytes

ROOT = Path(__file__).resolve().parents[2]


def test_candidates_are_the_called_modules_inside_layers() -> None:
    found = candidate_patterns(tiny_model(), FAMILY, tiny_batch())
    assert {"layers.*", "layers.*.prefix.mlp", "vision_tower.layers.*", "vision_tower.layers.*.mlp"} <= set(found)
    assert "layers.*.prefix.attention" not in found, "its forward is never called, so nothing could be recomputed"


def test_held_bytes_of_one_module_by_hand() -> None:
    """The gated MLP of the vision tower: of fc1's output [I * S, F] and its activation, only the input stays."""
    model, batch = tiny_model(), tiny_batch()
    nothing = measure(model, FAMILY, batch, ())
    recomputed = measure(model, FAMILY, batch, ("vision_tower.layers.*.mlp",))
    config = model.config
    tokens = 2 * 2 * (config.image_size // config.patch_size) ** 2
    inner = tokens * config.vision_ffn_hidden_size * 8 * config.vision_num_layers
    assert nothing.held_bytes - recomputed.held_bytes == 2 * inner
    assert nothing.milliseconds > 0


def test_measuring_leaves_the_model_as_it_was() -> None:
    model, batch = tiny_model(), tiny_batch()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    candidates = candidate_patterns(model, FAMILY, batch)
    measured = costs(model, FAMILY, batch, candidates)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert measured[0].patterns == () and all(c.held_bytes < measured[0].held_bytes for c in measured[1:])
    assert all(p.grad is None for p in model.parameters())
    assert gradients(model, batch).keys() == gradients(tiny_model(), batch).keys()
    assert len(table(measured, 2).splitlines()) == 2 + len(measured)


def test_every_figure_is_reported_as_soon_as_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """... and what saves next to nothing is left out of the result only. The faster of the first and the last pass counts."""
    nothing, layers, norm = Cost((), 100 * GIB, 500.0), Cost(("layers.*",), 40 * GIB, 860.0), Cost(("norm",), 100 * GIB, 501.0)
    cold = Cost((), 100 * GIB, 590.0)
    played, lines, lines_before = iter([cold, norm, layers, nothing]), list[str](), list[int]()

    def measure_played(model: object, family: object, batch: object, patterns: object) -> Cost:
        lines_before.append(len(lines))
        cost = next(played)
        assert cost.patterns == patterns
        return cost

    monkeypatch.setattr(recompute_cost, "measure", measure_played)
    found = costs(torch.nn.Module(), FAMILY, tiny_batch(), ["norm", "layers.*"], lines.append)
    assert found == [nothing, layers]
    assert lines[1:] == [HEADER, row(cold, cold), row(norm, cold), row(layers, cold)]
    assert "2 kinds of modules" in lines[0] and lines_before == [1, 3, 4, 5]


def test_a_batch_that_does_not_fit_is_halved_until_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[int, bool]] = []

    def measure_played(model: object, family: object, batch: Batch, patterns: tuple[str, ...]) -> Cost:
        asked.append((batch.size, bool(patterns)))
        if batch.size > 1:
            raise torch.OutOfMemoryError("no")
        return Cost(patterns, (1 if patterns else 2) * GIB, 5.0)

    monkeypatch.setattr(recompute_cost, "measure", measure_played)
    measured, count = measured_costs(tiny_model(), FAMILY, tiny_batch())
    assert tiny_batch().size == 2 and count == 1 and len(measured) > 5
    # Nothing else is measured on what does not fit, and only the first pass twice.
    assert asked == [(2, False), (1, False), *[(1, True)] * (len(measured) - 1), (1, False)]
    assert "2 samples do not fit into the memory of the device: measuring 1" in capsys.readouterr().out


MEASURED = [
    Cost((), 100 * GIB, 500.0),
    Cost(("vision.*",), 80 * GIB, 540.0),  # 2 ms per GiB
    Cost(("layers.*.mlp",), 60 * GIB, 660.0),  # 4
    Cost(("layers.*",), 40 * GIB, 860.0),  # 6
]


@pytest.mark.parametrize(
    ("scale", "budget", "patterns", "held", "extra", "fits"),
    [
        (1, 120, (), 100, 0, True),
        (1, 90, ("vision.*",), 80, 40, True),
        (1, 50, ("vision.*", "layers.*.mlp"), 40, 200, True),
        (2, 90, ("vision.*", "layers.*.mlp"), 80, 400, True),
        # layers.*.mlp alone is cheaper than vision.* before it, which does not do by itself.
        (1, 70, ("layers.*.mlp",), 60, 160, True),
        # layers.* has to take the place of layers.*.mlp, which is cheaper per GiB.
        (1, 30, ("vision.*", "layers.*"), 20, 400, True),
        (1, 10, ("vision.*", "layers.*"), 20, 400, False),
    ],
)
def test_the_cheapest_patterns_that_fit(
    scale: float, budget: float, patterns: tuple[str, ...], held: float, extra: float, fits: bool
) -> None:
    found = recommend(MEASURED, scale, budget * GIB)
    assert (found.patterns, found.held_bytes, found.extra_milliseconds, found.fits) == (patterns, held * GIB, extra, fits)


def test_equally_cheap_patterns_hold_least_and_nothing_comes_before_all() -> None:
    nothing, more, less, free = Cost((), 100, 5.0), Cost(("a",), 60, 7.0), Cost(("b",), 50, 7.0), Cost(("c",), 99, 4.0)
    assert recommend([nothing, more, less], 1, 70).patterns == ("b",)
    assert recommend([nothing, free, more, less], 1, 100).patterns == ()


def test_no_choice_of_disjoint_patterns_is_cheaper() -> None:
    """Against every subset, by brute force, for drawn costs of the patterns of Pi0.5."""
    names = ("layers.*", "layers.*.prefix", "layers.*.prefix.mlp", "layers.*.suffix", "layers.*.suffix.mlp")
    names += ("vision_tower.layers.*", "vision_tower.layers.*.mlp", "vision_tower.layers.*.self_attn")
    draw = random.Random(0)
    for _ in range(20):
        nothing, *single = [Cost((), 1000, 500.0), *(Cost((n,), draw.randint(700, 990), draw.uniform(505, 700)) for n in names)]
        budget = draw.randint(400, 1000)
        possible: list[tuple[float, int]] = []
        for count in range(len(single) + 1):
            for chosen in itertools.combinations(single, count):
                pairs = itertools.permutations([c.patterns[0] for c in chosen], 2)
                held = 1000 - sum(1000 - c.held_bytes for c in chosen)
                if not any(inner.startswith(outer + ".") for outer, inner in pairs):
                    possible.append((sum(c.milliseconds - 500 for c in chosen), held))
        found = recommend([nothing, *single], 1, budget)
        cheapest = min((p for p in possible if p[1] <= budget), default=None)
        assert found.fits is (cheapest is not None)
        if cheapest is None:
            assert found.held_bytes == min(held for _, held in possible)
        else:
            assert (found.extra_milliseconds, found.held_bytes) == pytest.approx(cheapest)


def test_the_example_of_the_document() -> None:
    """docs/speed.md, Memory: 64 samples of Pi0.5 base beside 50 GiB of state on a card of 139.8 GiB."""
    rows = {
        "vision_tower.layers.*": (27.6, 47),
        "layers.*.prefix.mlp": (57.4, 122),
        "layers.*.prefix": (63.1, 133),
        "layers.*": (81.6, 402),
    }
    document = (ROOT / "docs" / "speed.md").read_text()
    assert all(f"| `{name}` | {saved} | {more} |" in document for name, (saved, more) in rows.items())
    nothing = Cost((), round(114.0 * GIB), 790.0)
    table_rows = [Cost((n,), round((114.0 - saved) * GIB), 790.0 + more) for n, (saved, more) in rows.items()]
    config = tiny_config("--micro-batch-size", "64", "--global-batch-size", "64")
    text = advice([nothing, *table_rows], 64, config, round(139.8 * GIB), 50 * GIB)
    assert text.endswith("use --activation-checkpoint-module-patterns layers.*.prefix.mlp (about 122 ms more per micro-batch)")


def test_passes_are_those_of_a_later_step_with_delayed_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first pass of all takes factors from its data; the timed ones find a history, as after a trainer's step."""
    config = OptimizationConfig(fp8="native", fp8_recipe="delayed", fp8_min_dim=64, attention_backend="sdpa")
    monkeypatch.setattr(CALIBRATION, "active", False)
    model = apply_optimizations(tiny_model(dtype=torch.bfloat16), config, FAMILY, lambda line: None)
    scaling = delayed_scaling_of(model)
    assert scaling is not None
    passes: list[tuple[bool, bool]] = []
    loss_of = recompute_cost._loss

    def seen(*arguments: Any) -> torch.Tensor:
        passes.append((CALIBRATION.active, bool(scaling.state())))
        return loss_of(*arguments)

    monkeypatch.setattr(recompute_cost, "_loss", seen)
    measure(model, FAMILY, tiny_batch(), ())
    assert passes == [(True, False), *[(False, True)] * recompute_cost.TIMED_PASSES]
    measure(model, FAMILY, tiny_batch(), ("layers.*",))
    assert passes[1 + recompute_cost.TIMED_PASSES :] == [(False, True)] * (1 + recompute_cost.TIMED_PASSES)


def test_advice_names_the_flag() -> None:
    config = tiny_config("--micro-batch-size", "4", "--global-batch-size", "4")
    text = advice(MEASURED, 4, config, total_bytes=100 * GIB, fixed_bytes=2 * GIB)
    assert "--activation-checkpoint-module-patterns vision.*" in text and "40 ms more" in text
    assert "recompute nothing" in advice(MEASURED, 4, config, total_bytes=200 * GIB, fixed_bytes=2 * GIB)
    assert "smaller --micro-batch-size" in advice(MEASURED, 4, config, total_bytes=20 * GIB, fixed_bytes=2 * GIB)


def test_state_of_one_process_by_hand() -> None:
    module = torch.nn.Linear(3, 5, bias=False, dtype=torch.bfloat16)
    direct = tiny_config("--bf16", "--micro-batch-size", "4", "--global-batch-size", "4")  # with an average of the weights
    assert state_bytes(module, 1, direct) == 15 * (2 + 2 + 4 * 4)
    accumulated = tiny_config("--bf16", "--micro-batch-size", "2", "--global-batch-size", "4")
    assert state_bytes(module, 1, accumulated) == 15 * (2 + 4 + 4 * 4)


def test_state_of_two_tensor_parallel_processes_by_hand() -> None:
    module = torch.nn.Linear(3, 5, bias=False, dtype=torch.bfloat16)
    buffered = tiny_config("--bf16", "--micro-batch-size", "4", "--global-batch-size", "4", "--tensor-model-parallel-size", "2")
    assert state_bytes(module, 2, buffered) == 15 * (2 + 4 + 4 * 4)
    direct = dataclasses.replace(buffered, parallel=dataclasses.replace(buffered.parallel, gradient_buffers=False))
    assert state_bytes(module, 2, direct) == 15 * (2 + 2 + 4 * 4)


def test_state_in_shards_by_hand() -> None:
    """fsdp2 cuts weights, gradients and the optimizer's state; ZeRO-1 the latter only."""
    module = torch.nn.Linear(3, 10, bias=False, dtype=torch.bfloat16)
    flags = ("--bf16", "--micro-batch-size", "4", "--global-batch-size", "16")  # with an average of the weights
    zero = tiny_config(*flags, "--use-distributed-optimizer")
    assert state_bytes(module, 4, zero) == 30 * (2 + 4) + 30 * 16 // 4
    # The first of four ranks holds 3 rows of 10, in bf16 as their reduced gradients.
    sharded = tiny_config(*flags, "--data-parallel-strategy", "fsdp2", "--fsdp-replicate-size", "1")
    assert state_bytes(module, 4, sharded) == 9 * (2 + 2 + 16)
    copies = dataclasses.replace(sharded, parallel=dataclasses.replace(sharded.parallel, fsdp_replicate_size=2))
    assert state_bytes(module, 4, copies) == 15 * (2 + 2 + 16)
    gathered = dataclasses.replace(sharded, parallel=dataclasses.replace(sharded.parallel, fsdp_reshard_after_forward=False))
    assert state_bytes(module, 4, gathered) == 9 * (2 + 2 + 16) + 30 * 2
    # Two micro-batches: whole gradients add up on each rank before they are reduced.
    twice = tiny_config("--bf16", "--micro-batch-size", "2", "--global-batch-size", "16", "--data-parallel-strategy", "fsdp2")
    assert state_bytes(module, 4, twice) == 30 * 4 + 9 * (2 + 16)


def test_gradients_that_are_not_accumulated_in_fp32_take_the_weights_dtype() -> None:
    module = torch.nn.Linear(3, 10, bias=False, dtype=torch.bfloat16)
    config = tiny_config(
        "--bf16", "--micro-batch-size", "2", "--global-batch-size", "4", "--no-accumulate-allreduce-grads-in-fp32"
    )
    assert state_bytes(module, 1, config) == 30 * (2 + 2 + 16)


@pytest.mark.slow
def test_the_flag_prints_the_table_and_does_not_train() -> None:
    command = [sys.executable, str(ROOT / "pretrain_vla.py"), *TINY, "--report-memory"]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert result.returncode == 0, result.stderr
    assert "ms / GiB" in result.stdout and "vision_tower.layers.*" in result.stdout and "iteration" not in result.stdout
