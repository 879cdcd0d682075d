"""EpisodeTable: where every episode's rows and frames are, whatever the dataset's format.

Flat NumPy arrays and path templates only: 100,000 episodes are a few megabytes, pickle in milliseconds and are shared by
forked workers. Shape legend: E episodes, F files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vla.data.video_encoder import fps_fraction


@dataclass(frozen=True)
class Feature:
    """One column of the dataset. `dtype` is a NumPy name, "string", "video" or "image"; `names` label the last axis or are
    absent."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...] | None = None
    codec: str | None = None

    @property
    def is_visual(self) -> bool:
        """A camera."""
        return self.dtype in ("video", "image")

    @property
    def size(self) -> int:
        """Numbers per frame."""
        return int(np.prod(self.shape)) if self.shape else 1


@dataclass(frozen=True)
class FileSet:
    """A family of files: `template` with fields filled from per-file integers, and the file of each episode.

    fields_F: field name -> int64 [F]; text: constant fields (video_key). file_of_E: int32 [E], index into the F files.
    names: relative paths instead of a template, where a dataset lists its files.
    """

    root: str
    template: str
    fields_F: dict[str, np.ndarray]
    file_of_E: np.ndarray
    text: dict[str, str]
    names: tuple[str, ...] = ()

    @property
    def num_files(self) -> int:
        """F."""
        if self.names:
            return len(self.names)
        return len(next(iter(self.fields_F.values())))

    def relative_path(self, file: int) -> str:
        """Path of file number `file` below the root."""
        if self.names:
            return self.names[file]
        return self.template.format(**{k: int(v[file]) for k, v in self.fields_F.items()}, **self.text)

    def path(self, file: int) -> Path:
        """Absolute path of file number `file`."""
        return Path(self.root) / self.relative_path(file)

    def path_of(self, episode: int) -> Path:
        """File of the episode in row `episode` of the table."""
        return self.path(int(self.file_of_E[episode]))

    def episodes_by_file(self) -> Iterator[tuple[int, np.ndarray]]:
        """(file, its episode rows in table order) for every file that has any."""
        order = np.argsort(self.file_of_E, kind="stable")
        bounds = np.flatnonzero(np.diff(self.file_of_E[order])) + 1
        for rows in np.split(order, bounds):
            yield int(self.file_of_E[rows[0]]), rows


@dataclass(frozen=True)
class VideoFiles:
    """Video files of one camera. Frame k of an episode is frame first_frame_E[e] + k of its file, counted from the file's
    start.

    from_timestamp_E and to_timestamp_E (float64 [E], seconds) are as stored, for checks; frames are addressed by integers only.
    """

    files: FileSet
    first_frame_E: np.ndarray
    from_timestamp_E: np.ndarray
    to_timestamp_E: np.ndarray


@dataclass(frozen=True)
class RecordEpisodes:
    """Episodes that are records of TFRecord or ArrayRecord files, one record each.

    record_E: number in the file; offset_E, size_E: place of its bytes; first_step: steps left out at its start; sources: camera
    -> key in the record; columns: name -> [R, D] of the table's episodes in order, or None once they were taken over.
    """

    file_format: str
    record_E: np.ndarray
    offset_E: np.ndarray
    size_E: np.ndarray
    first_step: int
    sources: dict[str, str]
    columns: dict[str, np.ndarray] | None

    def select(self, keep_E: np.ndarray, length_E: np.ndarray) -> RecordEpisodes:
        """Only the episodes where `keep_E` is True."""
        rows = np.repeat(keep_E, length_E)
        columns = None if self.columns is None else {name: values[rows] for name, values in self.columns.items()}
        return replace(
            self,
            record_E=self.record_E[keep_E],
            offset_E=self.offset_E[keep_E],
            size_E=self.size_E[keep_E],
            columns=columns,
        )


@dataclass(frozen=True)
class EpisodeTable:
    """All that training needs to know of a dataset's files.

    episode_index_E: the dataset's own numbers, int64 [E]; length_E: frames; data: parquet (or record) files; data_row_E:
    first row of the episode in its file; videos: camera -> VideoFiles (cameras stored as images in the data files are not in
    it); task_texts: task_index -> instruction; instruction_of_E: int32 index into `instructions`, -1 where the episode has
    none. stored_from_index_E / stored_to_index_E: global row ranges as stored, or None where the format has none (checked,
    never used). records: set where episodes are records of record files instead of rows and videos.
    """

    root: str
    format: str
    fps: float
    robot_type: str | None
    features: dict[str, Feature]
    episode_index_E: np.ndarray
    length_E: np.ndarray
    data: FileSet
    data_row_E: np.ndarray
    videos: dict[str, VideoFiles]
    task_texts: dict[int, str]
    instructions: tuple[str, ...]
    instruction_of_E: np.ndarray
    stored_from_index_E: np.ndarray | None
    stored_to_index_E: np.ndarray | None
    info: dict[str, Any]
    records: RecordEpisodes | None = None

    @property
    def num_episodes(self) -> int:
        """E."""
        return len(self.length_E)

    @property
    def num_frames(self) -> int:
        """Sum of the lengths."""
        return int(self.length_E.sum())

    @property
    def cameras(self) -> tuple[str, ...]:
        """Names of the visual features."""
        return tuple(name for name, feature in self.features.items() if feature.is_visual)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the numeric and text features."""
        return tuple(name for name, feature in self.features.items() if not feature.is_visual)

    def instruction(self, episode: int) -> str:
        """Instruction of table row `episode` as the episode metadata states it; empty if none."""
        code = int(self.instruction_of_E[episode])
        return self.instructions[code] if code >= 0 else ""

    def select(self, keep_E: np.ndarray) -> EpisodeTable:
        """The table with only the episodes where `keep_E` (bool [E]) is True; files and rows stay as they are."""
        return replace(
            self,
            episode_index_E=self.episode_index_E[keep_E],
            length_E=self.length_E[keep_E],
            data=replace(self.data, file_of_E=self.data.file_of_E[keep_E]),
            data_row_E=self.data_row_E[keep_E],
            videos={
                camera: VideoFiles(
                    files=replace(video.files, file_of_E=video.files.file_of_E[keep_E]),
                    first_frame_E=video.first_frame_E[keep_E],
                    from_timestamp_E=video.from_timestamp_E[keep_E],
                    to_timestamp_E=video.to_timestamp_E[keep_E],
                )
                for camera, video in self.videos.items()
            },
            instruction_of_E=self.instruction_of_E[keep_E],
            stored_from_index_E=None if self.stored_from_index_E is None else self.stored_from_index_E[keep_E],
            stored_to_index_E=None if self.stored_to_index_E is None else self.stored_to_index_E[keep_E],
            records=None if self.records is None else self.records.select(keep_E, self.length_E),
        )

    def without_columns(self) -> EpisodeTable:
        """The table without columns in memory: what workers need, which get the columns another way."""
        return self if self.records is None else replace(self, records=replace(self.records, columns=None))

    def frame_duration(self) -> float:
        """Seconds."""
        return float(1 / fps_fraction(self.fps))
