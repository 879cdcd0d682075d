"""tools/prepare_data.py: RLDS and HDF5 to LeRobot v3.0, equal to the source, resumable, verified so that faults are found."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import prepare_data
import pyarrow.parquet as pq
import pytest
from make_fixture_dataset import code_frame, make_dataset, read_code
from rlds_fixtures import rlds_of
from test_rlds import assert_same_samples

from megatron_vla.config.data import DataConfig
from megatron_vla.data import conversion, conversion_verify
from megatron_vla.data.conversion import ConversionSettings, plan_shards, stamped
from megatron_vla.data.conversion_source import open_source
from megatron_vla.data.dataset import RobotDataset, build_robot_dataset
from megatron_vla.data.dataset_check import check_dataset_files
from megatron_vla.data.frame_source import FrameSource
from megatron_vla.data.metadata import read_metadata
from megatron_vla.file_lock import alone_in

CAMERAS = ("observation.images.base", "observation.images.wrist")


def opened(path: Path, mapping: str | None = None, cameras: tuple[str, ...] = CAMERAS) -> RobotDataset:
    config = DataConfig(data_path=(str(path),), rlds_mapping=mapping, video_backend="pyav")
    return build_robot_dataset(config, 6, cameras)


@pytest.fixture(scope="module")
def rlds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    root = tmp_path_factory.mktemp("source")
    return rlds_of(make_dataset(root / "lerobot", "v3.0"), root / "rlds")


def prepare(source: Path, mapping: str, output: Path, *more: str) -> int:
    flags = ["--input", str(source), "--mapping", mapping, "--output", str(output), "--num-processes", "1"]
    return prepare_data.main([*flags, "--episodes-per-shard", "2", *more])


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_lossless_round_trip_gives_identical_samples(rlds: tuple[Path, str], tmp_path: Path, processes: str) -> None:
    output = tmp_path / "out"
    assert prepare(*rlds, output, "--storage", "image", "--verify-frames", "0", "--num-processes", processes) == 0
    ours, reference = opened(output), opened(*rlds)
    assert_same_samples(ours, reference)
    assert ours.fingerprint() == reference.fingerprint()
    assert not [f for f in check_dataset_files(output, deep=True) if f.severity == "error"]
    assert not (tmp_path / "out.partial").exists()


def test_video_pairs_pictures_and_rows(rlds: tuple[Path, str], tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert prepare(*rlds, output) == 0
    table, _ = read_metadata(output)
    assert table.videos[CAMERAS[0]].files.num_files == 2 == table.data.num_files
    source = FrameSource(table, "pyav", 2)
    for episode in range(table.num_episodes):
        for number, camera in enumerate(CAMERAS):
            for frame in (0, int(table.length_E[episode]) - 1):
                assert read_code(source.frames(camera, episode, [frame])[0]) == (number, episode, frame)
    stored = json.loads((output / "meta/stats.json").read_text())
    ours = opened(output)
    np.testing.assert_allclose(stored["action"]["q01"], np.quantile(ours.actions_ND.astype(np.float64), 0.01, axis=0))
    assert stored["action"]["count"] == [len(ours)]
    indices = pq.read_table(sorted((output / "data").rglob("*.parquet"))[1])["index"].to_pylist()
    assert indices[0] == int(table.length_E[:2].sum())


def test_stopped_conversion_goes_on(rlds: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, calls = tmp_path / "out", []
    original = conversion.verify_shard

    def stop_at_second(folder: Path, source: Any, episodes: Sequence[int], verify_frames: int) -> None:
        calls.append(list(episodes))
        if len(calls) == 2:
            raise ValueError("stopped here")
        original(folder, source, episodes, verify_frames)

    monkeypatch.setattr(conversion, "verify_shard", stop_at_second)
    assert prepare(*rlds, output) == 1
    assert not output.exists()
    assert prepare(*rlds, output) == 0
    assert calls == [[0, 1], [2, 3], [2, 3]]  # the first shard was done once
    assert opened(output).fingerprint() == opened(*rlds).fingerprint()
    assert prepare(*rlds, output) == 1  # exists: not replaced without --overwrite


@pytest.mark.parametrize("moved", [False, True])
def test_shard_damaged_after_it_was_done_is_converted_again(
    rlds: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], moved: bool
) -> None:
    output, part = tmp_path / "out", "file-001" if moved else "data"
    original = os.replace

    def stop(source: Any, target: Any) -> None:
        # After the first shard's files, or before any.
        if part in str(target) and "/shard-0" not in str(target):
            raise ValueError("stopped here")
        original(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(conversion.os, "replace", stop)
        assert prepare(*rlds, output) == 1
    work = tmp_path / "out.partial"
    (damaged,) = (work / ("dataset" if moved else "shard-00000") / "videos" / CAMERAS[0]).rglob("*.mp4")
    os.truncate(damaged, 700)
    if moved:
        assert prepare(*rlds, output) == 1
        text = capsys.readouterr().err
        assert f"{damaged}: has 700 bytes" in text and "shard-00000 are converted again" in text
    assert prepare(*rlds, output) == 0
    assert opened(output).fingerprint() == opened(*rlds).fingerprint()
    assert not [f for f in check_dataset_files(output, deep=True) if f.severity == "error"]


def test_second_conversion_to_the_same_place_is_refused(
    rlds: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with alone_in(tmp_path / "out.partial", "conversion"):
        assert prepare(*rlds, tmp_path / "out") == 1
    assert "another conversion is at work here -> wait for it" in capsys.readouterr().err


@pytest.mark.parametrize("settings", [("--episodes-per-shard", "4"), pytest.param((), marks=pytest.mark.slow)], ids=str)
def test_stop_while_merging_with_the_same_or_other_settings(
    rlds: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]
) -> None:
    output, moved = tmp_path / "out", []
    original = os.replace

    def stop_at_third(source: Any, target: Any) -> None:
        if "file-" in str(target):
            moved.append(target)
            if len(moved) == 3:
                raise ValueError("stopped here")
        original(source, target)

    monkeypatch.setattr(conversion.os, "replace", stop_at_third)
    assert prepare(*rlds, output) == 1
    assert prepare(*rlds, output, *settings) == 0
    assert opened(output).fingerprint() == opened(*rlds).fingerprint()
    # Other settings leave nothing of the old files behind.
    assert len(list(output.rglob("*.mp4"))) == (2 if settings else 4)
    assert not [f for f in check_dataset_files(output, deep=False) if f.severity == "error"]


@pytest.mark.parametrize("fault", ["shifted frames", "changed number"])
def test_verification_finds_wrong_pairing(
    rlds: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    path, mapping = rlds
    source = open_source(path, mapping, str(tmp_path / "index"))
    plan = plan_shards(source, path, mapping, tmp_path, ConversionSettings(), 2)[1]
    if fault == "changed number":
        original_columns = type(source).columns
        calls: list[int] = []

        def columns(self: Any, episode: int) -> dict[str, np.ndarray]:
            calls.append(episode)
            values = original_columns(self, episode)
            return {**values, "action": values["action"] + (len(calls) == 1)}

        monkeypatch.setattr(type(source), "columns", columns)
        with pytest.raises(ValueError, match=r"record 0: column action was not written as it is"):
            conversion.convert_shard(plan)
    else:
        original_frames = type(source).frames

        def frames(self: Any, camera: str, episode: int, indices: Sequence[int]) -> Iterator[np.ndarray]:
            steps = list(indices)
            if len(steps) > 3:  # while writing: one frame late, as when a recorder drops its first picture
                steps = [max(0, k - 1) for k in steps]
            return original_frames(self, camera, episode, steps)

        monkeypatch.setattr(type(source), "frames", frames)
        with pytest.raises(ValueError, match=r"record 0, camera .*, frame \d+: .* is closest to frame \d+"):
            conversion.convert_shard(plan)
    assert stamped(plan) is None


def test_scene_at_rest_is_no_wrong_pairing() -> None:
    assert not conversion_verify.is_other(own_error=2.0, other_error=1.0, difference=1.5)
    assert conversion_verify.is_other(own_error=11.0, other_error=1.0, difference=10.0)


def write_hdf5(root: Path, upside_down: bool = True, text: str | None = "open the drawer") -> list[np.ndarray]:
    """Two files of LIBERO's layout; returns the actions of each demonstration in order."""
    h5py = pytest.importorskip("h5py")
    root.mkdir()
    actions = []
    for file, lengths in enumerate(((5, 7), (6,))):
        with h5py.File(root / f"task_{file}_demo.hdf5", "w") as handle:
            data = handle.create_group("data")
            if text is not None:
                data.attrs["problem_info"] = json.dumps({"language_instruction": f"{text} {file}"})
            for demo in reversed(range(len(lengths))):  # stored out of order; demo_10 must come after demo_2
                group, length = data.create_group(f"demo_{demo * 8 + 2}"), lengths[demo]
                generator = np.random.default_rng(10 * file + demo)
                group["actions"] = generator.normal(size=(length, 7))
                group["obs/ee_states"] = generator.normal(size=(length, 6))
                group["obs/gripper_states"] = generator.normal(size=(length, 2))
                frames = np.stack([code_frame(0, 4 * file + demo, k) for k in range(length)])
                group["obs/agentview_rgb"] = frames[:, ::-1, ::-1] if upside_down else frames
            actions += [np.asarray(data[f"demo_{demo * 8 + 2}/actions"]) for demo in range(len(lengths))]
    return actions


