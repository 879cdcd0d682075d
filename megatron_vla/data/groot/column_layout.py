"""Where the keys of a modality configuration lie in a dataset: meta/modality.json, or the whole columns without that file.

modality.json (Isaac-GR00T's addition to LeRobot datasets): `state` and `action` map a key to {start, end[, original_key]},
`video` maps a key to {original_key}, `annotation` a name to {original_key} (spec of GR00T N1.7, section 5.1).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_vla.data.episode_table import EpisodeTable
from megatron_vla.data.groot.modality import TASK_LANGUAGE, ActionSpec, ModalityConfig, ModalityKeys
from megatron_vla.data.sample_shape import KeyPlace
from megatron_vla.findings import Finding, error

MODALITY_FILE = "meta/modality.json"
ANNOTATION = "annotation."
DEFAULT_ACTION_STEPS = 16  # what released examples of new robots predict


@dataclass(frozen=True)
class ColumnLayout:
    """state, action: key -> place; video: key -> camera; annotation: language key -> column of task indices.

    where: what to name in messages.
    """

    where: str
    state: Mapping[str, KeyPlace]
    action: Mapping[str, KeyPlace]
    video: Mapping[str, str]
    annotation: Mapping[str, str]

    def places(self, modality: str, keys: Sequence[str]) -> tuple[list[KeyPlace], list[Finding]]:
        """Places of the keys in their order, and an error for those that the dataset does not have."""
        known: Mapping[str, KeyPlace] = self.state if modality == "state" else self.action
        missing = [key for key in keys if key not in known]
        if missing:
            what = (
                f"{modality} keys {', '.join(missing)} of the modality configuration do not exist; there are {', '.join(known)}"
            )
            return [], [error(self.where, what, "correct --modality-config, or describe the columns in meta/modality.json")]
        return [known[key] for key in keys], []

    def task_column(self, language_key: str) -> tuple[str, list[Finding]]:
        """Column of task indices behind a language key; the episode's own task for "task"."""
        if language_key == TASK_LANGUAGE:
            return "task_index", []
        if language_key in self.annotation:
            return self.annotation[language_key], []
        listed = ", ".join([TASK_LANGUAGE, *self.annotation])
        return "task_index", [error(self.where, f"no language key {language_key!r}; there are {listed}", "use one of them")]


def read_layout(table: EpisodeTable, state_key: str, action_key: str) -> tuple[ColumnLayout | None, list[Finding]]:
    """(layout, errors): modality.json where the dataset has one, else one key for the whole of each column."""
    path = Path(table.root) / MODALITY_FILE
    if not path.is_file():
        return _whole_columns(table, state_key, action_key)
    try:
        content = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as problem:
        return None, [error(str(path), f"no readable JSON ({problem})", "repair the file")]
    findings: list[Finding] = []
    parts: dict[str, dict[str, KeyPlace]] = {"state": {}, "action": {}}
    for modality, column in (("state", state_key), ("action", action_key)):
        for key, entry in content.get(modality, {}).items():
            place, problems = _place(f"{path}: {modality}.{key}", key, entry, column, table)
            findings += problems
            if place is not None:
                parts[modality][key] = place
        if not content.get(modality):
            findings.append(error(str(path), f"no {modality} keys", "list them as KEY: {start, end}"))
    video = {key: entry.get("original_key", f"observation.images.{key}") for key, entry in content.get("video", {}).items()}
    annotation = {}
    for name, entry in content.get("annotation", {}).items():
        column = (entry or {}).get("original_key") or ANNOTATION + name
        if column in table.columns:
            annotation[ANNOTATION + name] = column
    layout = ColumnLayout(str(path), parts["state"], parts["action"], video, annotation)
    return (None if findings else layout), findings


def _place(
    where: str, key: str, entry: Mapping[str, Any], column: str, table: EpisodeTable
) -> tuple[KeyPlace | None, list[Finding]]:
    column = entry.get("original_key") or column
    if column not in table.columns:
        return None, [error(where, f"no column {column!r}; there are {', '.join(table.columns)}", "correct original_key")]
    size = table.features[column].size
    start, end = entry.get("start"), entry.get("end")
    if not (isinstance(start, int) and isinstance(end, int) and 0 <= start < end <= size):
        what = f"start {start!r} and end {end!r} are no slice of the {size} numbers of {column}"
        return None, [error(where, what, f"use 0 <= start < end <= {size}")]
    return KeyPlace(key, column, start, end), []


def _whole_columns(table: EpisodeTable, state_key: str, action_key: str) -> tuple[ColumnLayout | None, list[Finding]]:
    missing = [key for key in (state_key, action_key) if key not in table.columns]
    if missing:
        what = f"no column {', '.join(missing)} and no {MODALITY_FILE}; columns are {', '.join(table.columns)}"
        return None, [error(table.root, what, "use --state-key and --action-key, or write meta/modality.json")]
    state, action = (KeyPlace(key, key, 0, table.features[key].size) for key in (state_key, action_key))
    named = {"state": KeyPlace("state", *_tail(state))}, {"action": KeyPlace("action", *_tail(action))}
    cameras = {camera.removeprefix("observation.images."): camera for camera in table.cameras}
    return ColumnLayout(f"{table.root} (no {MODALITY_FILE})", named[0], named[1], cameras, {}), []


def _tail(place: KeyPlace) -> tuple[str, int, int]:
    return place.column, place.start, place.end


def default_modality(layout: ColumnLayout, views: Sequence[str], num_steps: int, language_key: str) -> ModalityConfig:
    """Every key of the layout in its order, all actions as the dataset writes them, one frame per view."""
    action = tuple(layout.action)
    return ModalityConfig(
        video=ModalityKeys(delta_indices=(0,), keys=tuple(views)),
        state=ModalityKeys(delta_indices=(0,), keys=tuple(layout.state)),
        action=ModalityKeys(
            delta_indices=tuple(range(num_steps)), keys=action, action_specs=tuple(ActionSpec() for _ in action)
        ),
        language=ModalityKeys(delta_indices=(0,), keys=(language_key,)),
    )


def split_dimensions(layout: ColumnLayout, relative_dims: Sequence[int]) -> tuple[ColumnLayout, dict[str, ActionSpec]]:
    """A whole-column layout cut into runs of relative and of other dimensions, for --delta-action-dims without modality.json.

    Returns the layout with keys action_0, action_6, ... and the state pieces they refer to, and a specification per key.
    """
    (action,), (state,) = layout.action.values(), layout.state.values()
    is_relative = [dim in relative_dims for dim in range(action.width)]
    starts = [dim for dim in range(action.width) if dim == 0 or is_relative[dim] != is_relative[dim - 1]]
    actions: dict[str, KeyPlace] = {}
    states: dict[str, KeyPlace] = {}
    specs: dict[str, ActionSpec] = {}
    for start, end in zip(starts, [*starts[1:], action.width], strict=True):
        key = f"action_{start}"
        actions[key] = KeyPlace(key, action.column, start, end)
        specs[key] = ActionSpec(rep="RELATIVE", state_key=f"state_{start}") if is_relative[start] else ActionSpec()
    # The state is cut at the same places, so that each relative run has a key of its own width; order stays the column's.
    cuts = sorted({*(start for start in starts if start < state.width), state.width})
    for start, end in pairwise(cuts):
        states[f"state_{start}"] = KeyPlace(f"state_{start}", state.column, start, end)
    return ColumnLayout(layout.where, states, actions, layout.video, layout.annotation), specs
