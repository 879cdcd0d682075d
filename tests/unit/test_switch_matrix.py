"""Speed and memory switches in pairs: each pair runs, computes what the plain model computes, and shares its checkpoints."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from pi05_fixtures import gradients, mean_loss, tiny_batch, tiny_model
from torch import Tensor
from training_fixtures import config_saving_to

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.models.common.attention_mask import resolve_backend
from megatron_vla.models.pi05.family import FAMILY
from megatron_vla.models.pi05.model import Pi05Model
from megatron_vla.optimizations.apply import apply_optimizations
from megatron_vla.training.loop import train
from megatron_vla.training.session import training_session

pytestmark = pytest.mark.usefixtures("quick_and_restored")

# Every switch that exists on the CPU. Those that exclude each other are values of one switch.
SWITCHES: dict[str, list[dict[str, Any]]] = {
    "dead compute": [{"skip_dead_compute": False}],
    "attention": [{"attention_backend": backend} for backend in ("sdpa", "matmul", "varlen")],
    "recompute": [
        {"activation_checkpoint_module_patterns": ("vision_tower.layers.*", "layers.*")},
        {"activation_checkpoint_module_patterns": ("vision_tower", "layers.*.*.mlp")},
    ],
    "merge": [{"merge_projections": True}, {"merge_projections": True, "neighbouring_weights": False}],
    "tf32": [{"allow_tf32": True}],
    "compile": [{"compile": True, "compile_scope": scope} for scope in ("per_layer", "backbone", "multi_group")],
}
PLAIN: dict[str, Any] = {"attention_backend": "eager"}


def pairs(switches: dict[str, list[dict[str, Any]]]) -> list[Any]:
    """Both of every two switches on, in all their values; what compiles takes seconds each, not fractions of one."""
    found = []
    for first, second in itertools.combinations(switches, 2):
        for left, right in itertools.product(switches[first], switches[second]):
            options = {**PLAIN, **left, **right}
            marks = [pytest.mark.slow] if "compile" in options else []
            found.append(pytest.param(options, marks=marks, id=" + ".join(f"{k}={v}" for k, v in {**left, **right}.items())))
    return found


ALL_ON: dict[str, Any] = {
    "skip_dead_compute": True,
    "attention_backend": "varlen",
    "activation_checkpoint_module_patterns": ("vision_tower.layers.*", "layers.*.*.mlp"),
    "merge_projections": True,
    "allow_tf32": True,
    "compile": True,
}


def built(options: dict[str, Any]) -> Pi05Model:
    config = OptimizationConfig(**options)
    model = tiny_model(attention_backend=resolve_backend(config.attention_backend), skip_dead_compute=config.skip_dead_compute)
    applied = apply_optimizations(model, config, FAMILY, lambda line: None)
    assert applied is model
    return model


@pytest.fixture(scope="module")
def reference() -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients and state of the plain model."""
    model, batch = built(PLAIN), tiny_batch()
    return float(mean_loss(model, batch).detach()), gradients(model, batch), model.state_dict()


# Everything at once, in each scope of compilation.
TOGETHER = [pytest.param({**ALL_ON, **scope}, id=f"all, {scope['compile_scope']}") for scope in SWITCHES["compile"]]


@pytest.mark.parametrize("options", [*pairs(SWITCHES), *TOGETHER])
def test_pair_of_switches(options: dict[str, Any], reference: tuple[float, dict[str, Tensor], dict[str, Tensor]]) -> None:
    loss, expected, state = reference
    model, batch = built(options), tiny_batch()
    assert list(model.state_dict()) == list(state)
    model.load_state_dict(state)
    assert float(mean_loss(model, batch).detach()) == pytest.approx(loss, rel=1e-12)
    found = gradients(model, batch)
    assert found.keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-14 * scale, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("first_is_plain", [True, False])
def test_a_run_goes_on_under_other_switches(tmp_path: Path, first_is_plain: bool) -> None:
    """A checkpoint of a plain run resumed with everything on, and the other way round."""
    on = ("--attention-backend", "varlen", "--merge-projections", "--compile", "--compile-scope", "multi_group")
    length = ("--train-iters", "4", "--lr-decay-iters", "4", "--lr-warmup-iters", "1")

    def losses(folder: Path, *extra: str) -> list[float]:
        found: list[float] = []
        with training_session(config_saving_to(folder, *length, *extra), FAMILY) as run:
            honest = run.runner.step

            def step(*arguments: Any) -> Any:
                metrics = honest(*arguments)
                found.append(float(metrics.loss))
                return metrics

            run.runner.step = step  # type: ignore[method-assign]
            train(run)
        return found

    expected = losses(tmp_path / "whole")
    before, after = ((), on) if first_is_plain else (on, ())
    found = losses(tmp_path / "cut", *before, "--exit-interval", "2")
    found += losses(tmp_path / "cut", *after, "--load", str(tmp_path / "cut"))
    assert len(found) == 4 and found == pytest.approx(expected, rel=1e-5)
