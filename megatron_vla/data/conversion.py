"""Conversion of episodes to LeRobot v3.0, shard by shard: plan, convert one shard, merge.

Plain functions of picklable values, so that any engine can run the shards (`run_in_processes` here), in any order, again and
again. A shard is a folder with files of the final dataset and a stamp, written last; a run that was stopped goes on with the
shards that have none. Shape legend: E episodes, C channels.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_vla.data import lerobot_layout as layout
from megatron_vla.data.conversion_source import ConversionSource, open_source
from megatron_vla.data.conversion_verify import verify_shard
from megatron_vla.data.lerobot_statistics import ImageHistogram, jsonable, statistics_of_files
from megatron_vla.data.lerobot_writer import LeRobotWriter
from megatron_vla.whole_file import replace_text

STAMP = "stamp.json"
MERGING = "merging"
STAMP_VERSION = 2
PARENT_CHECK_SECONDS = 0.5


@dataclass(frozen=True)
class ConversionSettings:
    """How files are written and how many frames of each episode and camera are looked at again (0: all)."""

    storage: Literal["video", "image"] = "video"
    video_codec: Literal["h264", "av1", "hevc"] = "h264"
    crf: int | None = None
    gop: int = 2
    verify_frames: int = 3


@dataclass(frozen=True)
class ShardPlan:
    """One shard: episodes [start, stop) of the source. identity changes with everything that changes the files."""

    number: int
    source: str
    mapping: str | None
    cache_path: str
    folder: str
    start: int
    stop: int
    first_frame: int
    tasks: tuple[str, ...]
    settings: ConversionSettings
    identity: str


@dataclass(frozen=True)
class ShardResult:
    """What a stamp holds. files: kind ("data" or camera) -> bytes of its files; counts: camera -> [C, 256] of sampled pictures;
    low, high: column -> extremes as the source has them."""

    number: int
    episodes: int
    frames: int
    files: dict[str, list[int]]
    counts: dict[str, list[list[int]]]
    sampled: dict[str, int]
    low: dict[str, list[float]]
    high: dict[str, list[float]]


def plan_shards(
    source: ConversionSource,
    path: Path,
    mapping: str | None,
    work: Path,
    settings: ConversionSettings,
    episodes_per_shard: int,
) -> list[ShardPlan]:
    """Shards of consecutive episodes. Numbers of episodes, frames and tasks are fixed here: no shard needs another."""
    # In order of appearance, as a recording of these episodes would number them.
    tasks = tuple(dict.fromkeys(source.instructions))
    first_frame_E = np.cumsum(source.length_E) - source.length_E
    # Not of the files' bytes: hashing terabytes would take longer than converting them.
    identity = hashlib.sha256()
    about = (STAMP_VERSION, str(path.resolve()), mapping, source.fps, source.features, tasks, settings, episodes_per_shard)
    identity.update(json.dumps(about, sort_keys=True, default=dataclasses.asdict).encode())
    identity.update(np.ascontiguousarray(source.length_E, dtype="<i8").tobytes())
    plans = []
    for number, start in enumerate(range(0, len(source.length_E), episodes_per_shard)):
        plans.append(
            ShardPlan(
                number=number,
                source=str(path),
                mapping=mapping,
                cache_path=str(work / "index"),
                folder=str(work / f"shard-{number:05d}"),
                start=start,
                stop=min(start + episodes_per_shard, len(source.length_E)),
                first_frame=int(first_frame_E[start]),
                tasks=tasks,
                settings=settings,
                identity=identity.hexdigest()[:24],
            )
        )
    return plans


def stamped(plan: ShardPlan) -> ShardResult | None:
    """The result of a shard that is complete, was made by this very plan, and whose files are as long as they were written."""
    path = Path(plan.folder) / STAMP
    if not path.is_file():
        return None
    content = json.loads(path.read_text())
    if content.pop("identity") != plan.identity:
        return None
    result = ShardResult(**content)
    marker = path.parent.parent / MERGING
    may_be_moved = marker.is_file() and marker.read_text() == plan.identity
    for kind, sizes in result.files.items():
        for own, size in enumerate(sizes):
            file = path.parent / _name(kind, own)
            if file.stat().st_size != size if file.is_file() else not may_be_moved:
                return None
    return result


def convert_shard(plan: ShardPlan) -> ShardResult:
    """Write, verify and stamp one shard; an earlier run's stamp is taken as it is. Raises ValueError naming the episode."""
    done = stamped(plan)
    if done is not None:
        return done
    source = _source(plan.source, plan.mapping, plan.cache_path)
    folder = Path(plan.folder)
    shutil.rmtree(folder, ignore_errors=True)  # half-written, or of other settings
    writer = _writer(plan, source, folder)
    low: dict[str, np.ndarray] = {}
    high: dict[str, np.ndarray] = {}
    cameras = [name for name, feature in source.features.items() if feature["dtype"] == "image"]
    for episode in range(plan.start, plan.stop):
        columns = source.columns(episode)
        for name, values in columns.items():
            low[name] = np.minimum(low.get(name, np.inf), values.min(axis=0))
            high[name] = np.maximum(high.get(name, -np.inf), values.max(axis=0))
        steps = range(int(source.length_E[episode]))
        # Generators: one decoded picture at a time, whatever the length of the episode.
        images = {camera: source.frames(camera, episode, steps) for camera in cameras}
        try:
            writer.add_episode(columns, images, source.instructions[episode])
        except ValueError as problem:
            raise ValueError(f"{source.where(episode)}: {problem}") from problem
    # Before the stamp: a shard that does not verify is made again.
    writer.finalize()
    verify_shard(folder, source, range(plan.start, plan.stop), plan.settings.verify_frames)
    return stamp(plan, writer, low, high)


