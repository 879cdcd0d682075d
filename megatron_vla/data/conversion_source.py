"""What tools/prepare_data.py converts from: episodes of an RLDS dataset or of HDF5 files, through one interface.

Shape legend: E episodes, T frames of an episode, D dimensions, H height, W width, C colours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_vla.data.episode_table import EpisodeTable
from megatron_vla.data.frame_source import FrameSource
from megatron_vla.data.metadata import read_metadata
from megatron_vla.data.rlds_features import is_rlds

TASK = "task_index"


class ConversionSource(Protocol):
    """Episodes to convert. features: columns and cameras ("image") as the writer takes them; where(e): file and record."""

    fps: float
    robot_type: str | None
    features: dict[str, dict[str, Any]]
    length_E: np.ndarray
    instructions: tuple[str, ...]

    def columns(self, episode: int) -> dict[str, np.ndarray]:
        """Name -> float32 [T, D]."""
        ...

    def frames(self, camera: str, episode: int, frame_indices: Sequence[int]) -> Iterator[np.ndarray]:
        """uint8 [H, W, C] pictures, decoded one after the other."""
        ...

    def where(self, episode: int) -> str:
        """For messages."""
        ...


class TableSource:
    """Episodes of an RLDS dataset."""

    def __init__(self, table: EpisodeTable):
        assert table.records is not None and table.records.columns is not None
        self.table = table
        self.fps, self.robot_type = table.fps, table.robot_type
        self.features = {
            name: {"dtype": f.dtype, "shape": list(f.shape), "names": None if f.names is None else list(f.names)}
            for name, f in table.features.items()
            if name != TASK
        }
        self.length_E = table.length_E
        self._first_E = np.concatenate([[0], np.cumsum(table.length_E)])
        self._columns = table.records.columns
        # One open file: episodes are read in storage order.
        self._frames = FrameSource(table.without_columns(), "pyav", cache_size=1)
        self.instructions = tuple(self._instruction(episode) for episode in range(table.num_episodes))

    def _rows(self, episode: int) -> slice:
        return slice(int(self._first_E[episode]), int(self._first_E[episode + 1]))

    def _instruction(self, episode: int) -> str:
        # Training reads such episodes as they are; only LeRobot's files cannot hold them.
        codes = np.unique(self._columns[TASK][self._rows(episode)])
        if len(codes) > 1:
            raise ValueError(f"{self.where(episode)}: {len(codes)} instructions in one episode; LeRobot's files hold one each")
        return self.table.task_texts[int(codes[0])]

    def columns(self, episode: int) -> dict[str, np.ndarray]:
        """See `ConversionSource`."""
        return {name: values[self._rows(episode)] for name, values in self._columns.items() if name != TASK}

    def frames(self, camera: str, episode: int, frame_indices: Sequence[int]) -> Iterator[np.ndarray]:
        """See `ConversionSource`."""
        for frame in frame_indices:
            yield self._frames.frames(camera, episode, [frame])[0]

    def where(self, episode: int) -> str:
        """See `ConversionSource`."""
        assert self.table.records is not None
        return f"{self.table.data.path_of(episode)}, record {int(self.table.records.record_E[episode])}"


def open_source(path: Path, mapping: str | None, cache_path: str | None) -> ConversionSource:
    """RLDS folder, HDF5 file, or folder of HDF5 files. Raises ValueError naming what was found instead."""
    from megatron_vla.data.hdf5_source import Hdf5Source, hdf5_files

    if path.is_dir() and is_rlds(path):
        return TableSource(read_metadata(path, mapping, cache_path)[0])
    if files := hdf5_files(path):
        return Hdf5Source(path, files, mapping)
    # A copy in another version would double the disk for nothing.
    if (path / "meta/info.json").is_file():
        raise ValueError(f"--input {path}: a LeRobot dataset already, which training reads in place -> nothing to convert")
    raise ValueError(f"--input {path}: no RLDS dataset (dataset_info.json) and no .hdf5 files -> give one of these")
