"""tools/compare_loss.py: figures against numpy, thresholds as exit status, every kind of log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compare_loss
import numpy as np
import pytest
import torch
from training_fixtures import TINY, tiny_config

from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.parallel.groups import ParallelGroups, initialize, shut_down
from megatron_vla.training.run_record import record_start


def write(path: Path, losses: list[float], interval: int = 3, first: int = 1) -> Path:
    """A metrics.jsonl with `interval` iterations a line."""
    iterations = list(range(first, first + len(losses)))
    lines = [
        json.dumps({"iterations": iterations[i : i + interval], "losses": losses[i : i + interval]})
        for i in range(0, len(losses), interval)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    generator = np.random.default_rng(0)
    reference = 2 * np.exp(-np.arange(50) / 20) + 0.1 * generator.random(50)
    candidate = reference * (1 + 0.004 * generator.standard_normal(50))
    (tmp_path / "a").mkdir()
    write(tmp_path / "a" / "metrics.jsonl", reference.tolist())
    return tmp_path / "a", write(tmp_path / "b.jsonl", candidate.tolist(), interval=7)


@pytest.fixture
def groups() -> Iterator[ParallelGroups]:
    yield initialize(ParallelConfig(distributed_timeout_minutes=1.0))
    shut_down()


def test_figures_are_those_of_numpy(runs: tuple[Path, Path]) -> None:
    reference, candidate = (compare_loss.read_losses(str(run)) for run in runs)
    figures = compare_loss.compare(reference, candidate)
    a, b = (np.array(list(losses.values())) for losses in (reference, candidate))
    errors = np.abs(b - a) / np.abs(a)
    assert figures.correlation == pytest.approx(np.corrcoef(a, b)[0, 1], rel=1e-12)
    assert (figures.mean_error, figures.max_error) == pytest.approx((errors.mean(), errors.max()))
    assert figures.max_error_iteration == 1 + int(errors.argmax())
    assert (figures.num_iterations, figures.first_iteration, figures.last_iteration) == (50, 1, 50)


@pytest.mark.parametrize(
    ("flags", "status", "says"),
    [
        ([], 0, "50 iterations (1 to 50)"),
        (["--min-correlation", "0.999", "--max-mean-error", "0.006", "--max-error", "0.05"], 0, "Pearson 0.9"),
        (["--max-mean-error", "0.001"], 1, "FAILED: mean relative error"),
        (["--min-correlation", "0.9999999"], 1, "FAILED: correlation"),
        (["--max-error", "0.001"], 1, "FAILED: largest relative error"),
        (["--first-iteration", "11", "--last-iteration", "20"], 0, "10 iterations (11 to 20)"),
    ],
)
def test_thresholds_decide_the_exit_status(
    flags: list[str], status: int, says: str, runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out" / "comparison.json"
    words = ["--reference", str(runs[0]), "--candidate", str(runs[1]), "--output", str(output), *flags]
    assert compare_loss.main(words) == status
    assert says in capsys.readouterr().out
    written = json.loads(output.read_text())
    assert bool(written["failed"]) == bool(status)
    assert written["losses"]["iteration"] == list(range(written["first_iteration"], written["last_iteration"] + 1))
    differences = np.abs(np.subtract(written["losses"]["candidate"], written["losses"]["reference"]))
    np.testing.assert_allclose((differences / np.abs(written["losses"]["reference"])).mean(), written["mean_error"])
    assert output.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"


def test_a_diverged_run_fails_every_threshold(tmp_path: Path) -> None:
    reference, candidate = write(tmp_path / "a.jsonl", [1.0, 0.9, 0.8]), write(tmp_path / "b.jsonl", [1.0, float("nan"), 0.8])
    flags = ["--min-correlation", "0", "--max-mean-error", "10", "--max-error", "10"]
    assert compare_loss.main(["--reference", str(reference), "--candidate", str(candidate), *flags]) == 1
    figures = compare_loss.compare(compare_loss.read_losses(str(reference)), compare_loss.read_losses(str(candidate)))
    config = compare_loss.CompareConfig(min_correlation=0, max_mean_error=10, max_error=10)
    assert len(figures.violations(config)) == 3 and figures.max_error_iteration == 2


def test_rungs_of_a_benchmark_can_be_compared(tmp_path: Path) -> None:
    path = tmp_path / "ladder.json"
    rungs = [{"name": "bf16", "losses": [2.0, 1.0]}, {"name": "fp8", "losses": [2.02, 1.0]}, {"name": "broken", "error": "x"}]
    path.write_text(json.dumps({"rungs": rungs}))
    figures = compare_loss.compare(*(compare_loss.read_losses(f"{path}#{name}") for name in ("bf16", "fp8")))
    assert figures.mean_error == pytest.approx(0.005)
    with pytest.raises(ValueError, match="no rung 'broken' with losses; there are: bf16, fp8, broken"):
        compare_loss.read_losses(f"{path}#broken")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ("", "no losses in it"),
        ('{"iterations": [1], "losses": [1.0]}\n{"iterat', "line 2: not a metrics record"),
        ('{"iterations": [90], "losses": [1.0]}', "0 iterations in common"),
    ],
)
def test_what_cannot_be_compared_ends_with_status_2(
    text: str | None, says: str, runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.jsonl"
    if text is not None:
        path.write_text(text)
    assert compare_loss.main(["--reference", str(runs[0]), "--candidate", str(path)]) == 2
    assert says in capsys.readouterr().err


def record(folder: Path, *flags: str, groups: ParallelGroups, iteration: int = 0) -> None:
    record_start(folder, tiny_config(*flags), groups, iteration)


def compared(tmp_path: Path, reference: Path | str, candidate: Path | str) -> dict[str, Any]:
    """The written JSON."""
    output = tmp_path / "comparison.json"
    words = ["--reference", str(reference), "--candidate", str(candidate), "--output", str(output)]
    assert compare_loss.main(words) == 0
    written: dict[str, Any] = json.loads(output.read_text())
    return written


def test_the_json_says_what_both_runs_were(tmp_path: Path, groups: ParallelGroups) -> None:
    folders = [tmp_path / "bf16", tmp_path / "fp8"]
    for folder in folders:
        folder.mkdir()
        write(folder / "metrics.jsonl", [3.0, 2.0, 1.0])
    shared = ("--bf16", "--no-allow-tf32", "--activation-checkpoint-module-patterns", "layers.*")
    record(folders[0], *shared, "--log-dir", "bf16", groups=groups)
    record(folders[1], *shared, "--log-dir", "fp8", "--fp8", "native", groups=groups)
    # The file in a folder is as good as the folder.
    written = compared(tmp_path, folders[0], folders[1] / "metrics.jsonl")
    assert written["flags"]["different"] == {
        "--fp8": {"reference": None, "candidate": "native"},
        "--log-dir": {"reference": "bf16", "candidate": "fp8"},
    }
    common = written["flags"]["common"]
    assert common["--bf16"] is True and common["--allow-tf32"] is False and common["--lr"] == 1e-3
    assert common["--activation-checkpoint-module-patterns"] == "layers.*" and "--weight-decay" not in common
    for run in written["runs"].values():
        assert run["gpu"] == "none (CPU)" and run["num_processes"] == 1 and run["command"] and run["iteration"] == 0
        assert run["versions"]["torch"] == torch.__version__ and "flags" not in run and "earlier_starts" not in run


def test_a_resumed_run_has_all_its_starts(tmp_path: Path, groups: ParallelGroups) -> None:
    write(tmp_path / "metrics.jsonl", [3.0, 2.0, 1.0])
    record(tmp_path, groups=groups)
    record(tmp_path, "--seed", "7", groups=groups, iteration=2)
    run = compared(tmp_path, tmp_path, tmp_path)["runs"]["candidate"]
    assert run["iteration"] == 2 and [start["iteration"] for start in run["earlier_starts"]] == [0]
    assert compare_loss.read_record(str(tmp_path))[1]["--seed"] == 7


def test_a_rung_and_a_training_are_set_beside_each_other(tmp_path: Path, groups: ParallelGroups) -> None:
    write(tmp_path / "metrics.jsonl", [3.0, 2.0])
    record(tmp_path, "--bf16", "--no-allow-tf32", groups=groups)
    rung = {"name": "fp8", "losses": [3.0, 2.5], "gpu": "NVIDIA H200", "commit": "abc"}
    rung["flags"] = [*TINY, "--bf16", "--no-allow-tf32", "--fp8", "native"]
    path = tmp_path / "ladder.json"
    path.write_text(json.dumps({"gpu": "NVIDIA H200", "versions": {"torch": "2.11.0"}, "command": "python x", "rungs": [rung]}))
    written = compared(tmp_path, tmp_path, f"{path}#fp8")
    assert written["flags"]["different"] == {"--fp8": {"reference": None, "candidate": "native"}}
    assert written["runs"]["candidate"] == {
        "command": "python x",
        "gpu": "NVIDIA H200",
        "versions": {"torch": "2.11.0"},
        "commit": "abc",
    }


def test_runs_of_before_are_compared_without_a_record(runs: tuple[Path, Path], tmp_path: Path) -> None:
    written = compared(tmp_path, *runs)
    assert written["runs"] == {"reference": None, "candidate": None} and written["flags"] is None
    path = tmp_path / "ladder.json"
    path.write_text(json.dumps({"rungs": [{"name": "old", "losses": [2.0, 1.0]}]}))
    written = compared(tmp_path, f"{path}#old", runs[0])
    assert written["runs"] == {"reference": None, "candidate": None} and written["flags"] is None


def test_a_broken_record_is_named(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    (runs[0] / "run.json").write_text("{")
    assert compare_loss.main(["--reference", str(runs[0]), "--candidate", str(runs[1])]) == 2
    assert "run.json: not the record of a run" in capsys.readouterr().err
