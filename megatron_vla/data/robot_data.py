"""Everything that is checked and computed before a robot dataset is trained on, reported as one list of findings.

Shape legend: N dataset rows (frames), E episodes, D dimensions, T action horizon.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from megatron_vla.config.cli import flag_name
from megatron_vla.config.data import DataConfig
from megatron_vla.config.run import RunConfig
from megatron_vla.data.action_steps import action_steps
from megatron_vla.data.cameras import CameraMap, parse_camera_map
from megatron_vla.data.dataset import RobotDataset, build_robot_dataset, open_table
from megatron_vla.data.episode_table import EpisodeTable, Feature
from megatron_vla.data.locator import has_complete_chunk
from megatron_vla.data.preprocess import Preprocessor, PreprocessSettings
from megatron_vla.data.prompt import SentencePieceTokenizer, check_prompt_lengths, load_tokenizer, longest_prompts
from megatron_vla.data.recorded_pictures import recorded_pictures
from megatron_vla.data.sample_shape import SampleShape, dimension_labels
from megatron_vla.data.statistics import SANITY_SAMPLES, Statistics, range_table
from megatron_vla.data.statistics_pass import (
    StreamTransform,
    compute_statistics,
    load_statistics,
    merged_statistics,
    transformed_blocks,
    windows_with_nonfinite,
)
from megatron_vla.findings import CheckError, Finding, error, raise_errors, warning

# Flags of the data section that change which numbers the statistics are made of.
STREAM_FLAGS = (
    "data_path",
    "state_key",
    "action_key",
    "dataset_action_representation",
    "model_action_representation",
    "delta_action_dims",
    "exclude_episodes_file",
    "empty_instruction",
    "drop_nonfinite",
    "drop_idle_frames",
    "action_horizon_policy",
    "statistics_quantiles",
    "rlds_mapping",
    "action_fps",
    "action_horizon_seconds",
    "action_resampling",
    "data_override",
    "mixture_statistics",
    "embodiment_tag",
    "modality_config",
    "language_key",
)


@dataclass(frozen=True)
class PreparedData:
    """What `prepare_robot_data` made. `rows` maps sample number -> dataset row when samples were left out.

    longest_prompt: as in `OpenedData`.
    """

    dataset: RobotDataset
    preprocessor: Preprocessor
    rows: np.ndarray | None
    num_samples: int
    findings: list[Finding]
    summary: list[str]
    expected_padded_fraction: float
    longest_prompt: int | None = None


def stream_transform(config: RunConfig, dataset_fps: float) -> StreamTransform:
    """What shapes the stream of states and actions of a dataset. Raises CheckError for a rate that it cannot be given."""
    data = config.data
    dims = data.delta_action_dims if data.model_action_representation == "delta" else ()
    steps = action_steps(data, config.family.action_horizon, dataset_fps)
    return StreamTransform(steps.horizon, dims, data.state_key, data.action_key, steps.frames_per_step, steps.resampling)


def statistics_command(config: RunConfig) -> str:
    """The command line that recomputes statistics.json for these flags."""
    data, defaults = config.data, DataConfig()
    words = ["python", "tools/compute_norm_stats.py", "--model-name", config.model.model_name]
    for name in STREAM_FLAGS:
        value = getattr(data, name)
        if value == getattr(defaults, name):
            continue
        words.append(flag_name(name))
        if not isinstance(value, bool):
            words += [str(v) for v in value] if isinstance(value, tuple) else [str(value)]
    words += ["--action-horizon", str(config.family.action_horizon), "--output", data.statistics_path or "statistics.json"]
    return shlex.join(words)


def dimension_names(feature: Feature | None, width: int) -> tuple[str, ...]:
    """One name per dimension: the dataset's, or dim_0, dim_1, ..."""
    if feature is not None and feature.names is not None and len(feature.names) == width:
        return feature.names
    return tuple(f"dim_{i}" for i in range(width))


