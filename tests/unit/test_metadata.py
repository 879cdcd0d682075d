"""Metadata of all three formats, their quirks, and errors that say file and line."""

from __future__ import annotations

import json
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from make_fixture_dataset import CAMERAS, LENGTHS, make_dataset

from megatron_vla.data.metadata import read_metadata

VERSIONS = ("v2.0", "v2.1", "v3.0")


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_golden_table(golden_datasets: dict[str, Path], version: str) -> None:
    table, findings = read_metadata(golden_datasets[version])
    assert not findings
    assert table.length_E.tolist() == [20, 20, 20, 20]
    assert [table.instruction(e) for e in range(4)] == ["Open a drawer"] * 2 + ["Pick and place a puck to a goal"] * 2
    assert table.features["action"].names == ("dx", "dy", "dz", "gripper")
    assert table.cameras == ("observation.images.front", "observation.images.wrist")
    for video in table.videos.values():
        assert all(video.files.path_of(e).is_file() for e in range(4))
    first = [0, 20, 40, 60] if version == "v3.0" else [0, 0, 0, 0]
    assert table.videos["observation.images.wrist"].first_frame_E.tolist() == first
    assert table.data_row_E.tolist() == first


def test_v3_places_episodes_in_files(fixture_dataset: Callable[..., Path]) -> None:
    """Data is split after three episodes, the base camera after two, the wrist camera after three."""
    table, _ = read_metadata(fixture_dataset())
    assert table.length_E.tolist() == list(LENGTHS)
    assert table.data.file_of_E.tolist() == [0, 0, 0, 1]
    assert table.data_row_E.tolist() == [0, 23, 41, 0]
    assert table.videos[CAMERAS[0]].files.file_of_E.tolist() == [0, 0, 1, 1]
    assert table.videos[CAMERAS[0]].first_frame_E.tolist() == [0, 23, 0, 40]
    assert table.videos[CAMERAS[1]].first_frame_E.tolist() == [0, 23, 41, 0]
    assert table.data.relative_path(1) == "data/chunk-000/file-001.parquet"


@pytest.mark.parametrize("version", VERSIONS)
def test_D07_names_null_and_no_image_statistics(fixture_dataset: Callable[..., Path], version: str) -> None:
    table, findings = read_metadata(fixture_dataset("names_null", version))
    assert not findings
    assert all(feature.names is None for feature in table.features.values())


def test_D11_json_lines_quirks(fixture_dataset: Callable[..., Path]) -> None:
    root = fixture_dataset("jsonl_quirks", "v2.1")
    assert (root / "meta/tasks.jsonl").read_bytes().startswith(b"\xef\xbb\xbf")
    table, _ = read_metadata(root)
    healthy, _ = read_metadata(fixture_dataset(None, "v2.1"))
    assert table.task_texts == healthy.task_texts
    assert table.length_E.tolist() == list(LENGTHS)


@pytest.mark.parametrize(
    ("file", "line"), [("tasks.jsonl", '{"task_index": 1, "task": '), ("episodes.jsonl", '{"episode_index": 9}')]
)
def test_D11_error_states_file_and_line(tmp_path: Path, file: str, line: str) -> None:
    root = make_dataset(tmp_path / "d", "v2.1")
    path = root / "meta" / file
    lines = path.read_text().splitlines()
    lines.insert(1, line)
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=rf"{file}, line 2: .* -> repair the line"):
        read_metadata(root)


@pytest.mark.parametrize(("version", "stored"), [("v3.0", "v3.7"), ("v2.1", "v2.9"), ("v2.1", "2.1")])
def test_D12_unknown_minor_version_is_tried_and_said(tmp_path: Path, version: str, stored: str) -> None:
    root = make_dataset(tmp_path / "d", version)
    path = root / "meta/info.json"
    path.write_text(path.read_text().replace(f'"{version}"', f'"{stored}"'))
    table, findings = read_metadata(root)
    assert table.length_E.tolist() == list(LENGTHS)
    assert [f.severity for f in findings] == ([] if stored == "2.1" else ["warning"])
    assert all(stored in f.what for f in findings)


