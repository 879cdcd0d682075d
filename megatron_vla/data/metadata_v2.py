"""LeRobot v2.0 and v2.1: one parquet file per episode, one mp4 per episode and camera, JSON-lines metadata.

Shape legend: E episodes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_vla.data import lerobot_layout as layout
from megatron_vla.data.episode_table import EpisodeTable, Feature, FileSet, VideoFiles
from megatron_vla.data.metadata import read_json_lines, template_of


def read_v2(root: Path, info: dict[str, Any], features: dict[str, Feature]) -> EpisodeTable:
    """Table of a v2.x dataset. Raises ValueError naming file and line."""
    index_E, length_E, texts = _read_episodes(root / "meta/episodes.jsonl")
    num_episodes = len(index_E)
    codes: dict[str, int] = {}
    instruction_of_E = np.array([codes.setdefault(t, len(codes)) if t is not None else -1 for t in texts], dtype=np.int32)
    fields = {"episode_index": index_E, "episode_chunk": index_E // int(info.get("chunks_size") or layout.CHUNKS_SIZE)}
    info_path = root / "meta/info.json"
    data_template = template_of(info, "data_path", layout.V2_DATA_PATH, set(fields), info_path)
    file_of_E = np.arange(num_episodes, dtype=np.int32)
    videos: dict[str, VideoFiles] = {}
    for name, feature in features.items():
        if feature.dtype == "video":
            template = template_of(info, "video_path", layout.V2_VIDEO_PATH, {*fields, "video_key"}, info_path)
            videos[name] = VideoFiles(
                files=FileSet(str(root), template, fields, file_of_E, {"video_key": name}),
                first_frame_E=np.zeros(num_episodes, dtype=np.int64),
                from_timestamp_E=np.zeros(num_episodes),
                to_timestamp_E=length_E / float(info["fps"]),
            )
    return EpisodeTable(
        root=str(root),
        format=f"LeRobot {info['codebase_version']}",
        fps=float(info["fps"]),
        robot_type=info.get("robot_type"),
        features=features,
        episode_index_E=index_E,
        length_E=length_E,
        data=FileSet(str(root), data_template, fields, file_of_E, {}),
        data_row_E=np.zeros(num_episodes, dtype=np.int64),
        videos=videos,
        task_texts=read_tasks_jsonl(root / "meta/tasks.jsonl"),
        instructions=tuple(codes),
        instruction_of_E=instruction_of_E,
        stored_from_index_E=None,
        stored_to_index_E=None,
        info=info,
    )


def _read_episodes(path: Path) -> tuple[np.ndarray, np.ndarray, list[str | None]]:
    rows: list[tuple[int, int, str | None]] = []
    for number, entry in read_json_lines(path):
        try:
            tasks = entry.get("tasks")
            if isinstance(tasks, str):
                tasks = [tasks]
            rows.append((int(entry["episode_index"]), int(entry["length"]), str(tasks[0]) if tasks else None))
        except (KeyError, TypeError, ValueError) as problem:
            raise ValueError(
                f"{path}, line {number}: {entry} has no usable episode_index and length ({problem!r}) -> repair the line"
            ) from problem
    if not rows:
        raise ValueError(f"{path}: no episodes -> restore the file")
    rows.sort(key=lambda row: row[0])
    return np.array([r[0] for r in rows], dtype=np.int64), np.array([r[1] for r in rows], dtype=np.int64), [r[2] for r in rows]


def read_tasks_jsonl(path: Path) -> dict[int, str]:
    """task_index -> text. Raises ValueError naming file and line."""
    tasks: dict[int, str] = {}
    for number, entry in read_json_lines(path):
        try:
            tasks[int(entry["task_index"])] = str(entry["task"])
        except (KeyError, TypeError, ValueError) as problem:
            raise ValueError(
                f"{path}, line {number}: {entry} has no usable task_index and task -> repair the line"
            ) from problem
    return tasks
