"""tools/select_fp8.py: shapes and counts of every linear layer, the decision by time, the list that training reads."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import select_fp8
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.config.run import RunConfig, parse_args
from megatron_vla.data.build import build_data
from megatron_vla.kernels.fp8_quantize.op import CALIBRATION
from megatron_vla.models.pi05.family import FAMILY
from megatron_vla.optimizations.fp8_scaling import DelayedScaling
from megatron_vla.optimizations.fp8_selection import select
from megatron_vla.optimizations.fp8_timing import PassTimes, estimated_times, measured_timer
from megatron_vla.optimizations.fp8_trace import LinearUse, product_times, trace_linears

# One camera of four patches, eight prompt slots: 12 prefix rows and 10 action rows per sample.
TINY = (
    *("--model-variant", "tiny", "--image-size", "28", "--num-layers", "2", "--vision-num-layers", "1", "--bf16"),
    *("--mock-data", "--mock-num-samples", "40", "--mock-num-cameras", "1", "--mock-prompt-length", "8"),
    *("--max-prompt-length", "8", "--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", "20"),
    *("--lr-warmup-iters", "4", "--num-workers", "0", "--no-first-batch-report", "--attention-backend", "sdpa"),
)
MLP = "vision_tower.layers.0.mlp.fc1"


def config_of(*flags: str) -> RunConfig:
    return parse_args([*TINY, *flags])


def trace(config: RunConfig) -> tuple[dict[tuple[str, ...], LinearUse], list[str]]:
    supply = build_data(config, FAMILY)
    uses, unused = trace_linears(config, FAMILY, supply.first_batch())
    supply.close()
    return {use.names: use for use in uses}, unused


def test_trace_counts_rows_calls_and_gradients() -> None:
    uses, unused = trace(config_of("--activation-checkpoint-module-patterns", "vision_tower.layers.*"))
    assert uses[(MLP,)] == LinearUse((MLP,), 8, 32, (56,), True, 2, True, True)
    gate = "layers.0.prefix.mlp.gate_proj"
    assert uses[(gate,)] == LinearUse((gate,), 24, 64, (128,), False, 1, True, True)
    first = uses[("action_in_proj",)]
    assert (first.rows, first.forward_calls, first.input_gradient, first.weight_gradient) == (20, 1, False, True)
    assert first.num_products == 2 and first.flops == 2 * 2.0 * 20 * 12 * 32
    dead = [
        f"layers.1.prefix.{n}"
        for n in ("attention.q_proj", "attention.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    ]
    assert unused == dead
    assert len(uses) + len(unused) == sum(isinstance(m, torch.nn.Linear) for m in FAMILY.skeleton(config_of()).modules())


def test_trace_joins_what_is_computed_together() -> None:
    uses, _ = trace(config_of("--merge-projections"))
    joined = uses[("layers.0.prefix.mlp.gate_proj", "layers.0.prefix.mlp.up_proj")]
    assert joined.outputs == (128, 128) and joined.product_key == (24, 64, 256)
    # Nobody asks for the queries of the last prefix layer.
    assert ("layers.1.prefix.attention.k_proj", "layers.1.prefix.attention.v_proj") in uses
    assert ("layers.0.prefix.attention.q_proj", "layers.0.prefix.attention.k_proj", "layers.0.prefix.attention.v_proj") in uses


def test_profile_of_a_real_step_maps_to_the_traced_shapes() -> None:
    """Every product that a linear layer makes on the CPU is found under its sorted shape, three per trained layer."""
    linear = torch.nn.Linear(24, 40, dtype=torch.bfloat16)
    hidden = torch.randn(16, 24, dtype=torch.bfloat16, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        linear(hidden).sum().backward()
    times = product_times(profiler.events())
    assert list(times) == [(16, 24, 40)] and times[16, 24, 40].calls == 3 and times[16, 24, 40].milliseconds > 0


def test_product_times_prefer_the_devices_clock() -> None:
    events = [
        SimpleNamespace(name="aten::mm", input_shapes=[[6, 2], [2, 4]], device_time_total=3.0, cpu_time_total=90.0),
        SimpleNamespace(name="aten::addmm", input_shapes=[[4], [6, 2], [2, 4]], device_time_total=2.0, cpu_time_total=90.0),
        SimpleNamespace(name="aten::add", input_shapes=[[6, 2]], device_time_total=2.0, cpu_time_total=90.0),
    ]
    assert {key: (t.calls, t.milliseconds) for key, t in product_times(events).items()} == {(2, 4, 6): (2, 0.005)}


def test_decisions_follow_the_timer() -> None:
    fast, slow, sensitive = (
        LinearUse((name,), 8, 16, (n,), False, 2, True, True) for name, n in (("f", 32), ("s", 64), ("x", 16))
    )
    again = LinearUse(("g",), 8, 16, (32,), False, 2, True, True)
    asked: list[Any] = []

    def timer(use: LinearUse, in_fp8: bool) -> PassTimes:
        asked.append((use.names, in_fp8))
        return PassTimes(1.0, 2.0) if not in_fp8 else PassTimes(0.5, 1.0) if use.outputs == (32,) else PassTimes(0.98, 1.98)

    found = select_fp8.decide(
        [fast, slow, again, sensitive],
        {"x": "precision-sensitive"},
        timer,
        num_microbatches=3,
        smallest_gain=0.05,
        progress=lambda line: None,
    )
    assert asked == [(("f",), False), (("f",), True), (("s",), False), (("s",), True)], "equal shapes are timed once"
    # Two forward passes and one backward pass per micro-batch, three micro-batches.
    assert [(d.bf16_ms, d.fp8_ms) for d in found] == [(12.0, 6.0), (12.0, 11.82), (12.0, 6.0), (None, None)]
    assert [d.reason for d in found] == [None, "saves less than 5%", None, "precision-sensitive"]
    assert [d.gain_ms for d in found] == [6.0, 0.0, 6.0, 0.0]
    trace = select_fp8.StepTrace(
        100.0, 80.0, {(8, 16, 32): select_fp8.ProductTime(24, 16.0), (1, 2, 3): select_fp8.ProductTime(1, 4.0)}
    )
    result = select_fp8.summary(found, ["never"], trace, 3)
    assert result["modules"] == ["f", "g"] and result["num_linears"] == 5 and result["never_run"] == ["never"]
    assert (result["step_ms"], result["predicted_step_ms"]) == (100.0, 88.0)
    assert result["matrix_product_share"] == 0.25 and result["products_of_no_linear_layer_ms"] == 4.0
    row = result["rows"][0]
    assert (row["modules"], row["traced_bf16_ms"], row["bf16_ms"], row["speedup"]) == (["f"], 8.0, 12.0, 2.0)


@pytest.mark.parametrize("recipe", [None, "tensorwise", "delayed"])
def test_a_pass_is_measured_as_a_later_step_runs_it(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, and forward with backward; new factors of delayed scaling belong to the step: made once, before."""
    rolls: list[DelayedScaling] = []
    roll = DelayedScaling.roll
    monkeypatch.setattr(DelayedScaling, "roll", lambda scaling, group: (rolls.append(scaling), roll(scaling, group)))
    results: list[Any] = []

    def clock(function: Any) -> float:
        assert not CALIBRATION.active, "a first step takes its factors from the data at hand, later ones do not"
        results.append(function())
        return (2.0, 5.0)[len(results) - 1]

    use = LinearUse(("q", "k"), 20, 32, (48, 16), True, 1, True, True)
    config = OptimizationConfig(fp8="native", fp8_recipe=recipe or "delayed")
    timer = measured_timer(config, compiled=False, clock=clock, device="cpu")
    assert timer(use, recipe is not None) == PassTimes(2.0, 3.0)
    assert [tuple(t.shape) for t in results[0]] == [(20, 48), (20, 16)]
    assert [tuple(t.shape) for t in results[1]] == [(20, 32), (48, 32), (48,), (16, 32), (16,)]
    assert len(rolls) == (recipe == "delayed")


