"""HDF5 demonstrations as LIBERO and robomimic write them: data/demo_k/{actions, obs/*}, one or several files.

The instruction is in the mapping ("instruction_text": a text, or file name without ending -> text) or in LIBERO's attribute
problem_info of the group "data". LIBERO's pictures are upside down: "rotate_180" names the cameras to turn.

Shape legend: E episodes, T steps, D dimensions, H height, W width, C colours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vla.data.frame_source import HandlePool
from megatron_vla.data.rlds_features import RldsFeature, RldsInfo, RldsSplit
from megatron_vla.data.rlds_mapping import ACTION, STATE, MappingDefaults, RldsMapping, read_mapping
from megatron_vla.data.tfrecord import INSTALL_HINT

ENDINGS = (".hdf5", ".h5")
HDF5_DEFAULTS = MappingDefaults(
    flag="--mapping",
    # LIBERO's low-dimensional state is the end effector's pose (6) and both finger positions (2).
    columns={
        STATE: (
            ("obs/ee_states", "obs/gripper_states"),
            ("obs/robot0_eef_pos", "obs/robot0_eef_quat", "obs/robot0_gripper_qpos"),
        ),
        ACTION: (("actions",),),
    },
    instructions=(),
    observation="obs/",
    can_rotate=True,
)


def hdf5_files(path: Path) -> list[Path]:
    """`path` itself, or the HDF5 files directly in it, by name."""
    if path.is_file() and path.suffix in ENDINGS:
        return [path]
    return sorted(file for file in path.glob("*") if file.suffix in ENDINGS) if path.is_dir() else []


def open_hdf5(path: Path) -> Any:
    """An h5py.File for reading. Raises ValueError naming file or package."""
    try:
        import h5py
    except ImportError as problem:
        raise ValueError(f"{path}: HDF5 files need the package h5py -> {INSTALL_HINT}") from problem
    try:
        return h5py.File(path, "r")
    except OSError as problem:
        raise ValueError(f"{path}: no readable HDF5 file ({problem}) -> restore the file") from problem


class Hdf5Source:
    """Episodes of HDF5 files: files by name, demonstrations by number. See `ConversionSource`."""

    def __init__(self, path: Path, files: Sequence[Path], mapping: str | None):
        self.path = path
        # Files are read one after the other; HDF5 keeps a cache per open one.
        self._handles = HandlePool(1)
        self._texts, mapping = _instruction_texts(mapping)
        self._places: list[tuple[Path, str]] = []
        instructions: list[str] = []
        for file in files:
            names = self._demonstrations(file)
            self._places += [(file, name) for name in names]
            instructions += [self._instruction(file)] * len(names)
        if not self._places:
            raise ValueError(f"{path}: no demonstration data/demo_k in {len(files)} files -> give another folder")
        self.instructions = tuple(instructions)
        info = RldsInfo(path, path.name, "HDF5", {"train": RldsSplit("train", (), ())}, self._described())
        self._info = info
        self.mapping: RldsMapping = read_mapping(mapping, info, HDF5_DEFAULTS)
        self.fps, self.robot_type = self.mapping.fps, self.mapping.robot_type
        self.length_E = np.array([self._length(episode) for episode in range(len(self._places))], dtype=np.int64)
        self.features = self._features()

    def _group(self, file: Path) -> Any:
        handle = self._handles.get(file, lambda: open_hdf5(file))
        if "data" not in handle:
            raise ValueError(f"{file}: no group 'data'; it has {', '.join(handle)} -> LIBERO's layout is data/demo_k")
        return handle["data"]

    def _demonstrations(self, file: Path) -> list[str]:
        """demo_10 comes after demo_9: the order of the numbers, not of the letters."""
        names = [name for name in self._group(file) if name.rpartition("_")[2].isdecimal()]
        return sorted(names, key=lambda name: int(name.rpartition("_")[2]))

    def _instruction(self, file: Path) -> str:
        if isinstance(self._texts, str):
            return self._texts
        if file.stem in self._texts:
            return self._texts[file.stem]
        stated = self._group(file).attrs.get("problem_info")
        text = json.loads(stated).get("language_instruction") if stated is not None else None
        if not text:
            fix = json.dumps({"instruction_text": {file.stem: "..."}})
            raise ValueError(
                f"{file}: states no instruction (problem_info.language_instruction) -> give it in --mapping: {fix}"
            )
        return "".join(text).strip().strip('"') if isinstance(text, list) else str(text).strip().strip('"')

    def _demo(self, episode: int) -> Any:
        file, name = self._places[episode]
        return self._group(file)[name]

    def _described(self) -> dict[str, RldsFeature]:
        """Datasets of the first demonstration: uint8 [T, H, W, 3] is a camera, numbers [T, ...] are a column."""
        features: dict[str, RldsFeature] = {}

        def visit(key: str, node: Any) -> None:
            if not hasattr(node, "shape") or not node.shape or node.dtype.kind not in "fiub":
                return
            shape = tuple(int(n) for n in node.shape[1:])
            # HDF5 has no image type; this is what both code bases store.
            is_image = node.dtype == np.uint8 and len(shape) == 3
            features[key] = RldsFeature(key, "image" if is_image else "tensor", str(node.dtype), shape)

        # All demonstrations are checked against the first: a key that one lacks is an error, not a hole.
        self._demo(0).visititems(visit)
        return features

    def _length(self, episode: int) -> int:
        demo = self._demo(episode)
        sources = {part.source for parts in self.mapping.columns.values() for part in parts} | set(
            self.mapping.cameras.values()
        )
        missing = sorted(key for key in sources if key not in demo)
        if missing:
            raise ValueError(
                f"{self.where(episode)}: no {', '.join(missing)}; the first demonstration has it -> repair the file"
            )
        lengths = {key: len(demo[key]) for key in sources}
        if len(set(lengths.values())) != 1:
            listed = ", ".join(f"{key} {length}" for key, length in lengths.items())
            raise ValueError(f"{self.where(episode)}: different numbers of steps: {listed} -> repair the file")
        length = next(iter(lengths.values())) - self.mapping.skip_first_steps - self.mapping.skip_last_steps
        if length < 1:
            raise ValueError(f"{self.where(episode)}: skip_first_steps and skip_last_steps leave no step -> lower them")
        return length

    def _features(self) -> dict[str, dict[str, Any]]:
        result: dict[str, dict[str, Any]] = {}
        for name, values in self.columns(0).items():
            names = self.mapping.names.get(name)
            result[name] = {"dtype": "float32", "shape": [values.shape[1]], "names": list(names) if names else None}
        for camera, key in self.mapping.cameras.items():
            result[camera] = {"dtype": "image", "shape": list(self._info.features[key].shape)}
        return result

    def columns(self, episode: int) -> dict[str, np.ndarray]:
        """See `ConversionSource`."""
        demo, first = self._demo(episode), self.mapping.skip_first_steps
        result = {}
        for name, parts in self.mapping.columns.items():
            # float32 as everywhere: HDF5 demonstrations are often float64.
            sources = [np.asarray(demo[part.source], dtype=np.float32).reshape(len(demo[part.source]), -1) for part in parts]
            joined = np.concatenate([part.apply(values) for part, values in zip(parts, sources, strict=True)], axis=1)
            result[name] = joined[first : first + int(self.length_E[episode])]
        return result

    def frames(self, camera: str, episode: int, frame_indices: Sequence[int]) -> Iterator[np.ndarray]:
        """See `ConversionSource`."""
        dataset = self._demo(episode)[self.mapping.cameras[camera]]
        for frame in frame_indices:
            # One frame at a time: chunks are decompressed by HDF5 itself, and whole episodes may not fit.
            picture_HWC = dataset[self.mapping.skip_first_steps + frame]
            yield np.ascontiguousarray(picture_HWC[::-1, ::-1] if camera in self.mapping.rotate_180 else picture_HWC)

    def where(self, episode: int) -> str:
        """See `ConversionSource`."""
        file, name = self._places[episode]
        return f"{file}, {name}"


def _instruction_texts(mapping: str | None) -> tuple[str | Mapping[str, str], str | None]:
    """("instruction_text" of the mapping, the mapping without it): it belongs to HDF5 alone."""
    if mapping is None:
        return {}, None
    try:
        text = mapping if mapping.lstrip().startswith("{") else Path(mapping).read_text(encoding="utf-8-sig")
        content = json.loads(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        return {}, mapping  # reported with a suggestion when the mapping itself is read
    if not isinstance(content, dict) or "instruction_text" not in content:
        return {}, mapping
    texts = content.pop("instruction_text")
    return texts, json.dumps(content)
