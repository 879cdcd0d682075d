"""Rollouts on a simulator of one line: outcomes that depend on the trials alone, repairs, resume, gate and statistics."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_vla.config.evaluation import EvaluationConfig
from megatron_vla.evaluation import closed_loop, gate
from megatron_vla.evaluation.environments import interface
from megatron_vla.evaluation.environments.interface import EnvironmentSettings, SimulatorError, environment_backend
from megatron_vla.evaluation.gate import judge, paired_test, parse_gate, read_baseline, record_verdict
from megatron_vla.evaluation.plan import list_trials, parse_options
from megatron_vla.evaluation.results import ResultFolder, first_error, read_trials
from megatron_vla.evaluation.rollout import ActRequest, Rollout, RolloutSettings, TrialQueue, TrialResult
from megatron_vla.evaluation.statistics import PairedTest, Share, binomial_tail
from megatron_vla.evaluation.video import read_video
from megatron_vla.file_lock import alone_in
from megatron_vla.training.checkpoint_folder import BEST_POINTER, best_iteration, in_use_file, remove_old

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # worker processes import fake_suite by its name


@pytest.fixture(autouse=True)
def fake_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(interface.ENVIRONMENTS, "fake", "fake_suite")


class Striding:
    """Steps of 0.5 in chunks of four; notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, float]] = []
        self.batch_sizes: list[int] = []

    def __call__(self, requests: Sequence[ActRequest]) -> list[np.ndarray]:
        self.batch_sizes.append(len(requests))
        for r in requests:
            self.asked.append((r.trial.key, r.chunk, float(r.observation.state_D[0])))
        return [np.full((4, 1), 0.5, np.float32) for _ in requests]


def roll(
    options: dict[str, Any] | None = None, count: int = 4, act: Any = None, tasks_named: tuple[str, ...] = (), **changes: Any
) -> dict[str, TrialResult]:
    """Results of `count` trials of each task by key."""
    settings = EnvironmentSettings(suite="line", tasks=tasks_named, options=options or {})
    backend = environment_backend("fake")
    tasks = backend.tasks(settings)
    trials = list_trials(tasks, count, 0, settings)
    rollout = Rollout(backend, settings, tasks, RolloutSettings(replan_interval=3, **changes), act or Striding())
    results = {result.key: result for result in rollout.run(trials)}
    assert set(results) == {trial.key for trial in trials}, "every listed trial ends once"
    return results


def expected_steps(result: TrialResult) -> int:
    """What the point needs at half a unit a step."""
    goal = (1.0 if result.task == "near" else 3.0) + (result.seed % 100) / 100
    return math.ceil(goal / 0.5)


def test_outcomes_do_not_depend_on_processes_and_batching() -> None:
    one, many = Striding(), Striding()
    alone = roll(act=one, num_workers=1)
    together = roll(act=many, num_workers=2, environments_per_worker=3)
    for key, result in alone.items():
        assert result.succeeded and result.num_steps == expected_steps(result)
        assert (result.num_steps, result.seed) == (together[key].num_steps, together[key].seed)
    assert set(one.asked) == set(many.asked)
    assert max(many.batch_sizes) >= 3 and max(one.batch_sizes) == 1
    # Three of four actions are executed, then the policy is asked again, from where the point is then.
    assert {(c, p) for k, c, p in one.asked if k == "far/0"} == {(0, 0.0), (1, 1.5), (2, 3.0)}


def test_a_trial_ends_at_its_limit_as_a_failure_and_at_its_end() -> None:
    slow = roll(act=lambda requests: [np.full((4, 1), 0.01, np.float32) for _ in requests], count=1)
    assert [(r.succeeded, r.num_steps, r.error) for r in slow.values()] == [(False, 13, None)] * 2
    off = roll(act=lambda requests: [np.full((4, 1), -0.6, np.float32) for _ in requests], count=1)
    assert [(r.succeeded, r.num_steps) for r in off.values()] == [(False, 2)] * 2


def test_the_expert_acts_through_the_same_runner() -> None:
    results = roll(act=lambda requests: None, count=1, environments_per_worker=2)
    assert results["near/0"].succeeded and not results["far/0"].succeeded  # 13 steps of 0.25 are not enough for far


def test_a_crash_or_exception_is_repeated_and_not_a_failure(tmp_path: Path) -> None:
    options = {"crash": [1], "raise": [2], "marks": str(tmp_path)}
    results = roll(options, num_workers=2)
    assert all(r.succeeded and r.error is None for r in results.values())
    assert {r.attempts for r in results.values() if r.index in (1, 2)} >= {2}


