"""Checks of a dataset's numbers: rows of the right episode, clocks, NaN, instructions, and actions that teach nothing.

Shape legend: R rows (frames), E episodes, A action and S state dimensions.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from megatron_vla.data.dataset_check_files import Found
from megatron_vla.data.episode_table import EpisodeTable
from megatron_vla.data.lerobot_columns import EXCLUDE_HINT, Columns, named_episodes
from megatron_vla.findings import error, warning

DUMMY_INSTRUCTIONS = frozenset(
    {
        "dummy",
        "test",
        "task",
        "todo",
        "tbd",
        "none",
        "null",
        "nan",
        "n/a",
        "na",
        "unknown",
        "default",
        "instruction",
        "do something",
    }
)
MAX_JITTERY_SHARE = 0.01  # share of frames that may be more than half a frame off
IDLE_SHARE_LIMIT = 0.5
MOTION_THRESHOLD = 1e-3  # of a dimension's range: less is standing still


def check_rows(table: EpisodeTable, columns: Columns) -> Found:
    """Stored episode_index and frame_index must be what the metadata places in these rows."""
    found = Found()
    episode_R = columns.episode_of_R()
    expected = {"episode_index": table.episode_index_E[episode_R], "frame_index": columns.frame_of_R()}
    for name, values in expected.items():
        if name not in columns.values:
            continue
        wrong = np.flatnonzero(columns.values[name] != values)
        if len(wrong):
            row = int(wrong[0])
            bad = np.unique(episode_R[wrong])
            found.add(
                error(
                    f"column {name} ({named_episodes(table, bad)})",
                    f"{len(wrong)} rows do not belong where the metadata places them; the first is frame "
                    f"{columns.frame_of_R()[row]} of episode {table.episode_index_E[episode_R[row]]}, stored as "
                    f"{columns.values[name][row]}",
                    EXCLUDE_HINT,
                ),
                bad,
            )
    return found


def check_timestamps(table: EpisodeTable, columns: Columns) -> Found:
    """Clocks that do not start at 0 or do not tick evenly. Frames are addressed by index, so this is a warning up to a
    point."""
    found = Found()
    if "timestamp" not in columns.values:
        return found
    seconds_R = columns.values["timestamp"]
    duration = table.frame_duration()
    episode_R = columns.episode_of_R()
    inside = episode_R[1:] == episode_R[:-1]
    deviation = np.abs(np.diff(seconds_R) - duration)[inside]
    first_E = seconds_R[columns.first_row_E[:-1]]
    late = np.flatnonzero(np.abs(first_E) > duration / 2)
    if len(late):
        found.add(
            warning(
                f"column timestamp ({named_episodes(table, late)})",
                f"starts at {first_E[late[0]]:.3f} s instead of 0 (a wall clock?)",
                "frames are taken by index; nothing to do if videos and rows have equal lengths",
            )
        )
    if not len(deviation):
        return found
    far = deviation > duration / 2
    typical, worst = deviation.mean() * 1e3, deviation.max() * 1e3
    jitter = f"steps deviate from {duration * 1e3:.2f} ms by {typical:.2f} ms on average, {worst:.2f} ms at most"
    if far.mean() > MAX_JITTERY_SHARE:
        bad = np.unique(episode_R[1:][inside][far])
        found.add(
            error(
                f"column timestamp ({named_episodes(table, bad)})",
                f"{jitter}; {far.mean():.1%} of the frames by more than half a frame: frames are missing or fps is wrong",
                "correct fps in meta/info.json, or resample, or --exclude-episodes-file",
            ),
            bad,
        )
    elif deviation.max() > max(1e-3, 0.02 * duration):
        found.add(warning("column timestamp", jitter, "frames are taken by index; nothing to do if the jitter is the clock's"))
    return found


def check_finite(table: EpisodeTable, columns: Columns, names: tuple[str, ...], drop_nonfinite: bool = False) -> Found:
    """NaN and Inf in state and action, by episode, frame and dimension; an error unless their windows are left out."""
    found = Found()
    episode_R, frame_R = columns.episode_of_R(), columns.frame_of_R()
    for name in names:
        values = columns.values[name].reshape(columns.num_rows, -1)
        rows, dimensions = np.nonzero(~np.isfinite(values))
        if not len(rows):
            continue
        labels = table.features[name].names
        places = [
            f"episode {table.episode_index_E[episode_R[r]]} frame {frame_R[r]} dimension {d}"
            + (f" ({labels[d]})" if labels and d < len(labels) else "")
            for r, d in zip(rows[:10], dimensions[:10], strict=True)
        ]
        more = f" and {len(rows) - 10} more" if len(rows) > 10 else ""
        make = warning if drop_nonfinite else error
        fix = "windows that hold them are left out" if drop_nonfinite else "--drop-nonfinite leaves their windows out"
        bad = np.unique(episode_R[rows])
        found.add(make(f"column {name}", f"{len(rows)} values are NaN or Inf: {'; '.join(places)}{more}", fix))
        if not drop_nonfinite:
            found.bad_episodes.update(int(e) for e in bad)
    return found


def is_empty_instruction(text: str) -> bool:
    """Whether no letter and no digit is in it: punctuation alone says nothing, and some families drop it."""
    return not any(map(str.isalnum, text))


def check_instructions(
    table: EpisodeTable, text_code_R: np.ndarray, texts: tuple[str, ...], columns: Columns, policy: str
) -> Found:
    """Empty, unknown, dummy and constant instructions. `text_code_R` indexes `texts`; -1 is a task_index without text."""
    found = Found()
    episode_R = columns.episode_of_R()
    unknown = text_code_R < 0
    empty = unknown | np.isin(text_code_R, [i for i, text in enumerate(texts) if is_empty_instruction(text)])
    fix = "--empty-instruction drop leaves them out, keep trains on them; or write their tasks into meta/tasks"
    if unknown.any():
        bad = np.unique(episode_R[unknown])
        indices = sorted({int(i) for i in columns.values["task_index"][unknown][:1000]})[:8]
        make = error if policy == "error" else warning
        text = f"{named_episodes(table, bad)}: task_index {', '.join(map(str, indices))} is not in meta/tasks"
        found.add(make("instruction", text, fix), bad if policy == "error" else None)
    if (empty & ~unknown).any():
        bad = np.unique(episode_R[empty & ~unknown])
        text = f"{named_episodes(table, bad)} ({len(bad)} of {table.num_episodes}) have an empty instruction"
        make = error if policy == "error" else warning
        found.add(make("instruction", text, fix), bad if policy == "error" else None)
    per_text = Counter(
        {texts[code]: int(n) for code, n in zip(*np.unique(text_code_R[~empty], return_counts=True), strict=True)}
    )
    dummy = {text: n for text, n in per_text.items() if text.strip().lower().rstrip(".") in DUMMY_INSTRUCTIONS}
    if dummy:
        named = ", ".join(f"{text!r} ({n} frames)" for text, n in dummy.items())
        found.add(warning("instruction", f"placeholder instructions: {named}", "write real tasks, or exclude these episodes"))
    if len(per_text) == 1 and table.num_episodes > 1:
        found.add(
            warning(
                "instruction",
                f"all {table.num_episodes} episodes have the same one, {next(iter(per_text))!r}",
                "fine for one task; the model cannot learn to follow language from it",
            )
        )
    return found


def motion_facts(columns: Columns, state_key: str) -> dict[str, Any]:
    """idle_R bool [R] (no state dimension moves to the next frame by more than 0.1 % of its range) and still_E bool [E]."""
    state_RS = columns.values[state_key].reshape(columns.num_rows, -1)
    spread = np.nanmax(state_RS, axis=0) - np.nanmin(state_RS, axis=0) if columns.num_rows else np.zeros(state_RS.shape[1])
    moving = np.abs(np.diff(state_RS, axis=0)) > MOTION_THRESHOLD * np.maximum(spread, 1e-8)
    idle_R = np.ones(columns.num_rows, dtype=bool)
    idle_R[:-1] = ~moving.any(axis=1)
    last_E = columns.first_row_E[1:] - 1
    # the last frame has no next one: it is as idle as the one before it
    idle_R[last_E] = idle_R[np.maximum(last_E - 1, columns.first_row_E[:-1])]
    still_E = np.minimum.reduceat(idle_R, columns.first_row_E[:-1]) if columns.num_rows else np.zeros(0, dtype=bool)
    return {"idle_R": idle_R, "still_E": still_E}


def check_actions(table: EpisodeTable, columns: Columns, state_key: str, action_key: str, representation: str) -> Found:
    """Actions that copy the state, episodes that stand still, and differences that are declared absolute (or the reverse)."""
    found = Found()
    state_RS = columns.values[state_key].reshape(columns.num_rows, -1)
    action_RA = columns.values[action_key].reshape(columns.num_rows, -1)
    shared = min(state_RS.shape[1], action_RA.shape[1])
    gap = np.nanmax(np.abs(action_RA[:, :shared] - state_RS[:, :shared]), initial=0.0)
    scale = float(np.nanstd(state_RS[:, :shared])) if columns.num_rows else 0.0
    if gap <= 1e-4 * max(scale, 1e-8):
        found.add(
            warning(
                f"column {action_key}",
                f"equals {state_key} in every frame (max |action - state| {gap:.2g}): the model learns to stand still",
                "record the commanded action, or shift the action by one frame",
            )
        )
    facts = motion_facts(columns, state_key)
    idle, still = float(facts["idle_R"].mean()), np.flatnonzero(facts["still_E"])
    if idle > IDLE_SHARE_LIMIT:
        found.add(warning(f"column {state_key}", f"{idle:.0%} of the frames are idle", "--drop-idle-frames leaves them out"))
    if len(still):
        found.add(
            warning(
                f"column {state_key}",
                f"no motion at all in {len(still)} of {table.num_episodes} episodes ({named_episodes(table, still)})",
                "exclude them with --exclude-episodes-file",
            )
        )
    found.merge(_check_representation(columns, state_RS, action_RA, action_key, representation))
    return found


def _check_representation(
    columns: Columns, state_RS: np.ndarray, action_RA: np.ndarray, action_key: str, representation: str
) -> Found:
    """Absolute targets follow the state, deltas follow its change. Two-valued dimensions (grippers) say nothing and are left
    out."""
    found = Found()
    inside = np.ones(columns.num_rows, dtype=bool)
    inside[columns.first_row_E[1:] - 1] = False
    rows = np.flatnonzero(inside)
    shared = min(state_RS.shape[1], action_RA.shape[1])
    with_state, with_change = [], []
    for d in range(shared):
        action, state, change = action_RA[rows, d], state_RS[rows, d], state_RS[rows + 1, d] - state_RS[rows, d]
        finite = np.isfinite(action) & np.isfinite(state) & np.isfinite(change)
        if finite.sum() < 8 or len(np.unique(action[finite][:1000])) <= 3:
            continue
        with_state.append(_correlation(action[finite], state[finite]))
        with_change.append(_correlation(action[finite], change[finite]))
    if not with_state:
        return found
    follows_state, follows_change = float(np.median(with_state)), float(np.median(with_change))
    looks = None
    if follows_change > 0.5 and follows_change > follows_state + 0.2:
        looks = "delta"
    elif follows_state > 0.8 and follows_state > follows_change + 0.2:
        looks = "absolute"
    if looks is not None and looks != representation:
        found.add(
            warning(
                f"column {action_key}",
                f"looks {looks} (correlation with the state {follows_state:.2f}, with its change {follows_change:.2f}), "
                f"--dataset-action-representation says {representation}",
                f"--dataset-action-representation {looks}, unless you know better",
            )
        )
    return found


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64) - a.mean(dtype=np.float64), b.astype(np.float64) - b.mean(dtype=np.float64)
    size = np.sqrt((a * a).sum() * (b * b).sum())
    return float(abs((a * b).sum() / size)) if size > 0 else 0.0