def _width_findings(config: RunConfig, table: EpisodeTable, state_is_model_input: bool) -> list[Finding]:
    """Widths of state and action against the model and --delta-action-dims."""
    data, model = config.data, config.family
    findings: list[Finding] = []
    if not {data.state_key, data.action_key} <= set(table.columns):
        return findings  # build_robot_dataset names the keys that exist
    action_dim, state_dim = table.features[data.action_key].size, table.features[data.state_key].size
    if action_dim > model.max_action_dim:
        what = f"the dataset's {data.action_key} has {action_dim} dimensions, the model takes at most {model.max_action_dim}"
        fix = (
            f"use --max-action-dim {action_dim} or more; it gives action_in_proj and action_out_proj other shapes, so with "
            "--pretrained-checkpoint add --pretrained-reinitialize action_in_proj action_out_proj (random weights)"
        )
        findings.append(error("--max-action-dim", what, fix))
    if state_dim > model.max_action_dim and state_is_model_input:
        what = f"the dataset's {data.state_key} has {state_dim} dimensions, the model takes at most {model.max_action_dim}"
        findings.append(error("--max-action-dim", what, f"use --max-action-dim {state_dim} or more"))
    # A delta needs a state of the same index to subtract.
    wrong = [dim for dim in data.delta_action_dims if not 0 <= dim < min(action_dim, state_dim)]
    if wrong:
        what = f"dimension(s) {wrong} do not exist in both the action ({action_dim}) and the state ({state_dim})"
        findings.append(error("--delta-action-dims", what, f"use dimensions below {min(action_dim, state_dim)}"))
    return findings


def _statistics(
    config: RunConfig, dataset: RobotDataset, transform: StreamTransform, samples: np.ndarray, command: str
) -> tuple[Statistics | None, list[Finding], str]:
    """(statistics or None with errors, findings, one line for the log)."""
    data = config.data
    # Every rank computes the same from the same columns: no rank waits, nothing to send.
    if data.statistics_path is None:
        statistics = compute_statistics(dataset, transform, samples, data.statistics_quantiles)
        line = f"statistics: computed from {len(samples)} samples ({statistics.quantiles} quantiles), stored in checkpoints"
        return statistics, [], line
    found, findings = load_statistics(
        data.statistics_path, dataset, transform, len(samples), data.allow_foreign_statistics, command
    )
    return found, findings, f"statistics: {data.statistics_path}"


def sanity_rows(
    preprocessor: Preprocessor, dataset: RobotDataset, transform: StreamTransform, samples: np.ndarray
) -> dict[str, np.ndarray]:
    """Normalized rows of up to 1,000 samples spread evenly: "state" [n, D] and "actions" [n * T, D]."""
    # Spread over the dataset: the first episodes often show one task only.
    spread = samples[np.unique(np.linspace(0, len(samples) - 1, SANITY_SAMPLES).astype(np.int64))]
    states_nD, actions_nTD = next(transformed_blocks(dataset, transform, spread))
    actions = preprocessor.action_normalizer.normalize(actions_nTD)
    return {
        "state": preprocessor.state_normalizer.normalize(states_nD),
        "actions": actions.reshape(-1, actions.shape[-1]),
    }


def _settings(
    config: RunConfig, dataset: RobotDataset, cameras: CameraMap, transform: StreamTransform, min_state_dim: int
) -> PreprocessSettings:
    data, model, features = config.data, config.family, dataset.table.features
    action_dim, state_dim = dataset.actions_ND.shape[-1], dataset.state_ND.shape[-1]
    return PreprocessSettings(
        views=cameras.views,
        camera_keys=cameras.keys,
        num_images=cameras.num_images,
        image_size=model.image_size,
        image_resize=data.image_resize,
        action_dim=action_dim,
        state_dim=state_dim,
        max_action_dim=model.max_action_dim,
        max_state_dim=max(state_dim, model.max_action_dim, min_state_dim),
        action_horizon=model.action_horizon,
        action_names=dimension_names(features.get(data.action_key), action_dim),
        state_names=dimension_names(features.get(data.state_key), state_dim),
        delta_action_dims=transform.delta_action_dims,
        normalization=data.normalization,
        normalization_variant=data.normalization_variant,
        prompt_state=data.prompt_state,
        prompt_overflow=data.prompt_overflow,
        max_prompt_length=model.max_prompt_length,
        action_loss=model.action_loss,
        action_fps=dataset.table.fps / transform.frames_per_step,
    )


@dataclass(frozen=True)
class OpenedColumns:
    """A dataset whose low-dimensional columns were checked.

    names: "state" and "actions" -> a name per dimension. samples: dataset rows to train on. findings may hold errors; then
    statistics make no sense.
    """

    dataset: RobotDataset
    names: dict[str, tuple[str, ...]]
    samples: np.ndarray
    findings: list[Finding]

    @property
    def has_errors(self) -> bool:
        """Any finding is an error."""
        return any(finding.severity == "error" for finding in self.findings)


