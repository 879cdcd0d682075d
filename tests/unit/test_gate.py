"""The best pointer through verdicts of every kind, baselines that cannot be compared, and who evaluates where."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_vla.config.evaluation import EvaluationConfig
from megatron_vla.evaluation import closed_loop, command, gate
from megatron_vla.evaluation.command import CommandConfig, run_rollouts
from megatron_vla.evaluation.environments import interface
from megatron_vla.evaluation.gate import Gate, GateRules, Verdict, evaluation_folder, parse_gate
from megatron_vla.evaluation.plan import conditions, environment_settings
from megatron_vla.evaluation.results import ResultFolder, read_trials
from megatron_vla.evaluation.rollout import ActRequest, TrialResult
from megatron_vla.file_lock import alone_in
from megatron_vla.training.checkpoint_folder import BEST_POINTER, CheckpointFolder, best_iteration

CONDITIONS = {"environment": "fake", "revision": None, "settings": {"suite": "line"}, "seed": 0, "replan_interval": 2}
CONFIG = EvaluationConfig(eval_environment="fake", eval_trials_per_task=1, eval_workers=1)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def fake_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[1])  # worker processes import fake_suite by its name
    monkeypatch.setitem(interface.ENVIRONMENTS, "fake", "fake_suite")


def evaluated(root: Path, iteration: int, outcomes: str) -> list[TrialResult]:
    """A checkpoint and its finished evaluation; outcomes: "110" -> success, success, failure."""
    (root / f"iter_{iteration:07d}").mkdir(parents=True, exist_ok=True)
    folder = ResultFolder(evaluation_folder(root, iteration), CONDITIONS)
    for index, text in enumerate(outcomes):
        folder.add(TrialResult("near", index, 100 + index, None, text == "1", 5, 0.1))
    return folder.results


def judged(root: Path, iteration: int, *rules: str) -> str:
    """Its status by these rules."""
    results = read_trials(evaluation_folder(root, iteration))
    return Gate(rules=parse_gate(rules), root=root, iteration=iteration).record(results, CONDITIONS).status


def status_of(root: Path) -> dict[str, str]:
    content = json.loads((root / "evaluation/status.json").read_text())
    return {number: told["status"] for number, told in content.items()}


def test_the_pointer_leaves_a_checkpoint_that_stricter_rules_reject(tmp_path: Path) -> None:
    for iteration, outcomes in ((1, "1" * 12 + "0" * 8), (2, "1" * 13 + "0" * 7), (3, "1" * 14 + "0" * 6)):
        evaluated(tmp_path, iteration, outcomes)
        assert judged(tmp_path, iteration, "min_success=0.5") == "promoted" and best_iteration(tmp_path) == iteration
    (tmp_path / "iter_0000002").rmdir()  # as --keep-last does
    assert judged(tmp_path, 3, "min_success=0.9") == "rejected"
    assert best_iteration(tmp_path) == 1, "the newest promoted one that is still there"
    assert judged(tmp_path, 1, "min_success=0.9") == "rejected"
    assert best_iteration(tmp_path) is None and not (tmp_path / BEST_POINTER).exists()
    assert status_of(tmp_path) == {"1": "rejected", "2": "promoted", "3": "rejected"}
    assert judged(tmp_path, 3, "min_success=0.5") == "promoted" and best_iteration(tmp_path) == 3


def test_an_older_checkpoint_takes_the_pointer_only_if_it_is_shown_to_be_better(tmp_path: Path) -> None:
    for iteration, outcomes in ((1, "1" * 15 + "0" * 5), (2, "1" * 19 + "0"), (3, "1" * 12 + "0" * 8)):
        evaluated(tmp_path, iteration, outcomes)
    assert judged(tmp_path, 3, "min_success=0.5") == "promoted"
    # 3 trials gained, none lost: p = 1/8. Not worse, and that is no reason to go back.
    assert judged(tmp_path, 1, "rule=not_worse") == "promoted" and best_iteration(tmp_path) == 3
    # 7 gained, none lost: p = 1/128.
    assert judged(tmp_path, 2, "rule=not_worse", "alpha=0.007") == "promoted" and best_iteration(tmp_path) == 3
    assert judged(tmp_path, 2, "rule=not_worse", "alpha=0.008") == "promoted" and best_iteration(tmp_path) == 2
    # A newer one has to be not worse only: 12 against 19, p = 1/128.
    assert judged(tmp_path, 3, "rule=not_worse") == "rejected" and best_iteration(tmp_path) == 2
    evaluated(tmp_path, 4, "1" * 18 + "00")
    assert judged(tmp_path, 4, "rule=not_worse") == "promoted" and best_iteration(tmp_path) == 4


def test_an_evaluation_without_a_gate_takes_no_verdict_back(tmp_path: Path) -> None:
    evaluated(tmp_path, 1, "1100")
    evaluated(tmp_path, 2, "1101")
    assert judged(tmp_path, 1, "min_success=0.5") == "promoted"
    assert judged(tmp_path, 1) == "evaluated" and judged(tmp_path, 2) == "evaluated"
    assert status_of(tmp_path) == {"1": "promoted", "2": "evaluated"} and best_iteration(tmp_path) == 1


def test_verdicts_of_two_evaluations_at_once_are_both_kept(tmp_path: Path) -> None:
    """Each reads status.json before it writes it: the second has to wait for the first."""
    for iteration in (1, 2):
        evaluated(tmp_path, iteration, "1100")
    second = threading.Thread(target=judged, args=(tmp_path, 2, "min_success=0.5"))
    with alone_in(tmp_path / "evaluation", "verdict"):
        second.start()
        second.join(0.2)
        assert second.is_alive(), "it did not wait"
        gate.record_verdict(tmp_path, 1, Verdict("promoted"), 0.5)
    second.join(60)
    assert status_of(tmp_path) == {"1": "promoted", "2": "promoted"} and best_iteration(tmp_path) == 2
    assert json.loads((tmp_path / "evaluation/status.json").read_text())["2"]["comparison"]["trials"] == 4


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"eval_seed": 7}, "--eval-seed: 0 there, 7 now"),
        ({"eval_tasks": ("near",)}, r"--eval-tasks: \[\] there, \['near'\] now"),
        ({"eval_replan_interval": 3}, "--eval-replan-interval: 8 there, 3 now"),
        ({"eval_max_steps": 5}, "--eval-max-steps: None there, 5 now"),
        ({"eval_options": ("fps=5",)}, "--eval-options.fps: None there, 5 now"),
    ],
)
def test_a_baseline_that_cannot_be_compared_is_told_before_any_rollout(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    backend = interface.environment_backend("fake")
    described = conditions(CONFIG, backend, environment_settings(CONFIG, backend), 16)
    folder = ResultFolder(evaluation_folder(tmp_path, 1), described)
    folder.add(TrialResult("near", 0, 1, None, True, 5, 0.1))
    (tmp_path / BEST_POINTER).write_text("1\n")
    config = dataclasses.replace(CONFIG, **changes)
    rules = parse_gate(("min_success=0",))
    for by_hand, more in (
        (Gate(rules=None, baseline=folder.path), "name another evaluation with --baseline"),
        (Gate(rules=rules, root=tmp_path, iteration=2), f"delete {tmp_path / BEST_POINTER}"),
    ):
        with pytest.raises(ValueError, match=f"evaluated differently .{told}.* -> .*{more}"):
            closed_loop.evaluate(config, tmp_path / "out", None, {"name": "expert"}, print, by_hand.reference)
        assert not (tmp_path / "out").exists(), "it was begun"
    # Nothing is judged without a gate, so nothing has to be comparable.
    assert Gate(rules=None, root=tmp_path, iteration=2).reference({**described, "seed": 7}) is None
    found = Gate(rules=rules, root=tmp_path, iteration=2).reference(described)
    assert found is not None and found[0] == folder.path and len(found[1]) == 1


def test_a_baseline_without_a_finished_trial_is_told(tmp_path: Path) -> None:
    folder = ResultFolder(tmp_path, CONDITIONS)
    folder.add(TrialResult("near", 0, 1, None, False, 5, 0.1, error="crashed"))
    with pytest.raises(ValueError, match="no trial has ended -> finish that evaluation"):
        Gate(rules=GateRules(), baseline=tmp_path).reference(CONDITIONS)


class Striding:
    """In place of a policy: half a unit a step, and the costs of two calls."""

    action_horizon = 4
    camera_keys = ()
    preprocessor = SimpleNamespace(settings=None, pictures=None)

    def __call__(self, requests: Sequence[ActRequest]) -> list[np.ndarray]:
        return [np.full((4, 1), 0.5, np.float32) for _ in requests]

    def summary(self) -> dict[str, float]:
        return {"mean_batch_size": 1.5, "call_ms_p50": 7.04, "call_ms_p99": 9.0, "actions_per_s": 812.3}


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointFolder:
    """Its policy is a Striding."""
    monkeypatch.setattr(command, "load_policy", lambda *arguments: Striding())
    monkeypatch.setattr(command, "policy_facts", lambda *arguments: {"name": "striding"})
    monkeypatch.setattr(closed_loop, "PolicyActor", lambda policy, *arguments: policy)
    monkeypatch.setattr(closed_loop, "compatibility", lambda *arguments: None)
    monkeypatch.setattr(closed_loop, "simulator_cameras", lambda *arguments: {})
    (tmp_path / "save/iter_0000002").mkdir(parents=True)
    return CheckpointFolder(tmp_path / "save/iter_0000002", {"iteration": 2})


def test_the_expert_leaves_the_checkpoints_own_folder_alone(
    checkpoint: CheckpointFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    config = dataclasses.replace(CONFIG, eval_gate=("min_success=0.1",))
    root = checkpoint.path.parent
    assert run_rollouts(CommandConfig(policy="expert"), config, checkpoint)[1] == 2
    assert (root / "evaluation/expert/report.md").is_file() and not evaluation_folder(root, 2).exists()
    assert "* latency" not in capsys.readouterr().out and best_iteration(root) is None
    verdict, finished = run_rollouts(CommandConfig(), config, checkpoint)
    assert (verdict.status, finished, best_iteration(root)) == ("promoted", 2, 2)
    said = capsys.readouterr().out
    line = "* latency: 7.0 ms a call of the policy (p50), 9.0 ms (p99), mean batch 1.5, 812 actions/s"
    assert line in said and line in (evaluation_folder(root, 2) / "report.md").read_text()
    assert f"promoted checkpoint of {root}: 2" in said


def test_a_checkpoint_is_not_rolled_out_where_its_baseline_cannot_be_compared(checkpoint: CheckpointFolder) -> None:
    root = checkpoint.path.parent
    evaluated(root, 1, "11")
    (root / BEST_POINTER).write_text("1\n")
    config = dataclasses.replace(CONFIG, eval_gate=("min_success=0.1",), eval_seed=3)
    with pytest.raises(ValueError, match=r"--eval-seed: 0 there, 3 now\) -> give the same flags; or delete that folder"):
        run_rollouts(CommandConfig(), config, checkpoint)
    assert not evaluation_folder(root, 2).exists()