def stamp(plan: ShardPlan, writer: LeRobotWriter, low: Mapping[str, np.ndarray], high: Mapping[str, np.ndarray]) -> ShardResult:
    """Mark the shard that `writer` has finished as complete. low, high: extremes of the source's columns that are compared with
    the merged dataset's."""
    histograms = writer.image_histograms()
    folder = Path(plan.folder)
    result = ShardResult(
        number=plan.number,
        episodes=writer.num_episodes,
        frames=writer.num_frames,
        files={kind: [file.stat().st_size for file in _files(folder, kind)] for kind in _kinds(folder)},
        counts={camera: histogram.counts_C256.tolist() for camera, histogram in histograms.items()},
        sampled={camera: histogram.num_frames for camera, histogram in histograms.items()},
        low={name: values.tolist() for name, values in low.items()},
        high={name: values.tolist() for name, values in high.items()},
    )
    _write_json(folder / STAMP, {"identity": plan.identity, **dataclasses.asdict(result)})
    return result


@lru_cache(maxsize=1)
def _source(path: str, mapping: str | None, cache_path: str) -> ConversionSource:
    """One per process: a large dataset's index takes seconds to load."""
    return open_source(Path(path), mapping, cache_path)


def _writer(plan: ShardPlan, source: ConversionSource, folder: Path) -> LeRobotWriter:
    features = {
        name: {**feature, "dtype": plan.settings.storage} if feature["dtype"] == "image" else feature
        for name, feature in source.features.items()
    }
    return LeRobotWriter(
        folder,
        fps=source.fps,
        features=features,
        robot_type=source.robot_type,
        video_codec=plan.settings.video_codec,
        gop=plan.settings.gop,
        crf=plan.settings.crf,
        first_episode=plan.start,
        first_frame=plan.first_frame,
        tasks=plan.tasks,
    )


def _kinds(folder: Path) -> list[str]:
    videos = folder / "videos"
    return ["data", *(sorted(path.name for path in videos.iterdir()) if videos.is_dir() else [])]


def _files(folder: Path, kind: str) -> list[Path]:
    return sorted((folder / "data" if kind == "data" else folder / "videos" / kind).rglob("file-*"))


def run_in_processes(
    convert: Callable[[ShardPlan], ShardResult], plans: Sequence[ShardPlan], num_processes: int
) -> Iterator[ShardResult]:
    """Results as they come. The engine boundary: another engine takes the same function and plans.

    Raises what a shard raised (later shards are not started), or ValueError when a process died.
    """
    if num_processes == 1:
        # In this process: an error has a readable traceback, and small jobs save the start of another.
        yield from map(convert, plans)
        return
    # Spawned, not forked: decoders and HDF5 keep threads and locks that do not survive a fork.
    follow = (_follow_parent, (os.getpid(),))
    with ProcessPoolExecutor(num_processes, get_context("spawn"), *follow) as pool:
        futures = [pool.submit(convert, plan) for plan in plans]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool as problem:
            raise ValueError(
                "a conversion process died (killed, or out of memory) -> run the same command again to go on with the missing "
                "shards, with a lower --num-processes if memory is short"
            ) from problem
        finally:
            for future in futures:
                future.cancel()


