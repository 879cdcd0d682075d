"""run.json of a training: what it holds, what a resume leaves of it, and the commit in it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from training_fixtures import build_run, tiny_config

from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.config.run import parse_args
from megatron_vla.parallel.groups import ParallelGroups, initialize, shut_down
from megatron_vla.training import run_record
from megatron_vla.training.loop import train
from megatron_vla.training.run_record import given_flags, read_starts, record_start
from megatron_vla.version import __version__, git_commit


@pytest.fixture
def groups() -> Iterator[ParallelGroups]:
    yield initialize(ParallelConfig(distributed_timeout_minutes=1.0))
    shut_down()


def test_a_training_records_its_start(tmp_path: Path, groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(run_record, "git_commit", lambda root: asked.append(root) or "abc")
    config = tiny_config("--train-iters", "1", "--lr-warmup-iters", "0", "--log-dir", str(tmp_path), "--no-allow-tf32")
    train(build_run(config, groups))
    (start,) = read_starts(tmp_path)
    assert start["iteration"] == 0 and start["gpu"] == "none (CPU)" and start["num_processes"] == 1
    assert start["flags"]["--train-iters"] == 1 and start["flags"]["--allow-tf32"] is False
    assert "--weight-decay" not in start["flags"], "it was not given"
    versions = start["versions"]
    assert versions["torch"] == torch.__version__ and versions["megatron_vla"] == __version__
    assert versions["cuda"] == torch.version.cuda and versions["megatron_core"] and versions["python"]
    assert start["command"] and start["started_at"]
    assert start["commit"] == "abc" and asked == [Path(__file__).resolve().parents[2]]


def test_flags_are_those_that_were_given_also_of_the_family() -> None:
    words = ("--model-variant", "tiny", "--image-size", "28", "--pipeline-layout", "1", "3", "--bf16")
    flags = given_flags(parse_args(words))
    assert flags == {"--model-variant": "tiny", "--image-size": 28, "--pipeline-layout": (1, 3), "--bf16": True}


def test_a_resume_keeps_the_starts_whose_steps_it_keeps(tmp_path: Path, groups: ParallelGroups) -> None:
    config = tiny_config()
    for iteration, kept in ((0, [0]), (10, [0, 10]), (20, [0, 10, 20]), (15, [0, 10, 15]), (10, [0, 10]), (0, [0])):
        record_start(tmp_path, config, groups, iteration)
        assert [start["iteration"] for start in read_starts(tmp_path)] == kept
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"begins": []})])
def test_a_broken_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run\.json: not the record of a run"):
        read_starts(tmp_path)


def test_the_commit_is_that_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a + for changed code, but not for results; None outside of git."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit(tmp_path) is None

    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    for name in ("code.py", "result.json"):
        (tmp_path / name).write_text("1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    (tmp_path / "result.json").write_text("2\n")
    assert git_commit(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "code.py").write_text("2\n")
    assert git_commit(tmp_path) == git("rev-parse", "HEAD") + "+"
