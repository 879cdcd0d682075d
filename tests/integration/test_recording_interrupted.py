"""Lost simulators, interrupted recordings and --overwrite: nothing is lost, and nothing of it shows in the dataset."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

import pytest
from recording_fixtures import CONFIG, FAULTS, MARKS, play_fakes

from megatron_vla.data.recording_shards import ShardedRecording
from megatron_vla.file_lock import alone_in
from tools import record_demonstrations as recorder
from tools.record_demonstrations import RecordingConfig, is_reusable, record


@pytest.fixture
def faked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordingConfig:
    """Two tasks of five episodes of `FakeEnvironment`, in shards of two; FAULTS says what goes wrong in which episode."""
    monkeypatch.setenv("MUJOCO_GL", "none")  # as the recorder sets it: taken back afterwards
    monkeypatch.setattr(recorder, "choose_backend", lambda: "none")
    monkeypatch.setattr(recorder, "version", lambda package: "0")
    monkeypatch.setattr(recorder, "record_episodes", play_fakes)
    monkeypatch.setenv(FAULTS, "")
    monkeypatch.setattr(recorder, "ShardedRecording", partial(ShardedRecording, episodes_per_shard=2))
    monkeypatch.setenv(MARKS, str(tmp_path / "marks"))
    (tmp_path / "marks").mkdir()
    return dataclasses.replace(
        CONFIG, episodes_per_task=5, noise_fraction=0.5, image_size=2, picture_format="png", output=str(tmp_path / "made")
    )


def files_of(root: Path) -> dict[str, bytes]:
    """Everything in a folder, but what is told of the settings (it names no output)."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_lost_simulators_leave_no_trace(
    faked: RecordingConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One process, and two that are both lost on the way: the same files."""
    one = files_of(record(faked))
    assert len([name for name in one if name.startswith("data/")]) == 5 and "meta/info.json" in one
    capsys.readouterr()
    monkeypatch.setenv(FAULTS, "crash:button-press-topdown-v3:1 raise:window-close-v3:0")
    config = dataclasses.replace(faked, num_processes=2, output=faked.output + "2")
    assert files_of(record(config)) == one
    told = capsys.readouterr().out
    seed, _ = recorder.attempt_draws(config, recorder.chosen(config)[2][0], 1, 0)
    assert f"task button-press-topdown-v3, episode 1, attempt 1 (simulator seed {seed}): its process ended with" in told
    assert "task window-close-v3, episode 0, attempt 1" in told and "physics exploded" in told


def test_an_episode_that_always_crashes_is_named(faked: RecordingConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULTS, "always:window-close-v3:3")
    message = r"task window-close-v3, episode 3, attempt 1 \(simulator seed \d+\): .*exit status 9 \(3 times.*--tasks"
    with pytest.raises(ValueError, match=message):
        record(faked)


def test_an_interrupted_recording_goes_on(
    faked: RecordingConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its eight finished episodes are not played again, and the files are those of a recording without interruption."""
    uninterrupted = files_of(record(dataclasses.replace(faked, output=faked.output + "2")))
    monkeypatch.setenv(FAULTS, "stop:window-close-v3:3")
    with pytest.raises(ValueError, match="stopped here"):
        record(faked)
    work = Path(faked.output + ".partial")
    shards = {path: path.stat().st_mtime_ns for path in work.glob("shard-*/stamp.json")}
    assert len(shards) == 4
    # Other settings neither go on with them nor delete them.
    with pytest.raises(ValueError, match=r"interrupted recording \(seed: 3 there, 4 asked\) -> .*--overwrite"):
        record(dataclasses.replace(faked, seed=4))
    assert {path: path.stat().st_mtime_ns for path in work.glob("shard-*/stamp.json")} == shards
    monkeypatch.setenv(FAULTS, "always:button-press-topdown-v3:2 always:window-close-v3:1")
    capsys.readouterr()
    assert files_of(record(faked)) == uninterrupted
    assert "8 of 10 episodes are there" in capsys.readouterr().out and not work.exists()


def test_overwriting_keeps_the_old_dataset_until_the_new_one_is_complete(
    faked: RecordingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = files_of(record(faked))
    other = dataclasses.replace(faked, seed=4, overwrite=True)
    monkeypatch.setenv(FAULTS, "stop:window-close-v3:3")
    with pytest.raises(ValueError, match="stopped here"):
        record(other)
    assert files_of(Path(faked.output)) == old
    monkeypatch.setenv(FAULTS, "")
    record(other)
    new = json.loads((Path(faked.output) / recorder.RECORDING_FILE).read_text())
    assert new["settings"]["seed"] == 4 and not Path(faked.output + ".partial").exists()


def test_foreign_and_interrupted_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("precious")
    with pytest.raises(ValueError, match="not recorded by this tool"):
        is_reusable(dataclasses.replace(CONFIG, output=str(tmp_path / "mine")))
    partial = tmp_path / "new.partial"
    (partial / "dataset/data").mkdir(parents=True)
    with alone_in(partial, "recording"), pytest.raises(ValueError, match=r"new\.partial: another recording is at work here"):
        record(dataclasses.replace(CONFIG, output=str(tmp_path / "new")))
    assert (partial / "dataset/data").exists()
    monkeypatch.setattr(recorder, "choose_backend", lambda: (_ for _ in ()).throw(ValueError("stop here")))
    with pytest.raises(ValueError, match="stop here"):
        record(dataclasses.replace(CONFIG, output=str(tmp_path / "new")))
    assert (partial / "dataset/data").exists() and not (tmp_path / "new").exists()
