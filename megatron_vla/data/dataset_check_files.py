"""Checks of a dataset's metadata against its files: what the tables promise must be in the files.

Every function returns all that it found; nothing stops at the first fault. Shape legend: E episodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from megatron_vla.data.episode_table import EpisodeTable, VideoFiles
from megatron_vla.data.frame_source import FrameSource
from megatron_vla.data.lerobot_columns import EXCLUDE_HINT, named_episodes
from megatron_vla.data.metadata_v3 import UNREADABLE, parquet_problem
from megatron_vla.data.video_backends import FrameMismatch, open_decoder
from megatron_vla.data.video_encoder import fps_fraction
from megatron_vla.data.video_probe import declared_codecs
from megatron_vla.findings import Finding, error, warning


@dataclass
class Found:
    """Findings, the table rows of the episodes that an exclude list must name, and for each video codec met one readable file
    with the number of its frames that are needed."""

    findings: list[Finding] = field(default_factory=list)
    bad_episodes: set[int] = field(default_factory=set)
    codec_files: dict[str, tuple[Path, int]] = field(default_factory=dict)

    def add(self, finding: Finding, episodes: np.ndarray | None = None) -> None:
        """Record a finding; `episodes` are table rows that cannot be trained on."""
        self.findings.append(finding)
        if episodes is not None:
            self.bad_episodes.update(int(e) for e in episodes)

    def merge(self, other: Found) -> None:
        """Add another check's result."""
        self.findings += other.findings
        self.bad_episodes |= other.bad_episodes
        self.codec_files = {**other.codec_files, **self.codec_files}


def check_table(table: EpisodeTable, keep_E: np.ndarray | None = None) -> Found:
    """Rules that need only the metadata: totals, lengths, stored row ranges, order of the episodes in each video file.

    `table` is the whole dataset; faults of episodes where `keep_E` (bool [E]) is False are not reported.
    """
    found = Found()
    keep_E = np.ones(table.num_episodes, dtype=bool) if keep_E is None else keep_E
    numbers, counts = np.unique(table.episode_index_E, return_counts=True)
    twice = numbers[counts > 1]
    if len(twice):
        found.add(error("meta/episodes", f"episode {', '.join(map(str, twice[:8]))} is listed twice", "keep one entry each"))
    empty = np.flatnonzero((table.length_E <= 0) & keep_E)
    if len(empty):
        found.add(error("meta/episodes", f"{named_episodes(table, empty)}: length 0 or less", EXCLUDE_HINT), empty)
    for key, value in (("total_episodes", table.num_episodes), ("total_frames", table.num_frames)):
        stated = table.info.get(key)
        if stated is not None and int(stated) != value:
            found.add(
                warning("meta/info.json", f"{key} {stated}; the episode list has {value}", "trained as the episode list says")
            )
    if table.stored_from_index_E is not None:
        found.merge(_check_row_ranges(table, keep_E))
    for camera, video in table.videos.items():
        found.merge(_check_intervals(table, camera, video, keep_E))
    return found


def _check_row_ranges(table: EpisodeTable, keep_E: np.ndarray) -> Found:
    """Stored dataset_from_index/dataset_to_index must be the running sum of the lengths."""
    found = Found()
    ends = np.cumsum(table.length_E)
    wrong = table.stored_from_index_E != ends - table.length_E
    if table.stored_to_index_E is not None:
        wrong |= table.stored_to_index_E != ends
    rows = np.flatnonzero(wrong & keep_E)
    if len(rows):
        first = rows[0]
        assert table.stored_from_index_E is not None
        found.add(
            error(
                "meta/episodes dataset_from_index/dataset_to_index",
                f"{named_episodes(table, rows)}: stored ranges are not the running sum of the lengths (episode "
                f"{table.episode_index_E[first]}: from {table.stored_from_index_E[first]}, lengths give "
                f"{ends[first] - table.length_E[first]}); action chunks would end at wrong places",
                "convert the dataset again with a current converter",
            ),
            rows,
        )
    return found


