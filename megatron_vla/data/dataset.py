"""RobotDataset: one sample per frame of a robot dataset: images, state, the following actions, and the instruction.

Shape legend: N samples (one per frame of the kept episodes, in storage order), E episodes, H height, W width, C colours, T
action horizon, D dimensions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_vla.config.data import DataConfig
from megatron_vla.config.datasets import split_data_path
from megatron_vla.data.action_steps import ActionSteps, action_steps
from megatron_vla.data.cameras import suggested_flag
from megatron_vla.data.dataset_check import (
    START_VIDEO_FILES,
    CheckSettings,
    check_columns,
    instruction_codes,
    missing_columns,
    once,
)
from megatron_vla.data.dataset_check_columns import is_empty_instruction, motion_facts
from megatron_vla.data.dataset_check_files import Found, check_table, check_video_files
from megatron_vla.data.episode_table import EpisodeTable
from megatron_vla.data.frame_source import FrameSource
from megatron_vla.data.lerobot_columns import Columns, named_episodes
from megatron_vla.data.metadata import read_metadata
from megatron_vla.data.sample_shape import SampleShape, joined
from megatron_vla.data.video_probe import BackendChoice, choose_backend
from megatron_vla.findings import CheckError, Finding, error, raise_errors, warning

# An open decoder: demuxer, codec context and about this many decoded pictures (reference frames and output).
DECODER_BASE_BYTES = 6 << 20
DECODER_PICTURES = 20
PADDED_SHARE_LIMIT = 0.5


@dataclass(frozen=True)
class RawSample:
    """One sample as the dataset has it.

    images: camera -> uint8 RGB [H, W, C] (with several frames per sample [F, H, W, C]); state_D float32 (with several
    steps [H, D]); actions_TD float32: this frame's action and the following ones, repeating the episode's last;
    action_is_in_episode_T bool: False where repeated; index: sample number; episode_index: the dataset's own number.
    """

    index: int
    episode_index: int
    frame_index: int
    images: dict[str, np.ndarray]
    state_D: np.ndarray
    actions_TD: np.ndarray
    action_is_in_episode_T: np.ndarray
    instruction: str


@dataclass(frozen=True)
class RawBlock:
    """Samples of one episode as the dataset has them: fields as RawSample's, with a dimension n of samples in front.

    index_n: sample numbers, int64. images: camera -> uint8 RGB [n, H, W, C].
    """

    index_n: np.ndarray
    images: dict[str, np.ndarray]
    state_nD: np.ndarray
    actions_nTD: np.ndarray
    action_is_in_episode_nT: np.ndarray
    instructions: tuple[str, ...]

    def one(self, place: int) -> RawBlock:
        """The block of the sample at `place` alone."""
        here = slice(place, place + 1)
        images = {camera: frames_nHWC[here] for camera, frames_nHWC in self.images.items()}
        actions_nTD, is_in_episode_nT = self.actions_nTD[here], self.action_is_in_episode_nT[here]
        instructions = self.instructions[here]
        return RawBlock(self.index_n[here], images, self.state_nD[here], actions_nTD, is_in_episode_nT, instructions)


class RobotDataset:
    """Random access to samples. Low-dimensional columns are flat arrays in memory, frames are decoded on demand.

    Picklable: spawned workers get the arrays through shared memory, forked ones share the parent's pages; decoders are
    opened by the process that uses them. `findings` are the warnings of the start-up checks, `summary` lines for the log.
    """

    def __init__(
        self,
        table: EpisodeTable,
        columns: Columns,
        *,
        state_key: str,
        action_key: str,
        cameras: Sequence[str],
        steps: ActionSteps,
        backend: str,
        cache_size: int,
        findings: Sequence[Finding] = (),
        summary: Sequence[str] = (),
        shape: SampleShape | None = None,
    ):
        # The columns are held once, below: a table of record files would carry a second copy to every worker.
        self.table = table.without_columns()
        self.cameras = tuple(cameras)
        self.state_key, self.action_key = state_key, action_key
        self.steps = steps
        self.frame_deltas = (0,) if shape is None else shape.frame_deltas
        self.state_deltas = (0,) if shape is None else shape.state_deltas
        self.findings, self.summary = tuple(findings), tuple(summary)
        self.frames = FrameSource(self.table, backend, cache_size)
        rows = columns.num_rows
        if shape is None:
            text_of_N, self._texts = instruction_codes(table, columns)
            state_ND, actions_ND = (columns.values[key].reshape(rows, -1) for key in (state_key, action_key))
        else:
            text_of_N, self._texts = instruction_codes(table, columns, shape.task_column)
            state_ND, actions_ND = (joined(columns.values, places, rows) for places in (shape.state, shape.action))
        arrays = {
            "state": state_ND,
            "actions": actions_ND,
            "frame": columns.frame_of_R(),
            "row": columns.episode_of_R(),
            "first_row": columns.first_row_E,
            "text": text_of_N,
        }
        # Held as tensors, since torch moves those to shared memory for spawned workers: one copy for all instead of one each.
        # Arrays are views made on access, because sharing replaces the memory below the tensor.
        self._arrays = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}

    def __len__(self) -> int:
        return len(self._arrays["row"])

    @property
    def action_horizon(self) -> int:
        """Steps of an action chunk."""
        return self.steps.horizon

    @property
    def state_ND(self) -> np.ndarray:
        """float32 [N, D], physical units."""
        return self._arrays["state"].numpy()

    @property
    def actions_ND(self) -> np.ndarray:
        """float32 [N, D], physical units: each frame's own action."""
        return self._arrays["actions"].numpy()

    @property
    def frame_of_N(self) -> np.ndarray:
        """Frame number in its episode, int32 [N]."""
        return self._arrays["frame"].numpy()

    @property
    def _row_of_N(self) -> np.ndarray:
        """Row of the episode table, int32 [N]."""
        return self._arrays["row"].numpy()

    @property
    def _text_of_N(self) -> np.ndarray:
        """Place of each sample's instruction in the list of texts, -1 for none: int [N]."""
        return self._arrays["text"].numpy()

    @property
    def _first_E(self) -> np.ndarray:
        """Sample at which each episode starts, and N: int64 [E + 1]."""
        return self._arrays["first_row"].numpy()

    @property
    def episode_of_N(self) -> np.ndarray:
        """The dataset's own episode number of each sample, int64 [N]."""
        return self.table.episode_index_E[self._row_of_N]

    def __getitem__(self, index: int) -> RawSample:
        """Sample `index`. Raises ValueError naming file, episode, camera and frame when a picture cannot be had."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.raw_sample(index, next(iter(self.pictures(self.table_row(index), [int(self.frame_of_N[index])]))))

    def pictures(self, row: int, frames: Sequence[int]) -> Iterator[dict[str, np.ndarray]]:
        """camera -> uint8 [H, W, C] (several frames per sample: [F, H, W, C]) of samples at ascending `frames` of one episode.

        Each frame is decoded once, in ascending order. Raises ValueError naming file, episode, camera and frame.
        """
        if self.frame_deltas == (0,):
            decoded = {camera: self.frames.frames(camera, row, frames) for camera in self.cameras}
            yield from ({camera: decoded[camera][place] for camera in self.cameras} for place in range(len(frames)))
            return
        # Before the episode's start its first frame stands in: nothing else has been seen by then.
        wanted = np.maximum(0, np.asarray(frames)[:, None] + np.asarray(self.frame_deltas)[None, :])
        unique, place_of = np.unique(wanted, return_inverse=True)
        decoded = {camera: self.frames.frames(camera, row, unique.tolist()) for camera in self.cameras}
        for places in place_of.reshape(wanted.shape).tolist():
            yield {camera: np.stack([decoded[camera][place] for place in places]) for camera in self.cameras}

    def block(self, row: int, index_n: np.ndarray, room: Mapping[str, np.ndarray]) -> RawBlock:
        """Samples `index_n` (ascending) of the episode in table row `row`, each frame decoded once.

        room: camera -> uint8 [n, C, H, W], memory for its pictures where they have that size. Raises as `pictures`.
        """
        assert self.frame_deltas == (0,) and self.state_deltas == (0,), "one frame per camera and one state per sample"
        frames = self.frame_of_N[index_n].tolist()
        last_n = np.full(len(index_n), int(self._first_E[row + 1]) - 1)
        actions_nTD, is_in_episode_nT = self.steps.chunks(self.actions_ND, index_n, last_n)
        return RawBlock(
            index_n=index_n,
            images={camera: self.frames.frames(camera, row, frames, room.get(camera)) for camera in self.cameras},
            state_nD=self.state_ND[index_n],
            actions_nTD=actions_nTD,
            action_is_in_episode_nT=is_in_episode_nT,
            instructions=tuple(self._texts[code] if code >= 0 else "" for code in self._text_of_N[index_n].tolist()),
        )

    @property
    def length_of_N(self) -> np.ndarray:
        """Frames of each sample's episode, int64 [N]."""
        return self.table.length_E[self._row_of_N]

    def table_row(self, index: int) -> int:
        """Row of the episode table that sample `index` belongs to."""
        return int(self._row_of_N[index])

    def raw_sample(self, index: int, images: dict[str, np.ndarray]) -> RawSample:
        """Sample `index` with pictures (camera -> uint8 [H, W, C]) that were decoded already."""
        actions_TD, is_in_episode_T = self.action_chunk(index)
        return RawSample(
            index=int(index),
            episode_index=int(self.table.episode_index_E[self.table_row(index)]),
            frame_index=int(self.frame_of_N[index]),
            images=images,
            state_D=self._state(index),
            actions_TD=actions_TD,
            action_is_in_episode_T=is_in_episode_T,
            instruction=self.instruction(index),
        )

    def _state(self, index: int) -> np.ndarray:
        """float32 [D], or [H, D] of several steps. As for pictures, an episode's first row stands in before its start."""
        if self.state_deltas == (0,):
            return self.state_ND[index].copy()
        return self.state_ND[np.maximum(self._first_E[self.table_row(index)], index + np.asarray(self.state_deltas))]

    def action_chunk(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(actions_TD float32, is_in_episode_T bool) from sample `index` on, repeating the episode's last action."""
        last = int(self._first_E[self._row_of_N[index] + 1]) - 1
        actions_NTD, is_in_episode_NT = self.steps.chunks(self.actions_ND, np.array([index]), np.array([last]))
        return actions_NTD[0], is_in_episode_NT[0]

    def instruction(self, index: int) -> str:
        """Task text of sample `index`; empty if it has none."""
        code = int(self._text_of_N[index])
        return self._texts[code] if code >= 0 else ""

    def instructions(self) -> tuple[str, ...]:
        """Task texts that the samples have, each once; "" stands for none."""
        return tuple(sorted({self._texts[code] if code >= 0 else "" for code in np.unique(self._text_of_N).tolist()}))

    def idle_N(self) -> np.ndarray:
        """bool [N]: no state dimension moves to the next frame by more than 0.1 % of its range."""
        columns = Columns({self.state_key: self.state_ND}, self._first_E)
        idle: np.ndarray = motion_facts(columns, self.state_key)["idle_R"]
        return idle

    @property
    def embodiment(self) -> str | None:
        """Robot type of the dataset's metadata."""
        return self.table.robot_type

    def fingerprint(self) -> str:
        """Names the numbers that statistics are made of: rate, episodes, states and actions; the same for every file format."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(
            repr((self.table.fps, self.state_key, self.action_key, self.state_ND.shape, self.actions_ND.shape)).encode()
        )
        for array in (self.table.episode_index_E, self.table.length_E, self.state_ND, self.actions_ND):
            digest.update(np.ascontiguousarray(array).tobytes() if array.size < 1 << 16 else np.ascontiguousarray(array).data)
        return digest.hexdigest()


def open_table(data_config: DataConfig) -> tuple[EpisodeTable, list[Finding]]:
    """Metadata of the one dataset of --data-path, and warnings. Raises CheckError."""
    root = _single_root(data_config)
    try:
        return read_metadata(root, data_config.rlds_mapping, data_config.data_cache_path)
    except ValueError as problem:
        what, _, fix = str(problem).partition(" -> ")
        raise CheckError([error("--data-path", what, fix or "run tools/check_dataset.py")]) from problem


def build_robot_dataset(
    data_config: DataConfig,
    action_horizon: int,
    camera_keys: Sequence[str],
    opened: tuple[EpisodeTable, list[Finding]] | None = None,
    shape: SampleShape | None = None,
) -> RobotDataset:
    """Check and index the dataset of --data-path for `camera_keys`. Raises CheckError with everything found.

    `opened`: what `open_table` returned, when that was called before. `shape`: a sample's own make-up; its columns exist.
    """
    whole, findings = opened or open_table(data_config)
    found = Found(findings)
    keep_E = _kept_episodes(data_config, whole, found)
    found.merge(check_table(whole, keep_E))
    keys = {"state_key": data_config.state_key, "action_key": data_config.action_key}
    settings = CheckSettings(
        dataset_action_representation=data_config.dataset_action_representation,
        empty_instruction=data_config.empty_instruction,
        drop_nonfinite=data_config.drop_nonfinite,
        **{**keys, **_shape_settings(shape)},
    )
    _check_keys(whole, settings, camera_keys, found)
    raise_errors(found.findings)
    table = whole.select(keep_E)
    found.merge(check_video_files(table, tuple(camera_keys), START_VIDEO_FILES))
    columns = check_columns(table, settings, found)
    raise_errors(found.findings)
    assert columns is not None
    if data_config.empty_instruction == "drop":
        table, columns = _drop_without_instruction(table, columns, found)
    choice = _backend(data_config, found, table.fps)
    steps = action_steps(data_config, action_horizon, table.fps) if shape is None else shape.steps
    padded = steps.padded_share(table.length_E)
    if padded > PADDED_SHARE_LIMIT:
        found.add(
            warning(
                "--action-horizon",
                f"{padded:.0%} of all action steps lie beyond their episode's end (mean length {table.length_E.mean():.0f})",
                "shorten it, or check the episode lengths with tools/check_dataset.py",
            )
        )
    raise_errors(found.findings)
    return RobotDataset(
        table,
        columns,
        state_key=settings.state_key,
        action_key=settings.action_key,
        cameras=camera_keys,
        steps=steps,
        backend=choice.backend,
        cache_size=data_config.video_decoder_cache_size,
        findings=once([f for f in found.findings if f.severity == "warning"]),
        summary=_summary(data_config, table, whole, choice, padded, tuple(camera_keys)),
        shape=shape,
    )


def _shape_settings(shape: SampleShape | None) -> dict[str, Any]:
    if shape is None:
        return {}
    # The first column of each stands for it in the checks of motion and copied actions; all are checked for NaN.
    first = {"state_key": shape.state[0].column, "action_key": shape.action[0].column}
    more = tuple(column for column in shape.columns if column not in first.values())
    return {**first, "more_columns": more, "task_column": shape.task_column}


def _single_root(data_config: DataConfig) -> Path:
    if not data_config.data_path:
        raise CheckError([error("--data-path", "no dataset given", "name a dataset folder, or use --mock-data")])
    assert len(data_config.data_path) == 1, "a mixture is taken apart first (config/datasets.py)"
    return Path(split_data_path(data_config.data_path[0])[1])


def _kept_episodes(data_config: DataConfig, table: EpisodeTable, found: Found) -> np.ndarray:
    """bool [E] after --exclude-episodes-file."""
    keep_E = np.ones(table.num_episodes, dtype=bool)
    name = data_config.exclude_episodes_file
    if name is None:
        return keep_E
    numbers, problems = read_episode_list(Path(name))
    found.findings += problems
    unknown = sorted(set(numbers) - set(table.episode_index_E.tolist()))
    if unknown:
        found.add(
            error(
                "--exclude-episodes-file",
                f"{name} lists episode {', '.join(map(str, unknown[:8]))}, which {table.root} does not have",
                "use the list that tools/check_dataset.py wrote for this dataset",
            )
        )
    keep_E = ~np.isin(table.episode_index_E, numbers)
    if not keep_E.any():
        found.add(error("--exclude-episodes-file", f"{name} excludes all {table.num_episodes} episodes", "shorten the list"))
    else:
        found.add(
            warning("--exclude-episodes-file", f"{(~keep_E).sum()} of {table.num_episodes} episodes left out", "as asked")
        )
    return keep_E


def read_episode_list(path: Path) -> tuple[list[int], list[Finding]]:
    """Episode numbers, one a line; blank lines and # comments are fine."""
    if not path.is_file():
        return [], [
            error("--exclude-episodes-file", f"{path}: no such file", "tools/check_dataset.py --write-exclude-list FILE")
        ]
    numbers, findings = [], []
    for line_number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if text.isdecimal():
            numbers.append(int(text))
        elif text:
            findings.append(
                error("--exclude-episodes-file", f"{path}, line {line_number}: {text!r}", "one episode number a line")
            )
    return numbers, findings


def _check_keys(table: EpisodeTable, settings: CheckSettings, camera_keys: Sequence[str], found: Found) -> None:
    missing = [key for key in camera_keys if key not in table.cameras]
    if missing:
        found.add(
            error(
                "--camera-map",
                f"asks for camera {', '.join(missing)}; the dataset has cameras {', '.join(table.cameras) or 'none'}",
                f"use {suggested_flag(table.cameras)}" if table.cameras else "a dataset with camera features",
            )
        )
    if any(key not in table.columns for key in (settings.state_key, settings.action_key)):
        found.add(missing_columns(table, settings))


def _drop_without_instruction(table: EpisodeTable, columns: Columns, found: Found) -> tuple[EpisodeTable, Columns]:
    """--empty-instruction drop: whole episodes go, so that no action chunk gets a hole."""
    codes, texts = instruction_codes(table, columns)
    is_empty = np.array([is_empty_instruction(text) for text in texts] + [True])  # the last entry answers code -1
    without_E = np.maximum.reduceat(is_empty[codes], columns.first_row_E[:-1])
    if not without_E.any():
        return table, columns
    if without_E.all():
        found.add(
            error("--empty-instruction drop", f"none of the {table.num_episodes} episodes has an instruction", "use keep")
        )
        return table, columns
    dropped = np.flatnonzero(without_E)
    frames = int(table.length_E[dropped].sum())
    what = f"{len(dropped)} episodes ({frames} frames) left out: {named_episodes(table, dropped)}"
    found.add(warning("--empty-instruction drop", what, "as asked"))
    rows = np.repeat(~without_E, table.length_E)
    kept = table.select(~without_E)
    first_row_E = np.concatenate([[0], np.cumsum(kept.length_E)])
    return kept, Columns({name: values[rows] for name, values in columns.values.items()}, first_row_E)


def _backend(data_config: DataConfig, found: Found, fps: float) -> BackendChoice:
    try:
        return choose_backend(data_config.video_backend, found.codec_files, fps)
    except ValueError as problem:
        what, _, fix = str(problem).removeprefix(f"--video-backend {data_config.video_backend}: ").partition(" -> ")
        raise CheckError([error(f"--video-backend {data_config.video_backend}", what, fix)]) from problem


def _summary(
    data_config: DataConfig,
    table: EpisodeTable,
    whole: EpisodeTable,
    choice: BackendChoice,
    padded: float,
    cameras: tuple[str, ...],
) -> list[str]:
    pixels = max((table.features[camera].size for camera in cameras), default=0)
    decoder = DECODER_BASE_BYTES + DECODER_PICTURES * pixels // 2  # yuv420p: 1.5 of 3 bytes per pixel
    processes = max(1, data_config.num_workers)
    total = processes * data_config.video_decoder_cache_size * decoder
    lines = [
        f"dataset: {table.format} at {table.root}, {table.num_episodes} of {whole.num_episodes} episodes, "
        f"{table.num_frames} frames, "
        f"{table.fps:g} fps, {padded:.1%} of the action steps beyond the episode's end"
    ]
    if any(camera in table.videos for camera in cameras):
        lines += str(choice).splitlines()
        lines.append(
            f"video decoders: at most {processes} workers x {data_config.video_decoder_cache_size} open x about "
            f"{decoder / 2**20:.0f} MiB = {total / 2**30:.2f} GiB of host memory per rank (--video-decoder-cache-size)"
        )
    return lines