def _follow_parent(parent: int) -> None:
    """A killed conversion must not leave processes that wait for work for ever, or write where the next one does."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def merge_shards(plans: Sequence[ShardPlan], results: Sequence[ShardResult], work: Path) -> Path:
    """Move the shards' files to their final numbers, write the metadata; returns `work`/dataset. May be repeated after a stop.

    Raises ValueError when totals or statistics do not fit the source.
    """
    target, marker = work / "dataset", work / MERGING
    if not marker.is_file() or marker.read_text() != plans[0].identity:
        # What lies there belongs to shards of other settings.
        shutil.rmtree(target, ignore_errors=True)
        marker.write_text(plans[0].identity)
    first_file: dict[str, int] = dict.fromkeys(results[0].files, 0)
    (target / "meta").mkdir(parents=True, exist_ok=True)
    for plan, result in zip(plans, results, strict=True):
        folder = Path(plan.folder)
        # Rows are made from the shard's own, which stay: only files move, so this may be repeated.
        _write_episode_rows(folder, target, plan.number, first_file)
        for kind, sizes in result.files.items():
            for own, size in enumerate(sizes):
                _move(folder / _name(kind, own), target / _name(kind, first_file[kind] + own), size)
            first_file[kind] += len(sizes)
    info = json.loads((Path(plans[0].folder) / "meta/info.json").read_text())
    episodes, frames = sum(r.episodes for r in results), sum(r.frames for r in results)
    info.update(
        total_episodes=episodes, total_frames=frames, total_tasks=len(plans[0].tasks), splits={"train": f"0:{episodes}"}
    )
    pq.write_table(layout.tasks_table(list(plans[0].tasks)), target / "meta/tasks.parquet")
    statistics = _statistics(target, info["features"], results)
    _check_statistics(statistics, results, frames)
    _write_json(target / "meta/stats.json", jsonable(statistics))
    # Last, as in a recording: without it the folder is no dataset.
    _write_json(target / "meta/info.json", info)
    return target


def _name(kind: str, number: int) -> str:
    chunk, file = divmod(number, layout.CHUNKS_SIZE)
    if kind == "data":
        return layout.V3_DATA_PATH.format(chunk_index=chunk, file_index=file)
    return layout.V3_VIDEO_PATH.format(video_key=kind, chunk_index=chunk, file_index=file)


def _move(source: Path, target: Path, size: int) -> None:
    """Raises ValueError for a file that is not as long as it was written; its shard is then no longer done."""
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(source, target)
    found = target.stat().st_size if target.is_file() else None  # moved before a stop
    if found != size:
        shard = next(parent for parent in source.parents if parent.name.startswith("shard-"))
        (shard / STAMP).unlink(missing_ok=True)
        what = "is gone" if found is None else f"has {found} bytes"
        raise ValueError(
            f"{target}: {what}, {size} were written -> check the disk; the episodes of {shard.name} are converted again"
        )


def _write_episode_rows(folder: Path, target: Path, shard: int, first_file: Mapping[str, int]) -> None:
    """The shard's episode rows with the final file numbers."""
    table = pq.read_table(folder / layout.V3_EPISODES_PATH.format(chunk_index=0, file_index=0))
    chunk, file = divmod(shard, layout.CHUNKS_SIZE)
    # One file of rows per shard: no shard's rows are ever in memory together with another's.
    places = {"meta/episodes": np.full(table.num_rows, shard)}
    for kind, first in first_file.items():
        prefix = "data" if kind == "data" else f"videos/{kind}"
        stored = [table[f"{prefix}/{field}"].to_numpy() for field in ("chunk_index", "file_index")]
        places[prefix] = first + stored[0] * layout.CHUNKS_SIZE + stored[1]
    for prefix, numbers in places.items():
        for field, values in zip(("chunk_index", "file_index"), np.divmod(numbers, layout.CHUNKS_SIZE), strict=True):
            column = table.schema.get_field_index(f"{prefix}/{field}")
            table = table.set_column(column, table.schema.field(column), pa.array(values, pa.int64()))
    path = target / layout.V3_EPISODES_PATH.format(chunk_index=chunk, file_index=file)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


def _statistics(
    target: Path, features: Mapping[str, Mapping[str, Any]], results: Sequence[ShardResult]
) -> dict[str, dict[str, np.ndarray]]:
    """Exact over all frames; pictures from the shards' histograms, which add."""
    merged: dict[str, dict[str, np.ndarray]] = {}
    for camera in results[0].counts:
        histogram = ImageHistogram()
        for result in results:
            part = ImageHistogram()
            # Counts add exactly; means of shards would not.
            part.counts_C256, part.num_frames = np.array(result.counts[camera], dtype=np.int64), result.sampled[camera]
            histogram.merge(part)
        merged[camera] = histogram.statistics()
    return {**merged, **statistics_of_files(_files(target, "data"), features)}


def _check_statistics(statistics: Mapping[str, Mapping[str, np.ndarray]], results: Sequence[ShardResult], frames: int) -> None:
    """Against the source: every frame counted once, the same extremes."""
    for name in results[0].low:
        found = statistics[name]
        low = np.min([result.low[name] for result in results], axis=0)
        high = np.max([result.high[name] for result in results], axis=0)
        if int(found["count"][0]) != frames or not _equal(found, low, high):
            raise ValueError(
                f"statistics of {name}: {int(found['count'][0])} frames from {found['min']} to {found['max']}, the source has "
                f"{frames} from {low} to {high} -> delete the work folder and convert again"
            )


def _equal(found: Mapping[str, np.ndarray], low: np.ndarray, high: np.ndarray) -> bool:
    return np.array_equal(found["min"], low, equal_nan=True) and np.array_equal(found["max"], high, equal_nan=True)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    replace_text(path, json.dumps(content, indent=1))
