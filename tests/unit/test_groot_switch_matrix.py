"""GR00T's speed and memory switches in pairs: each pair computes what the plain model computes; FP8 goes with the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from groot_model_fixtures import gradients, mean_loss, tiny_batch, tiny_config, tiny_model
from test_switch_matrix import PLAIN, pairs
from torch import Tensor

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.models.common.attention_mask import resolve_backend
from megatron_vla.models.groot_n1_7.family import FAMILY
from megatron_vla.models.groot_n1_7.model import GrootN17Model
from megatron_vla.optimizations.apply import apply_optimizations

pytestmark = pytest.mark.usefixtures("quick_and_restored")

# Whole layers of every kind, and parts of them.
RECOMPUTED = (
    ("vision_tower.layers.*", "text_layers.*", "vl_layers.*", "dit_layers.*"),
    ("vision_tower", "text_layers.*.attention", "vl_layers.*.mlp", "dit_layers.*.mlp"),
)
SWITCHES: dict[str, list[dict[str, Any]]] = {
    "attention": [{"attention_backend": "sdpa"}],
    "recompute": [{"activation_checkpoint_module_patterns": patterns} for patterns in RECOMPUTED],
    "merge": [{"merge_projections": True}],
    "tf32": [{"allow_tf32": True}],
    "compile": [{"compile": True, "compile_scope": scope} for scope in ("per_layer", "backbone", "multi_group")],
}
ALL_ON: dict[str, Any] = {
    "attention_backend": "auto",
    "activation_checkpoint_module_patterns": ("text_layers.*", "dit_layers.*.mlp"),
    "merge_projections": True,
    "allow_tf32": True,
    "compile": True,
    "compile_scope": "per_layer",
}
# Everything is trained, so that every module has a gradient to compare.
TUNED = tiny_config(tune_llm=True, tune_visual=True)


def built(options: dict[str, Any], dtype: torch.dtype = torch.float64) -> GrootN17Model:
    config = OptimizationConfig(**options)
    model = tiny_model(TUNED, dtype, attention_backend=resolve_backend(config.attention_backend))
    assert apply_optimizations(model, config, FAMILY, lambda line: None) is model
    return model


@pytest.fixture(scope="module")
def reference() -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients and state of the plain model."""
    model, batch = built(PLAIN), tiny_batch(TUNED)
    return float(mean_loss(model, batch).detach()), gradients(model, batch), model.state_dict()


@pytest.mark.parametrize("options", [*pairs(SWITCHES), pytest.param(ALL_ON, id="all", marks=pytest.mark.slow)])
def test_pair_of_switches(options: dict[str, Any], reference: tuple[float, dict[str, Tensor], dict[str, Tensor]]) -> None:
    loss, expected, state = reference
    model, batch = built(options), tiny_batch(TUNED)
    assert list(model.state_dict()) == list(state)
    model.load_state_dict(state)
    assert float(mean_loss(model, batch).detach()) == pytest.approx(loss, rel=1e-12)
    found = gradients(model, batch)
    assert found.keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-12 * scale, msg=name)


FP8: dict[str, Any] = {"fp8": "native", "fp8_min_dim": 64}


@pytest.mark.parametrize("merged", [False, True])
def test_fp8_is_near_and_other_switches_change_nothing_in_it(merged: bool) -> None:
    options = {**FP8, "merge_projections": merged}
    plain, found, recomputed = (
        built(chosen, torch.bfloat16)
        for chosen in ({}, options, {**options, "activation_checkpoint_module_patterns": RECOMPUTED[0]})
    )
    batch = tiny_batch(TUNED)
    exact, near, again = (float(mean_loss(model, batch).detach()) for model in (plain, found, recomputed))
    assert 0 < abs(near - exact) < 0.1 * exact and again == near
    assert list(found.state_dict()) == list(plain.state_dict())
    ours, theirs = gradients(found, batch), gradients(recomputed, batch)
    assert ours.keys() == theirs.keys() == gradients(plain, batch).keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
