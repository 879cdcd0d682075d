"""All checks of a dataset in one pass: what tools/check_dataset.py prints and what training runs at start (the cheap part)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vla.data.dataset_check_columns import (
    check_actions,
    check_finite,
    check_instructions,
    check_rows,
    check_timestamps,
    motion_facts,
)
from megatron_vla.data.dataset_check_files import Found, check_data_files, check_frames, check_table, check_video_files
from megatron_vla.data.episode_table import EpisodeTable
from megatron_vla.data.lerobot_columns import Columns, load_columns
from megatron_vla.data.metadata import read_metadata
from megatron_vla.findings import Finding, error

# Opening a container costs milliseconds on a good file system: at start, at most this many per camera, evenly spread.
START_VIDEO_FILES = 200


@dataclass(frozen=True)
class CheckSettings:
    """What the checks assume about the training that follows (the names are those of the flags)."""

    state_key: str = "observation.state"
    action_key: str = "action"
    dataset_action_representation: str = "absolute"
    empty_instruction: str = "error"
    drop_nonfinite: bool = False
    more_columns: tuple[str, ...] = ()  # further columns of numbers that are trained on
    task_column: str = "task_index"


@dataclass(frozen=True)
class Checked:
    """Findings, dataset numbers of the episodes to exclude, and facts to print."""

    findings: list[Finding]
    bad_episodes: list[int]
    facts: dict[str, Any]


def check_dataset_files(root: str | Path, *, deep: bool, settings: CheckSettings | None = None) -> list[Finding]:
    """Everything that is wrong with the dataset at `root`, one finding per fault. deep: decode every frame of every camera."""
    return check_dataset(root, deep=deep, settings=settings).findings


def check_dataset(
    root: str | Path,
    *,
    deep: bool,
    settings: CheckSettings | None = None,
    max_video_files: int | None = None,
    rlds_mapping: str | None = None,
) -> Checked:
    """`check_dataset_files` with the exclude list and the facts. max_video_files limits the containers opened per camera."""
    settings = settings or CheckSettings()
    try:
        table, findings = read_metadata(root, rlds_mapping)
    except ValueError as problem:
        where, _, what = str(problem).partition(": ")
        what, _, fix = what.partition(" -> ")
        return Checked([error(where, what or str(problem), fix or "restore the file")], [], {})
    found = check_table(table)
    found.findings = findings + found.findings
    found.merge(check_data_files(table))
    found.merge(check_video_files(table, table.cameras, max_video_files))
    broken_files = frozenset(found.bad_episodes)
    columns = check_columns(table, settings, found)
    if deep:
        found.merge(check_frames(table, table.cameras, broken_files))
    bad = sorted(int(table.episode_index_E[e]) for e in found.bad_episodes)
    return Checked(once(found.findings), bad, _facts(table, columns, settings))


def check_columns(table: EpisodeTable, settings: CheckSettings, found: Found) -> Columns | None:
    """Load the low-dimensional columns and check them.

    Returns the rows of the episodes whose files could be read (all of them, if nothing was found), or None (with findings) if
    state or action does not exist or nothing is readable.
    """
    missing = [key for key in (settings.state_key, settings.action_key) if key not in table.columns]
    if missing:
        found.add(missing_columns(table, settings))
        return None
    wanted = dict.fromkeys([settings.state_key, settings.action_key, *settings.more_columns])
    for name in (settings.task_column, "episode_index", "frame_index", "timestamp"):
        if name in table.features:
            wanted[name] = None
    columns, broken = load_columns(table, tuple(wanted))
    for file in broken:
        found.add(file.finding, file.episodes)
    lost = np.unique(np.concatenate([file.episodes for file in broken])) if broken else np.zeros(0, dtype=np.int64)
    if len(lost) == table.num_episodes:
        return None
    readable = np.ones(table.num_episodes, dtype=bool)
    readable[lost] = False
    # Zero rows of unreadable files would raise findings of their own: check what could be read.
    part, rows = table.select(readable), np.repeat(readable, table.length_E)
    first_row_E = np.concatenate([[0], np.cumsum(part.length_E)])
    view = Columns({k: v[rows] for k, v in columns.values.items()}, first_row_E) if broken else columns
    numbers = np.flatnonzero(readable)
    result = Found()
    for check in (check_rows, check_timestamps):
        result.merge(check(part, view))
    numbers_keys = (settings.state_key, settings.action_key, *settings.more_columns)
    result.merge(check_finite(part, view, numbers_keys, settings.drop_nonfinite))
    result.merge(check_actions(part, view, settings.state_key, settings.action_key, settings.dataset_action_representation))
    codes, texts = instruction_codes(part, view, settings.task_column)
    result.merge(check_instructions(part, codes, texts, view, settings.empty_instruction))
    result.bad_episodes = {int(numbers[e]) for e in result.bad_episodes}
    found.merge(result)
    return view


def missing_columns(table: EpisodeTable, settings: CheckSettings) -> Finding:
    """Names what the dataset has, with the flags to type."""
    numeric = [name for name in table.columns if table.features[name].dtype.startswith("float") and name != "timestamp"]
    flags = []
    for flag, key in (("--state-key", settings.state_key), ("--action-key", settings.action_key)):
        if key not in table.columns:
            near = [name for name in numeric if key.split(".")[-1] in name] or numeric
            flags.append(f"{flag} {near[0]}" if near else f"{flag} NAME")
    asked = ", ".join(key for key in (settings.state_key, settings.action_key) if key not in table.columns)
    listed = ", ".join(f"{name} [{table.features[name].size}]" for name in numeric) or "none"
    return error("meta/info.json", f"no feature {asked}; numeric features are {listed}", f"for example {' '.join(flags)}")


def instruction_codes(
    table: EpisodeTable, columns: Columns, task_column: str = "task_index"
) -> tuple[np.ndarray, tuple[str, ...]]:
    """(int32 code of each row's instruction, texts): by the column of task indices; -1 where the task does not exist.

    Datasets without that column use the episode's own task.
    """
    if task_column not in columns.values:
        return table.instruction_of_E[columns.episode_of_R()], table.instructions
    indices = np.array(sorted(table.task_texts), dtype=np.int64)
    texts = tuple(table.task_texts[int(i)] for i in indices)
    task_R = columns.values[task_column]
    if not len(indices):
        return np.full(columns.num_rows, -1, dtype=np.int32), texts
    place = np.clip(np.searchsorted(indices, task_R), 0, len(indices) - 1).astype(np.int32)
    return np.where(indices[place] == task_R, place, -1).astype(np.int32), texts


def once(findings: list[Finding]) -> list[Finding]:
    """The findings without repetitions, in order."""
    return list(dict.fromkeys(findings))


def _facts(table: EpisodeTable, columns: Columns | None, settings: CheckSettings) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "format": table.format,
        "episodes": table.num_episodes,
        "frames": table.num_frames,
        "fps": table.fps,
        "cameras": ", ".join(table.cameras) or "none",
        "tasks": len(table.task_texts),
    }
    if columns is not None and columns.num_rows:
        motion = motion_facts(columns, settings.state_key)
        facts["idle frames"] = f"{motion['idle_R'].mean():.1%}"
        facts["episodes without motion"] = f"{motion['still_E'].mean():.1%}"
        state = columns.values[settings.state_key].reshape(columns.num_rows, -1)
        action = columns.values[settings.action_key].reshape(columns.num_rows, -1)
        shared = min(state.shape[1], action.shape[1])
        facts["max |action - state|"] = f"{np.nanmax(np.abs(action[:, :shared] - state[:, :shared])):.4g}"
    return facts
