"""Camera frames of an episode, from mp4 files or from images in the data files, through one interface.

Handles belong to the process that opened them: they are made on first use and dropped without being touched when the process
id changed (fork) or the object was pickled (spawn). Shape legend: n frames, H height, W width, C colours.
"""

from __future__ import annotations

import io
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from megatron_vla.data.episode_table import EpisodeTable
from megatron_vla.data.rlds_example import feature_values, parse_example
from megatron_vla.data.tfrecord import RecordPlace, open_record_file
from megatron_vla.data.video_backends import Decoder, FrameMismatch, in_room, open_decoder


class HandlePool:
    """At most `capacity` open handles per process; the least recently used one is closed first."""

    def __init__(self, capacity: int):
        if capacity < 1:
            raise ValueError(f"--video-decoder-cache-size {capacity}: at least 1 open decoder is needed")
        self.capacity = capacity
        self.open_seconds = 0.0  # spent in openers, in this process
        self._owner = os.getpid()
        self._open: OrderedDict[Any, Any] = OrderedDict()
        self._inherited: Any = None

    def get(self, key: Any, opener: Callable[[], Any]) -> Any:
        """The handle for `key`, opened by `opener` if this process has none."""
        if self._owner != os.getpid():
            # Handles inherited over fork share file offsets and threads with the parent: forget them, close nothing.
            self._inherited, self._open, self._owner = self._open, OrderedDict(), os.getpid()
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        while len(self._open) >= self.capacity:
            _, oldest = self._open.popitem(last=False)
            oldest.close()
        started = time.perf_counter()
        handle = self._open[key] = opener()
        self.open_seconds += time.perf_counter() - started
        return handle

    def discard(self, key: Any) -> None:
        """Close one handle, if open here."""
        handle = self._open.pop(key, None) if self._owner == os.getpid() else None
        if handle is not None:
            handle.close()

    def __len__(self) -> int:
        return len(self._open) if self._owner == os.getpid() else 0

    def __getstate__(self) -> dict[str, Any]:
        return {"capacity": self.capacity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["capacity"])  # type: ignore[misc]


