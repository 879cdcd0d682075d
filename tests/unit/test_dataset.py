"""RobotDataset: pictures and rows of the same moment, whatever the format, the process and the defect.

Shape legend: N samples, T action horizon, D dimensions.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq
import pytest
from make_fixture_dataset import CAMERAS, LENGTHS, make_dataset, motion, read_code

from megatron_vla.config.data import DataConfig
from megatron_vla.data.dataset import RawSample, RobotDataset, build_robot_dataset
from megatron_vla.findings import CheckError

HORIZON = 10
VERSIONS = ("v2.0", "v2.1", "v3.0")
STARTS = np.concatenate([[0], np.cumsum(LENGTHS)])


def build(root: Path, cameras: tuple[str, ...] = CAMERAS, horizon: int = HORIZON, **flags: Any) -> RobotDataset:
    return build_robot_dataset(DataConfig(data_path=(str(root),), **flags), horizon, cameras)


def assert_paired(sample: RawSample, cameras: tuple[str, ...] = CAMERAS) -> None:
    """The pictures, the action and the sample's own labels name the same moment."""
    assert np.float32(sample.episode_index + sample.frame_index / 1000) == sample.actions_TD[0, 0]
    for i, camera in enumerate(cameras):
        assert read_code(sample.images[camera]) == (i, sample.episode_index, sample.frame_index)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_sample_pairs_pictures_and_rows(fixture_dataset: Callable[..., Path], version: str) -> None:
    dataset = build(fixture_dataset(None, version))
    assert len(dataset) == sum(LENGTHS)
    for i in np.random.default_rng(1).permutation(len(dataset)):
        assert_paired(dataset[int(i)])


def test_action_windows_end_with_the_episode(fixture_dataset: Callable[..., Path]) -> None:
    dataset = build(fixture_dataset())
    for episode, length in enumerate(LENGTHS):
        state, action = motion(episode, length)
        for frame in (0, length - HORIZON, length - HORIZON + 1, length - 1):
            sample = dataset[int(STARTS[episode] + frame)]
            rows = np.minimum(frame + np.arange(HORIZON), length - 1)
            np.testing.assert_array_equal(sample.actions_TD, action[rows])
            np.testing.assert_array_equal(sample.state_D, state[frame])
            assert sample.action_is_in_episode_T.tolist() == [frame + k < length for k in range(HORIZON)]
            assert sample.instruction == ("Open a drawer", "Pick up the puck")[episode % 2]
    assert dataset.episode_of_N.tolist() == np.repeat(range(4), LENGTHS).tolist()
    assert dataset.state_ND.dtype == dataset.actions_ND.dtype == np.float32


