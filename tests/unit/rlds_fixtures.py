"""Writes small RLDS datasets: the episodes of a LeRobot dataset as record files, with the same pictures, losslessly."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from megatron_vla.data.episode_table import EpisodeTable
from megatron_vla.data.frame_source import FrameSource
from megatron_vla.data.lerobot_columns import load_columns
from megatron_vla.data.metadata import read_metadata
from megatron_vla.data.rlds_example import example_class
from megatron_vla.data.tfrecord import frame_record


def png(image_HWC: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image_HWC).save(buffer, format="PNG")
    return buffer.getvalue()


def example_bytes(values: dict[str, Any]) -> bytes:
    """A serialized tf.train.Example; lists of bytes, float arrays, or integer arrays."""
    example = example_class()()
    for key, value in values.items():
        feature = example.features.feature[key]
        if isinstance(value, list):
            feature.bytes_list.value.extend(value)
        elif np.asarray(value).dtype.kind == "f":
            feature.float_list.value.extend(np.asarray(value).ravel().tolist())
        else:
            feature.int64_list.value.extend(np.asarray(value).astype(np.int64).ravel().tolist())
    data: bytes = example.SerializeToString()
    return data


def tensor_feature(dtype: str, *shape: int) -> dict[str, Any]:
    return {"tensor": {"dtype": dtype, "shape": {"dimensions": [str(n) for n in shape]}, "encoding": "none"}}


def tree(leaves: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """features.json of step features, from "a/b" -> leaf."""
    root: dict[str, Any] = {}
    for key, leaf in leaves.items():
        node = root
        *folders, name = key.split("/")
        for folder in folders:
            node = node.setdefault(folder, {"featuresDict": {"features": {}}})["featuresDict"]["features"]
        node[name] = leaf
    steps = {"sequence": {"feature": {"featuresDict": {"features": root}}}}
    return {"featuresDict": {"features": {"steps": steps}}}


def write_records(
    root: Path,
    episodes: list[dict[str, Any]],
    leaves: dict[str, dict[str, Any]],
    *,
    file_format: str = "tfrecord",
    num_files: int = 2,
    compress: bool = False,
) -> Path:
    """Episodes (record key -> values) -> the folder of a version; leaves: key below "steps/" -> node of features.json."""
    folder = root / "toy" / "1.0.0"
    folder.mkdir(parents=True)
    groups = [list(group) for group in np.array_split(np.arange(len(episodes)), num_files)]
    for file, group in enumerate(groups):
        path = folder / f"toy-train.{file_format}-{file:05d}-of-{num_files:05d}"
        records = [example_bytes(episodes[e]) for e in group]
        if file_format == "array_record":
            from array_record.python.array_record_module import ArrayRecordWriter

            writer = ArrayRecordWriter(str(path), "group_size:1")
            for record in records:
                writer.write(record)
            writer.close()
        else:
            content = b"".join(frame_record(record) for record in records)
            path.write_bytes(gzip.compress(content) if compress else content)
    split = {"name": "train", "shardLengths": [str(len(group)) for group in groups]}
    split["filepathTemplate"] = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    info = {"name": "toy", "version": "1.0.0", "fileFormat": file_format, "splits": [split]}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    (folder / "features.json").write_text(json.dumps(tree(leaves)))
    return folder


def rlds_of(dataset: Path, root: Path, **options: Any) -> tuple[Path, str]:
    """(RLDS folder, --rlds-mapping) with the episodes of a LeRobot dataset, pictures as PNG."""
    table: EpisodeTable = read_metadata(dataset)[0]
    columns, _ = load_columns(table, ("observation.state", "action", "task_index"))
    frames = FrameSource(table, "pyav", 4)
    episodes = []
    for episode in range(table.num_episodes):
        rows = slice(int(columns.first_row_E[episode]), int(columns.first_row_E[episode + 1]))
        length = int(table.length_E[episode])
        values: dict[str, Any] = {
            "steps/is_first": np.arange(length) == 0,
            "steps/action": columns.values["action"][rows],
            "steps/observation/state": columns.values["observation.state"][rows],
            "steps/language_instruction": [table.task_texts[int(t)].encode() for t in columns.values["task_index"][rows]],
        }
        for number, camera in enumerate(table.cameras):
            values[f"steps/observation/camera_{number}"] = [png(f) for f in frames.frames(camera, episode, range(length))]
        episodes.append(values)
    leaves: dict[str, dict[str, Any]] = {
        "is_first": tensor_feature("bool"),
        "action": tensor_feature("float32", table.features["action"].size),
        "observation/state": tensor_feature("float32", table.features["observation.state"].size),
        "language_instruction": {"text": {}},
    }
    for number in range(len(table.cameras)):
        shape = {"dimensions": ["-1", "-1", "3"]}
        leaves[f"observation/camera_{number}"] = {"image": {"dtype": "uint8", "shape": shape, "encodingFormat": "png"}}
    mapping = {
        "fps": table.fps,
        "cameras": {camera: f"steps/observation/camera_{number}" for number, camera in enumerate(table.cameras)},
        "names": {name: table.features[name].names for name in ("observation.state", "action") if table.features[name].names},
    }
    return write_records(root, episodes, leaves, **options), json.dumps(mapping)
