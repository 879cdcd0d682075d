"""Opening a robot dataset for GR00T: modality configuration, columns, statistics, preprocessor, all checked before training.

The module behind `SampleRules.robot_data`: what Pi0.5 does in data/robot_data.py, with keys in place of whole columns.

Shape legend: N dataset rows, T steps of the chunk, D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_vla.config.run import RunConfig
from megatron_vla.data.dataset import RobotDataset, open_table
from megatron_vla.data.episode_table import EpisodeTable
from megatron_vla.data.groot.assembly import picture_settings
from megatron_vla.data.groot.preprocess import GrootPreprocessor, GrootPreprocessSettings
from megatron_vla.data.groot.resolution import ResolvedRobot, resolve_robot
from megatron_vla.data.groot.state_action import StateActionOptions
from megatron_vla.data.groot.statistics import (
    RELATIVE,
    KeyStream,
    compute_key_statistics,
    from_key_statistics,
    merge_key_statistics,
    read_released,
)
from megatron_vla.data.groot.tokenizer import BytePairTokenizer, load_chat_tokenizer
from megatron_vla.data.recorded_pictures import recorded_pictures
from megatron_vla.data.robot_data import (
    OpenedColumns,
    PreparedData,
    SharedLayout,
    format_range_table,
    open_columns,
    statistics_command,
)
from megatron_vla.data.statistics import SANITY_SAMPLES, Statistics, range_table
from megatron_vla.data.statistics_pass import last_rows, load_statistics
from megatron_vla.findings import CheckError, Finding, error, raise_errors, warning

COMMAND_HINT = "it was made for another modality configuration or horizon"


@dataclass(frozen=True)
class OpenedGrootData:
    """A dataset after every check that statistics are not needed for. `config` holds the flags of this dataset alone."""

    config: RunConfig
    command: str
    columns: OpenedColumns
    robot: ResolvedRobot
    tokenizer: BytePairTokenizer | None
    findings: list[Finding]

    @property
    def transform(self) -> KeyStream:
        """What statistics are made of."""
        return self.robot.stream

    @property
    def layout(self) -> SharedLayout:
        """Views of this dataset; datasets of a mixture need not share them."""
        return SharedLayout(self.robot.views, len(self.robot.views), self.columns.dataset.state_ND.shape[-1])


def open_robot_data(config: RunConfig, batch_fields: Container[str]) -> OpenedGrootData:
    """Open and check one dataset. Raises CheckError with everything found when it cannot be opened."""
    family = config.family
    opened = open_table(config.data)
    tokenizer, findings = load_chat_tokenizer(
        config.data.tokenizer_model, family.vocab_size, family.image_token, family.padding_token
    )
    robot, columns = _open(config, opened, findings)
    findings += columns.findings
    return OpenedGrootData(config, statistics_command(config), columns, robot, tokenizer, findings)


def open_stream(config: RunConfig, opened: tuple[EpisodeTable, list[Finding]]) -> tuple[OpenedColumns, KeyStream]:
    """Columns and stream that statistics are made of. Raises CheckError."""
    robot, columns = _open(config, opened, [], with_cameras=False)
    stream = robot.stream
    labels = [columns.names["actions"][dim] for dim in stream.relative_columns()]
    columns.names[RELATIVE] = tuple(f"{label} step {step}" for step in range(stream.horizon) for label in labels)
    return columns, stream


def _open(
    config: RunConfig, opened: tuple[EpisodeTable, list[Finding]], earlier: list[Finding], with_cameras: bool = True
) -> tuple[ResolvedRobot, OpenedColumns]:
    robot, findings = resolve_robot(config, opened[0], with_cameras)
    if robot is None:
        raise CheckError([*earlier, *findings])
    try:
        columns = open_columns(config, opened, robot.cameras if with_cameras else (), shape=robot.shape)
    except CheckError as problems:
        raise CheckError([*earlier, *findings, *problems.findings]) from problems
    columns.findings.extend(findings)
    return robot, columns


def statistics_of_streams(
    streams: Sequence[tuple[RobotDataset, KeyStream, np.ndarray]],
    quantiles: Literal["auto", "exact", "histogram"],
    progress: Callable[[int], object] = lambda num_samples: None,
    weights: Sequence[float] | None = None,
) -> list[Statistics]:
    """Statistics of all streams together, once for each of them with its own identity; see `merge_key_statistics`."""
    parts = [compute_key_statistics(columns, stream, samples, quantiles, progress) for columns, stream, samples in streams]
    if len(parts) == 1:
        return parts
    keys = {(stream.modality.state.keys, stream.modality.action.keys, stream.horizon) for _, stream, _ in streams}
    if len(keys) > 1:
        what = "merged, but the datasets have different keys or steps: " + "; ".join(map(str, sorted(keys)))
        raise CheckError([error("--mixture-statistics", what, "use --mixture-statistics per_dataset")])
    merged = merge_key_statistics(parts, weights or [len(samples) for _, _, samples in streams])
    return [
        Statistics(merged.features, part.dataset_fingerprint, part.transform_hash, part.quantiles, part.about) for part in parts
    ]


def finish_robot_data(
    opened: OpenedGrootData, layout: SharedLayout | None = None, statistics: Statistics | None = None
) -> PreparedData:
    """Statistics (computed or loaded, unless given), preprocessor and range check. Raises CheckError with everything found."""
    config, robot, columns, findings = opened.config, opened.robot, opened.columns, list(opened.findings)
    dataset, samples = columns.dataset, columns.samples
    line = "statistics: of all datasets of the mixture together"
    if statistics is None and not columns.has_errors:
        statistics, more, line = _statistics(opened)
        findings += more
    if statistics is None or opened.tokenizer is None:
        raise CheckError(findings)
    try:
        pictures = recorded_pictures(dataset.table, dataset.cameras)
        preprocessor = GrootPreprocessor(_settings(config, robot, dataset), statistics, opened.tokenizer, pictures)
    except ValueError as problem:
        raise CheckError([*findings, error("--statistics-path", str(problem), opened.command)]) from problem
    preprocessor.keep_pictures = config.data.augmentation != "none"
    findings += _prompt_findings(config, dataset, preprocessor)
    rows, names = _unclipped_rows(preprocessor, dataset, samples)
    ranges, range_findings = range_table(rows, names, config.data.max_out_of_range_fraction)
    findings += range_findings
    raise_errors(findings)
    rate = dataset.table.fps / robot.shape.steps.frames_per_step
    summary = [
        *dataset.summary,
        f"samples: {len(samples)} of {len(dataset)}",
        *robot.lines,
        f"action chunk: {robot.stream.horizon} of {config.family.action_horizon} steps at {rate:g} per second",
        line,
        *format_range_table(ranges),
        *(str(finding) for finding in findings),
    ]
    is_complete = config.data.action_horizon_policy == "complete"
    expected = 0.0 if is_complete else robot.shape.steps.padded_share(dataset.table.length_E)
    # The model's own padding of the chunk is no padding of the data: the share is of all steps of the batch.
    share = expected * robot.stream.horizon / config.family.action_horizon
    rows_left = None if len(samples) == len(dataset) else samples
    return PreparedData(dataset, preprocessor, rows_left, len(samples), findings, summary, share)  # type: ignore[arg-type]


def _statistics(opened: OpenedGrootData) -> tuple[Statistics | None, list[Finding], str]:
    """(statistics or None with errors, findings, one line for the log)."""
    data, stream, columns = opened.config.data, opened.robot.stream, opened.columns
    dataset, samples = columns.dataset, columns.samples
    if data.statistics_path is None:
        statistics = compute_key_statistics(dataset, stream, samples, data.statistics_quantiles)
        line = f"statistics: computed from {len(samples)} samples ({statistics.quantiles} quantiles), stored in checkpoints"
        return statistics, [], line
    line = f"statistics: {data.statistics_path}"
    try:
        released = read_released(Path(data.statistics_path), data.embodiment_tag)
        if released is not None:
            found = from_key_statistics(released, stream.modality, stream.relative.keys)
            what = f"{data.statistics_path} is a released file: it does not say which data it was made of"
            if data.allow_foreign_statistics:
                return found, [warning("--statistics-path", what, "used as --allow-foreign-statistics says")], line
            return None, [error("--statistics-path", what, "add --allow-foreign-statistics to use it")], line
    except ValueError as problem:
        return None, [error("--statistics-path", str(problem), opened.command)], line
    loaded, findings = load_statistics(
        data.statistics_path,
        dataset,
        stream,  # type: ignore[arg-type]  # its hash and its description are all that is asked
        len(samples),
        data.allow_foreign_statistics,
        opened.command,
    )
    return loaded, findings, line


def _settings(config: RunConfig, robot: ResolvedRobot, dataset: RobotDataset) -> GrootPreprocessSettings:
    data, family = config.data, config.family
    return GrootPreprocessSettings(
        embodiment_tag=data.embodiment_tag,
        embodiment_id=robot.embodiment_id,
        modality=robot.modality,
        state=robot.shape.state,
        action=robot.shape.action,
        steps=robot.shape.steps,
        views=robot.views,
        camera_keys=robot.cameras,
        pictures=picture_settings(family),
        state_action=StateActionOptions(family.use_percentiles, family.sin_cos_state, family.use_relative_action),
        max_state_dim=family.max_state_dim,
        max_action_dim=family.max_action_dim,
        action_horizon=family.action_horizon,
        max_prompt_length=family.max_prompt_length,
        prompt_overflow=data.prompt_overflow,
        formalize_language=family.formalize_language,
        exclude_state=family.exclude_state,
        action_loss=family.action_loss,
        action_fps=dataset.table.fps / robot.shape.steps.frames_per_step,
        color_jitter=family.color_jitter,
        state_dropout_prob=family.state_dropout_prob,
    )


def _prompt_findings(config: RunConfig, dataset: RobotDataset, preprocessor: GrootPreprocessor) -> list[Finding]:
    """Every task's prompt against --max-prompt-length, and the widths of state and action."""
    settings, family = preprocessor.settings, config.family
    findings = []
    for flag, width, limit in (
        ("--max-state-dim", preprocessor.transform.state_width, family.max_state_dim),
        ("--max-action-dim", settings.action_dim, family.max_action_dim),
    ):
        if width > limit:
            findings.append(error(flag, f"the robot has {width} dimensions, the model takes {limit}", f"use {flag} {width}"))
    sizes = {camera: dataset.table.features[camera].shape for camera in settings.camera_keys}
    tokens = []
    for camera in settings.camera_keys * len(settings.modality.video.delta_indices):
        height, width = _height_and_width(sizes[camera])
        resized = settings.pictures.resized(np.zeros((height, width, 3), dtype=np.uint8), camera)
        grid = settings.pictures.grid(resized.shape[1], resized.shape[2])
        tokens.append(grid[1] * grid[2] // settings.pictures.merge_size**2)
    for text in dataset.instructions():
        try:
            preprocessor.tokenize(text, tokens)
        except ValueError as problem:
            findings.append(error("--max-prompt-length", str(problem), "see the message"))
            break
    preprocessor.num_truncated_prompts = 0
    return findings


def _height_and_width(shape: tuple[int, ...]) -> tuple[int, int]:
    """Of a camera feature, whichever order its shape is written in."""
    return (shape[1], shape[2]) if shape[0] == 3 else (shape[0], shape[1])


def _unclipped_rows(
    preprocessor: GrootPreprocessor, dataset: RobotDataset, samples: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, Sequence[str]]]:
    """Rows of up to 1,000 samples spread evenly, normalized without clipping, and a name per column."""
    spread = samples[np.unique(np.linspace(0, len(samples) - 1, SANITY_SAMPLES).astype(np.int64))]
    settings: Any = preprocessor.settings
    actions_nTD, _ = settings.steps.chunks(dataset.actions_ND, spread, last_rows(dataset)[spread])
    states, actions = preprocessor.transform.unclipped(actions_nTD, dataset.state_ND[spread])
    names = settings.state_names
    if len(names) != states.shape[-1]:
        names = tuple(f"state_{i}" for i in range(states.shape[-1]))
    rows = {"state": states, "actions": actions.reshape(-1, actions.shape[-1])}
    return rows, {"state": names, "actions": settings.action_names}
