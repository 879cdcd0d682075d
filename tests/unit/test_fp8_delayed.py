"""--fp8-recipe delayed: factors from the steps before, every operand quantised once, the gated MLP as one function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pi05_fixtures import gradients, mean_loss, tiny_batch, tiny_model
from torch import Tensor, nn
from torch.nn import functional as F
from training_fixtures import build_run, take_steps, tiny_config

from megatron_vla.config.check import check
from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.config.run import parse_args
from megatron_vla.kernels.fp8_quantize.op import CALIBRATION, IS_KNOWN, LARGEST, RECIPROCAL, SCALE, power_of_two_scale
from megatron_vla.kernels.fp8_quantize.reference import quantized_reference
from megatron_vla.models.common.decoder_layer import GatedMlp
from megatron_vla.models.common.merged_linear import merged_linear
from megatron_vla.models.pi05.family import FAMILY
from megatron_vla.optimizations import compile as compile_optimization
from megatron_vla.optimizations.apply import apply_optimizations
from megatron_vla.optimizations.fp8 import convert_layers
from megatron_vla.optimizations.fp8_linear import Fp8Linear, delayed_scaling_of
from megatron_vla.optimizations.fp8_scaling import DelayedScaling
from megatron_vla.parallel.groups import ParallelGroups, initialize, shut_down
from megatron_vla.parallel.tensor_parallel import NOT_PARALLEL

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DELAYED = OptimizationConfig(fp8="native", fp8_recipe="delayed", fp8_fast_accumulation="none", fp8_amax_history_len=3)
RUN_FLAGS = ("--bf16", "--attention-backend", "sdpa", "--fp8", "native", "--fp8-min-dim", "64", "--merge-projections")


@pytest.fixture(autouse=True)
def calibration() -> Iterator[None]:
    """One per process: left as it was found."""
    before = CALIBRATION.active
    yield
    CALIBRATION.active = before


@pytest.fixture
def groups() -> Iterator[ParallelGroups]:
    yield initialize(ParallelConfig(distributed_timeout_minutes=1.0))
    shut_down()


def drawn(*shape: int, seed: int, factor: float = 1.0) -> Tensor:
    return (factor * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def layers(outputs: tuple[int, ...], inputs: int = 64) -> tuple[nn.ModuleList, DelayedScaling]:
    made = nn.ModuleList(nn.Linear(inputs, n, bias=False, dtype=torch.bfloat16) for n in outputs)
    for number, parameter in enumerate(made.parameters()):
        parameter.data = drawn(*parameter.shape, seed=number, factor=0.2)
    convert_layers(made, [str(i) for i in range(len(outputs))], DELAYED, emulate=True)
    scaling = delayed_scaling_of(made)
    assert scaling is not None
    return made, scaling


def factor_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """By logarithms, not by bits: the largest power of two with which the largest magnitude is within the range."""
    return (torch.finfo(dtype).max / tensor.abs().amax().double()).log2().floor().exp2().float()


def value_of(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64: what the quantised tensor stands for."""
    return quantized_reference(tensor, scale, dtype).double() / scale.double()


@pytest.mark.parametrize(
    ("largest", "dtype", "expected"),
    [
        (448.0, E4M3, 1.0),
        (449.0, E4M3, 0.5),
        (224.0, E4M3, 2.0),
        (1.0, E4M3, 256.0),
        (3e-8, E5M2, 2.0**40),
        (57344.0, E5M2, 1.0),
    ],
)
def test_factors_are_the_largest_powers_of_two_that_fit(largest: float, dtype: torch.dtype, expected: float) -> None:
    scale, reciprocal = power_of_two_scale(torch.tensor(largest), dtype)
    assert float(scale) == expected and float(reciprocal) == 1 / expected
    assert largest * expected <= torch.finfo(dtype).max < 2 * largest * expected


def test_extreme_magnitudes_keep_both_factors_finite() -> None:
    scale, reciprocal = power_of_two_scale(torch.tensor([1e-45, 3e38]), E5M2)
    assert scale.isfinite().all() and reciprocal.isfinite().all() and (scale * reciprocal == 1).all()


def test_quantising_saturates_but_keeps_what_is_not_finite() -> None:
    found = quantized_reference(
        torch.tensor([1e9, -1e9, torch.inf, -torch.inf, torch.nan, 2.0]), torch.tensor(4.0), E4M3
    ).float()
    assert found[[0, 1, 5]].tolist() == [448.0, -448.0, 8.0] and found[2:5].isnan().all()