def test_a_trial_that_always_crashes_is_an_error_and_the_others_finish() -> None:
    results = roll({"crash": [0]}, count=2, num_workers=1)
    for result in results.values():
        assert result.succeeded == (result.index == 1)
    assert results["near/0"].error is not None and "exit status 9" in results["near/0"].error
    assert results["near/0"].attempts == 3


def test_an_error_of_the_physics_costs_attempts_and_not_the_evaluation() -> None:
    """Of any kind: LinAlgError is a ValueError, as are many others of simulators."""
    results = roll({"raise": [0]}, count=2, num_workers=1, tasks_named=("near",))
    assert results["near/1"].succeeded and results["near/0"].attempts == 3
    assert results["near/0"].error is not None and "LinAlgError: physics exploded" in results["near/0"].error


def test_a_hanging_simulator_is_replaced(tmp_path: Path) -> None:
    options = {"hang": [0], "marks": str(tmp_path)}
    results = roll(options, count=1, tasks_named=("near",), num_workers=1, step_timeout_seconds=12.0)
    assert all(r.succeeded for r in results.values()) and {r.attempts for r in results.values()} == {2}


def test_what_no_repetition_helps_ends_the_evaluation() -> None:
    with pytest.raises(SimulatorError, match="pip install point"):
        roll({"missing": True})
    with pytest.raises(SimulatorError, match="no such point"):
        roll({"refuse": [0]}, count=1)


def test_queue_keeps_the_task_and_then_takes_the_longest() -> None:
    settings = EnvironmentSettings(suite="line")
    trials = list_trials(environment_backend("fake").tasks(settings), 2, 0, settings)
    queue = TrialQueue([*trials, dataclasses.replace(trials[0], index=7)])
    order = [queue.take("far"), queue.take("far"), queue.take("far")]
    assert [t.key for t, _ in order if t] == ["far/0", "far/1", "near/0"]  # type: ignore[misc]
    assert len(queue) == 2


def test_starts_are_the_same_for_every_checkpoint_and_differ_by_seed_and_task() -> None:
    settings = EnvironmentSettings(suite="line")
    tasks = environment_backend("fake").tasks(settings)
    trials = list_trials(tasks, 4, 0, settings)
    assert trials == list_trials(tasks[::-1], 4, 0, settings)[4:] + list_trials(tasks[::-1], 4, 0, settings)[:4]
    assert len({t.seed for t in (*trials, *list_trials(tasks, 4, 1, settings))}) == 16
    assert [t.initial_state for t in trials[:4]] == [0, 1, 2, 0]
    random = list_trials(tasks, 2, 0, dataclasses.replace(settings, initial_states="random"))
    assert {t.initial_state for t in random} == {None} and random[0].seed == trials[0].seed


CONFIG = EvaluationConfig(eval_environment="fake", eval_trials_per_task=3, eval_workers=1)  # type: ignore[arg-type]


def test_evaluation_reports_films_and_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    said: list[str] = []
    report, results, description = closed_loop.evaluate(CONFIG, tmp_path, None, {"name": "expert"}, said.append)
    assert [row["successes"] for row in report["tasks"]] == [3, 0] and report["trials"] == 6
    assert (tmp_path / "montage.gif").stat().st_size > 100
    assert {p.name for p in (tmp_path / "videos").iterdir()} == {"near_0_success.gif", "far_0_failure.gif"}
    table = (tmp_path / "report.md").read_text()
    assert "| near | 100% | 44% to 100% | 3 |" in table and "| **all** | 50% | 19% to 81% | 6 |" in table
    # Killed after two trials, the second line half written.
    lines = (tmp_path / "trials.jsonl").read_text().splitlines()
    (tmp_path / "trials.jsonl").write_text(lines[0] + "\n" + lines[1] + "\n" + lines[2][:20])
    said.clear()
    again, _, _ = closed_loop.evaluate(CONFIG, tmp_path, None, {"name": "expert"}, said.append)
    assert "2 of 6 trials are there, 4 to run" in said[0]
    assert again["tasks"] == report["tasks"] and len(read_trials(tmp_path)) == 6
    with pytest.raises(ValueError, match=r"holds another evaluation .seed: 0 there, 1 now"):
        closed_loop.evaluate(dataclasses.replace(CONFIG, eval_seed=1), tmp_path, None, {"name": "expert"}, said.append)
    assert description["settings"]["suite"] == "line" and len(results) == 6


