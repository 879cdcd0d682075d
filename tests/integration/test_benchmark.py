"""The ladder tool: a process per rung, losses compared, failures recorded, kept rungs not run again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMON = "--model-name pi05 --model-variant tiny --mock-data --mock-num-cameras 2 --micro-batch-size 2 --seed 7"
COMMON += " --train-iters 20 --lr-warmup-iters 2"
EAGER = ["--attention-backend", "eager"]


def run(folder: Path, rungs: list[dict[str, Any]], *words: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    (folder / "ladder.json").write_text(json.dumps({"name": "test", "common_flags": COMMON.split(), "rungs": rungs}))
    command = [sys.executable, "tools/benchmark.py", "--ladder", str(folder / "ladder.json")]
    command += ["--output", str(folder / "out.json"), "--steps", "2", "--warmup", "1", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    return ended, json.loads((folder / "out.json").read_text())


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rungs of the same mathematics, one on other samples, and one whose flag is wrong."""
    folder = tmp_path_factory.mktemp("ladder")
    rungs = [
        {"name": "eager", "flags": EAGER},
        {"name": "merged", "flags": [*EAGER, "--merge-projections"], "environment": {"MADE_UP_VARIABLE": "1"}},
        {"name": "broken", "flags": ["--no-such-flag"]},
        {"name": "larger", "flags": [*EAGER, "--micro-batch-size", "4"]},
    ]
    ended, result = run(folder, rungs)
    assert ended.returncode == 1, ended.stderr
    assert [rung["name"] for rung in result["rungs"]] == ["eager", "merged", "broken", "larger"]
    return folder


def test_rungs_are_compared_with_the_last_one_on_the_same_samples(measured: Path) -> None:
    result = json.loads((measured / "out.json").read_text())
    eager, merged, broken, larger = result["rungs"]
    assert "loss_vs_previous" not in eager and "loss_vs_previous" not in larger
    differences = [abs(a - b) for a, b in zip(merged["losses"], eager["losses"], strict=True)]
    assert len(differences) == 3 and max(differences) < 1e-5 < min(eager["losses"])
    assert merged["loss_vs_previous"]["max"] == max(differences)
    assert abs(larger["losses"][0] - eager["losses"][0]) > 1e-5
    assert "--no-such-flag" in broken["error"] and "samples_per_s" not in broken


def test_figures_follow_from_the_measured_time(measured: Path) -> None:
    result = json.loads((measured / "out.json").read_text())
    for rung, samples in ((result["rungs"][0], 2), (result["rungs"][3], 4)):
        assert rung["samples_per_step"] == samples
        assert rung["samples_per_s"] == pytest.approx(samples / rung["step_ms"] * 1e3, rel=1e-3)
        assert rung["host_cores"] == os.cpu_count() and 0 <= rung["host_busy_cores"] <= os.cpu_count() + 1
        assert rung["mfu"] is None and rung["gpu"] == "none (CPU)"
    assert result["rungs"][1]["environment"] == {"MADE_UP_VARIABLE": "1"} and "environment" not in result["rungs"][0]
    assert result["workload"]["micro_batch_size"] == 2 and result["workload"]["cameras"] == 2
    assert (measured / "out.png").stat().st_size > 1000


def test_kept_rungs_are_not_run_again(measured: Path) -> None:
    """... but those whose flags or variables are others now are."""
    before = json.loads((measured / "out.json").read_text())["rungs"]
    rungs = [
        {"name": "eager", "flags": EAGER},
        {"name": "merged", "flags": [*EAGER, "--merge-projections"], "environment": {"MADE_UP_VARIABLE": "2"}},
    ]
    ended, result = run(measured, rungs, "--keep")
    assert ended.returncode == 0, ended.stderr
    assert "-- eager:" not in ended.stdout and "-- merged:" in ended.stdout
    assert result["rungs"][0] == before[0] and result["rungs"][1]["environment"] == {"MADE_UP_VARIABLE": "2"}
    assert result["rungs"][1]["losses"] == before[1]["losses"], "the same draws"


def test_an_unknown_rung_is_named(tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text("{}")
    ended, _ = run(tmp_path, [{"name": "eager", "flags": []}], "--rungs", "graph")
    assert ended.returncode == 1 and "--rungs graph: not in" in ended.stderr and "which has eager" in ended.stderr