@pytest.mark.parametrize("outputs", [(48,), (48, 16, 32)], ids=str)
@pytest.mark.parametrize("rows", [(32,), (3, 7)], ids=str)  # 21 rows: padded to 32
def test_products_of_the_quantised_operands(outputs: tuple[int, ...], rows: tuple[int, ...]) -> None:
    """The second step's factors are those of the first step's magnitudes, although its own data are 16 times as large."""
    made, scaling = layers(outputs)
    weight_NK = torch.cat([p.detach() for p in made.parameters()])
    for step, (size, seed) in enumerate(((1.0, 10), (16.0, 20))):
        hidden = drawn(*rows, 64, seed=seed, factor=size).requires_grad_()
        gradient = drawn(*rows, sum(outputs), seed=seed + 1, factor=size * 1e-4)
        made.zero_grad()
        joined = torch.cat(merged_linear(hidden, list(made), merged=True), dim=-1)
        joined.backward(gradient)
        rows_MK, gradient_MN = hidden.detach().flatten(0, -2), gradient.flatten(0, -2)
        if step == 0:
            scales = factor_of(rows_MK, E4M3), factor_of(weight_NK, E4M3), factor_of(gradient_MN, E5M2)
        rows8, weight8 = value_of(rows_MK, scales[0], E4M3), value_of(weight_NK, scales[1], E4M3)
        gradient8 = value_of(gradient_MN, scales[2], E5M2)
        assert hidden.grad is not None
        found = torch.cat([p.grad for p in made.parameters() if p.grad is not None])
        for ours, expected in (
            (joined.detach().flatten(0, -2), rows8 @ weight8.T),
            (hidden.grad.flatten(0, -2), gradient8 @ weight8),
            (found, gradient8.T @ rows8),
        ):
            assert float((ours.double() - expected).norm() / expected.norm()) < 0.004  # one rounding to bf16
        scaling.roll(None)


def test_the_window_forgets_and_ignores_what_is_not_finite() -> None:
    _, scaling = layers((16,))
    slots = scaling.slots_of("0")
    for largest, expected in ((1.0, 256.0), (100.0, 4.0), (torch.inf, 4.0), (torch.nan, 4.0), (1.0, 256.0), (0.0, 256.0)):
        slots.rows[LARGEST] = largest
        scaling.roll(None)
        assert float(slots.rows[SCALE]) == expected and float(slots.rows[RECIPROCAL]) == 1 / expected
        assert float(slots.rows[LARGEST]) == 0.0
    # Never met: as made.
    assert slots.gradient.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_a_first_micro_batch_decides_for_its_step_and_passes_before_it_are_forgotten() -> None:
    made, scaling = layers((16,))
    slots = scaling.slots_of("0")
    made[0](drawn(16, 64, seed=1, factor=1e4))  # a warm-up on other data
    scaling.forget_passes()
    assert float(slots.rows[IS_KNOWN]) == 0.0
    first, second = drawn(16, 64, seed=2), drawn(16, 64, seed=3, factor=50.0)
    made[0](first)
    made[0](second)
    assert slots.rows[SCALE] == factor_of(first, E4M3) and slots.rows[LARGEST] == second.abs().amax()
    scaling.roll(None)
    assert slots.rows[SCALE] == factor_of(second, E4M3) and not CALIBRATION.active
    scaling.forget_passes()
    assert slots.rows[SCALE] == factor_of(second, E4M3) and slots.rows[IS_KNOWN] == 1.0


def gated_mlp(fused: bool) -> GatedMlp:
    mlp = GatedMlp(64, 96, NOT_PARALLEL).bfloat16()
    for number, parameter in enumerate(mlp.parameters()):
        parameter.data = drawn(*parameter.shape, seed=number, factor=0.2)
    mlp.merged = True
    names = ["gate_proj", "up_proj", "down_proj"]
    convert_layers(mlp, names, DELAYED, emulate=True)
    assert isinstance(mlp.gate_proj, Fp8Linear) and mlp.gate_proj.fuses_gated_mlp([mlp.get_submodule(n) for n in names])
    if not fused:
        mlp.gate_proj.fuses_gated_mlp = lambda layers: False  # type: ignore[method-assign]
    return mlp