def test_a_layer_without_gradients_has_no_backward() -> None:
    calls: list[Any] = []

    def clock(function: Any) -> float:
        calls.append(function())
        return 2.0

    use = LinearUse(("frozen",), 16, 32, (48,), False, 1, False, False)
    times = measured_timer(OptimizationConfig(fp8="native"), compiled=False, clock=clock, device="cpu")(use, False)
    assert times == PassTimes(2.0, 0.0) and not calls[1][0].requires_grad


def test_a_failed_measurement_names_the_layers() -> None:
    def clock(function: Any) -> float:
        raise RuntimeError("cannot be captured")

    use = LinearUse(("q", "k"), 16, 32, (48, 16), False, 1, True, True)
    timer = measured_timer(OptimizationConfig(fp8="native", fp8_recipe="delayed"), compiled=False, clock=clock, device="cpu")
    with pytest.raises(RuntimeError, match="cannot be captured") as caught:
        timer(use, True)
    assert caught.value.__notes__ == ["while timing q, k in FP8 (native, delayed), not compiled"]


def test_the_written_list_is_what_training_converts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lists" / "modules.json"
    config = config_of("--fp8", "native", "--merge-projections")
    tool = select_fp8.SelectConfig(output=str(path), dry_run=True)

    def timer(use: LinearUse, in_fp8: bool) -> PassTimes:
        return PassTimes(0.5, 0.5) if in_fp8 and len(use.outputs) == 2 and "mlp" in use.names[0] else PassTimes(1.0, 1.0)

    result = select_fp8.run_selection(tool, config, timer)
    assert "bf16 2.000 ms, fp8 1.000 ms, 2.00x" in capsys.readouterr().out
    expected = [f"layers.{mlp}.mlp.{n}_proj" for mlp in ("0.prefix", "0.suffix", "1.suffix") for n in ("gate", "up")]
    assert result["modules"] == expected
    path.parent.mkdir()
    path.write_text(json.dumps(result))
    read = config_of("--fp8", "native", "--fp8-module-list", str(path))
    assert list(select(FAMILY.skeleton(read), read.optimization, FAMILY).converted) == expected


