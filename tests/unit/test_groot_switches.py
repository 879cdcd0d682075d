"""The speed and memory switches on GR00T N1.7: the same numbers with each, and refusals of what cannot work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from graph_fixtures import assert_same_state, with_graphs
from groot_model_fixtures import gradients, mean_loss, tiny_batch, tiny_config, tiny_model
from recorded_operations import OperationRecorder
from torch._dynamo.utils import counters
from training_fixtures import build_run, take_steps

from megatron_vla.config.check import check
from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.config.run import RunConfig, parse_args
from megatron_vla.kernels.fp8_quantize.op import CALIBRATION
from megatron_vla.models.common.merged_linear import merged_linear
from megatron_vla.models.groot_n1_7 import model as groot_model
from megatron_vla.models.groot_n1_7.family import FAMILY
from megatron_vla.models.groot_n1_7.model import GrootN17Model
from megatron_vla.optimizations.apply import apply_optimizations
from megatron_vla.parallel.data_parallel import DirectGradients
from megatron_vla.parallel.groups import ParallelGroups, initialize, shut_down
from megatron_vla.runner.warm_up import warm_up

RUN = (
    *("--model-name", "groot_n1_7", "--model-variant", "tiny", "--mock-data", "--mock-num-samples", "40"),
    *("--mock-prompt-length", "5", "--mock-num-embodiments", "2", "--micro-batch-size", "2", "--num-workers", "0"),
    *("--train-iters", "20", "--lr-warmup-iters", "4", "--lr", "1e-3", "--no-first-batch-report"),
)
# Vision, text, vision-language and DiT layers; a DiT block reads the backbone or its own tokens.
NUM_GRAPHS = {"per_layer": 5, "backbone": 2, "multi_group": 8}


def run_config(*flags: str) -> RunConfig:
    return parse_args([*RUN, *flags])


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    yield initialize(ParallelConfig(), quiet=True)
    shut_down()


def assert_same_gradients(switches: OptimizationConfig, tolerance: float, **config: Any) -> None:
    model_config = tiny_config(**config)
    batch = tiny_batch(model_config)
    model = apply_optimizations(tiny_model(model_config), switches, FAMILY, lambda line: None)
    assert isinstance(model, GrootN17Model)
    expected, found = gradients(tiny_model(model_config), batch), gradients(model, batch)
    assert found.keys() == expected.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance * scale, msg=name)


@pytest.mark.parametrize("tuned", [{}, {"tune_llm": True, "tune_visual": True}], ids=["frozen_backbone", "all"])
def test_merged_projections_compute_the_same(tuned: dict[str, bool]) -> None:
    assert_same_gradients(OptimizationConfig(merge_projections=True), 1e-12, **tuned)


def test_keys_and_values_of_all_blocks_are_two_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the blocks that read the text, one for those that read the images; none is projected again inside a block."""
    joined: list[int] = []

    def counted(hidden: torch.Tensor, linears: Any, merged: bool) -> tuple[torch.Tensor, ...]:
        joined.append(len(linears))
        return merged_linear(hidden, linears, merged)

    monkeypatch.setattr(groot_model, "merged_linear", counted)
    config = tiny_config()
    model = apply_optimizations(tiny_model(config), OptimizationConfig(merge_projections=True), FAMILY, lambda line: None)
    model(tiny_batch(config))
    readers = (config.dit_num_layers + 1) // 2
    assert len(joined) == 2 and sum(joined) == 2 * readers


def test_what_is_merged_is_printed() -> None:
    lines: list[str] = []
    apply_optimizations(
        tiny_model(), OptimizationConfig(merge_projections=True, attention_backend="sdpa"), FAMILY, lines.append
    )
    # q, k, v of vision (4 layers), text (4), vision-language (2) and half of the DiT (2); its others k, v; text gate, up.
    expected = (
        f"merged projections: {3 * 12 + 2 * 2 + 2 * 4} linear layers in 18 products, 18 of which read neighbours in memory"
    )
    (line,) = lines
    assert line.startswith(f"{expected}; gradients of biased products: ") and "GELU" not in line, "its gates are no GELU"


