"""The list of optimizations: patterns, activation checkpointing, equality of on and off, unchanged names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pi05_fixtures import gradients, mean_loss, tiny_batch, tiny_model
from torch import nn

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.models.pi05.family import FAMILY
from megatron_vla.optimizations.apply import apply_optimizations
from megatron_vla.optimizations.patterns import covers, matches, select_modules

FLAG = "--activation-checkpoint-module-patterns"


def checkpointing(*patterns: str) -> OptimizationConfig:
    return OptimizationConfig(activation_checkpoint_module_patterns=patterns, attention_backend="sdpa")


def count_calls(model: nn.Module, name: str) -> list[str]:
    """Grows by one for each run of the submodule `name`, recomputation included."""
    calls: list[str] = []
    dict(model.named_modules())[name].register_forward_hook(lambda *_: calls.append(name))
    return calls


@pytest.mark.parametrize(
    ("pattern", "name", "exact", "inside"),
    [
        ("layers.*", "layers.3", True, True),
        ("layers.*", "layers.3.prefix", False, True),
        ("layers.*", "vision_tower.layers.3", False, False),
        ("*.layers.*", "vision_tower.layers.3", True, True),
        ("layers.*.prefix.mlp", "layers.0.suffix.mlp", False, False),
        ("layer", "layers", False, False),
        ("layers.*.prefix", "layers.0", False, False),
    ],
)
def test_a_star_is_one_segment(pattern: str, name: str, exact: bool, inside: bool) -> None:
    assert (matches(pattern, name), covers(pattern, name)) == (exact, inside)


def test_selection_keeps_the_models_order() -> None:
    model = tiny_model()
    names = list(select_modules(model, ("layers.*", "vision_tower.layers.*", "layers.0"), FLAG))
    assert names == ["vision_tower.layers.0", "vision_tower.layers.1", "layers.0", "layers.1"]


def test_block_names_of_the_family_describe_its_layers() -> None:
    assert len(select_modules(tiny_model(), FAMILY.block_names, "block_names")) == 4


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("layer.*",), r"layer\.\*.*nearest names: .*layers\.\*"),
        (("layers.*.prefx",), r"layers\.\*\.prefix"),
        (("layers.*", "layers.*.prefix.mlp"), r"layers\.0\.prefix\.mlp lies inside layers\.0"),
    ],
)
def test_a_wrong_pattern_is_an_error_with_the_nearest_names(patterns: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        apply_optimizations(tiny_model(), checkpointing(*patterns), FAMILY)
    assert FLAG in str(caught.value)


def test_off_returns_the_same_object_untouched() -> None:
    model = tiny_model()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    lines: list[str] = []
    assert apply_optimizations(model, OptimizationConfig(attention_backend="sdpa"), FAMILY, lines.append) is model
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert lines == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("skip_dead", [True, False])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "patterns", [("layers.*",), ("vision_tower.layers.*", "layers.*"), ("layers.*.*.mlp",), ("vision_tower",)], ids=str
)
def test_checkpointing_changes_nothing(patterns: tuple[str, ...], backend: Any, skip_dead: bool, dtype: torch.dtype) -> None:
    options = {"attention_backend": backend, "skip_dead_compute": skip_dead}
    plain, batch = tiny_model(dtype=dtype, **options), tiny_batch()
    model = apply_optimizations(tiny_model(dtype=dtype, **options), checkpointing(*patterns), FAMILY, lambda line: None)
    assert float(mean_loss(model, batch).detach()) == float(mean_loss(plain, batch).detach())
    expected, found = gradients(plain, batch), gradients(model, batch)
    assert expected.keys() == found.keys(), "a parameter without a gradient must not get one of zeros"
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]


def test_checkpointing_recomputes_exactly_the_chosen_modules() -> None:
    lines: list[str] = []
    model = apply_optimizations(tiny_model(), checkpointing("layers.*"), FAMILY, lines.append)
    inside = count_calls(model, "layers.0.suffix.mlp")
    outside = count_calls(model, "vision_tower.layers.0")
    gradients(model, tiny_batch())
    assert (len(inside), len(outside)) == (2, 1)
    assert len(lines) == 1 and lines[0].startswith("activation checkpoint: 2 modules")


def test_checkpointing_stores_less() -> None:
    def stored_bytes(*patterns: str) -> int:
        model, total = apply_optimizations(tiny_model(), checkpointing(*patterns), FAMILY, lambda line: None), 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            mean_loss(model, tiny_batch())
        return total

    assert stored_bytes("vision_tower.layers.*", "layers.*") < 0.5 * stored_bytes()


def test_checkpointed_model_samples_the_same_actions() -> None:
    plain, batch = tiny_model(), tiny_batch()
    model = apply_optimizations(tiny_model(), checkpointing("layers.*", "vision_tower.layers.*"), FAMILY, lambda line: None)
    actions = [m.sample_actions(batch, 3, batch.noise_BTA) for m in (plain, model)]
    assert torch.equal(*actions)


@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_is_switched_both_ways(allowed: bool) -> None:
    """torch's own defaults are mixed (convolutions yes, products no): the flag decides both."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    try:
        products.allow_tf32 = convolutions.allow_tf32 = not allowed
        model, lines = nn.Linear(2, 2), []
        assert apply_optimizations(model, OptimizationConfig(allow_tf32=allowed), FAMILY, lines.append) is model
        assert products.allow_tf32 is allowed and convolutions.allow_tf32 is allowed
        assert any("TF32" in line for line in lines) is allowed
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before
