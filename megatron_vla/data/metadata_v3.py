"""LeRobot v3.0: many episodes per parquet and mp4 file, metadata in parquet.

Shape legend: E episodes, F files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megatron_vla.data import lerobot_layout as layout
from megatron_vla.data.episode_table import EpisodeTable, Feature, FileSet, VideoFiles
from megatron_vla.data.metadata import template_of
from megatron_vla.data.metadata_v2 import read_tasks_jsonl

UNREADABLE = (pa.ArrowInvalid, pa.ArrowTypeError, OSError)


def read_v3(root: Path, info: dict[str, Any], features: dict[str, Feature]) -> EpisodeTable:
    """Table of a v3.x dataset. Raises ValueError naming the file and the columns it has."""
    video_keys = [name for name, feature in features.items() if feature.dtype == "video"]
    rows = _read_episodes(root, video_keys)
    order = np.argsort(rows["episode_index"], kind="stable")
    columns = {name: values[order] for name, values in rows.items() if isinstance(values, np.ndarray)}
    instructions, codes_E = _first_tasks(rows["tasks"])
    info_path = root / "meta/info.json"
    data_template = template_of(info, "data_path", layout.V3_DATA_PATH, {"chunk_index", "file_index"}, info_path)
    length_E = columns["length"]
    data = _file_set(root, data_template, columns["data/chunk_index"], columns["data/file_index"], {})
    fps = float(info["fps"])
    videos: dict[str, VideoFiles] = {}
    for key in video_keys:
        template = template_of(info, "video_path", layout.V3_VIDEO_PATH, {"chunk_index", "file_index", "video_key"}, info_path)
        start_E = columns[f"videos/{key}/from_timestamp"]
        videos[key] = VideoFiles(
            files=_file_set(
                root, template, columns[f"videos/{key}/chunk_index"], columns[f"videos/{key}/file_index"], {"video_key": key}
            ),
            # seconds were made from integers: rounding gets them back, whatever was lost on the way
            first_frame_E=np.rint(start_E * fps).astype(np.int64),
            from_timestamp_E=start_E,
            to_timestamp_E=columns[f"videos/{key}/to_timestamp"],
        )
    return EpisodeTable(
        root=str(root),
        format=f"LeRobot {info['codebase_version']}",
        fps=fps,
        robot_type=info.get("robot_type"),
        features=features,
        episode_index_E=columns["episode_index"],
        length_E=length_E,
        data=data,
        data_row_E=_row_in_file(data, length_E),
        videos=videos,
        task_texts=_read_tasks(root),
        instructions=instructions,
        instruction_of_E=codes_E[order],
        stored_from_index_E=columns.get("dataset_from_index"),
        stored_to_index_E=columns.get("dataset_to_index"),
        info=info,
    )


def _read_episodes(root: Path, video_keys: list[str]) -> dict[str, Any]:
    """Needed columns of every meta/episodes file (the many statistics columns stay on disk)."""
    paths = sorted((root / "meta/episodes").glob("*/*.parquet"))
    if not paths:
        raise ValueError(
            f"{root / 'meta/episodes'}: no parquet file; the recording was not finished (finalize) -> record again"
        )
    integers = ["episode_index", "length", "data/chunk_index", "data/file_index"]
    integers += [f"videos/{key}/{field}" for key in video_keys for field in ("chunk_index", "file_index")]
    floats = [f"videos/{key}/{field}" for key in video_keys for field in ("from_timestamp", "to_timestamp")]
    optional = ["dataset_from_index", "dataset_to_index"]
    tables = []
    for path in paths:
        try:
            available = set(pq.read_schema(path).names)
            missing = [name for name in (*integers, *floats) if name not in available]
            if missing:
                shown = ", ".join(sorted(n for n in available if not n.startswith("stats/")))
                raise ValueError(f"{path}: no column {', '.join(missing)}; it has {shown} -> convert the dataset again")
            wanted = [name for name in (*integers, *floats, *optional, "tasks") if name in available]
            tables.append(pq.read_table(path, columns=wanted))
        except UNREADABLE as problem:
            raise ValueError(f"{path}: {parquet_problem(problem)} -> restore the file, or record again") from problem
    table = pa.concat_tables(tables, promote_options="permissive")
    if table.num_rows == 0:
        raise ValueError(f"{paths[0]}: no episodes -> restore the file")
    result: dict[str, Any] = {}
    for name in (*integers, *floats, *optional):
        if name in table.column_names:
            column = table[name]
            if column.null_count:
                raise ValueError(f"{root / 'meta/episodes'}: column {name} has {column.null_count} empty entries -> restore it")
            kind = np.float64 if name in floats else np.int64
            result[name] = column.to_numpy().astype(kind)
    result["tasks"] = (
        table["tasks"].combine_chunks() if "tasks" in table.column_names else pa.nulls(table.num_rows, pa.string())
    )
    return result


def parquet_problem(problem: Exception) -> str:
    """Plain words for what pyarrow says about a broken file."""
    text = str(problem).split("\n")[0]
    if "magic bytes" in text or "footer" in text.lower():
        return f"no parquet footer: the file is cut off, or the recording was not finished ({text})"
    return f"unreadable ({text})"


def _first_tasks(tasks: pa.Array) -> tuple[tuple[str, ...], np.ndarray]:
    """First entry of each list, dictionary-encoded without a Python object per episode; -1 where the list is empty or null."""
    if isinstance(tasks, pa.ChunkedArray):
        tasks = pa.concat_arrays(tasks.chunks)
    if pa.types.is_list(tasks.type) or pa.types.is_large_list(tasks.type):
        lengths = pc.fill_null(pc.list_value_length(tasks), 0).to_numpy(zero_copy_only=False)
        first = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        index = pa.array(first, mask=lengths == 0)
        tasks = pc.list_flatten(tasks).take(index)
    encoded = pc.dictionary_encode(tasks)
    codes = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False).astype(np.int32)
    return tuple(encoded.dictionary.to_pylist()), codes


def _file_set(root: Path, template: str, chunk_E: np.ndarray, file_E: np.ndarray, text: dict[str, str]) -> FileSet:
    pairs, file_of_E = np.unique(np.stack([chunk_E, file_E], axis=1), axis=0, return_inverse=True)
    fields = {"chunk_index": pairs[:, 0], "file_index": pairs[:, 1]}
    return FileSet(str(root), template, fields, file_of_E.reshape(-1).astype(np.int32), text)


def _row_in_file(data: FileSet, length_E: np.ndarray) -> np.ndarray:
    """First row of each episode in its file, from lengths in episode order: stored indices are checked, never trusted."""
    order = np.argsort(data.file_of_E, kind="stable")
    ends = np.cumsum(length_E[order])
    starts = ends - length_E[order]
    first_of_file = np.concatenate([[True], np.diff(data.file_of_E[order]) != 0])
    base = np.maximum.accumulate(np.where(first_of_file, starts, 0))
    row_E = np.empty_like(length_E)
    row_E[order] = starts - base
    return row_E


def _read_tasks(root: Path) -> dict[int, str]:
    path = root / "meta/tasks.parquet"
    if not path.is_file():
        if (root / "meta/tasks.jsonl").is_file():
            return read_tasks_jsonl(root / "meta/tasks.jsonl")
        raise ValueError(f"{path}: missing -> restore the file")
    try:
        table = pq.read_table(path)
    except UNREADABLE as problem:
        raise ValueError(f"{path}: {parquet_problem(problem)} -> restore the file") from problem
    text = next((name for name in ("task", "__index_level_0__") if name in table.column_names), None)
    if text is None or "task_index" not in table.column_names:
        raise ValueError(
            f"{path}: columns {', '.join(table.column_names)}; task_index and task (or __index_level_0__) are needed"
        )
    return dict(zip(table["task_index"].to_pylist(), map(str, table[text].to_pylist()), strict=True))
