"""Closing the loop: every family's recipe passes the checks, stages reuse what is there, switches are compared rightly."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from loop_fixtures import parsed
from loop_recipes import RECIPES

from megatron_vla.config.check import check
from megatron_vla.evaluation.results import TRIALS_FILE
from megatron_vla.evaluation.statistics import Share
from megatron_vla.models.registry import MODEL_FAMILIES, model_family
from tools import close_the_loop
from tools.close_the_loop import (
    Loop,
    LoopConfig,
    Training,
    compare_switches,
    comparison,
    evaluation_command,
    prepared_environment,
    saved_steps,
    training_command,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("switches", ["all_switches", "no_switches"])
@pytest.mark.parametrize("name", MODEL_FAMILIES)
def test_recipes_pass_the_checks(name: str, switches: str) -> None:
    config = LoopConfig(model_name=name)
    flags = getattr(RECIPES[name], switches)
    run = parsed(config, Training(Path("out/run"), flags, 2000))
    errors = [finding for finding in check(run, model_family(name), 1) if finding.severity == "error"]
    assert not errors, errors
    assert run.model.bf16 and run.training.train_iters == 2000 and run.optimizer.lr_decay_style == "constant"
    is_fast = switches == "all_switches"
    assert run.optimization.runner == ("full_iteration_graph" if is_fast else "eager")
    assert run.optimization.compile == is_fast == run.optimizer.fused_adam
    assert run.family.action_horizon == 16


def test_small_groot_is_about_100_million_parameters_and_trains_them_all() -> None:
    run = parsed(LoopConfig(model_name="groot_n1_7"), Training(Path("out/run"), (), None))
    model = model_family("groot_n1_7").skeleton(run)
    counts = {p.requires_grad: 0 for p in model.parameters()}
    for parameter in model.parameters():
        counts[parameter.requires_grad] += parameter.numel()
    assert 95e6 < counts[True] < 120e6
    # The text tower's last norm, which nothing computes.
    assert counts[False] == run.family.hidden_size


def test_stages_are_reused_by_name(tmp_path: Path) -> None:
    config = LoopConfig(tasks=("reach",), train_iters=7)
    words = training_command(config, tmp_path, Training(tmp_path / "a", (), 7))
    assert "--min-lr" in words and words[words.index("--save-interval") + 1] == "1000"
    assert "--save-interval" not in training_command(LoopConfig(), tmp_path, Training(tmp_path / "a", (), None))
    assert saved_steps(tmp_path / "a") is None
    baseline = Training(tmp_path / "a", (), 7)
    evaluated = evaluation_command(config, Training(tmp_path / "b", (), 7), baseline)
    assert evaluated[evaluated.index("--baseline") + 1] == tmp_path / "a_evaluation"


def write_results(training: Training, outcomes: list[bool]) -> None:
    """What an evaluation leaves of these trials."""
    training.results.mkdir()
    share = Share(sum(outcomes), len(outcomes))
    report = {"success": share.value, "interval_95": list(share.interval), "trials": share.trials}
    (training.results / "report.json").write_text(json.dumps(report))
    trial = {"task": "reach", "seed": 1, "initial_state": None, "num_steps": 5, "seconds": 1.0}
    lines = [json.dumps({**trial, "index": i, "succeeded": outcome}) for i, outcome in enumerate(outcomes)]
    (training.results / TRIALS_FILE).write_text("\n".join(lines) + "\n")


def test_success_without_switches_is_compared_with_the_interval(tmp_path: Path) -> None:
    on, off = Training(tmp_path / "run", (), None), Training(tmp_path / "run_plain", (), 20)
    write_results(on, [True] * 12 + [False] * 8)
    write_results(off, [True] * 10 + [False] * 6 + [True] * 4)
    result, lines = comparison(on, off)
    assert result["off_is_within_interval"] and (result["trials_gained_by_off"], result["trials_lost_by_off"]) == (4, 2)
    assert "success 60.0%" in lines[0] and "success 70.0%, within that interval" in lines[1]
    worse = Training(tmp_path / "worse_plain", (), 20)
    write_results(worse, [True] * 2 + [False] * 18)
    result, lines = comparison(on, worse)
    assert not result["off_is_within_interval"] and result["p_off_is_worse"] < 0.01 and "OUTSIDE" in lines[1]


def test_another_schedule_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison may be a command of its own; without the first one's --train-iters it would compare schedules."""
    save = tmp_path / "run"
    save.mkdir()
    trained = SimpleNamespace(iteration=20, config=lambda: {"optimizer": {"lr_decay_style": "cosine"}})
    monkeypatch.setattr(close_the_loop, "latest_checkpoint", lambda save: trained)
    with pytest.raises(ValueError, match="run was trained with a cosine schedule -> compare with the --train-iters"):
        compare_switches(Loop(LoopConfig(), {}), tmp_path, Training(save, (), None))


