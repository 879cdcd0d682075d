"""features.json and dataset_info.json of a TensorFlow dataset (the RLDS layout of Open X-Embodiment)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INFO_FILE, FEATURES_FILE = "dataset_info.json", "features.json"


@dataclass(frozen=True)
class RldsFeature:
    """One leaf of the feature tree. kind: "tensor", "image" or "text"; `key` is the record's key; a size of -1 is open."""

    key: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    encoding: str = "none"

    @property
    def size(self) -> int:
        """Numbers per step."""
        size = 1
        for length in self.shape:
            size *= length
        return size

    @property
    def is_camera(self) -> bool:
        """An RGB picture (depth and masks have other types or channels)."""
        return self.kind == "image" and self.dtype == "uint8" and (not self.shape or self.shape[-1] == 3)

    def __str__(self) -> str:
        shape = f" [{', '.join(map(str, self.shape))}]" if self.shape else ""
        return f"{self.key} ({self.dtype if self.kind == 'tensor' else self.kind}{shape})"


@dataclass(frozen=True)
class RldsSplit:
    """One split: its files and, where dataset_info.json says so, the records in each."""

    name: str
    files: tuple[str, ...]
    records: tuple[int, ...]


@dataclass(frozen=True)
class RldsInfo:
    """What the two JSON files say. `features` are the step features by record key."""

    root: Path
    name: str
    file_format: str
    splits: dict[str, RldsSplit]
    features: dict[str, RldsFeature]


def is_rlds(folder: Path) -> bool:
    """`folder` is a TFDS version folder, or holds exactly such folders one level down."""
    return (folder / INFO_FILE).is_file() or any(folder.glob(f"*/{INFO_FILE}"))


def read_rlds_info(folder: Path) -> RldsInfo:
    """`folder` is <name>/<version>, or <name> when it has one version. Raises ValueError naming the file."""
    if not (folder / INFO_FILE).is_file():
        versions = sorted(path.parent for path in folder.glob(f"*/{INFO_FILE}"))
        # Never the newest by guess: versions differ in content.
        if len(versions) != 1:
            listed = ", ".join(str(path.relative_to(folder)) for path in versions) or "none"
            raise ValueError(f"--data-path {folder}: holds {len(versions)} versions ({listed}) -> give one version's folder")
        folder = versions[0]
    info, tree = _read_json(folder / INFO_FILE), _read_json(folder / FEATURES_FILE)
    steps = (tree.get("featuresDict", {}).get("features", {})).get("steps")
    if not isinstance(steps, Mapping) or "sequence" not in steps:
        known = ", ".join(tree.get("featuresDict", {}).get("features", {})) or "none"
        raise ValueError(
            f"{folder / FEATURES_FILE}: no sequence 'steps'; top-level features are {known} -> not an RLDS dataset"
        )
    name = str(info.get("name") or folder.parent.name)
    file_format = str(info.get("fileFormat") or "tfrecord").lower()
    splits = {}
    for raw in info.get("splits", []):
        split = _split(folder, name, file_format, raw)
        splits[split.name] = split
    if not splits:
        raise ValueError(f"{folder / INFO_FILE}: no splits -> the dataset was not completely generated")
    # Episode metadata is left out: nothing of it belongs to a step.
    features = {feature.key: feature for feature in _leaves(steps["sequence"]["feature"], "steps")}
    return RldsInfo(folder, name, file_format, splits, features)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path}: missing -> restore the file")
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError) as problem:
        raise ValueError(f"{path}: not valid JSON ({problem}) -> restore the file") from problem
    if not isinstance(content, dict):
        raise ValueError(f"{path}: {type(content).__name__} instead of an object -> restore the file")
    return content


def _split(folder: Path, name: str, file_format: str, raw: Mapping[str, Any]) -> RldsSplit:
    # int64 is written as text by protobuf's JSON form.
    lengths = tuple(int(length) for length in raw.get("shardLengths", []))
    split = str(raw.get("name"))
    # Older datasets state no template; this is what TFDS has always used.
    template = raw.get("filepathTemplate") or "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    files = []
    for shard in range(len(lengths)):
        fields = {
            "DATASET": name,
            "SPLIT": split,
            "FILEFORMAT": file_format,
            "SHARD_INDEX": f"{shard:05d}",
            "NUM_SHARDS": f"{len(lengths):05d}",
            "SHARD_X_OF_Y": f"{shard:05d}-of-{len(lengths):05d}",
        }
        try:
            files.append(template.format(**fields))
        except (KeyError, IndexError, ValueError) as problem:
            raise ValueError(
                f"{folder / INFO_FILE}: filepathTemplate {template!r} has an unknown field {problem}; known are "
                f"{', '.join(fields)} -> restore the file"
            ) from problem
    return RldsSplit(split, tuple(files), lengths)


def _leaves(node: Mapping[str, Any], key: str) -> Iterator[RldsFeature]:
    """Leaves below `node`. Inner sequences (ragged) are left out: no fixed number of values belongs to a step."""
    if "featuresDict" in node:
        for name, child in node["featuresDict"]["features"].items():
            yield from _leaves(child, f"{key}/{name}")
    elif "tensor" in node:
        tensor = node["tensor"]
        # Text features of some writers are tensors of strings.
        dtype, encoding = str(tensor.get("dtype", "float32")), str(tensor.get("encoding") or "none")
        yield RldsFeature(key, "text" if dtype in ("string", "object") else "tensor", dtype, _shape(tensor), encoding.lower())
    elif "image" in node:
        yield RldsFeature(key, "image", str(node["image"].get("dtype", "uint8")), _shape(node["image"]))
    elif "text" in node:
        yield RldsFeature(key, "text", "string", ())


def _shape(node: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(size) for size in (node.get("shape") or {}).get("dimensions", []))
