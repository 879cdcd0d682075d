"""Evaluations beside a training: nobody waits for them, a stop ends them, and what is left open is done by the next start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from evaluation_fixtures import EVALUATION_REPORT
from training_fixtures import tiny_config

from megatron_vla.config.run import RunConfig
from megatron_vla.file_lock import alone_in, is_held
from megatron_vla.models.registry import model_family
from megatron_vla.parallel.groups import shut_down
from megatron_vla.training import evaluation_jobs, loop
from megatron_vla.training.checkpoint_folder import in_use_file, remove_old
from megatron_vla.training.evaluation_jobs import EvaluationJobs
from megatron_vla.training.loop import train
from megatron_vla.training.session import training_session
from megatron_vla.training.signals import StopSignals

POPEN = subprocess.Popen
# In place of the evaluation: lives until the test writes SAVE/go, then leaves a result as the real one does. It ends by itself
# after two minutes, so that a training that waits for it fails the test and does not hang.
JOB = f"""
import json, os, pathlib, signal, sys, time
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
from megatron_vla.file_lock import alone_in
checkpoint = pathlib.Path(sys.argv[2])
save, results = checkpoint.parent, checkpoint.parent / "evaluation" / checkpoint.name
if (save / "deaf").exists():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with alone_in(results, "evaluation"):
    with (save / "started").open("a") as file:
        file.write(checkpoint.name[-1])
    deadline = time.monotonic() + 120
    while not (save / "go").exists():
        if time.monotonic() > deadline:
            sys.exit(1)
        time.sleep(0.01)
    (results / "report.json").write_text(json.dumps({EVALUATION_REPORT!r}))
    (results / "verdict.json").write_text(json.dumps({{"status": "promoted", "reasons": []}}))
"""


class Log:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def evaluation(self, iteration: int, results: Mapping[str, float]) -> None:
        self.said.append((iteration, results["success"]))

    def close(self) -> None:
        self.said.append("closed")


def run_config(folder: Path) -> RunConfig:
    """A tiny run that evaluates each of its three checkpoints."""
    evaluates = ("--save", str(folder), "--save-interval", "1", "--eval-interval", "1")
    return tiny_config("--train-iters", "3", "--lr-warmup-iters", "0", *evaluates)


@pytest.fixture
def jobs_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], EvaluationJobs]]:
    """EvaluationJobs of one --save folder, as each start of its training makes them; processes are JOBs."""
    started = []

    def popen(command: list[str], **options: Any) -> Any:
        started.append(POPEN([command[0], "-c", JOB, *command[3:]], **options))
        return started[-1]

    monkeypatch.setattr(evaluation_jobs.subprocess, "Popen", popen)
    yield lambda: EvaluationJobs(run_config(tmp_path), Log())
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


def save_checkpoint(jobs: EvaluationJobs, iteration: int) -> None:
    jobs.add(iteration)
    folder = jobs.root / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")


def started(root: Path, text: str) -> bool:
    """Wait until these JOBs work."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (root / "started").is_file() and (root / "started").read_text() == text:
            return True
        time.sleep(0.01)
    return False


def said_by(jobs: EvaluationJobs) -> list[Any]:
    assert isinstance(jobs.log, Log)
    return jobs.log.said


def test_polls_return_while_an_evaluation_lives(jobs_of: Callable[[], EvaluationJobs], tmp_path: Path) -> None:
    jobs = jobs_of()
    save_checkpoint(jobs, 1)
    assert [line.partition(" beside")[0] for line in jobs.poll()] == [f"evaluating {tmp_path}/iter_0000001"]
    assert started(tmp_path, "1")
    save_checkpoint(jobs, 2)
    assert [jobs.poll() for _ in range(20)] == [[]] * 20, "one at a time"
    assert jobs._process is not None and jobs._process.poll() is None and said_by(jobs) == []
    (tmp_path / "go").touch()
    jobs._process.wait(60)
    first, second = jobs.poll()
    assert first == "evaluation of iteration 1: success 50% (10% to 90%, 2 trials), promoted" and "iter_0000002" in second
    assert said_by(jobs) == [(1, 0.5)] and not in_use_file(tmp_path, 1).exists() and in_use_file(tmp_path, 2).exists()
    assert "iteration 2: success 50%" in list(jobs.finish())[-1]
    assert said_by(jobs) == [(1, 0.5), (2, 0.5), "closed"] and not in_use_file(tmp_path, 2).exists()