def _check_intervals(table: EpisodeTable, camera: str, video: VideoFiles, keep_E: np.ndarray) -> Found:
    """Episode intervals of one file must be in order, without overlap, and as long as the episode."""
    found = Found()
    half = table.frame_duration() / 2
    spans = video.to_timestamp_E - video.from_timestamp_E
    wrong = np.flatnonzero((np.abs(spans - table.length_E * table.frame_duration()) > half) & keep_E)
    if len(wrong):
        e = wrong[0]
        found.add(
            error(
                f"meta/episodes videos/{camera}",
                f"{named_episodes(table, wrong)}: from_timestamp to to_timestamp spans {spans[e]:.3f} s, "
                f"{table.length_E[e]} frames at {table.fps:g} fps are {table.length_E[e] * table.frame_duration():.3f} s",
                "convert or merge the dataset again",
            ),
            wrong,
        )
    order = np.lexsort((table.episode_index_E, video.files.file_of_E))
    before, after = order[:-1], order[1:]
    same_file = (video.files.file_of_E[before] == video.files.file_of_E[after]) & keep_E[before] & keep_E[after]
    overlap = same_file & (video.from_timestamp_E[after] < video.to_timestamp_E[before] - half)
    for a, b in zip(before[overlap], after[overlap], strict=True):
        found.add(
            error(
                f"{video.files.relative_path(int(video.files.file_of_E[b]))}",
                f"episode {table.episode_index_E[b]} starts at {video.from_timestamp_E[b]:.3f} s, before episode "
                f"{table.episode_index_E[a]} ends at {video.to_timestamp_E[a]:.3f} s: offset or file index was not "
                f"updated when merging or converting",
                "merge or convert again, or exclude these episodes (--exclude-episodes-file)",
            ),
            np.array([a, b]),
        )
    return found


def check_data_files(table: EpisodeTable, max_files: int | None = None) -> Found:
    """Footers of the data files: readable, and as many rows as the episodes placed there."""
    found = Found()
    if table.records is not None:
        return found  # every record was read, with its checksums, when the table was made
    for file, episodes in sampled(table.data.episodes_by_file(), max_files):
        path, name = table.data.path(file), table.data.relative_path(file)
        where = f"{name} ({named_episodes(table, episodes)})"
        if not path.is_file():
            found.add(error(where, "missing", EXCLUDE_HINT), episodes)
            continue
        try:
            rows = pq.read_metadata(path).num_rows
        except UNREADABLE as problem:
            found.add(error(where, parquet_problem(problem), EXCLUDE_HINT), episodes)
            continue
        needed = int((table.data_row_E[episodes] + table.length_E[episodes]).max())
        if rows < needed:
            found.add(error(where, f"{rows} rows, its episodes need {needed}", EXCLUDE_HINT), episodes)
        elif rows > needed:
            found.add(
                warning(where, f"{rows} rows, its episodes use {needed}", "harmless if episodes were excluded or deleted")
            )
    return found


def sampled(items: Any, limit: int | None) -> list[Any]:
    """All items, or `limit` of them evenly spread (first and last included)."""
    listed = list(items)
    if limit is None or len(listed) <= limit:
        return listed
    return [listed[i] for i in np.linspace(0, len(listed) - 1, limit).astype(int)]


def check_video_files(table: EpisodeTable, cameras: tuple[str, ...], max_files: int | None = None) -> Found:
    """Containers of the video files: readable, right rate, and as many frames as the episodes placed there."""
    found = Found()
    if find_spec("av") is None:
        # The container check needs PyAV; the decoder probe still runs, on what info.json says about codecs.
        found.codec_files = declared_codecs(table, cameras)
        if found.codec_files:
            found.add(warning("videos", "not checked: PyAV is not installed", "pip install av"))
        return found
    for camera in cameras:
        if camera not in table.videos:
            continue
        video = table.videos[camera]
        for file, episodes in sampled(video.files.episodes_by_file(), max_files):
            where = f"{video.files.relative_path(file)} ({named_episodes(table, episodes)})"
            ends = video.first_frame_E[episodes] + table.length_E[episodes]
            try:
                frames, rate, codec = container_facts(video.files.path(file), table.fps)
            except ValueError as problem:
                found.add(error(where, str(problem), EXCLUDE_HINT), episodes)
                continue
            found.codec_files.setdefault(codec, (video.files.path(file), int(min(frames, ends.max()))))
            if rate is not None and abs(rate - table.fps) > 0.01 * table.fps:
                found.add(
                    error(where, f"{rate:g} fps, meta/info.json says {table.fps:g}", "correct fps, or encode again"), episodes
                )
            beyond = episodes[ends > frames]
            if len(beyond):
                found.add(
                    error(
                        where,
                        f"{frames} frames, {named_episodes(table, beyond)} reach to {int(ends.max())}: the file is cut "
                        f"off, a frame is "
                        "missing, or the file index is stale",
                        EXCLUDE_HINT,
                    ),
                    beyond,
                )
            elif frames > ends.max():
                per_episode = len(episodes) == 1 and video.first_frame_E[episodes[0]] == 0
                text = f"{frames} frames, its episodes use {int(ends.max())}"
                if per_episode and "v2" in table.format:
                    # one clip per episode: a surplus means that rows and frames were not recorded together
                    found.add(error(where, f"{text}: rows and frames may be shifted", EXCLUDE_HINT), episodes)
                else:
                    found.add(warning(where, text, "harmless if episodes were excluded or deleted"))
    return found