@pytest.mark.parametrize("frozen", [(), ("rows",), ("weights",)], ids=str)
def test_the_fused_mlp_is_bitwise_its_parts(frozen: tuple[str, ...]) -> None:
    results = []
    for fused in (True, False):
        mlp = gated_mlp(fused)
        mlp.requires_grad_("weights" not in frozen)
        for step in range(2):
            hidden = drawn(2, 7, 64, seed=10 + step).requires_grad_("rows" not in frozen)
            output = mlp(hidden)
            output.backward(drawn(2, 7, 64, seed=20 + step, factor=1e-3))
            scaling = delayed_scaling_of(mlp)
            assert scaling is not None
            results.append([output, hidden.grad, *(p.grad for p in mlp.parameters()), scaling._slots.clone()])
            mlp.zero_grad()
            scaling.roll(None)
    for ours, theirs in zip(results[:2], results[2:], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
    gate, up, down = (p.detach().double() for p in mlp.parameters())
    exact = down @ (F.gelu(gate @ hidden.detach().double().mT, approximate="tanh") * (up @ hidden.detach().double().mT))
    assert 0.005 < float((output.detach().double().mT - exact).norm() / exact.norm()) < 0.1


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("recomputed", [True, False])
def test_compiled_and_recomputed_layers_compute_the_same(
    merged: bool, recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_optimization, "BACKEND", "aot_eager")
    batch, found = tiny_batch(), []
    for switches in ({}, {"compile": True}):
        patterns = ("layers.*",) if recomputed and switches else ()
        config = OptimizationConfig(
            attention_backend="sdpa",
            fp8="native",
            fp8_recipe="delayed",
            fp8_min_dim=64,
            merge_projections=merged,
            activation_checkpoint_module_patterns=patterns,
            **switches,
        )
        model: Any = apply_optimizations(tiny_model(dtype=torch.bfloat16), config, FAMILY, lambda line: None)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        loss = float(mean_loss(model, batch).detach())
        scaling = delayed_scaling_of(model)
        assert scaling is not None
        found.append((loss, gradients(model, batch), scaling.state(), scaling._slots.clone()))
    (loss, ours, _, slots), (other_loss, theirs, _, other_slots) = found
    assert loss == other_loss and torch.equal(slots, other_slots) and (slots[:, IS_KNOWN] == 1).sum() > 30
    difference = sum(float((ours[name].double() - theirs[name].double()).square().sum()) for name in ours)
    assert difference <= 1e-10 * sum(float(g.double().square().sum()) for g in theirs.values())
    # Layers of one kind share a graph, although each has slots of its own.
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 0 < graphs <= 6, graphs


def test_a_run_trains_near_bf16_and_resumes_to_the_bit(groups: ParallelGroups) -> None:
    def run(*flags: str) -> Any:
        return build_run(tiny_config(*RUN_FLAGS, *flags), groups)

    delayed = ("--fp8-recipe", "delayed", "--fp8-amax-history-len", "2")
    whole = run(*delayed)
    losses = take_steps(whole, 6)
    assert not CALIBRATION.active
    bf16 = take_steps(build_run(tiny_config("--bf16", "--attention-backend", "sdpa"), groups), 6)
    assert losses != bf16 and losses == pytest.approx(bf16, rel=0.02)
    first = run(*delayed)
    take_steps(first, 3)
    assert first.state.fp8_scaling is not None
    stored = first.state.fp8_scaling.state()
    resumed = run(*delayed)
    line = resumed.state.fp8_scaling.load(stored)
    assert f"of {len(resumed.state.fp8_scaling.layers)} layers" in line
    for name in ("_slots", "_history"):
        assert torch.equal(getattr(first.state.fp8_scaling, name), getattr(resumed.state.fp8_scaling, name)), name


def test_layers_that_a_checkpoint_does_not_know_take_factors_from_the_data() -> None:
    """As after a change of --merge-projections. Known layers go on as they were, operands that never had a number too."""
    made, scaling = layers((16, 32))
    nothing = [0.0, 0.0, 0.0]
    line = scaling.load({"0": {"rows": [1.0, 0.0, 0.0], "weight": [2.0, 0.0, 0.0], "gradient": nothing}})
    assert line == "loaded FP8 magnitudes of 1 of 2 layers"
    known, unknown = scaling.slots_of("0"), scaling.slots_of("1")
    rows = drawn(16, 64, seed=1, factor=30.0)
    for is_warm_up in (True, False):
        factor = 1e3 if is_warm_up else 1.0
        for layer in made:
            output = layer(factor * rows)
            output.backward(torch.full_like(output, 1e-7 * factor))
        assert float(known.rows[SCALE]) == 256.0 and float(known.weight[SCALE]) == 128.0 and float(known.gradient[SCALE]) == 1.0
        assert unknown.rows[SCALE] == factor_of(factor * rows, E4M3)
        assert float(unknown.gradient[SCALE]) > 1e8
        if is_warm_up:
            scaling.forget_passes()
            assert unknown.rows.tolist() == [1.0, 1.0, 0.0, 0.0]
    scaling.roll(None)
    assert not CALIBRATION.active and float(known.gradient[SCALE]) > 1e9


def test_a_checkpoint_that_knows_all_layers_calibrates_nothing() -> None:
    _, scaling = layers((16,))
    scaling.load({"0": {"rows": [1.0], "weight": [1.0], "gradient": [1.0]}})
    assert not CALIBRATION.active


@pytest.mark.parametrize(
    ("flags", "where", "says"),
    [
        (["--fp8", "torchao", "--fp8-recipe", "delayed"], "--fp8-recipe", "needs --fp8 native"),
        (["--fp8", "native", "--fp8-amax-history-len", "4"], "--fp8-amax-history-len", "without --fp8-recipe delayed"),
        (["--fp8", "native", "--fp8-recipe", "delayed", "--fp8-amax-history-len", "0"], "--fp8-amax-history-len", "below 1"),
        (["--fp8-amax-history-len", "4"], "--fp8-amax-history-len", "no effect without --fp8"),
    ],
)
def test_checks_name_the_flag(flags: list[str], where: str, says: str) -> None:
    base = ("--mock-data", "--model-variant", "tiny", "--train-iters", "3", "--lr-warmup-iters", "1", "--bf16")
    found = {f.where: f"{f.what} {f.fix}" for f in check(parse_args([*base, *flags]), FAMILY, 1) if f.severity == "error"}
    assert says in found[where]