@pytest.mark.usefixtures("jobs_of")
def test_training_goes_on_while_its_evaluation_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps are done before the first evaluation ends; its result reaches metrics.jsonl."""
    config = run_config(tmp_path)
    monkeypatch.setattr("megatron_vla.training.session.prepare", prepared_without_a_simulator)
    with training_session(config, model_family("pi05")) as session:
        jobs = train(session)
    assert jobs is not None and session.state.iteration == 3
    assert jobs._running == 1 and jobs._process is not None and jobs._process.poll() is None and jobs.waiting == [2, 3]
    (tmp_path / "go").touch()
    assert sum(": success 50% " in line for line in jobs.finish()) == 3
    lines = [json.loads(line) for line in (tmp_path / "logs/metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines if "evaluation" in line] == [1, 2, 3]


@pytest.mark.parametrize("reason", ["signal of another rank", "signal after the last step", "error"])
def test_a_training_that_is_stopped_or_fails_ends_its_evaluation(
    jobs_of: Callable[[], EvaluationJobs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    polls, made, processes = [], [], []

    def poll(self: StopSignals) -> bool:
        polls.append(self)
        if len(polls) == 3 and reason == "signal after the last step":
            os.kill(os.getpid(), signal.SIGTERM)
        elif len(polls) == 3 and reason == "error":
            raise RuntimeError("the disk is full")
        return len(polls) == 3 and reason == "signal of another rank"

    class Watched(EvaluationJobs):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

        def poll(self) -> list[str]:
            lines = super().poll()
            if self._process is not None:
                assert started(tmp_path, "1")
                processes.append(self._process)
            return lines

    monkeypatch.setattr(StopSignals, "poll", poll)
    monkeypatch.setattr(loop, "EvaluationJobs", Watched)
    monkeypatch.setattr("megatron_vla.training.session.prepare", prepared_without_a_simulator)
    with (
        pytest.raises(RuntimeError, match="the disk is full") if reason == "error" else nullcontext(),
        training_session(run_config(tmp_path), model_family("pi05")) as session,
    ):
        train(session)
    if reason == "error":  # a session that fails leaves the groups to the end of the process
        shut_down()
    (jobs,) = made
    monkeypatch.undo()
    assert processes[-1].wait(60) == -signal.SIGTERM
    "".join(jobs.finish())
    marks = [i for i in (1, 2, 3) if in_use_file(tmp_path, i).exists()]
    assert marks == ([1, 2] if reason == "error" else [1, 2, 3]) and (tmp_path / "started").read_text() == "1"


def prepared_without_a_simulator(config: RunConfig, family: Any, world_size: int) -> Any:
    """Mock data cannot be evaluated, which the checks would say; the jobs here do not care."""
    from megatron_vla.data.build import build_data

    return None, build_data(config, family)


def test_a_stop_ends_the_evaluation_and_the_next_start_goes_on_with_it(
    jobs_of: Callable[[], EvaluationJobs], tmp_path: Path
) -> None:
    jobs = jobs_of()
    for iteration in (1, 2):
        save_checkpoint(jobs, iteration)
    jobs.poll()
    assert started(tmp_path, "1")
    assert jobs._process is not None
    process = jobs._process
    # A launcher's signal to the training's process group or session does not reach it.
    assert os.getsid(process.pid) == process.pid == os.getpgid(process.pid) != os.getpgid(0)
    jobs.stop()
    save_checkpoint(jobs, 3)
    lines = list(jobs.finish())
    assert process.poll() == -signal.SIGTERM and (tmp_path / "started").read_text() == "1", "another one was started"
    assert "evaluation of iteration 1 was stopped, the next start of this training goes on with it" in lines[0]
    assert lines[1:] == ["evaluations left for the next start of this training: iteration 2, 3"]
    assert said_by(jobs) == ["closed"]
    assert remove_old(tmp_path, 1, 3) == [], "--keep-last deleted a checkpoint that was not judged"
    again = jobs_of()
    assert again.waiting == [1, 2, 3]
    (tmp_path / "go").touch()
    assert [line[:34] for line in list(again.finish())[1::2]] == [f"evaluation of iteration {i}: success" for i in (1, 2, 3)]
    assert said_by(again) == [(1, 0.5), (2, 0.5), (3, 0.5), "closed"] and remove_old(tmp_path, 1, 3) == [1, 2]


def test_an_evaluation_that_does_not_stop_is_killed(
    jobs_of: Callable[[], EvaluationJobs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation_jobs, "STOP_SECONDS", 0.1)
    (tmp_path / "deaf").touch()
    jobs = jobs_of()
    save_checkpoint(jobs, 1)
    jobs.poll()
    assert started(tmp_path, "1") and jobs._process is not None
    process = jobs._process
    jobs.stop()
    assert "was stopped" in "".join(jobs.finish()) and process.poll() == -signal.SIGKILL
    assert in_use_file(tmp_path, 1).exists() and not is_held(in_use_file(tmp_path, 1).parent)


def test_a_stop_signal_ends_the_wait_for_evaluations(jobs_of: Callable[[], EvaluationJobs], tmp_path: Path) -> None:
    """The training is done and waits; what it waits for goes on after the next start."""
    before = signal.getsignal(signal.SIGTERM)
    jobs = jobs_of()
    save_checkpoint(jobs, 1)
    lines = []
    for line in jobs.finish():
        lines.append(line)
        if line.startswith("evaluating") and started(tmp_path, "1"):
            os.kill(os.getpid(), signal.SIGTERM)
    assert len(lines) == 2 and "iteration 1 was stopped" in lines[1] and in_use_file(tmp_path, 1).exists()
    assert signal.getsignal(signal.SIGTERM) == before and said_by(jobs) == ["closed"]


def test_an_evaluation_that_was_killed_keeps_its_mark_and_one_that_failed_does_not(
    jobs_of: Callable[[], EvaluationJobs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_of()
    save_checkpoint(jobs, 1)
    jobs.poll()
    assert started(tmp_path, "1") and jobs._process is not None
    jobs._process.kill()
    jobs._process.wait()
    assert "iteration 1 was killed by signal 9, the next start" in jobs.poll()[0] and in_use_file(tmp_path, 1).exists()
    monkeypatch.setattr(evaluation_jobs.subprocess, "Popen", lambda c, **k: POPEN([c[0], "-c", "exit('error: no')"], **k))
    assert "iteration 1 failed with exit status 1 (error: no)" in list(jobs_of().finish())[1]
    assert not in_use_file(tmp_path, 1).exists()


def test_the_result_of_an_evaluation_whose_training_was_killed_is_taken(
    jobs_of: Callable[[], EvaluationJobs], tmp_path: Path
) -> None:
    killed = jobs_of()
    save_checkpoint(killed, 1)
    killed.poll()
    assert started(tmp_path, "1")
    resumed = jobs_of()
    (line,) = resumed.poll()
    assert "evaluation of iteration 1: another process is at work in" in line and resumed._process is None
    assert [resumed.poll() for _ in range(5)] == [[]] * 5, "it is told once"
    (tmp_path / "go").touch()
    assert list(resumed.finish()) == ["evaluation of iteration 1: success 50% (10% to 90%, 2 trials), promoted"]
    assert (tmp_path / "started").read_text() == "1" and said_by(resumed) == [(1, 0.5), "closed"]
    assert not in_use_file(tmp_path, 1).exists()


def test_an_old_verdict_is_not_taken_for_the_one_that_is_asked_for(
    jobs_of: Callable[[], EvaluationJobs], tmp_path: Path
) -> None:
    """The checkpoint is saved again after a resume from an earlier one."""
    results = in_use_file(tmp_path, 1).parent
    results.mkdir(parents=True)
    (results / "verdict.json").write_text(json.dumps({"status": "rejected", "reasons": ["old"]}))
    jobs = jobs_of()
    save_checkpoint(jobs, 1)
    (tmp_path / "go").touch()
    assert "promoted" in list(jobs.finish())[-1] and (tmp_path / "started").read_text() == "1"


def test_an_evaluation_that_finds_its_folder_taken_waits(jobs_of: Callable[[], EvaluationJobs], tmp_path: Path) -> None:
    """Another one took it between the look and the start."""
    jobs = jobs_of()
    save_checkpoint(jobs, 1)
    results = in_use_file(tmp_path, 1).parent
    line = jobs._start(jobs.waiting.pop(0))
    with alone_in(results, "evaluation"):
        assert "evaluating" in line and jobs._process is not None
        assert jobs._process.wait(60) == 1
        assert [text.partition(": another")[0] for text in jobs.poll()] == [
            "evaluation of iteration 1 waits",
            "evaluation of iteration 1",
        ]
        assert jobs.waiting == [1] and in_use_file(tmp_path, 1).exists()
    (tmp_path / "go").touch()
    assert "success 50%" in list(jobs.finish())[-1]


def test_a_folder_is_waited_for_where_work_is_short(tmp_path: Path) -> None:
    order: list[str] = []

    def second() -> None:
        with alone_in(tmp_path, "verdict", wait=True):
            order.append("second")

    thread = threading.Thread(target=second)
    with alone_in(tmp_path, "verdict"):
        assert is_held(tmp_path)
        thread.start()
        thread.join(0.1)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"] and not is_held(tmp_path) and not is_held(tmp_path / "nothing")
