"""Reads a dataset's metadata (LeRobot v2.0, v2.1, v3.0, or RLDS) in place into an `EpisodeTable`. No copy, no network, nothing
written unless a cache folder is given."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_vla.data.episode_table import EpisodeTable, Feature
from megatron_vla.data.rlds_features import is_rlds
from megatron_vla.findings import Finding, warning

KNOWN_VERSIONS = ("2.0", "2.1", "3.0")


def read_metadata(
    root: str | Path, rlds_mapping: str | None = None, data_cache_path: str | None = None
) -> tuple[EpisodeTable, list[Finding]]:
    """(the table, warnings). Raises ValueError naming the file (and line) for metadata that cannot be read.

    An RLDS dataset needs `rlds_mapping` (--rlds-mapping) and is read through once; its index goes to `data_cache_path` if set.
    """
    from megatron_vla.data.metadata_rlds import read_rlds
    from megatron_vla.data.metadata_v2 import read_v2
    from megatron_vla.data.metadata_v3 import read_v3

    folder = Path(root)
    if is_rlds(folder):
        return read_rlds(folder, rlds_mapping, data_cache_path)
    if rlds_mapping is not None:
        raise ValueError(f"--rlds-mapping: {folder} is no RLDS dataset (no dataset_info.json) -> leave the flag out for it")
    info = read_info(folder)
    version = str(info.get("codebase_version", "")).removeprefix("v")
    findings: list[Finding] = []
    if version not in KNOWN_VERSIONS:
        findings.append(
            warning(
                str(folder / "meta/info.json"),
                f"codebase_version {info.get('codebase_version')!r} is not one of v{', v'.join(KNOWN_VERSIONS)}; read "
                f"as the nearest",
                "run tools/check_dataset.py --deep before a long training",
            )
        )
    reader = {"2": read_v2, "3": read_v3}.get(version.split(".")[0])
    if reader is None:
        raise ValueError(
            f"{folder / 'meta/info.json'}: codebase_version {info.get('codebase_version')!r}; readable are v2.0, v2.1 and v3.0 "
            "-> convert the dataset with LeRobot's converter"
        )
    features = parse_features(info, folder / "meta/info.json")
    return reader(folder, info, features), findings


def read_info(folder: Path) -> dict[str, Any]:
    """`meta/info.json` as a dict, with the fields every version needs. Raises ValueError."""
    path = folder / "meta/info.json"
    if not folder.is_dir():
        raise ValueError(f"--data-path {folder}: no such folder")
    if not path.is_file():
        if (folder / "data").is_dir() or (folder / "meta").is_dir():
            raise ValueError(
                f"{path}: missing although the folder holds data; the recording was not finished (finalize) -> record again"
            )
        nested = sorted(str(p.parent.parent.relative_to(folder)) for p in folder.glob("*/meta/info.json"))
        hint = (
            f"datasets below it: {', '.join(nested[:8])}" if nested else "give the root folder of one LeRobot or RLDS dataset"
        )
        raise ValueError(f"--data-path {folder}: holds no meta/info.json -> {hint}")
    try:
        info = json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError) as problem:
        raise ValueError(f"{path}: not valid JSON ({problem}) -> restore the file") from problem
    missing = [key for key in ("fps", "features") if not info.get(key)]
    if missing:
        raise ValueError(f"{path}: no {' and no '.join(missing)}; it has {', '.join(info)} -> restore the file")
    return info


def parse_features(info: Mapping[str, Any], path: Path) -> dict[str, Feature]:
    """Features by name. `names` may be null, a list, or a dict of lists; image statistics are never needed."""
    features: dict[str, Feature] = {}
    for name, raw in info["features"].items():
        if "dtype" not in raw:
            raise ValueError(f"{path}: feature {name!r} has no dtype; it has {', '.join(raw)} -> restore the file")
        details = raw.get("info") or raw.get("video_info") or {}
        features[name] = Feature(
            name=name,
            dtype=str(raw["dtype"]),
            shape=tuple(int(size) for size in raw.get("shape") or ()),
            names=_flat_names(raw.get("names")),
            codec=details.get("video.codec"),
        )
    return features


def _flat_names(names: Any) -> tuple[str, ...] | None:
    if isinstance(names, Mapping):
        names = [entry for group in names.values() for entry in (group if isinstance(group, list) else [group])]
    return tuple(str(name) for name in names) if isinstance(names, list) and names else None


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a JSON-lines file; BOM, CRLF and blank lines are fine. Raises ValueError with file and line."""
    if not path.is_file():
        raise ValueError(f"{path}: missing -> restore the file")
    for number, raw in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            line = raw.decode("utf-8-sig").strip()
            if not line:
                continue
            entry = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as problem:
            raise ValueError(f"{path}, line {number}: not valid JSON ({problem}) -> repair the line") from problem
        if not isinstance(entry, dict):
            raise ValueError(f"{path}, line {number}: {type(entry).__name__} instead of an object -> repair the line")
        yield number, entry


def template_of(info: Mapping[str, Any], key: str, default: str, fields: set[str], path: Path) -> str:
    """The path template `key` of info.json, checked to use only `fields`. Raises ValueError."""
    from string import Formatter

    template = info.get(key) or default
    unknown = {field for _, field, _, _ in Formatter().parse(template) if field} - fields
    if unknown:
        raise ValueError(
            f"{path}: {key} {template!r} uses {', '.join(sorted(unknown))}; known fields are {', '.join(sorted(fields))}"
        )
    return str(template)