GRAPH = ("--runner", "full_iteration_graph", "--cuda-graph-max-buckets", "8", "--cuda-graph-warmup-steps", "2")


@pytest.mark.parametrize("runner", [(), GRAPH], ids=["eager", "graph"])
def test_the_traced_step_is_plain_bf16_whatever_the_fp8_flags(runner: tuple[str, ...]) -> None:
    """The flags of the FP8 run are given to the tool; those that mean nothing in its eager bf16 step must not stop it."""
    fp8 = ("--fp8", "native", "--fp8-recipe", "delayed", "--fp8-amax-history-len", "4", "--fp8-min-dim", "8")
    trace = select_fp8.trace_step(select_fp8.without_fp8(config_of(*fp8, *runner)), FAMILY, 1, 1)
    assert trace.step_ms > 0 and trace.products


def test_dry_run_writes_list_and_report(tmp_path: Path) -> None:
    path = tmp_path / "modules.json"
    flags = [*TINY, "--fp8", "native", "--dry-run", "--output", str(path), "--include-sensitive", "--smallest-gain", "-10000"]
    assert select_fp8.main(flags) == 0
    result = json.loads(path.read_text())
    assert "vision_tower.layers.0.self_attn.q_proj" in result["modules"], "asked for by --include-sensitive"
    assert MLP not in result["modules"]  # 56 features
    assert result["times"].startswith("estimated")
    report = path.with_suffix(".md").read_text()
    assert "estimated" in report and "features no multiple of 16" in report and "never run" in report


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "--output is needed"),
        (["--output", "x.json"], "the backend to time"),
        (["--output", "x.json", "--fp8", "native"], "no GPU to time on; --dry-run estimates"),
    ],
)
def test_wrong_flags_end_with_a_message(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as caught:
        select_fp8.main([*TINY, *flags])
    assert caught.value.code == 2 and says in capsys.readouterr().err


def test_estimates_grow_with_the_work_and_favour_large_products() -> None:
    small, large = (LinearUse(("a",), rows, 2048, (n,), False, 1, True, True) for rows, n in ((64, 256), (18432, 16384)))
    ratio = {
        use: estimated_times(use, False).of_micro_batch(use) / estimated_times(use, True).of_micro_batch(use)
        for use in (small, large)
    }
    assert ratio[small] < 1 < ratio[large] < 1400 / 790
