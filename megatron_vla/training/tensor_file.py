"""safetensors files written one tensor at a time, and read back by name.

The public writer wants every tensor in host memory at once: 45 GB for the optimizer state of a 3 B model. The format itself
(8 bytes header length, a JSON header, raw little-endian data; github.com/huggingface/safetensors) allows streaming.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write `tensors` to `path` in name order and flush them to the disk. Raises OSError when the disk does not take them."""
    header: dict[str, Any] = {"__metadata__": dict(metadata or {})}
    offset = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format wants the data 8-byte aligned
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for name in sorted(tensors):
            host = tensors[name].detach().to("cpu").contiguous()
            # As bytes: numpy has no bfloat16.
            file.write(host.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class TensorEntry:
    """Dtype name and shape of one stored tensor."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Names, dtypes and shapes of a safetensors file, without reading its data. Raises ValueError for a damaged file."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            content = json.loads(file.read(length))
    except (struct.error, json.JSONDecodeError, UnicodeDecodeError) as exception:
        raise ValueError(f"{path}: damaged safetensors header ({exception})") from exception
    content.pop("__metadata__", None)
    return {name: TensorEntry(entry["dtype"], tuple(entry["shape"])) for name, entry in content.items()}


class TensorReader:
    """Reads single tensors of one safetensors file (memory-mapped); use as a context manager."""

    def __init__(self, path: Path):
        self.path = path
        self._file: Any = safe_open(str(path), framework="pt", device="cpu")
        self.names = frozenset(self._file.keys())

    def __enter__(self) -> TensorReader:
        self._file.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._file.__exit__(*details)

    def read(self, name: str) -> Tensor:
        """The tensor `name` on the CPU. Raises ValueError naming the file when it is not there."""
        if name not in self.names:
            raise ValueError(f"{self.path}: tensor {name} is missing; the file is not a checkpoint of this model")
        return self._file.get_tensor(name)