def _start_and_leave(link: Any) -> None:
    child = multiprocessing.get_context("spawn").Process(target=_follow, args=(os.getpid(),))
    child.start()
    link.send(child.pid)
    link.recv()
    os._exit(0)  # as if killed: nothing is joined


def _follow(parent: int) -> None:
    conversion._follow_parent(parent)
    time.sleep(600)


@pytest.mark.slow
def test_workers_end_with_a_killed_conversion() -> None:
    mine, theirs = multiprocessing.Pipe()
    parent = multiprocessing.get_context("spawn").Process(target=_start_and_leave, args=(theirs,))
    parent.start()
    pid = mine.recv()
    mine.send(None)
    parent.join()
    deadline = time.monotonic() + 300
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()


def test_hdf5_of_liberos_layout(tmp_path: Path) -> None:
    actions = write_hdf5(tmp_path / "libero")
    camera = "observation.images.agentview_rgb"
    mapping = json.dumps({"fps": 20, "robot_type": "panda", "rotate_180": [camera]})
    assert prepare(tmp_path / "libero", mapping, tmp_path / "out", "--storage", "image") == 0
    dataset = opened(tmp_path / "out", cameras=(camera,))
    assert dataset.table.length_E.tolist() == [5, 7, 6] and dataset.table.fps == 20
    np.testing.assert_array_equal(dataset.actions_ND, np.concatenate(actions).astype(np.float32))
    assert dataset.state_ND.shape[1] == 8
    assert [dataset.instruction(i) for i in (0, 5, 12)] == ["open the drawer 0", "open the drawer 0", "open the drawer 1"]
    assert [read_code(dataset[i].images[camera]) for i in (0, 6, 17)] == [(0, 0, 0), (0, 1, 1), (0, 4, 5)]


