"""Records a LeRobot dataset (v3.0, v2.1 or v2.0), episode by episode, straight to disk.

Memory is one episode's low-dimensional columns and one frame. `meta/info.json` is written last, so a folder without it is a
recording that was interrupted. Shape legend: T frames of the episode, H height, W width, C colour channels.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_vla.data import lerobot_layout as layout
from megatron_vla.data.lerobot_statistics import (
    QUANTILES,
    ImageHistogram,
    column_statistics,
    jsonable,
    statistics_of_files,
)
from megatron_vla.data.video_encoder import VideoEncoder
from megatron_vla.whole_file import replace_text

CodebaseVersion = Literal["v2.0", "v2.1", "v3.0"]
MEGABYTE = 1 << 20
EPISODE_ROWS_PER_GROUP = 256
V2_STATISTICS = ("min", "max", "mean", "std", "count")


@dataclass(frozen=True)
class EncodedPictures:
    """One camera's frames of an episode as PNG files, with what statistics need of them: made where the frames are.

    `LeRobotWriter` is one process, and has to do nothing with them but to write them down: of 26 ms for an episode of 51 frames
    of three cameras of 112 pixels 14 were decoding and counting. shape: of each frame, [H, W, 3].
    """

    files: list[bytes]
    shape: tuple[int, ...]
    histogram: ImageHistogram

    @classmethod
    def of(cls, frames: Iterable[np.ndarray]) -> EncodedPictures:
        """Encode T frames uint8 [H, W, 3]."""
        files: list[bytes] = []
        shape: tuple[int, ...] = ()
        histogram = ImageHistogram()
        for frame_HWC in histogram.sampled(frames):
            files.append(_png(frame_HWC))
            shape = tuple(frame_HWC.shape)
        return cls(files, shape, histogram)


class LeRobotWriter:
    """Writes one dataset folder; `finalize()` makes it valid.

    features: name -> {"dtype", "shape"[, "names"]} of the robot's own features; camera features have dtype "video" or
        "image" and shape [H, W, 3]. timestamp, frame_index, episode_index, index and task_index are added here.
    episodes_per_file: v3.0 only: a number for every file kind, or {"data": n, camera: m}; None rolls by size
        (data_files_size_in_mb, video_files_size_in_mb).
    crf: None is the codec's usual quality. gop 2 is what LeRobot writes: cheap random access.
    first_episode, first_frame, tasks: numbers to go on from and tasks known before, for a part of a larger dataset.

    Raises ValueError for a non-empty root, unknown features, wrong shapes or lengths; a camera stream that fails half-way
    leaves the recording unusable, and every later call says so.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        fps: float,
        features: Mapping[str, Mapping[str, Any]],
        robot_type: str | None = None,
        codebase_version: CodebaseVersion = "v3.0",
        video_codec: Literal["h264", "av1", "hevc"] = "h264",
        gop: int = 2,
        crf: int | None = None,
        b_frames: int = 0,
        episodes_per_file: int | Mapping[str, int] | None = None,
        data_files_size_in_mb: int = 100,
        video_files_size_in_mb: int = 200,
        chunks_size: int = layout.CHUNKS_SIZE,
        first_episode: int = 0,
        first_frame: int = 0,
        tasks: Sequence[str] = (),
    ):
        self.root = Path(root)
        if self.root.exists() and any(self.root.iterdir()):
            raise ValueError(f"{self.root}: not empty; a recording needs a new folder")
        if codebase_version not in layout.CODEBASE_VERSIONS:
            raise ValueError(f"codebase_version {codebase_version!r}: known are {', '.join(layout.CODEBASE_VERSIONS)}")
        taken = sorted(set(features) & set(layout.BOOKKEEPING))
        if taken:
            raise ValueError(f"features {taken}: these columns are made by the writer")
        self.features: dict[str, dict[str, Any]] = {
            name: {"dtype": f["dtype"], "shape": list(f["shape"]), "names": f.get("names")} for name, f in features.items()
        }
        for name, dtype in layout.BOOKKEEPING.items():
            self.features[name] = {"dtype": dtype, "shape": [1], "names": None}
        self.version, self.fps, self.robot_type = codebase_version, fps, robot_type
        self.cameras = [name for name, f in self.features.items() if layout.is_visual(f)]
        self.video_keys = [name for name, f in self.features.items() if f["dtype"] == "video"]
        self.num_episodes = self.num_frames = 0
        self._codec, self._gop, self._crf, self._b_frames = video_codec, gop, crf, b_frames
        self._episodes_per_file, self._chunks_size = episodes_per_file, chunks_size
        self._data_limit_mb, self._video_limit_mb = data_files_size_in_mb, video_files_size_in_mb
        self._schema = layout.data_schema(self.features)
        self._first_episode, self._first_frame = first_episode, first_frame
        self._tasks: dict[str, int] = {task: number for number, task in enumerate(tasks)}
        self._histograms = {camera: ImageHistogram() for camera in self.cameras}
        self._data_files: list[Path] = []
        self._data_writer: Any = None
        self._encoders: dict[str, VideoEncoder] = {}
        # v3.0: number of files begun and of episodes in the open one, for "data" and each camera
        self._file_number = dict.fromkeys(["data", *self.video_keys], -1)
        self._file_episodes = dict.fromkeys(["data", *self.video_keys], 0)
        self._episode_rows: list[dict[str, Any]] = []
        self._episode_writer: Any = None
        self._broken: str | None = None
        (self.root / "meta").mkdir(parents=True, exist_ok=True)

    def add_episode(
        self,
        columns: Mapping[str, np.ndarray],
        images: Mapping[str, np.ndarray | Iterable[np.ndarray] | EncodedPictures],
        instruction: str,
    ) -> int:
        """Append one episode and return its index.

        columns: feature -> array [T, *shape] (or [T] for shape (1,)). images: camera -> uint8 [T, H, W, 3] or an iterable of
        T frames; for "image" features also T encoded ones.
        """
        if self._broken:
            raise ValueError(f"{self.root}: recording is unusable since {self._broken}; start a new folder")
        arrays = self._checked_columns(columns, images)
        num_frames = len(next(iter(arrays.values())))
        episode = self.num_episodes
        task_index = self._tasks.setdefault(instruction, len(self._tasks))
        frame_index = np.arange(num_frames, dtype=np.int64)
        arrays["timestamp"] = (frame_index / self.fps).astype(np.float32)
        arrays["frame_index"] = frame_index
        arrays["episode_index"] = np.full(num_frames, self._first_episode + episode, dtype=np.int64)
        arrays["index"] = self._first_frame + self.num_frames + frame_index
        arrays["task_index"] = np.full(num_frames, task_index, dtype=np.int64)
        row: dict[str, Any] = {"episode_index": self._first_episode + episode, "tasks": [instruction], "length": num_frames}
        statistics: dict[str, dict[str, np.ndarray]] = {}
        encoded: dict[str, list[dict[str, Any]]] = {}
        self._broken = f"episode {episode} failed while its frames were written"  # lifted when the episode is complete
        video_row: dict[str, Any] = {}
        for camera in self.cameras:
            statistics[camera] = self._write_camera(camera, images[camera], num_frames, episode, video_row, encoded)
        row.update(self._write_data(arrays, encoded, num_frames, episode))
        start = self._first_frame + self.num_frames
        row.update({"dataset_from_index": start, "dataset_to_index": start + num_frames, **video_row})
        for name, values in arrays.items():
            if self.features[name]["dtype"] != "string":
                statistics[name] = column_statistics(values)
        self._write_episode_row(row, statistics)
        self.num_episodes += 1
        self.num_frames += num_frames
        self._broken = None
        return episode

    def finalize(self) -> Path:
        """Close every file, write tasks, exact dataset statistics and, last, `meta/info.json`. Returns the root."""
        if self._broken:
            raise ValueError(f"{self.root}: recording is unusable since {self._broken}")
        if self.num_episodes == 0:
            raise ValueError(f"{self.root}: no episode was recorded")
        for encoder in self._encoders.values():
            encoder.close()
        if self._data_writer is not None:
            self._data_writer.close()
        self._flush_episode_rows()
        if self._episode_writer is not None:
            self._episode_writer.close()
        tasks = list(self._tasks)
        if self.version == "v3.0":
            pq.write_table(layout.tasks_table(tasks), self.root / "meta/tasks.parquet")
        else:
            lines = [json.dumps({"task_index": index, "task": task}, ensure_ascii=False) for index, task in enumerate(tasks)]
            replace_text(self.root / "meta/tasks.jsonl", "\n".join(lines) + "\n")
        if self.version != "v2.1":
            keys = ("min", "max", "mean", "std", *QUANTILES) if self.version == "v2.0" else None
            replace_text(self.root / "meta/stats.json", json.dumps(jsonable(self._dataset_statistics(), keys), indent=4))
        replace_text(self.root / "meta/info.json", json.dumps(self._info(), indent=4))
        return self.root

    def _checked_columns(self, columns: Mapping[str, Any], images: Mapping[str, Any]) -> dict[str, np.ndarray]:
        expected = [n for n in self.features if n not in layout.BOOKKEEPING and n not in self.cameras]
        if set(columns) != set(expected) or set(images) != set(self.cameras):
            raise ValueError(
                f"episode {self.num_episodes}: columns {sorted(columns)} and images {sorted(images)}; "
                f"the features need columns {sorted(expected)} and images {sorted(self.cameras)}"
            )
        arrays: dict[str, np.ndarray] = {}
        length: int | None = None
        for name in expected:
            feature = self.features[name]
            array = np.asarray(columns[name], dtype=None if feature["dtype"] == "string" else feature["dtype"])
            shape = tuple(feature["shape"])
            if array.ndim == 1 and shape == (1,):
                array = array[:, None]
            if array.shape[1:] != (shape or ()) or len(array) == 0:
                raise ValueError(
                    f"episode {self.num_episodes}, column {name!r}: shape {array.shape}; needed [T >= 1, *{shape}]"
                )
            if length is not None and len(array) != length:
                raise ValueError(f"episode {self.num_episodes}, column {name!r}: {len(array)} frames, others have {length}")
            length = len(array)
            arrays[name] = array
        for camera in self.cameras:
            frames, where = images[camera], f"episode {self.num_episodes}, camera {camera!r}"
            if isinstance(frames, EncodedPictures):
                kind, shape = self.features[camera]["dtype"], tuple(self.features[camera]["shape"])
                if kind == "video" or frames.shape != shape:
                    raise ValueError(f"{where}: encoded pictures of {frames.shape}; the feature is {kind} of {shape}")
                frames = frames.files
            if isinstance(frames, np.ndarray | list) and len(frames) != length:
                raise ValueError(f"{where}: {len(frames)} frames, columns have {length}")
        if length is None:
            raise ValueError("a dataset needs at least one column beside its cameras")
        return arrays

    def _write_camera(
        self,
        camera: str,
        frames: Iterable[np.ndarray] | EncodedPictures,
        num_frames: int,
        episode: int,
        video_row: dict[str, Any],
        encoded: dict[str, list[dict[str, Any]]],
    ) -> dict[str, np.ndarray]:
        shape, where = tuple(self.features[camera]["shape"]), f"episode {episode}, camera {camera!r}"
        if self.features[camera]["dtype"] == "video":
            encoder = self._encoder(camera, episode, video_row)
            first, histogram, count = encoder.num_frames, ImageHistogram(), 0
            assert not isinstance(frames, EncodedPictures), "refused before"
            for frame in histogram.sampled(_checked_frames(frames, shape, where)):
                encoder.add(frame, keyframe=count == 0)
                count += 1
            if self.version == "v3.0":
                video_row[f"videos/{camera}/from_timestamp"] = first / self.fps
                video_row[f"videos/{camera}/to_timestamp"] = (first + count) / self.fps
            else:
                encoder.close()
        else:
            pictures = (
                frames if isinstance(frames, EncodedPictures) else EncodedPictures.of(_checked_frames(frames, shape, where))
            )
            histogram, count = pictures.histogram, len(pictures.files)
            encoded[camera] = [{"bytes": file, "path": f"frame_{k:06d}.png"} for k, file in enumerate(pictures.files)]
        if count != num_frames:
            raise ValueError(f"{where}: {count} frames, columns have {num_frames}")
        self._histograms[camera].merge(histogram)
        return histogram.statistics()

    def _encoder(self, camera: str, episode: int, video_row: dict[str, Any]) -> VideoEncoder:
        if self.version != "v3.0":
            chunk = episode // self._chunks_size
            name = layout.V2_VIDEO_PATH.format(episode_chunk=chunk, video_key=camera, episode_index=episode)
            return VideoEncoder(
                self.root / name, fps=self.fps, codec=self._codec, gop=self._gop, crf=self._crf, b_frames=self._b_frames
            )
        encoder = self._encoders.get(camera)
        if encoder is None or self._is_full(camera, encoder.size_bytes, self._video_limit_mb):
            if encoder is not None:
                encoder.close()
            chunk, file = self._next_file(camera)
            name = layout.V3_VIDEO_PATH.format(video_key=camera, chunk_index=chunk, file_index=file)
            encoder = VideoEncoder(
                self.root / name, fps=self.fps, codec=self._codec, gop=self._gop, crf=self._crf, b_frames=self._b_frames
            )
            self._encoders[camera] = encoder
        self._file_episodes[camera] += 1
        chunk, file = divmod(self._file_number[camera], self._chunks_size)
        video_row[f"videos/{camera}/chunk_index"], video_row[f"videos/{camera}/file_index"] = chunk, file
        return encoder

    def _is_full(self, kind: str, size_bytes: int, limit_mb: int) -> bool:
        limit = self._episodes_per_file
        if isinstance(limit, Mapping):
            limit = limit.get(kind)
        if limit is not None and self._file_episodes[kind] >= limit:
            return True
        return size_bytes >= limit_mb * MEGABYTE

    def _next_file(self, kind: str) -> tuple[int, int]:
        self._file_number[kind] += 1
        self._file_episodes[kind] = 0
        return divmod(self._file_number[kind], self._chunks_size)

    def _write_data(
        self, arrays: Mapping[str, np.ndarray], encoded: Mapping[str, list[dict[str, Any]]], num_frames: int, episode: int
    ) -> dict[str, Any]:
        fields = []
        for field in self._schema:
            if field.name in encoded:
                fields.append(pa.array(encoded[field.name], field.type))
            else:
                fields.append(_to_arrow(arrays[field.name], field.type))
        table = pa.Table.from_arrays(fields, schema=self._schema)
        # PNG files never repeat and are compressed already. Snappy saves nothing and takes two thirds of the time of writing
        # them (6.4 ms of an episode of 1.9 MB, 1.9 ms without), a dictionary as much again.
        options: dict[str, Any] = {"use_dictionary": False, "compression": "none"} if encoded else {}
        if self.version != "v3.0":
            path = self.root / layout.V2_DATA_PATH.format(episode_chunk=episode // self._chunks_size, episode_index=episode)
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, path, **options)
            self._data_files.append(path)
            return {}
        size = self._data_files[-1].stat().st_size if self._data_files else 0
        if self._data_writer is None or self._is_full("data", size, self._data_limit_mb):
            if self._data_writer is not None:
                self._data_writer.close()
            chunk, file = self._next_file("data")
            path = self.root / layout.V3_DATA_PATH.format(chunk_index=chunk, file_index=file)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._data_writer = pq.ParquetWriter(path, self._schema, **options)
            self._data_files.append(path)
        self._data_writer.write_table(table, row_group_size=num_frames)  # one row group per episode: cheap to read one episode
        self._file_episodes["data"] += 1
        chunk, file = divmod(self._file_number["data"], self._chunks_size)
        return {"data/chunk_index": chunk, "data/file_index": file}

    def _write_episode_row(self, row: dict[str, Any], statistics: dict[str, dict[str, np.ndarray]]) -> None:
        if self.version == "v3.0":
            for feature, values in statistics.items():
                row.update({f"stats/{feature}/{name}": value.tolist() for name, value in values.items()})
            row["meta/episodes/chunk_index"], row["meta/episodes/file_index"] = 0, 0
            self._episode_rows.append(row)
            if len(self._episode_rows) >= EPISODE_ROWS_PER_GROUP:
                self._flush_episode_rows()
            return
        entry = {key: row[key] for key in ("episode_index", "tasks", "length")}
        _append_line(self.root / "meta/episodes.jsonl", entry)
        if self.version == "v2.1":
            stats = jsonable(statistics, V2_STATISTICS)
            _append_line(self.root / "meta/episodes_stats.jsonl", {"episode_index": row["episode_index"], "stats": stats})

    def _flush_episode_rows(self) -> None:
        if not self._episode_rows:
            return
        table = pa.Table.from_pylist(self._episode_rows)
        if self._episode_writer is None:
            path = self.root / layout.V3_EPISODES_PATH.format(chunk_index=0, file_index=0)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._episode_writer = pq.ParquetWriter(path, table.schema)
        self._episode_writer.write_table(table.cast(self._episode_writer.schema))
        self._episode_rows = []

    def image_histograms(self) -> dict[str, ImageHistogram]:
        """Histogram of every camera so far."""
        return dict(self._histograms)

    def _dataset_statistics(self) -> dict[str, dict[str, np.ndarray]]:
        result: dict[str, dict[str, np.ndarray]] = {c: self._histograms[c].statistics() for c in self.cameras}
        return {**result, **statistics_of_files(self._data_files, self.features)}

    def _info(self) -> dict[str, Any]:
        is_v3 = self.version == "v3.0"
        info: dict[str, Any] = {
            "codebase_version": self.version,
            "robot_type": self.robot_type,
            "total_episodes": self.num_episodes,
            "total_frames": self.num_frames,
            "total_tasks": len(self._tasks),
        }
        if is_v3:
            info["chunks_size"] = self._chunks_size
            info["data_files_size_in_mb"], info["video_files_size_in_mb"] = self._data_limit_mb, self._video_limit_mb
        else:
            info["total_videos"] = self.num_episodes * len(self.video_keys)
            info["total_chunks"] = -(-self.num_episodes // self._chunks_size)
            info["chunks_size"] = self._chunks_size
        video_path = layout.V3_VIDEO_PATH if is_v3 else layout.V2_VIDEO_PATH
        info.update(
            {
                "fps": self.fps,
                "splits": {"train": f"0:{self.num_episodes}"},
                "data_path": layout.V3_DATA_PATH if is_v3 else layout.V2_DATA_PATH,
                "video_path": video_path if self.video_keys else None,
                "features": {name: self._described(name, feature) for name, feature in self.features.items()},
            }
        )
        return info

    def _described(self, name: str, feature: dict[str, Any]) -> dict[str, Any]:
        if name not in self.video_keys:
            return feature
        height, width, channels = feature["shape"]
        video = {
            "video.height": height,
            "video.width": width,
            "video.codec": self._codec,
            "video.pix_fmt": "yuv420p",
            "video.is_depth_map": False,
            "video.fps": self.fps,
            "video.channels": channels,
            "has_audio": False,
        }
        return {**feature, "info": video}


def _to_arrow(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """[T, *shape] -> Arrow array of T entries without going through Python objects (strings excepted)."""
    sizes = []
    while pa.types.is_fixed_size_list(kind):
        sizes.append(kind.list_size)
        kind = kind.value_type
    array = pa.array(values.ravel().tolist() if pa.types.is_string(kind) else np.ascontiguousarray(values).ravel(), kind)
    for size in reversed(sizes):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def _checked_frames(frames: Iterable[np.ndarray], shape: tuple[int, ...], where: str) -> Iterator[np.ndarray]:
    """`frames`, one by one. Raises ValueError for one that is not uint8 of `shape`."""
    for number, frame in enumerate(frames):
        if tuple(frame.shape) != shape or frame.dtype != np.uint8:
            found = f"{frame.dtype} {tuple(frame.shape)}"
            raise ValueError(f"{where}, frame {number}: {found}; features say uint8 {shape}")
        yield frame


def _png(frame_HWC: np.ndarray) -> bytes:
    """uint8 [H, W, 3] -> PNG file; level 1 is several times as fast as Pillow's 6 and a tenth larger."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(frame_HWC).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def _append_line(path: Path, entry: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry, ensure_ascii=False) + "\n")