def open_columns(
    config: RunConfig,
    opened: tuple[EpisodeTable, list[Finding]],
    camera_keys: tuple[str, ...],
    state_is_model_input: bool = False,
    shape: SampleShape | None = None,
) -> OpenedColumns:
    """Check the dataset of `open_table`, its widths and which samples remain. Raises CheckError when it cannot be used.

    `shape`: a family's own make-up of samples, whose widths it has checked.
    """
    data, table = config.data, opened[0]
    findings = _width_findings(config, table, state_is_model_input) if shape is None else []
    try:
        dataset = build_robot_dataset(data, config.family.action_horizon, camera_keys, opened, shape)
    except CheckError as problems:
        raise CheckError([*findings, *problems.findings]) from problems
    findings += dataset.findings
    if shape is None:
        names = {
            "state": dimension_names(table.features.get(data.state_key), dataset.state_ND.shape[-1]),
            "actions": dimension_names(table.features.get(data.action_key), dataset.actions_ND.shape[-1]),
        }
    else:
        names = {"state": dimension_labels(shape.state), "actions": dimension_labels(shape.action)}
    keep_N = np.ones(len(dataset), dtype=bool)
    if data.drop_nonfinite:
        keep_N = ~windows_with_nonfinite(dataset, dataset.steps.reach)
        if not keep_N.all():
            what = f"{(~keep_N).sum()} of {len(dataset)} samples left out: NaN or Inf in their state or action chunk"
            findings.append(warning("--drop-nonfinite", what, "as asked"))
    if data.drop_idle_frames:
        idle_N = dataset.idle_N()
        keep_N &= ~idle_N
        what = f"{idle_N.sum()} of {len(dataset)} samples left out: the state does not move"
        findings.append(warning("--drop-idle-frames", what, "as asked"))
    if data.action_horizon_policy == "complete":
        complete_N = has_complete_chunk(dataset.frame_of_N, dataset.length_of_N, dataset.steps.reach)
        keep_N &= complete_N
        what = f"{(~complete_N).sum()} of {len(dataset)} samples left out: their action chunk ends after their episode"
        findings.append(warning("--action-horizon-policy complete", what, "as asked"))
    if not keep_N.any():
        findings.append(error("--data-path", f"no sample of {len(dataset)} is left", "repair the dataset"))
    return OpenedColumns(dataset, names, np.flatnonzero(keep_N), findings)


@dataclass(frozen=True)
class SharedLayout:
    """What datasets of one mixture must agree on: image slots by view name, and the width of the padded state."""

    views: tuple[str, ...]
    num_images: int
    state_dim: int


@dataclass(frozen=True)
class OpenedData:
    """A dataset after every check that statistics are not needed for. `config` holds the flags of this dataset alone.

    cameras and tokenizer are None when `findings` has their errors. command: how to make --statistics-path anew.
    longest_prompt: tokens that no prompt of this dataset exceeds; None: not known.
    """

    config: RunConfig
    command: str
    columns: OpenedColumns
    transform: StreamTransform
    cameras: CameraMap | None
    tokenizer: SentencePieceTokenizer | None
    findings: list[Finding]
    longest_prompt: int | None = None

    @property
    def layout(self) -> SharedLayout | None:
        """The layout of this dataset alone."""
        if self.cameras is None:
            return None
        return SharedLayout(self.cameras.views, self.cameras.num_images, self.columns.dataset.state_ND.shape[-1])