class RowGroupReader:
    """Images stored in one data file: decoded from the row group that holds them, one group kept."""

    def __init__(self, path: Path):
        self.path = path
        self._file = pq.ParquetFile(path)
        counts = [self._file.metadata.row_group(i).num_rows for i in range(self._file.metadata.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self._loaded: tuple[int, str] | None = None
        self._column: Any = None

    def cells(self, column: str, rows: Sequence[int]) -> list[Any]:
        """Values of `column` in file rows `rows`."""
        if column not in self._file.schema_arrow.names:
            raise ValueError(f"{self.path}: no column {column}; it has {', '.join(self._file.schema_arrow.names)}")
        values = []
        for row in rows:
            group = int(np.searchsorted(self._starts, row, side="right")) - 1
            if group >= len(self._starts) - 1:
                raise ValueError(f"{self.path}: row {row} is beyond its {self._starts[-1]} rows -> run tools/check_dataset.py")
            if self._loaded != (group, column):
                self._column = self._file.read_row_group(group, columns=[column])[column]
                self._loaded = (group, column)
            values.append(self._column[int(row - self._starts[group])].as_py())
        return values

    def close(self) -> None:
        """Release the file and the kept row group."""
        self._column = self._loaded = None
        self._file.close()


class RecordReader:
    """Pictures of episodes that are records: the last episode is kept parsed, since its cameras and frames come together."""

    def __init__(self, path: Path, file_format: str):
        self._file = open_record_file(path, file_format)
        self._loaded: int | None = None
        self._example: Any = None

    def cells(self, place: RecordPlace, key: str, steps: Sequence[int]) -> list[bytes]:
        """Encoded pictures of `steps`. Raises ValueError naming file and record."""
        if self._loaded != place.number:
            self._example = parse_example(self._file.read(place))
            self._loaded = place.number
        values = feature_values(self._example, key)
        return [values[step] for step in steps]

    def close(self) -> None:
        """Release the file and the kept episode."""
        self._example = self._loaded = None
        self._file.close()


class FrameSource:
    """Frames of every camera of one dataset. Picklable; safe after fork and spawn."""

    def __init__(self, table: EpisodeTable, backend: str, cache_size: int):
        self.table = table
        self.backend = backend
        self._decoders = HandlePool(cache_size)
        self._image_files = HandlePool(cache_size)
        self._seconds, self._cell_seconds, self._num_frames = 0.0, 0.0, 0

    def take_costs(self) -> tuple[float, int]:
        """(seconds of decoding, frames) since the last call, in this process. Opening and reading files is not in it.

        Video is read while it is decoded: of video only opening its file is left out.
        """
        read = self._cell_seconds + self._decoders.open_seconds + self._image_files.open_seconds
        costs = max(0.0, self._seconds - read), self._num_frames
        self._decoders.open_seconds = self._image_files.open_seconds = 0.0
        self._seconds, self._cell_seconds, self._num_frames = 0.0, 0.0, 0
        return costs

    def frames(self, camera: str, episode: int, frame_indices: Sequence[int], out_nCHW: np.ndarray | None = None) -> np.ndarray:
        """uint8 RGB [n, H, W, 3] of frames `frame_indices` (from the episode's start) of table row `episode`.

        `out_nCHW`: see `Decoder.frames_at`. Raises ValueError naming file, episode, camera, frame and both times: never another
        frame than the one asked for.
        """
        length = int(self.table.length_E[episode])
        outside = next((k for k in frame_indices if not 0 <= k < length), None)
        number = int(self.table.episode_index_E[episode])
        if outside is not None:
            raise ValueError(f"{self.table.root}, episode {number}, camera {camera!r}: frame {outside} of {length} asked for")
        started = time.perf_counter()
        read = self._video_frames if camera in self.table.videos else self._image_frames
        frames_nHWC = read(camera, episode, frame_indices, number, out_nCHW)
        self._seconds += time.perf_counter() - started
        self._num_frames += len(frame_indices)
        return frames_nHWC

    def _video_frames(
        self, camera: str, episode: int, frame_indices: Sequence[int], number: int, out_nCHW: np.ndarray | None
    ) -> np.ndarray:
        video = self.table.videos[camera]
        path = video.files.path_of(episode)
        first = int(video.first_frame_E[episode])
        try:
            decoder: Decoder = self._decoders.get(path, lambda: open_decoder(self.backend, path, self.table.fps))
            return decoder.frames_at([first + int(k) for k in frame_indices], out_nCHW)
        except FrameMismatch as mismatch:
            self._decoders.discard(path)
            raise ValueError(
                f"episode {number}, camera {camera!r}, frame {mismatch.frame - first}: {mismatch} "
                "-> run tools/check_dataset.py --deep; --exclude-episodes-file leaves such episodes out"
            ) from mismatch
        except (ValueError, RuntimeError, OSError) as problem:
            self._decoders.discard(path)
            raise ValueError(f"episode {number}, camera {camera!r}: {problem}") from problem

    def _image_cells(self, path: Path, camera: str, episode: int, frame_indices: Sequence[int]) -> list[Any]:
        records = self.table.records
        if records is not None:
            reader: RecordReader = self._image_files.get(path, lambda: RecordReader(path, records.file_format))
            place = RecordPlace(*(int(values[episode]) for values in (records.record_E, records.offset_E, records.size_E)))
            return reader.cells(place, records.sources[camera], [records.first_step + int(k) for k in frame_indices])
        first = int(self.table.data_row_E[episode])
        groups: RowGroupReader = self._image_files.get(path, lambda: RowGroupReader(path))
        return groups.cells(camera, [first + int(k) for k in frame_indices])

    def _image_frames(
        self, camera: str, episode: int, frame_indices: Sequence[int], number: int, out_nCHW: np.ndarray | None
    ) -> np.ndarray:
        path = self.table.data.path_of(episode)
        started, opened = time.perf_counter(), self._image_files.open_seconds
        cells = self._image_cells(path, camera, episode, frame_indices)
        self._cell_seconds += time.perf_counter() - started - (self._image_files.open_seconds - opened)
        frames = []
        for k, cell in zip(frame_indices, cells, strict=True):
            try:
                frames.append(decode_image(cell, Path(self.table.root)))
            except (ValueError, OSError) as problem:
                raise ValueError(f"{path}, episode {number}, camera {camera!r}, frame {k}: {problem}") from problem
        return in_room(np.stack(frames), out_nCHW)


def decode_image(cell: Any, root: Path) -> np.ndarray:
    """uint8 [H, W, 3] from a parquet cell: {"bytes", "path"}, bytes, or a path (relative ones are below `root`)."""
    from PIL import Image

    data, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
    if isinstance(data, str):
        data, path = None, data
    if data is None and path is None:
        raise ValueError("the image cell is empty -> record the episode again, or exclude it")
    source: Any = io.BytesIO(data) if data is not None else root / str(path)
    with Image.open(source) as image:
        return np.asarray(image.convert("RGB"))