def test_trials_of_different_revisions_of_a_simulator_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = lambda text: None  # noqa: E731
    _, _, first = closed_loop.evaluate(CONFIG, tmp_path / "one", None, {"name": "expert"}, silent)
    # As evaluations were described before there were revisions.
    stored = tmp_path / "one/evaluation.json"
    content = json.loads(stored.read_text())
    assert content.pop("revision") is None and content.pop("camera_map") is None
    stored.write_text(json.dumps(content))
    closed_loop.evaluate(CONFIG, tmp_path / "one", None, {"name": "expert"}, silent)
    assert len(read_baseline(tmp_path / "one", first)) == 6
    monkeypatch.setattr("fake_suite.BACKEND", dataclasses.replace(environment_backend("fake"), revision=2))
    with pytest.raises(ValueError, match=r"holds another evaluation .revision: None there, 2 now"):
        closed_loop.evaluate(CONFIG, tmp_path / "one", None, {"name": "expert"}, silent)
    _, _, second = closed_loop.evaluate(CONFIG, tmp_path / "two", None, {"name": "expert"}, silent)
    for folder, description in (("one", second), ("two", first)):
        with pytest.raises(ValueError, match=r"evaluated differently .revision: "):
            read_baseline(tmp_path / folder, description)


def test_one_evaluation_at_a_time_writes_to_a_folder(tmp_path: Path) -> None:
    with alone_in(tmp_path, "evaluation"), pytest.raises(ValueError, match="another evaluation is at work here"):
        closed_loop.evaluate(CONFIG, tmp_path, None, {"name": "expert"}, lambda text: None)
    assert not (tmp_path / "trials.jsonl").exists()
    assert closed_loop.evaluate(CONFIG, tmp_path, None, {"name": "expert"}, lambda text: None)[0]["trials"] == 6


