"""What a LeRobot folder looks like: file names, features, Arrow types. Shared by the reader and the writer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

CODEBASE_VERSIONS = ("v2.0", "v2.1", "v3.0")
CHUNKS_SIZE = 1000
V2_DATA_PATH = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
V2_VIDEO_PATH = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
V3_DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
V3_VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
V3_EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"

# Columns that every dataset has beside the robot's own; the writer makes them.
BOOKKEEPING: dict[str, str] = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_ARROW_TYPES: dict[str, pa.DataType] = {
    "float32": pa.float32(),
    "float64": pa.float64(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint8": pa.uint8(),
    "bool": pa.bool_(),
    "string": pa.string(),
}


def is_visual(feature: Mapping[str, Any]) -> bool:
    """Camera features: frames in mp4 files or images in parquet."""
    return feature["dtype"] in ("video", "image")


def arrow_type(name: str, feature: Mapping[str, Any]) -> pa.DataType:
    """Parquet type of a feature: scalars stay scalars, vectors are fixed-size lists, matrices nest."""
    dtype, shape = feature["dtype"], tuple(feature["shape"])
    if dtype == "image":
        return IMAGE_TYPE
    if dtype not in _ARROW_TYPES:
        raise ValueError(f"feature {name!r}: dtype {dtype!r}; known are {', '.join(_ARROW_TYPES)}, video, image")
    result = _ARROW_TYPES[dtype]
    if shape in ((), (1,)):
        return result
    for size in reversed(shape):
        result = pa.list_(result, size)
    return result


def data_schema(features: Mapping[str, Mapping[str, Any]]) -> pa.Schema:
    """Schema of the data files, with the feature description that Hugging Face `datasets` looks for."""
    stored = {name: feature for name, feature in features.items() if feature["dtype"] != "video"}
    described: dict[str, Any] = {}
    for name, feature in stored.items():
        if feature["dtype"] == "image":
            described[name] = {"_type": "Image"}
            continue
        description: dict[str, Any] = {"dtype": feature["dtype"], "_type": "Value"}
        for size in reversed(tuple(feature["shape"]) if tuple(feature["shape"]) not in ((), (1,)) else ()):
            description = {"feature": description, "length": size, "_type": "List"}
        described[name] = description
    schema = pa.schema([(name, arrow_type(name, feature)) for name, feature in stored.items()])
    return schema.with_metadata({"huggingface": json.dumps({"info": {"features": described}})})


def tasks_table(tasks: list[str]) -> pa.Table:
    """v3.0 tasks: a pandas frame whose index is the task text."""
    columns = [
        {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64", "metadata": None},
        {"name": None, "field_name": "__index_level_0__", "pandas_type": "object", "numpy_type": "str", "metadata": None},
    ]
    label = {"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "str", "metadata": {"encoding": "UTF-8"}}
    pandas = {
        "index_columns": ["__index_level_0__"],
        "column_indexes": [label],
        "columns": columns,
        "attributes": {},
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.0.0",
    }
    arrays = [pa.array(range(len(tasks)), pa.int64()), pa.array(tasks, pa.large_string())]
    table = pa.table(arrays, names=["task_index", "__index_level_0__"])
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})
