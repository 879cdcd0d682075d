"""Declarative mapping from an RLDS dataset's keys to this project's names: key -> source key, slice, transform; and the rate.

    {"fps": 10, "split": "train", "instruction": "steps/language_instruction",
     "cameras": {"observation.images.front": "steps/observation/image"},
     "columns": {"observation.state": ["steps/observation/state"],
                 "action": [{"source": "steps/action", "slice": [0, 6]},
                            {"source": "steps/action", "slice": [6, 7], "transform": "invert"}]},
     "names": {"action": ["x", "y", "z", "roll", "pitch", "yaw", "gripper"]}}

Only "fps" is needed: record files do not state their rate. Everything else has a default that `resolve` checks against the
features. Shape legend: T steps, D dimensions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vla.data.rlds_features import RldsFeature, RldsInfo

STATE, ACTION = "observation.state", "action"


@dataclass(frozen=True)
class MappingDefaults:
    """What a mapping file need not say. columns: name -> alternatives, each a list of sources; the first that exists counts.

    flag: how the file is given. can_rotate: pictures may be turned (they are read once and written anew).
    """

    flag: str
    columns: dict[str, tuple[tuple[str, ...], ...]]
    instructions: tuple[str, ...]
    observation: str
    can_rotate: bool


RLDS_DEFAULTS = MappingDefaults(
    flag="--rlds-mapping",
    columns={STATE: (("steps/observation/state",), ("steps/observation/proprio",)), ACTION: (("steps/action",),)},
    instructions=("steps/language_instruction", "steps/observation/natural_language_instruction"),
    observation="steps/observation/",
    can_rotate=False,
)
# x is a column's values. invert turns a gripper whose 1 means open into one whose 1 means closed, and back.
TRANSFORMS = ("invert", "negate", "double_minus_one", "affine", "binarize", "hold_last_command")


@dataclass(frozen=True)
class Part:
    """Some dimensions of a source: `slice` is [start, stop); transform is one of TRANSFORMS with its numbers."""

    source: str
    slice: tuple[int, int] | None = None
    transform: str | None = None
    scale: float = 1.0
    offset: float = 0.0
    threshold: float = 0.5

    def apply(self, values_TD: np.ndarray) -> np.ndarray:
        """float32 [T, d] of this part from the source's [T, D]."""
        part_Td = values_TD if self.slice is None else values_TD[:, self.slice[0] : self.slice[1]]
        if self.transform is None:
            return part_Td
        # float32 constants: the result must not depend on the promotion rules of a NumPy version.
        if self.transform == "invert":
            return np.float32(1.0) - part_Td
        if self.transform == "negate":
            return -part_Td
        if self.transform == "double_minus_one":
            return np.float32(2.0) * part_Td - np.float32(1.0)
        if self.transform == "affine":
            return np.float32(self.scale) * part_Td + np.float32(self.offset)
        if self.transform == "binarize":
            return (part_Td > self.threshold).astype(np.float32)
        return _held(part_Td, self.threshold)


def _held(command_Td: np.ndarray, threshold: float) -> np.ndarray:
    """Commands that mean a change (+1 close, -1 open, 0 go on) -> the state asked for (1 closed, 0 open).

    Before the first command the opposite of it holds: a gripper is first told to leave the state it is in.
    """
    # A dead zone around 0: commands of some robots are not exactly 0 when nothing is meant.
    signs_Td = np.where(command_Td > threshold, 1.0, np.where(command_Td < -threshold, -1.0, 0.0))
    for dim in range(signs_Td.shape[1]):
        given = np.flatnonzero(signs_Td[:, dim])
        last = -signs_Td[given[0], dim] if len(given) else -1.0
        for step in range(len(signs_Td)):
            last = signs_Td[step, dim] or last
            signs_Td[step, dim] = last
    return ((signs_Td + 1.0) / 2.0).astype(np.float32)


@dataclass(frozen=True)
class RldsMapping:
    """A mapping with nothing left open.

    `where` is the file it came from, for errors; `skip_*` leave steps of each episode out (RLDS: the action of the last step
    has no meaning); `rotate_180`: cameras whose pictures are upside down.
    """

    fps: float
    splits: tuple[str, ...]
    columns: dict[str, tuple[Part, ...]]
    cameras: dict[str, str]
    instruction: str | None
    names: dict[str, tuple[str, ...]]
    robot_type: str | None
    skip_first_steps: int
    skip_last_steps: int
    rotate_180: tuple[str, ...] = ()
    where: str = field(default="--rlds-mapping", compare=False)

    def identity(self) -> str:
        """Text that changes with everything that changes the index."""
        content = asdict(self)
        del content["where"]
        return json.dumps(content, sort_keys=True)