def test_trials_that_another_evaluation_has_just_finished_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one ends after this one has begun, and before this one holds the folder."""

    @contextmanager
    def late(folder: Path, work: str) -> Iterator[None]:
        monkeypatch.setattr(closed_loop, "alone_in", alone_in)
        closed_loop.evaluate(CONFIG, tmp_path, None, {"name": "expert"}, lambda text: None)
        with alone_in(folder, work):
            yield

    monkeypatch.setattr(closed_loop, "alone_in", late)
    assert closed_loop.evaluate(CONFIG, tmp_path, None, {"name": "expert"}, lambda text: None)[0]["trials"] == 6
    assert len((tmp_path / "trials.jsonl").read_text().splitlines()) == 6


def test_a_resumed_evaluation_has_the_whole_montage(tmp_path: Path) -> None:
    closed_loop.evaluate(CONFIG, tmp_path, None, {"name": "expert"}, lambda text: None)
    whole = read_video(tmp_path / "montage.gif", 10.0)
    lines = (tmp_path / "trials.jsonl").read_text().splitlines()
    for number in (1, len(lines)):  # killed after the first film, or before the montage
        (tmp_path / "montage.gif").unlink()
        (tmp_path / "trials.jsonl").write_text("".join(f"{line}\n" for line in lines[:number]))
        closed_loop.evaluate(CONFIG, tmp_path, None, {"name": "expert"}, lambda text: None)
        again = read_video(tmp_path / "montage.gif", 10.0)
        assert again[0].shape == whole[0].shape and abs(len(again) - len(whole)) <= 1


def test_errors_are_told() -> None:
    failed = dataclasses.replace(outcome("a", 1, False), error="Traceback\nRuntimeError: physics exploded\n")
    told = first_error([outcome("a", 0, True), failed])
    assert told is not None and told.startswith("1 trials") and told.endswith("first a/1: RuntimeError: physics exploded")
    assert first_error([outcome("a", 0, True)]) is None


def test_damaged_and_unwritable_folders_are_named(tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").write_text("{")
    with pytest.raises(ValueError, match=r"evaluation\.json: damaged"):
        ResultFolder(tmp_path, {"seed": 0})
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--output .*file/x: Not a directory"):
        closed_loop.evaluate(CONFIG, tmp_path / "file/x", None, {"name": "expert"}, lambda text: None)


def test_errors_run_again_on_resume(tmp_path: Path) -> None:
    folder = ResultFolder(tmp_path, {"seed": 0})
    folder.add(outcome("a", 0, True))
    folder.add(dataclasses.replace(outcome("a", 1, False), error="crashed"))
    assert [r.key for r in ResultFolder(tmp_path, {"seed": 0}).results] == ["a/0"]


def outcome(task: str, index: int, succeeded: bool) -> TrialResult:
    return TrialResult(task, index, 100 + index, None, succeeded, 5, 0.1)


def outcomes(task: str, text: str) -> list[TrialResult]:
    """ "110" -> success, success, failure."""
    return [outcome(task, k, c == "1") for k, c in enumerate(text)]


def test_wilson_interval_and_exact_test_against_published_numbers() -> None:
    # Newcombe 1998, table I, method 3 (Wilson score): 81/263, 15/148, 0/20, 1/29.
    for successes, trials, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert Share(successes, trials).interval == pytest.approx((low, high), abs=6e-5)
    assert Share(20, 20).interval[1] == 1.0 and Share(0, 0).interval == (0.0, 1.0)
    # Sign test tables: P(X >= 8 | 10) = 56/1024, P(X >= 9) = 11/1024.
    assert binomial_tail(8, 10) == 56 / 1024 and binomial_tail(9, 10) == 11 / 1024 and binomial_tail(0, 0) == 1.0
    test = PairedTest(gained=1, lost=9, trials=40)
    assert test.p_worse == 11 / 1024 and test.p_better == 1023 / 1024


def test_gate_promotes_rejects_and_says_why() -> None:
    good, bad = outcomes("a", "1" * 18 + "00"), outcomes("a", "1" * 10 + "0" * 10)
    rules = parse_gate(("min_success=0.6",))
    assert judge(rules, good, None, None).status == "promoted"
    rejected = judge(rules, bad, None, None)
    assert rejected.status == "rejected" and "success 50%" in rejected.reasons[0]
    # 8 lost, none gained: p = 1/256. The same difference over other trials is no pair.
    worse = judge(parse_gate(("rule=not_worse",)), bad, good, "best")
    assert worse.status == "rejected" and "8 lost of 20, p = 0.00391" in worse.reasons[0]
    assert judge(parse_gate(("rule=better",)), good, bad, "best").status == "promoted"
    even = judge(parse_gate(("rule=better",)), good, good, "best")
    assert even.status == "rejected" and "p = 1 " in even.reasons[0]
    assert judge(parse_gate(("alpha=0.05",)), good, good, "best").status == "promoted"
    assert "margin=0.1" in judge(parse_gate(("margin=0.1", "alpha=0")), bad, good, "b").reasons[0]
    assert "min_lower_bound" in judge(parse_gate(("min_lower_bound=0.8",)), good, None, None).reasons[0]
    tasks = [*outcomes("a", "11"), *outcomes("b", "00")]
    assert "b: 0%" in judge(parse_gate(("min_task_success=0.5",)), tasks, None, None).reasons[0]
    broken = [*good[:-1], dataclasses.replace(good[-1], error="crash")]
    assert "1 trials ended in errors" in judge(rules, broken, None, None).reasons[0]
    assert judge(None, bad, good, "best").status == "evaluated"
    other = [dataclasses.replace(r, seed=r.seed + 1000) for r in good]
    with pytest.raises(ValueError, match="other trials"):
        paired_test(good, other)


@pytest.mark.parametrize("entry", ["min_sucess=1", "min_success", "min_success=x", "rule=best", "alpha=7"])
def test_bad_gates_are_named(entry: str) -> None:
    with pytest.raises(ValueError, match=f"--eval-gate '{entry}'"):
        parse_gate((entry,))


def test_best_pointer_moves_only_on_promotion_and_protects_its_checkpoint(tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 4):
        (tmp_path / f"iter_{iteration:07d}").mkdir()
    record_verdict(tmp_path, 1, gate.Verdict("promoted"), 0.6)
    record_verdict(tmp_path, 2, gate.Verdict("rejected", ("worse",)), 0.2)
    assert best_iteration(tmp_path) == 1 and (tmp_path / BEST_POINTER).read_text() == "1\n"
    status = json.loads((tmp_path / "evaluation/status.json").read_text())
    assert [status[str(i)]["status"] for i in (1, 2)] == ["promoted", "rejected"] and status["2"]["reasons"] == ["worse"]
    assert gate.promoted_baseline(tmp_path, 2) == tmp_path / "evaluation/iter_0000001"
    in_use_file(tmp_path, 2).parent.mkdir(parents=True)
    in_use_file(tmp_path, 2).touch()
    assert remove_old(tmp_path, 1, 4) == [3]
    in_use_file(tmp_path, 2).unlink()
    assert remove_old(tmp_path, 1, 4) == [2]


def test_options_are_json_or_text() -> None:
    assert parse_options(("fps=10", "a=text", 'm={"x": 1}', "b=true")) == {"fps": 10, "a": "text", "m": {"x": 1}, "b": True}
    with pytest.raises(ValueError, match="--eval-options 'fps'"):
        parse_options(("fps",))
