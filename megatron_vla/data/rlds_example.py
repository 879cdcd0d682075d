"""tf.train.Example without TensorFlow: the message's descriptors are built at run time, so no generated code is needed.

Field numbers: tensorflow/core/example/feature.proto and example.proto. Shape legend: T steps of the episode.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from megatron_vla.data.rlds_features import RldsFeature
from megatron_vla.data.tfrecord import INSTALL_HINT

KINDS = ("bytes_list", "float_list", "int64_list")


@cache
def example_class() -> Any:
    """The protobuf message class tf.train.Example. Raises ValueError when protobuf is not installed."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as problem:
        raise ValueError(f"RLDS datasets need the package protobuf -> {INSTALL_HINT}") from problem
    field = descriptor_pb2.FieldDescriptorProto
    # A name and a pool of our own: TensorFlow may be loaded in the same process and owns "tensorflow.Example".
    package = "megatron_vla.rlds"
    file = descriptor_pb2.FileDescriptorProto(name="megatron_vla/rlds_example.proto", package=package, syntax="proto3")

    def add(message: Any, name: str, number: int, label: int, kind: int, type_name: str | None = None) -> None:
        message.field.add(name=name, number=number, label=label, type=kind, type_name=type_name)

    for name, kind in (("BytesList", field.TYPE_BYTES), ("FloatList", field.TYPE_FLOAT), ("Int64List", field.TYPE_INT64)):
        add(file.message_type.add(name=name), "value", 1, field.LABEL_REPEATED, kind)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, type_name) in enumerate(zip(KINDS, ("BytesList", "FloatList", "Int64List"), strict=True), 1):
        add(feature, name, number, field.LABEL_OPTIONAL, field.TYPE_MESSAGE, f".{package}.{type_name}")
        feature.field[-1].oneof_index = 0
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    # A map on the wire is a repeated message of key and value.
    entry.options.map_entry = True
    add(entry, "key", 1, field.LABEL_OPTIONAL, field.TYPE_STRING)
    add(entry, "value", 2, field.LABEL_OPTIONAL, field.TYPE_MESSAGE, f".{package}.Feature")
    add(features, "feature", 1, field.LABEL_REPEATED, field.TYPE_MESSAGE, f".{package}.Features.FeatureEntry")
    add(file.message_type.add(name="Example"), "features", 1, field.LABEL_OPTIONAL, field.TYPE_MESSAGE, f".{package}.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.Example"))


def parse_example(data: bytes) -> Mapping[str, Any]:
    """Key -> Feature message. Raises ValueError when `data` is no tf.train.Example."""
    from google.protobuf.message import DecodeError

    try:
        example = example_class().FromString(data)
    except DecodeError as problem:
        raise ValueError(f"no tf.train.Example ({problem})") from problem
    return example.features.feature  # type: ignore[no-any-return]


def feature_values(example: Mapping[str, Any], key: str) -> Any:
    """The repeated values of `key`. Raises ValueError naming the keys that the record has."""
    if key not in example:
        raise ValueError(f"no key {key!r}; the record has {', '.join(sorted(example))}")
    feature = example[key]
    kind = feature.WhichOneof("kind")
    return [] if kind is None else getattr(feature, kind).value


def numeric_steps(example: Mapping[str, Any], feature: RldsFeature) -> np.ndarray:
    """float32 [T, *shape] of a numeric step feature. Raises ValueError when the values do not divide into steps."""
    values = feature_values(example, feature.key)
    if feature.encoding in ("bytes", "zlib"):
        # TFDS stores tensors with an encoding as one byte string per step.
        raw = [zlib.decompress(v) if feature.encoding == "zlib" else v for v in values]
        flat = np.concatenate([np.frombuffer(v, dtype=feature.dtype) for v in raw]) if raw else np.zeros(0)
    else:
        flat = np.asarray(values)
    if flat.size % feature.size:
        raise ValueError(f"key {feature.key!r} has {flat.size} numbers, which are no multiple of its {feature.size} per step")
    return flat.astype(np.float32).reshape(-1, *feature.shape)


def text_steps(example: Mapping[str, Any], key: str) -> list[str]:
    """Text of each step. Raises ValueError."""
    values = feature_values(example, key)
    if len(values) and not isinstance(values[0], bytes):
        raise ValueError(f"key {key!r} holds numbers, not text")
    # Some datasets pad texts of one length with zero bytes.
    return [value.decode("utf-8", "replace").rstrip("\x00") for value in values]
