"""--fp8: which layers are converted, what stays as it was, and what the checks say."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from pi05_fixtures import gradients, mean_loss, tiny_batch, tiny_model
from torch import nn

from megatron_vla.config.check import check
from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.config.run import parse_args
from megatron_vla.config.training import OptimizerConfig
from megatron_vla.models.pi05.family import FAMILY
from megatron_vla.optimizations import check as optimization_check
from megatron_vla.optimizations import compile as compile_optimization
from megatron_vla.optimizations import fp8
from megatron_vla.optimizations.apply import apply_optimizations
from megatron_vla.optimizations.fp8_linear import Fp8Linear
from megatron_vla.optimizations.fp8_selection import select
from megatron_vla.training.optimizer import AdamW

BASE = ("--mock-data", "--model-variant", "tiny", "--train-iters", "3", "--lr-warmup-iters", "1", "--bf16")


def options(backend: Any = "native", min_dim: int = 64, **others: Any) -> OptimizationConfig:
    return OptimizationConfig(attention_backend="sdpa", fp8=backend, fp8_min_dim=min_dim, **others)


def converted_model(config: OptimizationConfig, lines: list[str] | None = None) -> Any:
    report = (lambda line: None) if lines is None else lines.append
    return apply_optimizations(tiny_model(dtype=torch.bfloat16), config, FAMILY, report)


def names_of(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Fp8Linear)]


def errors_of(*flags: str, world_size: int = 1) -> dict[str, str]:
    config = parse_args([*BASE, *flags])
    return {f.where: f"{f.what} {f.fix}" for f in check(config, FAMILY, world_size) if f.severity == "error"}


def test_base_converts_the_layers_of_the_recipe() -> None:
    """12 of 14 per layer: the expert's k and v (1024 x 256) are below 2048, the prefix's (2048 x 256) are not."""
    config = parse_args(["--mock-data", "--bf16", "--train-iters", "1", "--fp8", "native"])
    selection = select(FAMILY.skeleton(config), config.optimization, FAMILY)
    assert len(selection.converted) == 216
    one = [name.removeprefix("layers.3.") for name in selection.converted if name.startswith("layers.3.")]
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    expected = [f"prefix.attention.{n}" for n in attention] + [f"prefix.mlp.{n}" for n in mlp]
    expected += ["suffix.attention.q_proj", "suffix.attention.o_proj", *(f"suffix.mlp.{n}" for n in mlp)]
    assert one == expected
    assert selection.report() == "216 of 456 linear layers; skipped: 204 precision-sensitive, 36 below --fp8-min-dim 2048"


@pytest.mark.parametrize(("min_dim", "converted"), [(128, True), (129, False)])
def test_the_larger_side_is_compared(min_dim: int, converted: bool) -> None:
    """The MLPs of the tiny prefix are 64 x 128."""
    names = (
        names_of(converted_model(options(min_dim=min_dim, fp8_skip_module_patterns=("layers.*.*.attention",))))
        if converted
        else []
    )
    assert names == [f"layers.{n}.prefix.mlp.{p}_proj" for n in (0, 1) for p in ("gate", "up", "down")] * converted
    if not converted:
        with pytest.raises(ValueError, match=r"converts 0 of 50 linear layers; skipped: .*below --fp8-min-dim 129"):
            converted_model(options(min_dim=min_dim))


def test_skip_patterns_cover_what_is_inside() -> None:
    lines: list[str] = []
    names = names_of(
        converted_model(options(fp8_skip_module_patterns=("layers.*.prefix", "layers.0.suffix.mlp.up_proj")), lines)
    )
    assert names and all("suffix" in name for name in names) and "layers.0.suffix.mlp.up_proj" not in names
    assert any("under --fp8-skip-module-patterns" in line for line in lines)
    with pytest.raises(
        ValueError, match=r"--fp8-skip-module-patterns layers\.\*\.prefx: .*nearest names: .*layers\.\*\.prefix"
    ):
        converted_model(options(fp8_skip_module_patterns=("layers.*.prefx",)))


def test_a_list_decides_alone(tmp_path: Path) -> None:
    path = tmp_path / "modules.json"
    listed = ["vision_tower.layers.0.self_attn.q_proj", "layers.1.suffix.attention.k_proj"]
    path.write_text(json.dumps({"modules": listed}))
    lines: list[str] = []
    assert names_of(converted_model(options(fp8_module_list=str(path)), lines)) == listed
    assert "2 of 50 linear layers; skipped: 48 not in --fp8-module-list" in lines[-1]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            '{"modules": ["layers.0.prefix.mlp.gate"]}',
            r"1 of 1 names .* first layers\.0\.prefix\.mlp\.gate; nearest names: .*gate_proj",
        ),
        ('{"modules": ["layers.0.prefix.mlp"]}', "no linear layers"),
        ('{"modules": ["action_in_proj"]}', "action_in_proj cannot be converted: not in bf16 but float32"),
        ('{"modules": ["vision_tower.layers.0.mlp.fc1"]}', "features no multiple of 16"),
        ('["layers.0"]', 'not a JSON object with a list "modules"'),
        ("{", 'not a JSON object with a list "modules"'),
        (None, "No such file"),
    ],
)
def test_a_list_that_does_not_fit_is_an_error(content: str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "modules.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=says) as caught:
        converted_model(options(fp8_module_list=str(path)))
    assert f"--fp8-module-list {path}" in str(caught.value)
    found = errors_of("--fp8", "native", "--fp8-module-list", str(path))
    assert any("--fp8-module-list" in text for text in found.values())


@pytest.mark.parametrize("backend", ["native", "torchao"])
def test_nothing_but_the_products_changes(backend: str) -> None:
    plain, lines = tiny_model(dtype=torch.bfloat16), []
    model = tiny_model(dtype=torch.bfloat16)
    parameters, hooked = dict(model.named_parameters()), []
    model.layers[0].prefix.mlp.gate_proj.register_forward_hook(lambda *_: hooked.append(1))
    assert apply_optimizations(model, options(backend), FAMILY, lines.append) is model
    assert len(lines) == 1 and lines[0].startswith(
        f"fp8 ({backend}, tensorwise) (emulated in fp32: no GPU): 24 of 50 linear layers"
    )
    after = dict(model.named_parameters())
    assert list(after) == list(parameters) and all(after[name] is parameters[name] for name in after)
    model.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(model.state_dict(), strict=True)
    states = [AdamW(m.named_parameters(), OptimizerConfig()).state_tensors() for m in (plain, model)]
    assert [(k, v.dtype, v.shape) for k, v in states[0].items()] == [(k, v.dtype, v.shape) for k, v in states[1].items()]
    batch = tiny_batch()
    exact, found = float(mean_loss(plain, batch).detach()), float(mean_loss(model, batch).detach())
    assert 0 < abs(found - exact) < 0.1 * exact
    assert gradients(plain, batch).keys() == gradients(model, batch).keys()
    assert hooked


def test_off_is_the_same_object_untouched() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert apply_optimizations(model, OptimizationConfig(attention_backend="sdpa"), FAMILY, print) is model
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert not names_of(model)


@pytest.mark.parametrize(
    ("backend", "switches"),
    [
        ("native", {"activation_checkpoint_module_patterns": ("layers.*",)}),
        pytest.param("native", {"compile": True}, marks=pytest.mark.slow),
        pytest.param(
            "native", {"compile": True, "activation_checkpoint_module_patterns": ("layers.*",)}, marks=pytest.mark.slow
        ),
        pytest.param("torchao", {"compile": True}, marks=pytest.mark.slow),
        pytest.param("torchao", {"activation_checkpoint_module_patterns": ("layers.*",)}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("merged", [True, False])
def test_other_switches_change_nothing_in_fp8(
    backend: str, switches: dict[str, Any], merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_optimization, "BACKEND", "aot_eager")
    batch = tiny_batch()
    expected = converted_model(options(backend, merge_projections=merged))
    found = converted_model(options(backend, merge_projections=merged, **switches))
    assert float(mean_loss(found, batch).detach()) == float(mean_loss(expected, batch).detach())
    ours, theirs = gradients(found, batch), gradients(expected, batch)
    assert ours.keys() == theirs.keys()
    # Compiling sums fp32 gradients of the flow time in another order; a flipped FP8 rounding would be a thousand times more.
    difference = sum(float((ours[name].double() - theirs[name].double()).square().sum()) for name in ours)
    assert difference <= 1e-10 * sum(float(gradient.double().square().sum()) for gradient in theirs.values())


@pytest.mark.parametrize("attention", ["eager", "matmul", "varlen"])
@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("skip_dead", [True, False])
def test_fp8_goes_with_every_attention_and_dead_work(attention: Any, merged: bool, skip_dead: bool) -> None:
    """What rounds elsewhere moves FP8 roundings too: near the bf16 loss, not equal to it."""
    switches = {
        "attention_backend": attention,
        "merge_projections": merged,
        "skip_dead_compute": skip_dead,
        "allow_tf32": False,
    }
    config = OptimizationConfig(fp8="native", fp8_min_dim=64, **switches)
    model = tiny_model(dtype=torch.bfloat16, attention_backend=attention, skip_dead_compute=skip_dead)
    apply_optimizations(model, config, FAMILY, lambda line: None)
    plain, batch = tiny_model(dtype=torch.bfloat16), tiny_batch()
    assert float(mean_loss(model, batch).detach()) == pytest.approx(float(mean_loss(plain, batch).detach()), rel=0.1)
    assert gradients(model, batch).keys() == gradients(plain, batch).keys()
    assert list(model.state_dict()) == list(plain.state_dict())


def test_a_merged_group_of_both_kinds_computes_both(tmp_path: Path) -> None:
    """q in FP8 beside k and v in bf16: two products, outputs in their places."""
    path = tmp_path / "modules.json"
    path.write_text(json.dumps({"modules": ["layers.0.suffix.attention.q_proj"]}))
    batch = tiny_batch()
    losses = [
        float(mean_loss(converted_model(options(fp8_module_list=str(path), merge_projections=merged)), batch).detach())
        for merged in (True, False)
    ]
    assert losses[0] == losses[1] != float(mean_loss(tiny_model(dtype=torch.bfloat16), batch).detach())


@pytest.mark.parametrize(
    ("flags", "where", "says"),
    [
        (["--fp8-min-dim", "64"], "--fp8-min-dim", "no effect without --fp8"),
        (["--fp8", "native", "--no-bf16"], "--fp8 native", "add --bf16"),
        (["--fp8", "native", "--fp8-recipe", "rowwise"], "--fp8-recipe", "needs --fp8 torchao"),
        (["--fp8", "native", "--fp8-min-dim", "-1"], "--fp8-min-dim", "negative"),
        (["--fp8", "native", "--fp8-min-dim", "4096"], "--fp8 native", "converts 0 of"),
        (["--fp8", "native", "--fp8-skip-module-patterns", "layer.*"], "--fp8 native", "nearest names"),
        (["--fp8", "native", "--tensor-model-parallel-size", "2"], "--fp8 native", "--tensor-model-parallel-size 1"),
        (["--fp8", "transformer_engine"], "--fp8 transformer_engine", "not installed pip install transformer-engine"),
        (["--fp8", "transformer_engine", "--compile"], "--compile", "break"),
        (["--fp8", "transformer_engine", "--merge-projections"], "--merge-projections", "joined weights"),
    ],
)
def test_checks_name_the_flag_and_a_way_out(flags: list[str], where: str, says: str) -> None:
    assert says in errors_of(*flags, world_size=2 if "2" in flags else 1)[where]


def test_a_missing_torchao_is_found_before_the_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimization_check, "find_spec", lambda name: None)
    assert "pip install torchao, or use --fp8 native" in errors_of("--fp8", "torchao", "--fp8-min-dim", "64")["--fp8 torchao"]
    assert not errors_of("--fp8", "native", "--fp8-min-dim", "64")


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(dtype=torch.bfloat16)
    monkeypatch.setattr(model, "parameters", lambda: iter([types.SimpleNamespace(device=torch.device("cuda"))]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ValueError, match="--fp8 native: A100 has no FP8"):
        fp8.apply(model, options(), FAMILY, print)


def test_transformer_engine_layers_take_over_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in with Transformer Engine's interface: extra state in the state dict, FP8 only inside its context."""
    inside: list[Any] = []

    class Context:
        def __init__(self, enabled: bool, fp8_recipe: Any):
            assert enabled and fp8_recipe == "current scaling"

        def __enter__(self) -> None:
            inside.append(True)

        def __exit__(self, *_: Any) -> None:
            inside.append(False)

    class TeLinear(nn.Module):
        def __init__(self, inputs: int, outputs: int, *, bias: bool, params_dtype: torch.dtype, device: str):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=params_dtype, device=device))
            self.bias = nn.Parameter(torch.empty(outputs, dtype=params_dtype, device=device)) if bias else None

        def get_extra_state(self) -> torch.Tensor:
            return torch.zeros(3)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            assert inside[-1] and hidden.shape[:-1].numel() % 8 == 0
            return nn.functional.linear(hidden, self.weight, self.bias)

    package, recipes = types.ModuleType("transformer_engine.pytorch"), types.ModuleType("transformer_engine.common.recipe")
    package.Linear, package.fp8_autocast = TeLinear, Context  # type: ignore[attr-defined]
    recipes.Float8CurrentScaling = lambda: "current scaling"  # type: ignore[attr-defined]
    parent, common = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.common")
    parent.pytorch = package  # type: ignore[attr-defined]
    for module in (parent, package, common, recipes):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    plain, batch = tiny_model(dtype=torch.bfloat16), tiny_batch()
    model = converted_model(options("transformer_engine"))
    assert len([m for m in model.modules() if isinstance(m, TeLinear)]) == 24
    assert list(model.state_dict()) == list(plain.state_dict())
    assert float(mean_loss(model, batch).detach()) == float(mean_loss(plain, batch).detach())
    assert inside and not inside[-1]
    layer = next(m for m in model.modules() if isinstance(m, TeLinear))
    hidden = torch.randn(1, 50, layer.weight.shape[1], dtype=torch.bfloat16)
    torch.testing.assert_close(layer(hidden), nn.functional.linear(hidden, layer.weight, layer.bias))