def test_D06_padded_share_equals_brute_force(fixture_dataset: Callable[..., Path]) -> None:
    dataset = build(fixture_dataset())
    masks = np.stack([dataset.action_chunk(i)[1] for i in range(len(dataset))])
    assert dataset.steps.padded_share(dataset.table.length_E) == pytest.approx(1 - masks.mean())
    assert any("beyond the episode's end" in line for line in dataset.summary)
    long = build(fixture_dataset(), horizon=60)
    assert any(f.where == "--action-horizon" and "of all action steps" in f.what for f in long.findings)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_golden_samples_equal_a_sequential_decode(golden_datasets: dict[str, Path], version: str) -> None:
    """Pictures against PyAV decoding each file from its start, rows against pyarrow's Python lists."""
    root = golden_datasets[version]
    dataset = build(root, ("observation.images.front", "observation.images.wrist"), 8)
    rows = [row for path in sorted((root / "data").rglob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    frames: dict[str, list[np.ndarray]] = {}
    for camera in dataset.cameras:
        for path in sorted(p for p in (root / "videos").rglob("*.mp4") if camera in p.parts):
            with av.open(str(path)) as container:
                frames.setdefault(camera, []).extend(f.to_ndarray(format="rgb24") for f in container.decode(video=0))
    assert len(rows) == len(dataset) == 80
    for i in (0, 7, 19, 20, 39, 41, 60, 79):
        sample = dataset[i]
        np.testing.assert_array_equal(sample.state_D, np.float32(rows[i]["observation.state"]))
        last = i // 20 * 20 + 19
        np.testing.assert_array_equal(sample.actions_TD, np.float32([rows[min(i + k, last)]["action"] for k in range(8)]))
        for camera in dataset.cameras:
            np.testing.assert_array_equal(sample.images[camera], frames[camera][i])


def test_D12_golden_versions_agree(golden_datasets: dict[str, Path]) -> None:
    """The same recording in both formats: equal rows and fingerprint, pictures up to the two AV1 encodings."""
    old, new = (build(golden_datasets[v], ("observation.images.front",), 8) for v in ("v2.1", "v3.0"))
    assert old.fingerprint() == new.fingerprint()
    for i in range(0, 80, 9):
        a, b = old[i], new[i]
        np.testing.assert_array_equal(a.actions_TD, b.actions_TD)
        np.testing.assert_array_equal(a.state_D, b.state_D)
        assert (a.instruction, a.episode_index, a.frame_index) == (b.instruction, b.episode_index, b.frame_index)
        image_a, image_b = (s.images["observation.images.front"].astype(np.float32) for s in (a, b))
        assert np.abs(image_a - image_b).mean() < 3


def test_D12_three_versions_give_identical_samples(tmp_path: Path) -> None:
    """With lossless pictures every field of every sample is equal, bit for bit."""
    datasets = [
        build(make_dataset(tmp_path / v, v, camera_dtype="image", lengths=(7, 5, 9, 6)))  # type: ignore[arg-type]
        for v in VERSIONS
    ]
    assert len({dataset.fingerprint() for dataset in datasets}) == 1
    for i in range(27):
        first, *others = (pickle.dumps(dataset[i]) for dataset in datasets)
        assert all(other == first for other in others)


def test_fingerprint_sees_every_number(tmp_path: Path, fixture_dataset: Callable[..., Path]) -> None:
    healthy = build(fixture_dataset()).fingerprint()
    assert build(fixture_dataset(None, "v2.0")).fingerprint() == healthy
    assert build(fixture_dataset("copy_action")).fingerprint() != healthy
    (tmp_path / "exclude").write_text("3\n")
    assert build(fixture_dataset(), exclude_episodes_file=str(tmp_path / "exclude")).fingerprint() != healthy


def test_D10_image_features_equal_video_up_to_codec(fixture_dataset: Callable[..., Path]) -> None:
    images, video = build(fixture_dataset("image_only")), build(fixture_dataset())
    assert json.loads((fixture_dataset("image_only") / "meta/info.json").read_text())["video_path"] is None
    for i in (0, 22, 23, 60, 97):
        assert_paired(images[i])
        a, b = images[i].images[CAMERAS[0]].astype(np.float32), video[i].images[CAMERAS[0]].astype(np.float32)
        assert 0 < np.abs(a - b).mean() < 8


def test_D10_images_as_paths(tmp_path: Path) -> None:
    """Some recorders leave the PNG files in a folder and only their path in the table."""
    root = make_dataset(tmp_path / "d", "v2.1", camera_dtype="image", cameras=CAMERAS[:1], lengths=(5,))
    path = root / "data/chunk-000/episode_000000.parquet"
    table = pq.read_table(path)
    cells = table[CAMERAS[0]].to_pylist()
    for k, cell in enumerate(cells):
        (root / "images").mkdir(exist_ok=True)
        (root / f"images/{k}.png").write_bytes(cell["bytes"])
        cells[k] = {"bytes": None, "path": f"images/{k}.png"}
    import pyarrow as pa

    column = pa.array(cells, table.schema.field(CAMERAS[0]).type)
    pq.write_table(table.set_column(table.column_names.index(CAMERAS[0]), CAMERAS[0], column), path)
    dataset = build(root, CAMERAS[:1])
    for i in range(5):
        assert_paired(dataset[i], CAMERAS[:1])


@pytest.mark.parametrize("version", VERSIONS)
def test_D13_unused_columns_are_not_read(fixture_dataset: Callable[..., Path], version: str) -> None:
    dataset = build(fixture_dataset("extra_columns", version))
    assert dataset.fingerprint() == build(fixture_dataset()).fingerprint()
    assert_paired(dataset[50])


def test_D02_wall_clock_trains_with_a_warning(fixture_dataset: Callable[..., Path]) -> None:
    dataset = build(fixture_dataset("wall_clock"))
    texts = [str(f) for f in dataset.findings]
    assert any("starts at 1700000000" in t for t in texts)
    assert any("steps deviate from 100.00 ms by" in t for t in texts)
    assert_paired(dataset[70])


def test_D14_nothing_is_written_anywhere(fixture_dataset: Callable[..., Path], tmp_path: Path) -> None:
    """HOME and the cache folders cannot be created; the dataset folder stays as it was."""
    root = fixture_dataset()
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*")}
    code = (
        "import sys; from megatron_vla.config.data import DataConfig\n"
        "from megatron_vla.data.dataset import build_robot_dataset\n"
        "d = build_robot_dataset(DataConfig(data_path=(sys.argv[1],)), 4, sys.argv[2:]); d[30]\n"
        "assert not {'datasets', 'pandas', 'lerobot'} & set(sys.modules); print(len(d))"
    )
    env = {**os.environ, "HOME": "/proc/none", "XDG_CACHE_HOME": "/proc/none", "HF_HUB_OFFLINE": "1"}
    env["TMPDIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", code, str(root), *CAMERAS], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == str(sum(LENGTHS)), done.stderr
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*")} == before
    assert not list(tmp_path.iterdir())


def test_D15_broken_files_stop_training_until_excluded(fixture_dataset: Callable[..., Path], tmp_path: Path) -> None:
    from check_dataset import main

    root = fixture_dataset("broken_files")
    with pytest.raises(CheckError) as found:
        build(root)
    assert len(found.value.findings) == 3
    names = ("data/chunk-000/episode_000000.parquet", "base/episode_000001.mp4", "wrist/episode_000002.mp4")
    for name in names:
        assert sum(name in f.where for f in found.value.findings) == 1
    exclude = tmp_path / "exclude.txt"
    assert main(["--data-path", str(root), "--write-exclude-list", str(exclude)]) == 1
    dataset = build(root, exclude_episodes_file=str(exclude))
    assert set(dataset.episode_of_N.tolist()) == {3}
    assert len(dataset) == LENGTHS[3]
    for i in range(len(dataset)):
        assert_paired(dataset[i])


def test_exclude_list_of_another_dataset_is_refused(fixture_dataset: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "list").write_text("# a comment\n1\n\n17  # far\nx\n")
    with pytest.raises(CheckError) as found:
        build(fixture_dataset(), exclude_episodes_file=str(tmp_path / "list"))
    text = str(found.value)
    assert "lists episode 17, which" in text
    assert "list, line 5: 'x'" in text


def test_excluded_episode_in_the_middle_of_a_file(fixture_dataset: Callable[..., Path], tmp_path: Path) -> None:
    """Rows and frames of the others stay where they are."""
    (tmp_path / "list").write_text("1\n")
    dataset = build(fixture_dataset(), exclude_episodes_file=str(tmp_path / "list"))
    assert len(dataset) == sum(LENGTHS) - LENGTHS[1]
    for i in range(0, len(dataset), 5):
        assert_paired(dataset[i])
    assert any("1 of 4 episodes left out" in f.what for f in dataset.findings)


def test_N04_nonfinite_is_refused_and_located(fixture_dataset: Callable[..., Path]) -> None:
    root = fixture_dataset("nan_state")
    with pytest.raises(
        CheckError, match=r"observation.state: 1 values are NaN or Inf: episode 2 frame 11 dimension 3 \(roll\)"
    ):
        build(root)
    dataset = build(root, drop_nonfinite=True)
    assert any("episode 2 frame 11" in f.what and f.severity == "warning" for f in dataset.findings)


def test_C01_camera_names_that_do_not_match(fixture_dataset: Callable[..., Path]) -> None:
    with pytest.raises(CheckError) as found:
        build(fixture_dataset("odd_cameras"), ("observation.images.top", "cam_b"))
    text = str(found.value)
    assert "asks for camera observation.images.top; the dataset has cameras cam_a, cam_b" in text
    assert "--camera-map base=cam_a left_wrist=cam_b" in text
    assert_paired(build(fixture_dataset("odd_cameras"), ("cam_a", "cam_b"))[3], ("cam_a", "cam_b"))


def test_C02_images_are_bound_by_name(fixture_dataset: Callable[..., Path]) -> None:
    forward, backward = build(fixture_dataset()), build(fixture_dataset(), CAMERAS[::-1])
    assert tuple(backward.cameras) == CAMERAS[::-1]
    for camera in CAMERAS:
        np.testing.assert_array_equal(forward[40].images[camera], backward[40].images[camera])


def test_missing_state_key_lists_columns_and_a_flag(fixture_dataset: Callable[..., Path]) -> None:
    with pytest.raises(
        CheckError, match=r"no feature joints; numeric features are observation.state \[7\], action \[7\] -> .*--state-key"
    ):
        build(fixture_dataset(), state_key="joints")


def test_C04_instructions(fixture_dataset: Callable[..., Path]) -> None:
    root = fixture_dataset("empty_instruction")
    with pytest.raises(CheckError) as found:
        build(root)
    assert "episode 4: task_index 77 is not in meta/tasks" in str(found.value)
    assert "episodes 1, 3 (2 of 5) have an empty instruction" in str(found.value)
    dropped = build(root, empty_instruction="drop")
    assert sorted(set(dropped.episode_of_N.tolist())) == [0, 2]
    assert any(f"3 episodes ({18 + 17 + 9} frames) left out: episodes 1, 3, 4" in f.what for f in dropped.findings)
    assert {dropped[i].instruction for i in range(len(dropped))} == {"Open a drawer", "Pick up the puck"}
    assert_paired(dropped[LENGTHS[0] + 5])
    kept = build(root, empty_instruction="keep")
    assert len(kept) == sum(LENGTHS) + 9
    assert kept[LENGTHS[0]].instruction == kept[len(kept) - 1].instruction == ""


def test_V01_memory_of_decoders_is_predicted(fixture_dataset: Callable[..., Path]) -> None:
    dataset = build(fixture_dataset(), num_workers=3, video_decoder_cache_size=5)
    assert any("at most 3 workers x 5 open" in line and "GiB of host memory" in line for line in dataset.summary)


def test_V03_explicit_backend_without_fallback(fixture_dataset: Callable[..., Path], monkeypatch: Any) -> None:
    from megatron_vla.data import video_probe

    monkeypatch.setattr(video_probe, "import_problem", lambda backend: "import fails: libavutil.so")
    with pytest.raises(CheckError, match=r"--video-backend torchcodec: no backend .*\n.*h264 x torchcodec: import fails"):
        build(fixture_dataset(), video_backend="torchcodec")


@pytest.mark.parametrize("defect", ["codec_av1", "codec_hevc", "gop250_start"])
def test_V03_V07_other_codecs_pair_too(fixture_dataset: Callable[..., Path], defect: str) -> None:
    dataset = build(fixture_dataset(defect))
    for i in (97, 3, 41, 22, 23, 64):
        assert_paired(dataset[i])


def test_idle_frames(fixture_dataset: Callable[..., Path]) -> None:
    dataset = build(fixture_dataset("idle"))
    expected = np.concatenate([[k >= max(1, n // 5) for k in range(n)] for n in LENGTHS])
    np.testing.assert_array_equal(dataset.idle_N(), expected)


def test_pickle_keeps_samples(fixture_dataset: Callable[..., Path]) -> None:
    dataset = build(fixture_dataset())
    before = dataset[61]
    after = pickle.loads(pickle.dumps(dataset))[61]
    assert pickle.dumps(before) == pickle.dumps(after)
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_episode_numbers_need_not_start_at_zero(tmp_path: Path, fixture_dataset: Callable[..., Path]) -> None:
    """A v2 subset keeps its numbers: files are found by number, samples name it."""
    root = shutil.copytree(fixture_dataset(None, "v2.1"), tmp_path / "d")
    lines = (root / "meta/episodes.jsonl").read_text().splitlines()
    (root / "meta/episodes.jsonl").write_text("\n".join(lines[2:]) + "\n")
    dataset = build(root)
    assert len(dataset) == LENGTHS[2] + LENGTHS[3]
    assert dataset[0].episode_index == 2
    assert_paired(dataset[0])
    assert_paired(dataset[LENGTHS[2]])
    assert any("total_episodes 4" in f.what for f in dataset.findings)


def test_rows_of_another_episode_are_found(tmp_path: Path, fixture_dataset: Callable[..., Path]) -> None:
    """Metadata that says 24 and 17 frames where the file has 23 and 18."""
    root = shutil.copytree(fixture_dataset(), tmp_path / "d")
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    import pyarrow as pa

    table = pq.read_table(path)
    table = table.set_column(table.column_names.index("length"), "length", pa.array([24, 17, 40, 17]))
    pq.write_table(table, path)
    with pytest.raises(CheckError, match=r"1 rows do not belong|rows do not belong where the metadata places them|running sum"):
        build(root)


def test_config_is_not_changed(fixture_dataset: Callable[..., Path]) -> None:
    config = DataConfig(data_path=(str(fixture_dataset()),))
    copy = replace(config)
    build_robot_dataset(config, HORIZON, CAMERAS)
    assert config == copy


def test_without_pyav_another_backend_is_probed_and_used(fixture_dataset: Callable[..., Path], monkeypatch: Any) -> None:
    """Containers cannot be checked then, which is said; codecs come from info.json and decord still has to prove itself."""
    from importlib.util import find_spec

    from megatron_vla.data import dataset_check_files, video_backends, video_probe

    for module in (dataset_check_files, video_backends, video_probe):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name == "av" else find_spec(name))
    dataset = build(fixture_dataset())
    assert dataset.frames.backend == "decord"
    assert any("PyAV is not installed" in f.what for f in dataset.findings)
    assert "  h264 x pyav: not installed (pip install av)" in dataset.summary
    assert_paired(dataset[44])