def test_a_negative_number_of_held_out_episodes_is_told_before_anything_is_recorded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--held-out-episodes -1"):
        close_the_loop.close_the_loop(LoopConfig(output=str(tmp_path / "loop"), held_out_episodes=-1))
    assert not (tmp_path / "loop").exists()


@pytest.mark.simulator
@pytest.mark.slow
@pytest.mark.usefixtures("gl_backend")
@pytest.mark.parametrize("name", MODEL_FAMILIES)
def test_the_loop_closes(name: str, tmp_path: Path) -> None:
    """Record, train, evaluate, replay, and once more without switches."""
    size = {"pi05": "56", "groot_n1_7": "64"}[name]
    command = [sys.executable, "tools/close_the_loop.py", "--output", str(tmp_path / "loop"), "--model-name", name]
    command += ["--model-variant", "tiny", "--image-size", size, "--tasks", "drawer-close", "--episodes-per-task", "2"]
    command += ["--micro-batch-size", "4", "--train-iters", "20", "--trials-per-task", "2", "--max-steps", "10"]
    command += ["--num-processes", "2", "--train-flags=--no-bf16", "--compare-switches", "--results", str(tmp_path / "kept")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert result.stdout.count("bit for bit equal") == 2, "its own demonstrations and held-out ones"
    assert len(json.loads((tmp_path / "kept/run/replay/held_out/replay.json").read_text())["mean_absolute_error"]) == 4
    assert "that interval, after 20 steps as well" in result.stdout
    compared = json.loads((tmp_path / "kept/run_plain/comparison.json").read_text())
    assert compared["steps"] == 20 and (tmp_path / "kept/run/report.md").is_file()


def test_packages_of_another_python_are_refused_and_half_unpacked_ones_unpacked_again(tmp_path: Path) -> None:
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for name in (f"madeup-1-{own}-{own}-any.whl", "madeuptoo-1-py3-none-any.whl"):
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            wheel.writestr(f"{name.partition('-')[0]}/__init__.py", "")
    site = tmp_path / f"site-{sys.implementation.cache_tag}"
    site.with_name(f"{site.name}.partial").mkdir()
    environment = prepared_environment(str(tmp_path), ("json",))
    assert str(site) in environment["PYTHONPATH"] and {p.name for p in site.iterdir()} == {"madeup", "madeuptoo"}
    sys.path.remove(str(site))
    (tmp_path / "other-1-cp27-cp27m-any.whl").touch()
    with pytest.raises(ValueError, match=r"other-1-cp27-cp27m-any\.whl is not for Python 3"):
        prepared_environment(str(tmp_path), ("json",))


def test_every_recipe_has_a_family() -> None:
    assert set(RECIPES) == set(MODEL_FAMILIES)
    with pytest.raises(ValueError, match="known are pi05, groot_n1_7"):
        training_command(dataclasses.replace(LoopConfig(), model_name="x"), Path("out"), Training(Path("out/run"), (), None))