def open_robot_data(config: RunConfig, batch_fields: Container[str]) -> OpenedData:
    """Open and check one dataset. Raises CheckError with everything found when it cannot be opened.

    `batch_fields`: what the model reads. Batch.state_BD among them limits the state's width; in the prompt it does not matter.
    """
    data = config.data
    opened = open_table(data)
    # Every check goes on after an error of another, so that one run reports all of them.
    cameras, findings = parse_camera_map(data.camera_map, data.num_images, opened[0].cameras)
    tokenizer, tokenizer_findings = load_tokenizer(data.tokenizer_model, config.family.vocab_size)
    findings += tokenizer_findings
    try:
        columns = open_columns(config, opened, cameras.keys if cameras else (), "state_BD" in batch_fields)
        transform = stream_transform(config, opened[0].fps)
    except CheckError as problems:
        raise CheckError([*findings, *problems.findings]) from problems
    findings += columns.findings
    longest_prompt = None
    if tokenizer is not None:
        state_dim = columns.dataset.state_ND.shape[-1] if data.prompt_state else None
        lengths = longest_prompts(tokenizer, columns.dataset.instructions(), state_dim)
        findings += check_prompt_lengths(lengths, config.family.max_prompt_length, data.prompt_overflow)
        longest_prompt = max(lengths.values(), default=None)
    return OpenedData(config, statistics_command(config), columns, transform, cameras, tokenizer, findings, longest_prompt)


def finish_robot_data(
    opened: OpenedData, layout: SharedLayout | None = None, statistics: Statistics | None = None
) -> PreparedData:
    """Statistics (computed or loaded, unless given), preprocessor and range check. Raises CheckError with everything found."""
    config, transform, cameras, tokenizer = opened.config, opened.transform, opened.cameras, opened.tokenizer
    dataset, samples, findings = opened.columns.dataset, opened.columns.samples, list(opened.findings)
    statistics_line = "statistics: of all datasets of the mixture together"
    # Statistics over NaN or over the wrong dimensions would only add misleading findings.
    if statistics is None and not opened.columns.has_errors:
        statistics, statistics_findings, statistics_line = _statistics(config, dataset, transform, samples, opened.command)
        findings += statistics_findings
    if statistics is None or cameras is None or tokenizer is None:
        raise CheckError(findings)
    layout = layout or opened.layout
    assert layout is not None
    shared = cameras.arranged(layout.views, layout.num_images)
    settings = _settings(config, dataset, shared, transform, layout.state_dim)
    preprocessor = Preprocessor(settings, statistics, tokenizer, recorded_pictures(dataset.table, dataset.cameras))
    ranges, range_findings = range_table(
        sanity_rows(preprocessor, dataset, transform, samples), opened.columns.names, config.data.max_out_of_range_fraction
    )
    findings += range_findings if config.data.normalization != "identity" else []
    raise_errors(findings)
    rate = dataset.table.fps / transform.frames_per_step
    summary = [
        *dataset.summary,
        f"samples: {len(samples)} of {len(dataset)}",
        f"cameras: {' '.join(cameras.to_flag_values())}, {layout.num_images} image slots",
        f"action chunk: {transform.horizon} steps at {rate:g} per second = {transform.horizon / rate:.3g} s, a step is "
        f"{transform.frames_per_step:g} frame(s) ({transform.resampling})",
        statistics_line,
        *format_range_table(ranges),
        *(str(finding) for finding in findings),
    ]
    # No table at all in the usual case that every sample stays.
    rows = None if len(samples) == len(dataset) else samples
    is_complete = config.data.action_horizon_policy == "complete"
    expected = 0.0 if is_complete else transform.steps.padded_share(dataset.table.length_E)
    return PreparedData(dataset, preprocessor, rows, len(samples), findings, summary, expected, opened.longest_prompt)


def open_stream(config: RunConfig, opened: tuple[EpisodeTable, list[Finding]]) -> tuple[OpenedColumns, StreamTransform]:
    """Columns and stream that statistics are made of. Raises CheckError."""
    return open_columns(config, opened, ()), stream_transform(config, opened[0].fps)


def statistics_of_streams(
    streams: Sequence[tuple[RobotDataset, StreamTransform, np.ndarray]],
    quantiles: Literal["auto", "exact", "histogram"],
    progress: Callable[[int], object] = lambda num_samples: None,
    weights: Sequence[float] | None = None,
) -> list[Statistics]:
    """Statistics of all streams together, once for each of them; every sample counts once, whatever the weights."""
    return merged_statistics(streams, quantiles, progress)


def format_range_table(table: list[dict[str, Any]]) -> list[str]:
    """Lines for people."""
    lines = [f"{'normalized':<10} {'dimension':<28} {'outside 1.5':>11} {'max':>10}"]
    return lines + [
        f"{row['feature']:<10} {row['dim']:>3} {row['name'][:24]:<24} {row['outside']:>11.1%} {row['max']:>10.3f}"
        for row in table
    ]