def test_unknown_major_version_is_refused(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "d", "v3.0")
    path = root / "meta/info.json"
    path.write_text(path.read_text().replace('"v3.0"', '"v4.0"'))
    with pytest.raises(ValueError, match=r"codebase_version 'v4.0'; readable are v2.0, v2.1 and v3.0"):
        read_metadata(root)


def test_tasks_in_a_column_called_task(tmp_path: Path, fixture_dataset: Callable[..., Path]) -> None:
    """Newer files name the column, older ones keep the text in the pandas index."""
    root = shutil.copytree(fixture_dataset(), tmp_path / "d")
    table = pq.read_table(root / "meta/tasks.parquet")
    assert "__index_level_0__" in table.column_names
    before = read_metadata(root)[0].task_texts
    pq.write_table(table.rename_columns(["task_index", "task"]), root / "meta/tasks.parquet")
    assert read_metadata(root)[0].task_texts == before == {0: "Open a drawer", 1: "Pick up the puck"}


def test_missing_column_names_those_that_exist(tmp_path: Path, fixture_dataset: Callable[..., Path]) -> None:
    root = shutil.copytree(fixture_dataset(), tmp_path / "d")
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["length"]), path)
    with pytest.raises(ValueError, match=r"file-000.parquet: no column length; it has data/chunk_index, .*episode_index"):
        read_metadata(root)


def test_unfinished_recording_is_recognised(fixture_dataset: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"info.json: missing although .*not finished"):
        read_metadata(fixture_dataset("unfinished"))


def test_parent_folder_lists_the_datasets_below(tmp_path: Path) -> None:
    (tmp_path / "a/meta").mkdir(parents=True)
    (tmp_path / "a/meta/info.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds no meta/info.json -> datasets below it: a"):
        read_metadata(tmp_path)


def test_episodes_without_task(tmp_path: Path, fixture_dataset: Callable[..., Path]) -> None:
    """Empty and null task lists become empty instructions; the others keep theirs."""
    root = shutil.copytree(fixture_dataset(), tmp_path / "d")
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    tasks = pa.array([["a", "b"], [], None, ["c"]], pa.list_(pa.string()))
    pq.write_table(table.set_column(table.column_names.index("tasks"), "tasks", tasks), path)
    read, _ = read_metadata(root)
    assert [read.instruction(e) for e in range(4)] == ["a", "", "", "c"]


def test_V09_table_of_a_hundred_thousand_episodes_is_flat(tmp_path: Path) -> None:
    """Read in seconds; pickled size is a few numbers per episode and no Python objects."""
    count = 100_000
    (tmp_path / "meta/episodes/chunk-000").mkdir(parents=True)
    features = {"action": {"dtype": "float32", "shape": [7]}, "cam": {"dtype": "video", "shape": [8, 8, 3]}}
    info = {"codebase_version": "v3.0", "fps": 30, "features": features}
    (tmp_path / "meta/info.json").write_text(json.dumps(info))
    index = np.arange(count)
    columns = {
        "episode_index": index,
        "length": np.full(count, 300),
        "data/chunk_index": index // 1_000_000,
        "data/file_index": index // 500,
        "dataset_from_index": index * 300,
        "dataset_to_index": index * 300 + 300,
        "videos/cam/chunk_index": index * 0,
        "videos/cam/file_index": index // 50,
        "videos/cam/from_timestamp": (index % 50) * 10.0,
        "videos/cam/to_timestamp": (index % 50) * 10.0 + 10.0,
        "tasks": pa.array([["pick"], ["place"]] * (count // 2)),
    }
    pq.write_table(pa.table(columns), tmp_path / "meta/episodes/chunk-000/file-000.parquet")
    pq.write_table(pa.table({"task_index": [0, 1], "task": ["pick", "place"]}), tmp_path / "meta/tasks.parquet")
    began = time.perf_counter()
    table, _ = read_metadata(tmp_path)
    assert time.perf_counter() - began < 5
    assert len(pickle.dumps(table)) < 150 * count
    assert table.data_row_E[501] == 300
    assert table.videos["cam"].first_frame_E[51] == 300
    assert table.data.path_of(99_999).name == "file-199.parquet"
