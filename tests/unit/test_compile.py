"""torch.compile of layers, towers and groups: the same numbers, one graph each, none after the warm-up."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pi05_fixtures import gradients, mean_loss, replaced, tiny_batch, tiny_model
from torch._dynamo.utils import counters
from training_fixtures import build_run
from training_fixtures import tiny_config as tiny_run_config

from megatron_vla.config.check import check
from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.config.run import parse_args
from megatron_vla.models.pi05.family import FAMILY
from megatron_vla.models.pi05.model import Pi05Model
from megatron_vla.optimizations import compile as compile_optimization
from megatron_vla.optimizations.apply import apply_optimizations
from megatron_vla.parallel.groups import ParallelGroups, initialize, shut_down
from megatron_vla.runner.warm_up import prompt_widths, warm_up, with_prompt_width

pytestmark = pytest.mark.usefixtures("aot_eager")

# Two vision layers of one kind; two joint layers, the last of which computes keys and values only.
NUM_GRAPHS = {"per_layer": 3, "backbone": 2, "multi_group": 6}


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    yield initialize(ParallelConfig(), quiet=True)
    shut_down()


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def compiled(scope: Any = "per_layer", **options: Any) -> Pi05Model:
    config = OptimizationConfig(compile=True, compile_scope=scope, **options)
    model = apply_optimizations(tiny_model(), config, FAMILY, lambda line: None)
    assert isinstance(model, Pi05Model)
    return model


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    for name in expected:
        # Gradients of key biases are zero but for rounding, so small ones are compared with the largest.
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-14 * scale, msg=name)


@pytest.mark.parametrize(
    ("scope", "patterns"),
    [
        ("per_layer", ("vision_tower.layers.*.mlp", "layers.*.prefix.mlp")),
        ("backbone", ()),
        pytest.param("multi_group", ("layers.*",), marks=pytest.mark.slow),
        pytest.param("backbone", ("vision_tower.layers.*", "layers.*"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_on_equals_off(scope: str, patterns: tuple[str, ...]) -> None:
    plain, batch = tiny_model(), tiny_batch()
    model = compiled(scope, activation_checkpoint_module_patterns=patterns)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert float(mean_loss(model, batch).detach()) == pytest.approx(float(mean_loss(plain, batch).detach()), rel=1e-12)
    assert_same_gradients(gradients(model, batch), gradients(plain, batch))
    assert num_graphs() == NUM_GRAPHS[scope], "equal layers share a graph, and nothing breaks one"


def test_checkpointing_around_a_compiled_layer_recomputes_it() -> None:
    def stored_bytes(model: Pi05Model) -> int:
        total = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            mean_loss(model, tiny_batch())
        return total

    patterns = ("vision_tower.layers.*", "layers.*")
    config = OptimizationConfig(activation_checkpoint_module_patterns=patterns)
    plain = apply_optimizations(tiny_model(), config, FAMILY, lambda line: None)
    assert isinstance(plain, Pi05Model)
    assert stored_bytes(compiled(activation_checkpoint_module_patterns=patterns)) <= stored_bytes(plain)


def test_a_graph_break_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = type(tiny_model().layers[0]).forward

    def breaking(self: Any, *arguments: Any) -> Any:
        torch._dynamo.graph_break()
        return honest(self, *arguments)

    monkeypatch.setattr(type(tiny_model().layers[0]), "forward", breaking)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        mean_loss(compiled(), tiny_batch())


def test_what_is_compiled_is_printed() -> None:
    lines: list[str] = []
    config = OptimizationConfig(compile=True, attention_backend="sdpa")
    apply_optimizations(tiny_model(), config, FAMILY, lines.append)
    assert lines == ["compile (per_layer, default): 4 functions: vision_tower.layers.*.forward, layers.*.forward"]


@pytest.mark.slow
def test_compiled_model_samples_the_same_actions() -> None:
    batch = tiny_batch()
    actions = [m.sample_actions(batch, 2, batch.noise_BTA) for m in (tiny_model(), compiled("multi_group"))]
    torch.testing.assert_close(*actions, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("scope", ["per_layer", pytest.param("backbone", marks=pytest.mark.slow)])
def test_no_graph_is_added_after_the_warm_up(groups: ParallelGroups, scope: str) -> None:
    """Prompts of any length, in buckets: every width was compiled before the first step, and the warm-up changed nothing."""
    flags = ("--compile", "--compile-scope", scope, "--max-prompt-length", "11", "--prompt-bucket-size", "8")
    run = build_run(tiny_run_config(*flags), groups)
    before = {name: tensor.clone() for name, tensor in run.state.module.state_dict().items()}
    real_data = dataclasses.replace(run.config, data=dataclasses.replace(run.config.data, mock_data=False))
    lines: list[str] = []
    batch = run.supply.first_batch()
    warm_up(run.runner.model, FAMILY, groups, real_data, batch, lines.append)
    assert [line.split()[4] for line in lines] == ["11", "8"] and prompt_widths(real_data) == [8, 11]
    assert prompt_widths(real_data, longest_prompt=9) == [8, 11] and prompt_widths(real_data, longest_prompt=8) == [8]
    warm_up(run.runner.model, FAMILY, groups, real_data, batch, lines.append, longest_prompt=8)
    assert [line.split()[4] for line in lines] == ["11", "8", "8"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.state.module.state_dict().items())
    warmed = num_graphs()
    losses = []
    for width in (8, 11, 8, 11):
        valid = torch.arange(width) < torch.tensor([[width], [1]])
        resized = replaced(with_prompt_width(batch, width), token_is_valid_BL=valid)
        losses.append(float(run.runner.step(iter([resized, resized]), 1e-3).loss))
    assert num_graphs() == warmed
    assert len(set(losses)) == 4 and all(loss > 0 for loss in losses)


def test_there_is_no_short_last_batch() -> None:
    """Five samples in batches of two: the order goes on into the next epoch, so shapes stay."""
    from megatron_vla.data.build import build_data

    supply = build_data(tiny_run_config("--mock-num-samples", "5", "--global-batch-size", "2"), FAMILY)
    assert {batch.size for batch in supply.iterator(0, 0, 1, 6, False)} == {2}


def findings_of(*flags: str) -> dict[str, str]:
    """Where -> what and what to do, errors only."""
    config = parse_args(["--mock-data", "--train-iters", "10", "--lr-warmup-iters", "1", "--compile", *flags])
    found = check(config, FAMILY, 2)
    return {f.where: f"{f.what} {f.fix}" for f in found if f.severity == "error"}


def test_ddp_optimizer_is_refused_with_the_reason_and_the_flag() -> None:
    torch_ddp = ("--data-parallel-strategy", "torch_ddp")
    refused = findings_of(*torch_ddp)
    assert "DDPOptimizer" in refused["--compile"] and "--no-dynamo-optimize-ddp" in refused["--compile"]
    assert findings_of(*torch_ddp, "--no-dynamo-optimize-ddp") == {}
    assert findings_of() == {}


def test_ddp_optimizer_switch_reaches_torch() -> None:
    for flag in (False, True):
        apply_optimizations(tiny_model(), OptimizationConfig(dynamo_optimize_ddp=flag), FAMILY, lambda line: None)
        assert torch._dynamo.config.optimize_ddp is flag


@pytest.mark.parametrize(
    ("flags", "where", "words"),
    [
        (("--pipeline-model-parallel-size", "2", "--compile-scope", "backbone"), "--compile-scope", "pipeline stage"),
        (("--data-parallel-strategy", "fsdp2", "--compile-scope", "backbone"), "--compile-scope", "between the layers"),
        (("--data-parallel-strategy", "fsdp2", "--bf16"), "--compile", "inside each layer"),
        (("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"), "--compile", "--no-overlap"),
        (("--prompt-padding", "longest"), "--prompt-padding", "bucket"),
        (("--no-compile", "--compile-scope", "backbone"), "--compile-scope", "without --compile"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else None,
)
def test_what_does_not_compile_is_refused(flags: tuple[str, ...], where: str, words: str) -> None:
    assert words in findings_of(*flags)[where]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU")
@pytest.mark.parametrize("scope", ["per_layer", "backbone"])
def test_generated_code_computes_the_same(monkeypatch: pytest.MonkeyPatch, scope: str) -> None:
    monkeypatch.setattr(compile_optimization, "BACKEND", "inductor")
    plain, batch = tiny_model(), tiny_batch()
    assert_same_gradients(gradients(compiled(scope), batch), gradients(plain, batch))