def read_mapping(value: str | None, info: RldsInfo, defaults: MappingDefaults = RLDS_DEFAULTS) -> RldsMapping:
    """`value`: path of a JSON file, the JSON itself, or None. Raises ValueError listing the features when keys do not match."""
    if value is None:
        what = f"{info.file_format} files do not state their rate and name their columns freely"
        raise ValueError(f"{info.root}: {what} -> {_suggestion(info, defaults)}")
    # Inline JSON for short mappings on a command line.
    where = defaults.flag if value.lstrip().startswith("{") else value
    try:
        text = value if where != value else Path(value).read_text(encoding="utf-8-sig")
        content = json.loads(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as problem:
        raise ValueError(f"{where}: no readable JSON ({problem}) -> {_suggestion(info, defaults)}") from problem
    if not isinstance(content, dict):
        raise ValueError(f"{where}: {type(content).__name__} instead of an object -> {_suggestion(info, defaults)}")
    return resolve(content, info, where, defaults)


def resolve(content: Mapping[str, Any], info: RldsInfo, where: str, defaults: MappingDefaults = RLDS_DEFAULTS) -> RldsMapping:
    """Fill defaults, check every key against the dataset's features."""
    known = {"fps", "split", "columns", "cameras", "instruction", "names", "robot_type", "skip_first_steps", "skip_last_steps"}
    known |= {"rotate_180"} if defaults.can_rotate else set()
    problems = [f"unknown entry {name!r} (known: {', '.join(sorted(known))})" for name in content if name not in known]
    fps = content.get("fps")
    if not isinstance(fps, int | float) or fps <= 0:
        problems.append(f"fps is {fps!r}; the recording rate in frames per second is needed")
    # Defaults stay for columns that the file does not name.
    raw_columns = {**_default_columns(info, defaults), **content.get("columns", {})}
    columns = {name: _parts(name, parts, problems) for name, parts in raw_columns.items() if parts}
    problems += [f"no column {name!r}, and no default fits" for name in (STATE, ACTION) if name not in columns]
    cameras = dict(content.get("cameras", _default_cameras(info, defaults)))
    instruction = content.get("instruction", next((k for k in defaults.instructions if k in info.features), None))
    split = content.get("split", "train")
    splits = tuple(split) if isinstance(split, list) else tuple(str(split).split("+"))
    problems += [f"no split {name!r} (there are: {', '.join(info.splits)})" for name in splits if name not in info.splits]
    for name, parts in columns.items():
        for part in parts:
            problems += _part_problems(name, part, info.features.get(part.source))
    for name, key in cameras.items():
        if key not in info.features or not info.features[key].is_camera:
            problems.append(f"camera {name!r}: {key!r} is no RGB image")
    rotate_180 = tuple(content.get("rotate_180", ()))
    problems += [f"rotate_180: no camera {name!r}" for name in rotate_180 if name not in cameras]
    if instruction is not None and (instruction not in info.features or info.features[instruction].kind != "text"):
        problems.append(f"instruction: {instruction!r} is no text")
    if problems:
        raise ValueError(f"{where}: {'; '.join(problems)} -> {_listing(info)}")
    return RldsMapping(
        fps=float(fps),  # type: ignore[arg-type]
        splits=splits,
        columns=columns,
        cameras=cameras,
        instruction=instruction,
        names={name: tuple(map(str, labels)) for name, labels in content.get("names", {}).items()},
        robot_type=content.get("robot_type"),
        skip_first_steps=int(content.get("skip_first_steps", 0)),
        skip_last_steps=int(content.get("skip_last_steps", 0)),
        rotate_180=rotate_180,
        where=where,
    )


def _parts(name: str, raw: Any, problems: list[str]) -> tuple[Part, ...]:
    result = []
    for entry in raw if isinstance(raw, list | tuple) else [raw]:
        fields: dict[str, Any] = {"source": entry} if isinstance(entry, str) else dict(entry)
        if isinstance(fields.get("slice"), list):
            fields["slice"] = tuple(fields["slice"])
        try:
            result.append(Part(**fields))
        except TypeError:
            problems.append(
                f"column {name!r}: {json.dumps(entry)}; a part has source and, if wanted, slice, transform, scale, offset, "
                "threshold"
            )
    return tuple(result)


def _part_problems(name: str, part: Part, feature: RldsFeature | None) -> list[str]:
    if feature is None or feature.kind != "tensor":
        return [f"column {name!r}: {part.source!r} is no numeric step feature"]
    problems = []
    if feature.size < 1:
        problems.append(f"column {name!r}: {part.source!r} has the open shape {list(feature.shape)}")
    # Python would clip or wrap these without a word.
    if part.slice is not None:
        ok = len(part.slice) == 2 and all(isinstance(i, int) for i in part.slice)
        if not ok or not 0 <= part.slice[0] < part.slice[1] <= feature.size:
            problems.append(f"column {name!r}: slice {list(part.slice)} of the {feature.size} dimensions of {part.source!r}")
    if part.transform is not None and part.transform not in TRANSFORMS:
        problems.append(f"column {name!r}: transform {part.transform!r} (known: {', '.join(TRANSFORMS)})")
    return problems


def _default_columns(info: RldsInfo, defaults: MappingDefaults) -> dict[str, list[str]]:
    def fits(sources: tuple[str, ...]) -> bool:
        return all(key in info.features and info.features[key].kind == "tensor" for key in sources)

    found = {name: next((s for s in choices if fits(s)), None) for name, choices in defaults.columns.items()}
    return {name: list(sources) for name, sources in found.items() if sources is not None}


def _default_cameras(info: RldsInfo, defaults: MappingDefaults) -> dict[str, str]:
    prefix = defaults.observation
    keys = [key for key, feature in info.features.items() if feature.is_camera and key.startswith(prefix)]
    return {f"observation.images.{key.removeprefix(prefix).replace('/', '.')}": key for key in keys}


def _listing(info: RldsInfo) -> str:
    return f"step features of {info.name}: {', '.join(map(str, info.features.values()))}"


def _suggestion(info: RldsInfo, defaults: MappingDefaults) -> str:
    ready = {"fps": 10, "split": next(iter(info.splits)), "columns": _default_columns(info, defaults)}
    ready["cameras"] = _default_cameras(info, defaults)
    return f"give {defaults.flag} FILE with for example {json.dumps(ready)} (fps: the true rate); {_listing(info)}"
