"""Tensors on disk, read one by one: safetensors files (one, shards with an index, several parts), and training checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_vla.training.distributed_checkpoint import METADATA_FILE, TENSOR_FOLDER, PartReader
from megatron_vla.training.tensor_file import DTYPE_NAMES

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorSource:
    """Tensors of one checkpoint by name; only headers are read until `read` is called."""

    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    metadata: Mapping[str, str]

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """One tensor in its stored dtype."""
        with safe_open(self.files[name], framework="pt", device=str(device)) as handle:
            return handle.get_tensor(name)

    def __contains__(self, name: str) -> bool:
        return name in self.files


@dataclass(frozen=True)
class TrainingSource(TensorSource):
    """The weights of a training checkpoint, or their averages, under the parameters' names; joined from all ranks' parts."""

    reader: PartReader
    stored_names: Mapping[str, str]

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """One whole tensor in its stored dtype."""
        return self.reader.read(self.stored_names[name]).to(device)


def is_training_checkpoint(path: Path) -> bool:
    """Whether `path` is a folder that training wrote."""
    return (path / TENSOR_FOLDER / METADATA_FILE).is_file()


def open_training_checkpoint(path: Path, *, averaged: bool = False) -> TrainingSource:
    """Weights of SAVE/iter_N, or their EMA (frozen weights are their own average).

    Raises ValueError when `averaged` weights are asked for and the run had none.
    """
    reader = PartReader(path / TENSOR_FOLDER)
    names = {n.split(".", 1)[1]: n for n in reader.entries if n.startswith("model.")}
    averages = {n.split(".", 1)[1]: n for n in reader.entries if n.startswith("ema.")}
    if averaged and not averages:
        raise ValueError(f"{path}: the run had no --ema-decay, so there are no averaged weights; convert its weights")
    names |= averages if averaged else {}
    entries = {name: reader.entries[stored] for name, stored in names.items()}
    return TrainingSource(
        files=dict.fromkeys(names, path),
        shapes={name: entry.shape for name, entry in entries.items()},
        dtypes={name: DTYPE_NAMES[entry.dtype] for name, entry in entries.items()},
        metadata={},
        reader=reader,
        stored_names=names,
    )


def open_tensors(paths: Sequence[Path | str], *, averaged: bool = False) -> TensorSource:
    """One source from one or more checkpoints (a file, an index, a folder holding either), or from one training checkpoint.

    averaged: take the EMA of a training checkpoint. Raises ValueError naming the path when something is missing, unreadable, or
    found in two parts.
    """
    if len(paths) == 1 and is_training_checkpoint(Path(paths[0])):
        return open_training_checkpoint(Path(paths[0]), averaged=averaged)
    if averaged:
        raise ValueError(f"{', '.join(map(str, paths))}: only a training checkpoint (SAVE/iter_N) has averaged weights")
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    metadata: dict[str, str] = {}
    for path in (file for part in paths for file in _files_of(Path(part))):
        try:
            with safe_open(path, framework="pt") as handle:
                metadata.update(handle.metadata() or {})
                for name in handle.keys():  # noqa: SIM118 (not a mapping)
                    if name in files:
                        raise ValueError(f"{path}: tensor {name} is also in {files[name]}; give each tensor once")
                    view = handle.get_slice(name)
                    files[name], shapes[name], dtypes[name] = path, tuple(view.get_shape()), view.get_dtype()
        except (SafetensorError, OSError) as problem:
            raise ValueError(f"{path}: not a readable safetensors file ({problem}); copy or convert it again") from problem
    return TensorSource(files, shapes, dtypes, metadata)


def _files_of(path: Path) -> list[Path]:
    """The safetensors files that `path` stands for."""
    if path.is_dir():
        candidates = [path / INDEX_FILE, path / SINGLE_FILE]
        found = next((c for c in candidates if c.is_file()), None)
        if found is None:
            trained = sorted(p for p in path.iterdir() if is_training_checkpoint(p))
            if trained:
                raise ValueError(f"{path}: holds a training's checkpoints; name the iteration, such as {trained[-1]}")
            others = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
            raise ValueError(f"{path}: holds neither {INDEX_FILE} nor {SINGLE_FILE} (found {others}); name the file itself")
        path = found
    if not path.is_file():
        raise ValueError(f"{path}: no such file or folder; name a .safetensors file, its index, or the folder that holds one")
    if path.suffix != ".json":
        return [path]
    weight_map: dict[str, str] = json.loads(path.read_text())["weight_map"]
    shards = [path.parent / name for name in sorted(set(weight_map.values()))]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise ValueError(f"{path}: names shards that are not there: {', '.join(missing)}; copy the whole folder")
    return shards


def write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], max_shard_bytes: int | None
) -> None:
    """Write `folder`/model.safetensors, or numbered shards and their index when `max_shard_bytes` is exceeded."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        save_file(dict(tensors), folder / SINGLE_FILE, metadata=dict(metadata))
        return
    weight_map = {}
    for number, names in enumerate(shards, 1):
        shard = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / shard, metadata=dict(metadata))
        weight_map.update(dict.fromkeys(names, shard))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")


def _shards(tensors: Mapping[str, Tensor], max_shard_bytes: int | None) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    used = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if max_shard_bytes is not None and shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards
