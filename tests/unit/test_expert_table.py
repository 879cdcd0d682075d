"""The table of expert success: what the files say is what the trials were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_vla.config.evaluation import EvaluationConfig
from megatron_vla.evaluation.rollout import TrialResult
from tools import expert_table


def test_table_counts_tasks_and_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = {"take a": [True, True], "take b": [True, False]}

    def evaluate(config: EvaluationConfig, output: Path, *_: Any) -> tuple[dict[str, Any], list[TrialResult], dict[str, Any]]:
        assert config.eval_suite == output.name == "libero_goal" and config.eval_options == ("pictures=false",)
        results = [
            TrialResult(task=task, index=k, seed=0, initial_state=k, succeeded=s, num_steps=50, seconds=2.25)
            for task, successes in outcomes.items()
            for k, s in enumerate(successes)
        ]
        tasks = [
            {"task": task, "instruction": task, "successes": sum(s), "trials": 2, "mean_steps_of_successes": 50.0}
            for task, s in outcomes.items()
        ]
        report = {"success": 0.75, "interval_95": [0.3, 0.95], "successes": 3, "trials": 4, "errors": 0, "tasks": tasks}
        return report | {"versions": {"mujoco": "3.3.0"}, "gl_backend": "egl", "times": {}}, results, {}

    monkeypatch.setattr(expert_table, "evaluate", evaluate)
    expert_table.main(["--suites", "libero_goal", "--trials-per-task", "2", "--output", str(tmp_path / "table")])
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["suites"][0]["tasks_always_solved"] == 1 and table["suites"][0]["tasks"][1]["seconds"] == 4.5
    text = (tmp_path / "table.md").read_text()
    assert "3 of 4 trials (30% to 95%), 1 of 2 tasks in every trial" in text and "| take b | 1 of 2 | 50 | 4 |" in text
