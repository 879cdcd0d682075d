"""The writer against datasets that LeRobot itself wrote: same files, columns and keys; statistics against brute force."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from make_fixture_dataset import CAMERAS, LENGTHS, code_frame, make_dataset, motion, read_code
from PIL import Image

from megatron_vla.data.frame_source import FrameSource
from megatron_vla.data.lerobot_statistics import ImageHistogram, column_statistics
from megatron_vla.data.lerobot_writer import EncodedPictures, LeRobotWriter
from megatron_vla.data.metadata import read_metadata

CAMERA_FEATURE = {"dtype": "video", "shape": (224, 224, 3), "names": ["height", "width", "channel"]}
GOLDEN_FEATURES: dict[str, dict[str, Any]] = {
    "observation.state": {"dtype": "float32", "shape": (4,), "names": ["x", "y", "z", "gripper"]},
    "action": {"dtype": "float32", "shape": (4,), "names": ["dx", "dy", "dz", "gripper"]},
    "observation.images.front": CAMERA_FEATURE,
    "observation.images.wrist": CAMERA_FEATURE,
}


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def same_schema(ours: Path, theirs: Path) -> None:
    """Names and types; writers may differ in the nullability marks of list items."""
    a, b = pq.read_schema(ours), pq.read_schema(theirs)
    assert {f.name: str(f.type) for f in a} == {f.name: str(f.type) for f in b}
    assert (b"huggingface" in (a.metadata or {})) == (b"huggingface" in (b.metadata or {}))
    if b.metadata and b"huggingface" in b.metadata:
        described, expected = (json.loads(s.metadata[b"huggingface"])["info"]["features"] for s in (a, b))
        assert described == expected


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_layout_equals_lerobots_own(golden_datasets: dict[str, Path], tmp_path: Path, version: Any) -> None:
    golden = golden_datasets[version]
    golden_table, _ = read_metadata(golden)
    rows = {}
    for path in sorted((golden / "data").rglob("*.parquet")):
        for name in ("observation.state", "action"):
            rows.setdefault(name, []).extend(pq.read_table(path)[name].to_pylist())
    writer = LeRobotWriter(
        tmp_path / "d", fps=20, features=GOLDEN_FEATURES, robot_type="sawyer", codebase_version=version, video_codec="av1"
    )
    grey = np.full((20, 224, 224, 3), 90, dtype=np.uint8)
    for e in range(4):
        columns = {name: np.array(values[20 * e : 20 * e + 20]) for name, values in rows.items()}
        images = {"observation.images.front": grey, "observation.images.wrist": iter(grey)}
        writer.add_episode(columns, images, golden_table.instruction(e))
    root = writer.finalize()
    assert files(root) == files(golden)
    ours, theirs = (json.loads((r / "meta/info.json").read_text()) for r in (root, golden))
    assert list(ours) == list(theirs)
    assert ours == theirs
    for path in (p for p in files(golden) if p.endswith(".parquet")):
        same_schema(root / path, golden / path)
    if version == "v2.1":
        for name in ("episodes.jsonl", "tasks.jsonl"):
            ours, theirs = ((r / "meta" / name).read_text().splitlines() for r in (root, golden))
            assert [json.loads(a) for a in ours] == [json.loads(b) for b in theirs]
        ours, theirs = (json.loads((r / "meta/episodes_stats.jsonl").read_text().splitlines()[2]) for r in (root, golden))
        assert ours["stats"].keys() == theirs["stats"].keys()
        for name in ("action", "timestamp", "index"):
            for key, value in theirs["stats"][name].items():
                np.testing.assert_allclose(ours["stats"][name][key], value, rtol=1e-4, atol=1e-6)
        assert np.shape(ours["stats"]["observation.images.front"]["mean"]) == (3, 1, 1)
    else:
        path = "meta/episodes/chunk-000/file-000.parquet"
        ours, theirs = (pq.read_table(r / path).drop_columns([]).to_pylist() for r in (root, golden))
        for a, b in zip(ours, theirs, strict=True):
            for key in (k for k in b if not k.startswith("stats/")):
                assert a[key] == b[key], key
        ours, theirs = (json.loads((r / "meta/stats.json").read_text()) for r in (root, golden))
        assert set(ours) == set(theirs)
        for key in ("min", "max", "mean", "std", "count"):
            np.testing.assert_allclose(ours["action"][key], theirs["action"][key], rtol=1e-4, atol=1e-6)
        assert list(ours["action"]) == list(theirs["action"])


def test_dataset_quantiles_are_over_frames() -> None:
    """A two-valued gripper keeps its two values; averaging the quantiles of episodes would give -0.5 for both."""
    gripper = np.concatenate([np.full(40, -1.0), np.zeros(40)])[:, None].astype(np.float32)
    result = column_statistics(gripper)
    assert (result["q01"][0], result["q99"][0]) == (-1.0, 0.0)
    random = np.random.default_rng(3).normal(size=(1001, 3))
    expected = np.sort(random, axis=0)[10]  # 0.01 * 1000 is an exact order statistic
    np.testing.assert_allclose(column_statistics(random)["q01"], expected)


def test_stored_statistics_equal_brute_force(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "v3.0", cameras=CAMERAS[:1])
    stats = json.loads((root / "meta/stats.json").read_text())
    actions = np.concatenate([motion(e, n)[1] for e, n in enumerate(LENGTHS)]).astype(np.float64)
    np.testing.assert_allclose(stats["action"]["mean"], actions.mean(0), atol=1e-6)
    np.testing.assert_allclose(stats["action"]["q90"], np.quantile(actions, 0.9, axis=0), atol=1e-6)
    sampled = np.concatenate([[code_frame(0, e, k) for k in range(0, n, 10)] for e, n in enumerate(LENGTHS)]) / 255
    np.testing.assert_allclose(np.ravel(stats[CAMERAS[0]]["mean"]), sampled.mean((0, 1, 2)), atol=1e-9)
    np.testing.assert_allclose(np.ravel(stats[CAMERAS[0]]["std"]), sampled.std((0, 1, 2)), atol=1e-9)
    assert stats[CAMERAS[0]]["count"] == [len(sampled)]


def test_image_histograms_merge_exactly() -> None:
    random = np.random.default_rng(0)
    frames = random.integers(0, 256, (6, 20, 30, 3), dtype=np.uint8)
    whole, left, right = ImageHistogram(), ImageHistogram(), ImageHistogram()
    for i, frame in enumerate(frames):
        whole.add(frame)
        (left if i < 2 else right).add(frame)
    left.merge(right)
    for key, value in whole.statistics().items():
        np.testing.assert_array_equal(left.statistics()[key], value)
    np.testing.assert_allclose(whole.statistics()["q50"].ravel(), np.quantile(frames / 255, 0.5, axis=(0, 1, 2)), atol=1 / 255)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_bytes_are_deterministic(tmp_path: Path, version: Any) -> None:
    digests = []
    for name in ("a", "b"):
        root = make_dataset(tmp_path / name, version, lengths=(9, 7))
        digests.append({p: hashlib.sha256((root / p).read_bytes()).hexdigest() for p in files(root)})
    assert digests[0] == digests[1]


def test_failed_camera_stream_makes_the_recording_unusable(tmp_path: Path) -> None:
    features = {"action": {"dtype": "float32", "shape": (2,)}, "cam": {"dtype": "video", "shape": (48, 64, 3)}}
    writer = LeRobotWriter(tmp_path / "d", fps=10, features=features)
    frames = [code_frame(0, 0, k) for k in range(5)]
    writer.add_episode({"action": np.zeros((5, 2))}, {"cam": iter(frames)}, "a")
    with pytest.raises(ValueError, match=r"episode 1, camera 'cam': 4 frames, columns have 5"):
        writer.add_episode({"action": np.zeros((5, 2))}, {"cam": iter(frames[:4])}, "a")
    for call in (writer.finalize, lambda: writer.add_episode({"action": np.zeros((5, 2))}, {"cam": iter(frames)}, "a")):
        with pytest.raises(ValueError, match="unusable since episode 1"):
            call()
    with pytest.raises(ValueError, match="not finished"):
        read_metadata(tmp_path / "d")


def test_encoded_pictures_are_written_like_frames(tmp_path: Path) -> None:
    """Pictures and statistics are the same, whoever encodes them; what the feature does not say is refused."""
    frames = np.stack([code_frame(0, 0, k) for k in range(23)])
    columns = {"action": np.zeros((23, 2))}
    found = []
    for name, given in (("frames", frames), ("encoded", EncodedPictures.of(frames))):
        features = {"action": {"dtype": "float32", "shape": (2,)}, "cam": {"dtype": "image", "shape": (48, 64, 3)}}
        writer = LeRobotWriter(tmp_path / name, fps=10, features=features)
        writer.add_episode(columns, {"cam": given}, "a")
        root = writer.finalize()
        blobs = pq.read_table(root / "data/chunk-000/file-000.parquet")["cam"].to_pylist()
        pictures = [np.asarray(Image.open(io.BytesIO(blob["bytes"]))) for blob in blobs]
        assert [blob["path"] for blob in blobs] == [f"frame_{k:06d}.png" for k in range(23)]
        found.append((np.stack(pictures), json.loads((root / "meta/stats.json").read_text())["cam"]))
    np.testing.assert_array_equal(found[0][0], frames)
    np.testing.assert_array_equal(found[1][0], frames)
    assert found[0][1] == found[1][1]
    assert found[0][1]["count"] == [3]

    for kind, shape, given, message in (
        ("video", (48, 64, 3), frames, r"camera 'cam': encoded pictures of \(48, 64, 3\); the feature is video"),
        ("image", (48, 48, 3), frames, r"encoded pictures of \(48, 64, 3\); the feature is image of \(48, 48, 3\)"),
        ("image", (48, 64, 3), frames[:22], r"camera 'cam': 22 frames, columns have 23"),
    ):
        features = {"action": {"dtype": "float32", "shape": (2,)}, "cam": {"dtype": kind, "shape": shape}}
        writer = LeRobotWriter(tmp_path / f"{kind}{shape[1]}{len(given)}", fps=10, features=features)
        with pytest.raises(ValueError, match=message):
            writer.add_episode(columns, {"cam": EncodedPictures.of(given)}, "a")
        # Refused before anything was written.
        assert writer.add_episode(columns, {"cam": np.zeros((23, *shape), np.uint8)}, "a") == 0


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"action": np.zeros((5, 3))}, r"column 'action': shape \(5, 3\)"),
        ({"act": np.zeros((5, 2))}, r"columns \['act'\].*need columns \['action'\]"),
        ({"action": np.zeros((4, 2))}, r"camera 'cam': 5 frames, columns have 4"),
    ],
)
def test_wrong_columns_are_refused_before_anything_is_written(tmp_path: Path, columns: Any, message: str) -> None:
    features = {"action": {"dtype": "float32", "shape": (2,)}, "cam": {"dtype": "image", "shape": (48, 64, 3)}}
    writer = LeRobotWriter(tmp_path / "d", fps=10, features=features)
    frames = np.stack([code_frame(0, 0, k) for k in range(5)])
    with pytest.raises(ValueError, match=message):
        writer.add_episode(columns, {"cam": frames}, "a")
    writer.add_episode({"action": np.zeros((5, 2))}, {"cam": frames}, "a")
    assert read_metadata(writer.finalize())[0].length_E.tolist() == [5]


def test_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/precious").write_text("x")
    with pytest.raises(ValueError, match="not empty"):
        LeRobotWriter(tmp_path / "d", fps=10, features={"action": {"dtype": "float32", "shape": (2,)}})


def test_scalar_matrix_bool_and_text_features(tmp_path: Path) -> None:
    """Every kind of column comes back as it went in."""
    features = {
        "action": {"dtype": "float32", "shape": (2, 3)},
        "next.reward": {"dtype": "float32", "shape": (1,)},
        "next.done": {"dtype": "bool", "shape": (1,)},
        "note": {"dtype": "string", "shape": (1,)},
    }
    writer = LeRobotWriter(tmp_path / "d", fps=10, features=features, codebase_version="v2.0")
    action = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    done = np.array([False, False, False, True])
    note = np.array(["a", "b", "", "d"])
    writer.add_episode({"action": action, "next.reward": np.arange(4), "next.done": done, "note": note}, {}, "go")
    table = pq.read_table(writer.finalize() / "data/chunk-000/episode_000000.parquet")
    np.testing.assert_array_equal(table["action"].to_pylist(), action)
    assert table["next.done"].to_pylist() == done.tolist()
    assert table["note"].to_pylist() == note.tolist()
    assert table["next.reward"].to_pylist() == [0, 1, 2, 3]


def test_files_roll_by_size_and_chunks_fill_up(tmp_path: Path) -> None:
    """A limit of 0 MB starts a file per episode; two files make a chunk. What is read back is what was written."""
    features = {"action": {"dtype": "float32", "shape": (7,)}, "cam": {"dtype": "video", "shape": (48, 64, 3)}}
    writer = LeRobotWriter(
        tmp_path / "d", fps=10, features=features, data_files_size_in_mb=0, video_files_size_in_mb=0, chunks_size=2
    )
    for e in range(5):
        frames = (code_frame(0, e, k) for k in range(4))
        writer.add_episode({"action": motion(e, 4)[1]}, {"cam": frames}, f"task {e}")
    root = writer.finalize()
    table, _ = read_metadata(root)
    expected = [f"chunk-00{n // 2}/file-00{n % 2}" for n in range(5)]
    assert [table.data.relative_path(n) for n in range(5)] == [f"data/{name}.parquet" for name in expected]
    video = table.videos["cam"].files
    assert [video.relative_path(n) for n in range(5)] == [f"videos/cam/{name}.mp4" for name in expected]
    source = FrameSource(table, "pyav", 2)
    for e in range(5):
        assert [read_code(f) for f in source.frames("cam", e, range(4))] == [(0, e, k) for k in range(4)]
        rows = pq.read_table(table.data.path_of(e))
        assert rows["index"].to_pylist() == list(range(4 * e, 4 * e + 4))
        assert table.task_texts[rows["task_index"][0].as_py()] == f"task {e}"