def container_facts(path: Path, fps: float) -> tuple[int, float | None, str]:
    """(frames, average rate, codec) as the container's index says, without decoding. Raises ValueError for an unreadable or cut
    file."""
    import av

    if not path.is_file():
        raise ValueError("missing")
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise ValueError("no video stream, or an unknown codec")
            stream = container.streams.video[0]
            entries = stream.index_entries
            if len(entries):
                last = entries[len(entries) - 1]
                if last.pos + last.size > path.stat().st_size:
                    raise ValueError("cut off: the index points beyond the end of the file")
            frames = stream.frames
            if not frames and stream.duration and stream.time_base:
                frames = round(float(stream.duration * stream.time_base * fps_fraction(fps)))
            rate = float(stream.average_rate) if stream.average_rate else None
            return int(frames), rate, str(stream.codec_context.codec.canonical_name)
    except (av.error.FFmpegError, OSError) as problem:
        raise ValueError(f"not readable as video ({problem.strerror or problem})") from problem


def check_frames(table: EpisodeTable, cameras: tuple[str, ...], skip: frozenset[int], backend: str = "pyav") -> Found:
    """Decode every frame that training may ask for (slow): each one must decode and be at its own time.

    `skip`: table rows of episodes that are known to be bad already.
    """
    found = Found()
    for camera in cameras:
        if camera in table.videos:
            found.merge(_decode_video(table, camera, skip, backend))
        else:
            found.merge(_decode_images(table, camera, skip))
    return found


def _decode_video(table: EpisodeTable, camera: str, skip: frozenset[int], backend: str) -> Found:
    found = Found()
    video = table.videos[camera]
    for file, episodes in video.files.episodes_by_file():
        path, name = video.files.path(file), video.files.relative_path(file)
        episodes = np.array([e for e in episodes if int(e) not in skip], dtype=np.int64)
        if not len(episodes):
            continue
        try:
            decoder = open_decoder(backend, path, table.fps)
        except ValueError as problem:
            found.add(error(f"{name} ({named_episodes(table, episodes)})", str(problem), EXCLUDE_HINT), episodes)
            continue
        for episode in episodes:
            first = int(video.first_frame_E[episode])
            try:
                for start in range(0, int(table.length_E[episode]), 64):  # bounded memory
                    stop = min(start + 64, int(table.length_E[episode]))
                    decoder.frames_at(range(first + start, first + stop))
            except FrameMismatch as mismatch:
                where = f"{name} (episode {table.episode_index_E[episode]}, frame {mismatch.frame - first})"
                found.add(error(where, str(mismatch), EXCLUDE_HINT), np.array([episode]))
            except (ValueError, RuntimeError) as problem:
                where = f"{name} (episode {table.episode_index_E[episode]})"
                found.add(error(where, str(problem), EXCLUDE_HINT), np.array([episode]))
        decoder.close()
    return found


def _decode_images(table: EpisodeTable, camera: str, skip: frozenset[int]) -> Found:
    found = Found()
    source = FrameSource(table, "pyav", cache_size=1)
    for episode in range(table.num_episodes):
        if episode in skip:
            continue
        try:
            for k in range(int(table.length_E[episode])):
                source.frames(camera, episode, [k])
        except (ValueError, OSError) as problem:
            found.add(error(f"{table.data.relative_path(int(table.data.file_of_E[episode]))}", str(problem), EXCLUDE_HINT))
            found.bad_episodes.add(episode)
    return found
