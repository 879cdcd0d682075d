"""The data flags of a mixture, taken apart: one `DataConfig` per dataset.

Grammar: --data-path [NAME=]FOLDER ..., --camera-map [NAME:]VIEW=KEY ..., --data-override NAME:FLAG=VALUE[,VALUE] ...; a NAME
has neither "/", ":" nor "=".
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_vla.config.cli import flag_name
from megatron_vla.config.data import DataConfig
from megatron_vla.findings import Finding, error

# Flags that describe a dataset; all others describe the model or the run and cannot differ within one.
OVERRIDABLE = (
    "state_key",
    "action_key",
    "dataset_action_representation",
    "model_action_representation",
    "delta_action_dims",
    "normalization",
    "action_resampling",
    "exclude_episodes_file",
    "empty_instruction",
    "drop_nonfinite",
    "drop_idle_frames",
    "rlds_mapping",
    "embodiment_tag",
    "embodiment_id",
    "modality_config",
    "language_key",
)


@dataclass(frozen=True)
class DatasetPart:
    """One dataset of a run. data: its flags alone (one --data-path, own --camera-map); weight: as given, None by size."""

    name: str
    data: DataConfig
    weight: float | None


def split_data_path(value: str) -> tuple[str | None, str]:
    """(name or None, folder) of one value of --data-path."""
    name, separator, folder = value.partition("=")
    # A path may hold "=" too, but hardly before its first "/".
    return (name, folder) if separator and name and "/" not in name else (None, value)


def dataset_parts(data: DataConfig) -> tuple[list[DatasetPart], list[Finding]]:
    """The datasets of --data-path in order, and errors (then the list is not complete)."""
    findings: list[Finding] = []
    named = [split_data_path(value) for value in data.data_path]
    names = [name or _folder_name(folder) for name, folder in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        findings.append(
            error("--data-path", f"two datasets are called {', '.join(twice)}", "name them: --data-path FIRST=... SECOND=...")
        )
    if data.data_weights and len(data.data_weights) != len(names):
        what = f"{len(data.data_weights)} weights for {len(names)} datasets"
        findings.append(error("--data-weights", what, "give one for each --data-path, or none"))
    findings += [
        error("--data-weights", f"{weight:g}", "a weight is above 0; leave the dataset out instead")
        for weight in data.data_weights
        if not 0 < weight < float("inf")
    ]
    # All problems of all flags at once, as everywhere.
    changes, problems = _overrides(data.data_override, names)
    findings += problems
    cameras, problems = _camera_maps(data.camera_map, names)
    findings += problems
    if findings:
        return [], findings
    parts = []
    for number, (name, (_, folder)) in enumerate(zip(names, named, strict=True)):
        # A configuration of one dataset, so that all code for one dataset works as it is.
        own = dataclasses.replace(
            data, data_path=(folder,), camera_map=cameras[name], data_weights=(), data_override=(), **changes[name]
        )
        parts.append(DatasetPart(name, own, data.data_weights[number] if data.data_weights else None))
    return parts, []


def _folder_name(folder: str) -> str:
    """Last part of the path; of RLDS's NAME/1.0.0 the name."""
    path = Path(folder)
    # RLDS folders end with a version, which all datasets share.
    is_version = path.name.replace(".", "").isdecimal() and "." in path.name
    return (path.parent.name if is_version else path.name).replace(":", "_").replace("=", "_") or "dataset"


def _camera_maps(pairs: Sequence[str], names: Sequence[str]) -> tuple[dict[str, tuple[str, ...]], list[Finding]]:
    """Values of --camera-map per dataset: those for all, replaced view by view by the dataset's own."""
    findings = []
    common: list[str] = []
    own: dict[str, list[str]] = {name: [] for name in names}
    for pair in pairs:
        view, _, key = pair.partition("=")
        name, separator, rest = view.partition(":")
        if not separator:
            common.append(pair)
        elif name in own:
            own[name].append(f"{rest}={key}")
        else:
            findings.append(error("--camera-map", f"{pair!r}: no dataset {name!r}", f"datasets are {', '.join(names)}"))
    result = {}
    for name in names:
        # By view, not by position: a dataset may map fewer views than the others.
        replaced = {pair.partition("=")[0] for pair in own[name]}
        result[name] = (*(pair for pair in common if pair.partition("=")[0] not in replaced), *own[name])
    return result, findings


def _overrides(values: Sequence[str], names: Sequence[str]) -> tuple[dict[str, dict[str, Any]], list[Finding]]:
    findings = []
    changes: dict[str, dict[str, Any]] = {name: {} for name in names}
    known = ", ".join(flag_name(field)[2:] for field in OVERRIDABLE)
    for value in values:
        target, separator, text = value.partition("=")
        name, colon, flag = target.partition(":")
        field = flag.removeprefix("--").replace("-", "_")
        if not (separator and colon):
            findings.append(error("--data-override", f"{value!r} is not NAME:FLAG=VALUE", f"as {names[0]}:action-key=x"))
        elif name not in changes:
            findings.append(error("--data-override", f"{value!r}: no dataset {name!r}", f"datasets are {', '.join(names)}"))
        elif field not in OVERRIDABLE:
            findings.append(error("--data-override", f"{value!r}: {flag!r} is no flag of one dataset", f"known are {known}"))
        else:
            try:
                changes[name][field] = _converted(typing.get_type_hints(DataConfig)[field], text)
            except ValueError as problem:
                findings.append(error("--data-override", f"{value!r}: {problem}", "as the flag itself takes it"))
    return changes, findings


def _converted(annotation: Any, text: str) -> Any:
    """The flag's value from its text. Raises ValueError."""
    # "no" or "0" might be meant either way; two words leave no doubt.
    if annotation is bool:
        if text not in ("true", "false"):
            raise ValueError("true or false is needed")
        return text == "true"
    if typing.get_origin(annotation) is Literal:
        choices = typing.get_args(annotation)
        if text not in choices:
            raise ValueError(f"one of {', '.join(choices)} is needed")
        return text
    if annotation == int | None:
        return int(text)
    if typing.get_origin(annotation) is tuple:
        return tuple(int(number) for number in text.split(",") if number)
    return text