@pytest.mark.parametrize(
    ("scope", "tuned"),
    [
        ("per_layer", {}),
        pytest.param("per_layer", {"tune_llm": True, "tune_visual": True}, marks=pytest.mark.slow),
        pytest.param("multi_group", {}, marks=pytest.mark.slow),
        pytest.param("multi_group", {"flow_draws": 2}, marks=pytest.mark.slow),
        ("per_layer", {"flow_draws": 2}),
        pytest.param("backbone", {}, marks=pytest.mark.slow),
        pytest.param("backbone", {"flow_draws": 2}, marks=pytest.mark.slow),
        pytest.param("backbone", {"tune_llm": True, "tune_visual": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiled_layers_compute_the_same(aot_eager: None, scope: Any, tuned: dict[str, bool]) -> None:
    patterns = ("dit_layers.*",) if scope == "per_layer" else ()
    switches = OptimizationConfig(compile=True, compile_scope=scope, activation_checkpoint_module_patterns=patterns)
    assert_same_gradients(switches, 1e-12, **tuned)
    assert counters["stats"]["unique_graphs"] == NUM_GRAPHS[scope], "equal layers share a graph, and nothing breaks one"


@pytest.mark.parametrize("scope", ["per_layer", "backbone", "multi_group"])
@pytest.mark.parametrize("neighbours", [True, False])
def test_frozen_layers_are_compiled_with_merged_projections(aot_eager: None, scope: Any, neighbours: bool) -> None:
    """Where nothing needs a gradient torch 2.13 compiles some calls wrongly (joined_parameters.needs_gradient)."""
    merged = {"merge_projections": True, "neighbouring_weights": neighbours}
    assert_same_gradients(OptimizationConfig(**merged, compile=True, compile_scope=scope), 1e-12, flow_draws=2)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_frozen_layers_are_compiled_in_fp8(aot_eager: None, recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CALIBRATION, "active", False)  # a process has one
    options: dict[str, Any] = {"fp8": "native", "fp8_recipe": recipe, "fp8_min_dim": 64, "merge_projections": True}
    for neighbours in (True, False):
        losses = []
        for compiled in (False, True):
            switches = OptimizationConfig(**options, neighbouring_weights=neighbours, compile=compiled)
            model = apply_optimizations(tiny_model(dtype=torch.bfloat16), switches, FAMILY, lambda line: None)
            assert isinstance(model, GrootN17Model)
            losses.append(float(mean_loss(model, tiny_batch()).detach()))
        assert losses[0] == losses[1], neighbours


def test_warm_up_leaves_no_trace(aot_eager: None, groups: ParallelGroups) -> None:
    """Neither in weights nor in what dropout draws afterwards; and no step compiles anything more."""
    run = build_run(run_config("--compile", "--dropout", "0.2"), groups)
    before = {name: tensor.clone() for name, tensor in run.state.module.state_dict().items()}
    generator = torch.get_rng_state()
    warm_up(run.runner.model, FAMILY, groups, run.config, run.supply.example(), lambda line: None)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.state.module.state_dict().items())
    warmed = counters["stats"]["unique_graphs"]
    take_steps(run, 2)
    assert counters["stats"]["unique_graphs"] == warmed > 0


@pytest.mark.parametrize("tuned", [(), ("--tune-top-llm-layers", "1", "--no-tune-projector")], ids=["recipe", "other"])
def test_gradients_without_a_buffer_are_the_same(groups: ParallelGroups, tuned: tuple[str, ...]) -> None:
    """Most of the model is frozen; two embodiments of four occur."""
    config = run_config("--dropout", "0", *tuned)
    direct, buffered = build_run(config, groups), build_run(config, groups, with_buffers=True)
    assert isinstance(direct.runner.model, DirectGradients) and not isinstance(buffered.runner.model, DirectGradients)
    assert take_steps(direct, 4) == take_steps(buffered, 4)
    assert_same_state(direct, buffered)


@pytest.mark.parametrize(
    "switches", [(), ("--merge-projections", "--activation-checkpoint-module-patterns", "dit_layers.*")], ids=["plain", "all"]
)
def test_captured_steps_are_the_eager_ones(groups: ParallelGroups, switches: tuple[str, ...]) -> None:
    config = run_config("--dropout", "0", "--prompt-padding", "max", *switches)
    eager, graphs = build_run(config, groups), build_run(config, groups)
    recorder = OperationRecorder()
    with_graphs(graphs, recorder)
    assert take_steps(graphs, 6) == take_steps(eager, 6)
    assert_same_state(graphs, eager)
    assert sum(recording.replays for recording in recorder.recordings) == 4, "after two warm-up steps"


def test_fp8_converts_the_language_model_and_the_diffusion_transformer() -> None:
    lines: list[str] = []
    model = tiny_model(dtype=torch.bfloat16)
    apply_optimizations(model, OptimizationConfig(fp8="native", fp8_min_dim=64), FAMILY, lines.append)
    found = gradients(model, tiny_batch())
    assert found and all(bool(gradient.isfinite().all()) for gradient in found.values())
    kinds = {type(m) for name, m in model.named_modules() if name in ("text_layers.0.mlp.gate_proj", "dit_layers.0.mlp.fc1")}
    assert torch.nn.Linear not in kinds and type(model.get_submodule("time_mlp_out")) is torch.nn.Linear
    assert "fp8 (native" in lines[-1] and "precision-sensitive" in lines[-1]


FSDP = ("--data-parallel-strategy", "fsdp2")
GRAPHS = ("--runner", "full_iteration_graph", "--prompt-padding", "max")


@pytest.mark.parametrize(
    ("flags", "where", "words"),
    [
        (("--packing",), "--packing", "groot_n1_7 cannot read packs"),
        (("--mock-camera-counts", "1", "2"), "--mock-camera-counts", "--mock-num-cameras"),
        (("--mock-min-prompt-length", "2"), "--mock-min-prompt-length", "--mock-prompt-length"),
        (("--attention-backend", "varlen"), "--attention-backend", "causal"),
        (
            (*GRAPHS, "--activation-checkpoint-module-patterns", "dit_layers.*"),
            "--activation-checkpoint-module-patterns",
            "--dropout 0",
        ),
        ((*GRAPHS, "--tensor-model-parallel-size", "2"), "--runner", "--dropout 0"),
        ((*FSDP, "--bf16", "--compile"), "--compile", "inside each layer"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_cannot_work_is_refused(flags: tuple[str, ...], where: str, words: str) -> None:
    found = {f.where: f"{f.what} {f.fix}" for f in check(run_config(*flags), FAMILY, 2) if f.severity == "error"}
    assert words in found[where]
    if flags[: len(GRAPHS)] == GRAPHS:
        assert where not in {f.where for f in check(run_config(*flags, "--dropout", "0"), FAMILY, 2)}


@pytest.mark.parametrize(
    "flags",
    [(), ("--tune-llm", "--tune-visual"), ("--bf16", "--merge-projections"), ("--compile", "--prompt-padding", "max")],
    ids=lambda flags: " ".join(flags) or "default",
)
def test_sharding_is_allowed(flags: tuple[str, ...]) -> None:
    assert [str(f) for f in check(run_config(*FSDP, *flags), FAMILY, 2) if f.severity == "error"] == []


def test_a_family_without_sampling_is_not_evaluated() -> None:
    config = run_config("--eval-interval", "5")
    told = [f.what for f in check(config, replace(FAMILY, sample_actions=None), 1) if f.where == "--eval-interval"]
    assert any("no sampling" in what for what in told)
    assert not any("no sampling" in f.what for f in check(config, FAMILY, 1))
