"""Low-dimensional columns of all episodes as flat NumPy arrays, straight from Arrow buffers; nothing but the asked columns
is read.

Shape legend: R rows (all frames of the table's episodes, in table order), E episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_vla.data.episode_table import EpisodeTable
from megatron_vla.data.metadata_v3 import UNREADABLE, parquet_problem
from megatron_vla.findings import Finding, error

READER_THREADS = 8
EXCLUDE_HINT = "restore the file, or exclude its episodes: tools/check_dataset.py --write-exclude-list, --exclude-episodes-file"


@dataclass(frozen=True)
class Columns:
    """values: name -> [R] or [R, size]; first_row_E: int64 [E + 1], row where each episode starts (and the total)."""

    values: dict[str, np.ndarray]
    first_row_E: np.ndarray

    @property
    def num_rows(self) -> int:
        """R."""
        return int(self.first_row_E[-1])

    def episode_of_R(self) -> np.ndarray:
        """Table row of each frame, int32 [R]."""
        return np.repeat(np.arange(len(self.first_row_E) - 1, dtype=np.int32), np.diff(self.first_row_E))

    def frame_of_R(self) -> np.ndarray:
        """Frame number in its episode, int32 [R]."""
        return (np.arange(self.num_rows) - np.repeat(self.first_row_E[:-1], np.diff(self.first_row_E))).astype(np.int32)


@dataclass(frozen=True)
class BrokenFile:
    """A data file that could not be used, and the table rows of the episodes in it."""

    finding: Finding
    episodes: np.ndarray


def load_columns(table: EpisodeTable, names: Sequence[str]) -> tuple[Columns, list[BrokenFile]]:
    """Read `names` (features with numbers) of every episode. float columns become float32, except the timestamp; integers
    int64.

    Rows of unreadable or too short files stay zero and are reported, all of them, not one at a time.
    """
    first_row_E = np.concatenate([[0], np.cumsum(table.length_E)])
    if table.records is not None:
        assert table.records.columns is not None, "columns are taken over once"
        return Columns({name: table.records.columns[name] for name in names}, first_row_E), []
    num_rows = int(first_row_E[-1])
    values: dict[str, np.ndarray] = {}
    for name in names:
        feature = table.features[name]
        if name == "timestamp":
            kind: Any = np.float64
        else:
            kind = np.float32 if feature.dtype.startswith("float") else np.int64
        values[name] = np.zeros((num_rows, feature.size) if feature.shape not in ((), (1,)) else (num_rows,), dtype=kind)
    jobs = list(table.data.episodes_by_file())

    def read(job: tuple[int, np.ndarray]) -> BrokenFile | None:
        file, episodes = job
        try:
            _read_file(table, table.data.path(file), episodes, first_row_E, values)
        except ValueError as problem:
            path = table.data.relative_path(file)
            return BrokenFile(error(f"{path} ({named_episodes(table, episodes)})", str(problem), EXCLUDE_HINT), episodes)
        return None

    # Arrow releases the interpreter lock while it reads; one file per thread suits both many small files and few large ones.
    with ThreadPoolExecutor(READER_THREADS) as pool:
        broken = [result for result in pool.map(read, jobs) if result is not None]
    return Columns(values, first_row_E), broken


def named_episodes(table: EpisodeTable, episodes: np.ndarray) -> str:
    """Dataset numbers of table rows, shortened: "episodes 3, 4, 9 and 12 more"."""
    numbers = [str(n) for n in table.episode_index_E[episodes[:8]].tolist()]
    more = f" and {len(episodes) - 8} more" if len(episodes) > 8 else ""
    return f"episode{'s' if len(episodes) > 1 else ''} {', '.join(numbers)}{more}"


def _read_file(
    table: EpisodeTable, path: Path, episodes: np.ndarray, first_row_E: np.ndarray, values: dict[str, np.ndarray]
) -> None:
    """Copy the rows of `episodes` into `values`. Raises ValueError with what is wrong with this file."""
    if not path.is_file():
        raise ValueError("missing")
    try:
        with pq.ParquetFile(path) as file:
            missing = [name for name in values if name not in file.schema_arrow.names]
            if missing:
                raise ValueError(f"no column {', '.join(missing)}; it has {', '.join(file.schema_arrow.names)}")
            read = file.read(columns=list(values), use_threads=False)
    except UNREADABLE as problem:
        raise ValueError(parquet_problem(problem)) from problem
    needed = int((table.data_row_E[episodes] + table.length_E[episodes]).max())
    if read.num_rows < needed:
        raise ValueError(f"{read.num_rows} rows, its episodes need {needed}")
    for name, target in values.items():
        source = column_values(read[name], target.shape[1:], name)
        for episode in episodes:
            start, length, row = first_row_E[episode], table.length_E[episode], table.data_row_E[episode]
            target[start : start + length] = source[row : row + length]


def column_values(column: pa.ChunkedArray, shape: tuple[int, ...], name: str) -> np.ndarray:
    """[rows, *shape] of an Arrow column of numbers or (nested) lists of numbers. Raises ValueError for other sizes or empty
    cells."""
    if column.null_count:
        raise ValueError(f"column {name!r} has {column.null_count} empty cells")
    parts = []
    for chunk in column.chunks:
        flat = chunk
        while pa.types.is_nested(flat.type):
            if pa.types.is_struct(flat.type):
                raise ValueError(f"column {name!r} is {column.type}; numbers or lists of numbers are needed")
            flat = flat.flatten()  # honours slices and offsets, unlike `.values`
        if pa.types.is_boolean(flat.type):
            flat = flat.cast(pa.int8())
        parts.append(flat.to_numpy(zero_copy_only=False))
    values = np.concatenate(parts) if len(parts) != 1 else parts[0]
    expected = column.length() * int(np.prod(shape, dtype=np.int64))
    if values.size != expected:
        raise ValueError(
            f"column {name!r}: {values.size} numbers in {column.length()} rows; info.json's shape needs {expected}"
        )
    return values.reshape(column.length(), *shape)