def test_hdf5_faults_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_hdf5(tmp_path / "libero", text=None)
    assert prepare(tmp_path / "libero", '{"fps": 20}', tmp_path / "out") == 1
    assert "task_0_demo.hdf5: states no instruction" in capsys.readouterr().err
    texts = {"task_0_demo": "push", "task_1_demo": "pull"}
    mapping = json.dumps({"fps": 20, "instruction_text": texts, "columns": {"action": "action"}})
    assert prepare(tmp_path / "libero", mapping, tmp_path / "out") == 1
    printed = capsys.readouterr().err
    assert "'action' is no numeric step feature" in printed and "obs/agentview_rgb (image [48, 64, 3])" in printed
    mapping = json.dumps({"fps": 20, "instruction_text": texts})
    assert prepare(tmp_path / "libero", mapping, tmp_path / "out") == 0
    assert opened(tmp_path / "out", cameras=()).instructions() == ("pull", "push")


def test_other_inputs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_dataset(tmp_path / "lerobot", "v3.0")
    assert prepare(root, "{}", tmp_path / "out") == 1
    assert "a LeRobot dataset already" in capsys.readouterr().err
    assert prepare(tmp_path, "{}", tmp_path / "out") == 1
    assert "no RLDS dataset" in capsys.readouterr().err
