"""tools/benchmark.py, untrained: rungs beside each other, kept rungs of other runs, utilisation. Trained: tests/integration."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import benchmark
import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMON = "--model-name pi05 --model-variant tiny --mock-data --micro-batch-size 2 --train-iters 20 --lr-warmup-iters 2"
SPEEDS = {"first": 20.0, "broken": None, "second": 30.0, "larger": 33.0, "third": 60.0}
COMMIT = "0123456789abcdef"


def measured(rung: dict[str, Any], flags: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """What a process of `rung` would report: losses 2, 1.9, ... plus a hundredth for every rung before it."""
    name = rung["name"]
    if SPEEDS[name] is None:
        return {"name": name, "flags": flags, "error": "no"}
    shift = list(SPEEDS).index(name) / 100
    figures = dict.fromkeys(("step_ms", "peak_memory_gib", "mfu", "kernels", "host_syncs", "graph_launches"))
    return {
        **figures,
        "name": name,
        "flags": flags,
        "samples_per_s": SPEEDS[name],
        "steps": arguments.steps,
        "warmup": arguments.warmup,
        "num_gpus": rung.get("num_processes", 1),
        "samples_per_step": 4 if name == "larger" else 2,
        "losses": [2 - step / 10 + shift for step in range(min(10, arguments.warmup + arguments.steps))],
    }


def climb(folder: Path, *names: str, steps: int = 20, warmup: int = 5, keep: bool = False) -> dict[str, dict[str, Any]]:
    """The rungs of the written result by name."""
    ladder, output = folder / "ladder.json", folder / "out.json"
    rungs = [{"name": name, "flags": ["--seed", str(number)]} for number, name in enumerate(names)]
    ladder.write_text(json.dumps({"name": "test", "common_flags": COMMON.split(), "rungs": rungs}))
    words = {"ladder": ladder, "output": output, "steps": steps, "warmup": warmup, "keep": keep}
    benchmark.run_ladder(argparse.Namespace(**words, rungs=None, rung_timeout=None, profile=None, extra_flags=[]))
    return {rung["name"]: rung for rung in json.loads(output.read_text())["rungs"]}


@pytest.fixture(autouse=True)
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_run_rung", measured)
    monkeypatch.setattr(benchmark, "_commit", lambda: COMMIT)


def test_rungs_are_set_beside_the_one_above_and_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rungs = climb(tmp_path, *SPEEDS)
    assert "speedup" not in rungs["first"] and "loss_vs_previous" not in rungs["first"]
    assert rungs["second"]["speedup"] == {"previous": "first", "over_previous": 1.5, "first": "first", "over_first": 1.5}
    assert rungs["larger"]["speedup"] == {"previous": "second", "over_previous": 1.1, "first": "first", "over_first": 1.65}
    assert "loss_vs_previous" not in rungs["larger"], "it trained on other samples"
    third = rungs["third"]
    assert third["speedup"] == {"previous": "larger", "over_previous": 1.818, "first": "first", "over_first": 3.0}
    difference = third["loss_vs_previous"]
    assert (difference["previous"], difference["steps"]) == ("second", 10)
    assert (difference["mae"], difference["max"]) == pytest.approx((0.02, 0.02))
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("   third:"))
    assert "x 1.818 of larger, x 3.0 of first" in line and "mean |loss difference| 2.00e-02 to second (10 steps)" in line
    assert all((r["steps"], r["warmup"], r["commit"]) == (20, 5, COMMIT) for r in rungs.values() if "error" not in r)


def test_kept_rungs_of_other_step_counts_are_compared_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    climb(tmp_path, "first")
    rungs = climb(tmp_path, "first", "second", keep=True)
    assert "NOTE" not in capsys.readouterr().out
    monkeypatch.setattr(benchmark, "_commit", lambda: "fedcba")
    rungs = climb(tmp_path, "first", "second", "third", steps=2, warmup=1, keep=True)
    assert [(r["steps"], r["warmup"], r["commit"]) for r in rungs.values()] == [
        (20, 5, COMMIT),
        (20, 5, COMMIT),
        (2, 1, "fedcba"),
    ]
    difference = rungs["third"]["loss_vs_previous"]
    assert difference["steps"] == 3 and difference["mae"] == pytest.approx(0.02)
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("NOTE")]
    others = f"commit {COMMIT} (now fedcba), steps 20 (now 2), warmup 5 (now 1)"
    assert notes == [f"NOTE {name} is kept from another run: {others}" for name in ("first", "second")]


def test_a_rung_of_more_processes_is_another() -> None:
    rung = {"name": "first", "flags": ["--seed", "0"], "num_processes": 2}
    known = measured(rung, ["--seed", "0"], argparse.Namespace(steps=2, warmup=1))
    assert benchmark._is_result_of(known, rung, ["--seed", "0"])
    assert not benchmark._is_result_of(known, {**rung, "num_processes": 4}, ["--seed", "0"])
    assert not benchmark._is_result_of(known, rung, ["--seed", "1"])


def test_rungs_of_files_without_these_records_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    climb(tmp_path, "first")
    written = json.loads((tmp_path / "out.json").read_text())
    for name in ("steps", "warmup", "commit"):
        del written["rungs"][0][name]
    (tmp_path / "out.json").write_text(json.dumps(written))
    climb(tmp_path, "first", keep=True)
    others = f"commit not recorded (now {COMMIT}), steps not recorded (now 20), warmup not recorded (now 5)"
    assert f"NOTE first is kept from another run: {others}" in capsys.readouterr().out


def test_a_rung_that_is_the_first_now_is_beside_none(tmp_path: Path) -> None:
    climb(tmp_path, "first", "second")
    out = tmp_path / "out.json"
    written = json.loads(out.read_text())
    written["rungs"][1]["flags"] = written["rungs"][0]["flags"]
    out.write_text(json.dumps(written))
    rungs = climb(tmp_path, "second", keep=True)
    assert "speedup" not in rungs["second"] and "loss_vs_previous" not in rungs["second"]


def test_utilisation_is_of_the_bf16_peak() -> None:
    """As in every committed figure, FP8 rungs included."""
    checked = 0
    for path in sorted((ROOT / "benchmarks").glob("*_ladder.json")):
        result = json.loads(path.read_text())
        for rung in result["rungs"]:
            if rung.get("mfu"):
                flops = rung["model_tflop_per_sample"] * 1e12
                found = benchmark._utilisation(flops, rung["samples_per_s"], result["gpu"])
                assert found["mfu"] == pytest.approx(rung["mfu"], abs=2e-4), rung["name"]
                assert found["mfu_peak_tflop_per_s"] == 989.0 and found["mfu_peak"] == "dense bf16, datasheet"
                assert found["model_flop_per_sample"] == flops
                checked += rung["precision"] == "fp8"
    assert checked
    assert benchmark._utilisation(1e12, 1.0, "none (CPU)")["mfu"] is None
