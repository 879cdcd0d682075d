"""Everything that is checked and computed before a robot dataset is trained on, reported as one list of findings.

Shape legend: N dataset rows (frames), E episodes, D dimensions, T action horizon.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_vla.config.cli import flag_name
from megatron_vla.config.data import DataConfig
from megatron_vla.config.run import RunConfig
from megatron_vla.data.cameras import CameraMap, parse_camera_map
from megatron_vla.data.dataset import RobotDataset, build_robot_dataset
from megatron_vla.data.episode_table import EpisodeTable, Feature
from megatron_vla.data.metadata import read_metadata
from megatron_vla.data.preprocess import Preprocessor, PreprocessSettings
from megatron_vla.data.prompt import SentencePieceTokenizer, check_prompt_lengths, load_tokenizer
from megatron_vla.data.statistics import SANITY_SAMPLES, Statistics, range_table
from megatron_vla.data.statistics_pass import (
    StreamTransform,
    check_nonfinite,
    compute_statistics,
    last_rows,
    load_statistics,
    transformed_blocks,
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
    "statistics_quantiles",
)


@dataclass(frozen=True)
class PreparedData:
    """What `prepare_robot_data` made. `rows` maps sample number -> dataset row when samples were left out."""

    dataset: RobotDataset
    preprocessor: Preprocessor
    rows: np.ndarray | None
    num_samples: int
    findings: list[Finding]
    summary: list[str]
    expected_padded_fraction: float


def stream_transform(config: RunConfig) -> StreamTransform:
    """What shapes the stream of states and actions."""
    data = config.data
    dims = data.delta_action_dims if data.model_action_representation == "delta" else ()
    return StreamTransform(config.family.action_horizon, dims, data.state_key, data.action_key)


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


def _feature_findings(config: RunConfig, table: EpisodeTable, state_is_model_input: bool) -> list[Finding]:
    """Keys and widths of state and action against the dataset and the model."""
    data, model = config.data, config.family
    findings: list[Finding] = []
    for flag, key in (("--state-key", data.state_key), ("--action-key", data.action_key)):
        if key not in table.columns:
            findings.append(
                error(flag, f"{table.root} has no column {key!r}; it has {', '.join(table.columns)}", f"use {flag} KEY")
            )
    if findings:
        return findings
    action_dim, state_dim = table.features[data.action_key].size, table.features[data.state_key].size
    if action_dim > model.max_action_dim:
        what = (
            f"the dataset's {data.action_key} has {action_dim} dimensions, the model's action interface {model.max_action_dim}"
        )
        fix = (
            f"use --max-action-dim {action_dim} or more; it gives action_in_proj and action_out_proj other shapes, so with "
            "--pretrained-checkpoint these layers start from random weights"
        )
        findings.append(error("--max-action-dim", what, fix))
    if state_dim > model.max_action_dim and state_is_model_input:
        what = f"the dataset's {data.state_key} has {state_dim} dimensions, the model's state interface {model.max_action_dim}"
        findings.append(error("--max-action-dim", what, f"use --max-action-dim {state_dim} or more"))
    wrong = [dim for dim in data.delta_action_dims if not 0 <= dim < min(action_dim, state_dim)]
    if wrong:
        what = f"dimension(s) {wrong} do not exist in both the action ({action_dim}) and the state ({state_dim})"
        findings.append(error("--delta-action-dims", what, f"use dimensions below {min(action_dim, state_dim)}"))
    return findings


def _empty_instruction_samples(config: RunConfig, dataset: RobotDataset) -> tuple[np.ndarray, list[Finding]]:
    """(bool [N] samples to keep, findings) as --empty-instruction says."""
    table = dataset.table
    is_empty_E = np.array([not table.instruction(row).strip() for row in range(table.num_episodes)], dtype=bool)
    keep_N = np.ones(len(dataset), dtype=bool)
    if not is_empty_E.any():
        return keep_N, []
    episodes = table.episode_index_E[is_empty_E]
    shown = ", ".join(map(str, episodes[:10])) + (", ..." if len(episodes) > 10 else "")
    what = f"{len(episodes)} of {table.num_episodes} episodes have no task instruction (episode {shown})"
    policy = config.data.empty_instruction
    if policy == "drop":
        keep_N = ~np.isin(np.asarray(dataset.episode_of_N), episodes)
        return keep_N, [warning("--empty-instruction drop", what, f"leaving out their {(~keep_N).sum()} samples")]
    if policy == "keep":
        return keep_N, [warning("--empty-instruction keep", what, "training on them with an empty task text")]
    return keep_N, [
        error("--empty-instruction", what, "use drop to leave them out, keep to train on them, or repair meta/tasks")
    ]


def _statistics(
    config: RunConfig, dataset: RobotDataset, transform: StreamTransform, samples: np.ndarray
) -> tuple[Statistics | None, list[Finding], str]:
    """(statistics or None with errors, findings, one line for the log)."""
    data = config.data
    if data.statistics_path is None:
        statistics = compute_statistics(dataset, transform, samples, data.statistics_quantiles)
        line = f"statistics: computed from {len(samples)} samples ({statistics.quantiles} quantiles), stored in checkpoints"
        return statistics, [], line
    command = statistics_command(config)
    found, findings = load_statistics(
        data.statistics_path, dataset, transform, len(samples), data.allow_foreign_statistics, command
    )
    return found, findings, f"statistics: {data.statistics_path}"


def sanity_rows(
    preprocessor: Preprocessor, dataset: RobotDataset, transform: StreamTransform, samples: np.ndarray
) -> dict[str, np.ndarray]:
    """Normalized rows of up to 1,000 samples spread evenly: "state" [n, D] and "actions" [n * T, D]."""
    spread = samples[np.unique(np.linspace(0, len(samples) - 1, SANITY_SAMPLES).astype(np.int64))]
    states_nD, actions_nTD = next(transformed_blocks(dataset, transform, spread))
    actions = preprocessor.action_normalizer.normalize(actions_nTD)
    return {
        "state": preprocessor.state_normalizer.normalize(states_nD),
        "actions": actions.reshape(-1, actions.shape[-1]),
    }


def _settings(config: RunConfig, dataset: RobotDataset, cameras: CameraMap, transform: StreamTransform) -> PreprocessSettings:
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
        max_state_dim=max(state_dim, model.max_action_dim),
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
    )


def padded_fraction(dataset: RobotDataset, samples: np.ndarray, horizon: int) -> float:
    """Share of action steps beyond their episode's end, from episode lengths alone."""
    steps_left_n = last_rows(dataset)[samples] - samples + 1
    return float(np.maximum(0, horizon - steps_left_n).mean() / horizon)


@dataclass(frozen=True)
class OpenedColumns:
    """A dataset whose low-dimensional columns were checked; `findings` may hold errors. `samples`: dataset rows to train on."""

    dataset: RobotDataset
    names: dict[str, tuple[str, ...]]
    samples: np.ndarray
    findings: list[Finding]
    is_finite: bool


def read_table(config: RunConfig) -> EpisodeTable:
    """Metadata of the dataset. Raises CheckError."""
    data = config.data
    if not data.data_path:
        raise CheckError([error("--data-path", "no dataset given", "name a LeRobot dataset folder, or use --mock-data")])
    try:
        return read_metadata(data.data_path[0])[0]
    except ValueError as problem:
        raise CheckError([error("--data-path", str(problem), "give the root folder of a LeRobot dataset")]) from problem


def open_columns(
    config: RunConfig, table: EpisodeTable, camera_keys: tuple[str, ...], state_is_model_input: bool = False
) -> OpenedColumns:
    """Open the dataset and check keys, widths, instructions and finite values. Raises CheckError when it cannot be opened."""
    data = config.data
    feature_findings = _feature_findings(config, table, state_is_model_input)
    raise_errors(feature_findings)
    dataset = build_robot_dataset(data, config.family.action_horizon, camera_keys)
    names = {
        "state": dimension_names(table.features.get(data.state_key), dataset.state_ND.shape[-1]),
        "actions": dimension_names(table.features.get(data.action_key), dataset.actions_ND.shape[-1]),
    }
    keep_N, findings = _empty_instruction_samples(config, dataset)
    finite_N, finite_findings = check_nonfinite(dataset, config.family.action_horizon, data.drop_nonfinite, names)
    samples = np.flatnonzero(keep_N & finite_N)
    findings = [*feature_findings, *findings, *finite_findings]
    if not len(samples):
        what = f"no sample of {len(dataset)} is left"
        findings.append(error("--data-path", what, "see --empty-instruction, --drop-nonfinite, --exclude-episodes-file"))
    is_finite = len(samples) > 0 and not any(f.severity == "error" for f in finite_findings)
    return OpenedColumns(dataset, names, samples, findings, is_finite)


def prepare_robot_data(config: RunConfig, state_is_model_input: bool) -> PreparedData:
    """Open, check and prepare the dataset. Raises CheckError with everything found, not only the first problem.

    `state_is_model_input`: the model reads Batch.state_BD itself (then its width is limited), not only through the prompt.
    """
    data = config.data
    table = read_table(config)
    cameras, findings = parse_camera_map(data.camera_map, data.num_images, table.cameras)
    tokenizer, tokenizer_findings = load_tokenizer(data.tokenizer_model, config.family.vocab_size)
    findings += tokenizer_findings
    try:
        opened = open_columns(config, table, cameras.keys if cameras else (), state_is_model_input)
    except CheckError as problems:
        raise CheckError([*findings, *problems.findings]) from problems
    dataset, samples = opened.dataset, opened.samples
    findings += opened.findings
    if tokenizer is not None:
        findings += _prompt_findings(config, dataset, tokenizer)
    transform = stream_transform(config)
    statistics, statistics_line = None, ""
    if opened.is_finite:
        statistics, statistics_findings, statistics_line = _statistics(config, dataset, transform, samples)
        findings += statistics_findings
    if statistics is None or cameras is None or tokenizer is None:
        raise CheckError(findings)
    preprocessor = Preprocessor(_settings(config, dataset, cameras, transform), statistics, tokenizer)
    ranges, range_findings = range_table(
        sanity_rows(preprocessor, dataset, transform, samples), opened.names, data.max_out_of_range_fraction
    )
    findings += range_findings if data.normalization != "identity" else []
    raise_errors(findings)
    summary = [
        f"data: {data.data_path[0]}: {table.num_episodes} episodes, {len(samples)} of {len(dataset)} samples",
        f"cameras: {' '.join(cameras.to_flag_values())}, {cameras.num_images} image slots",
        statistics_line,
        *format_range_table(ranges),
        *(str(finding) for finding in findings),
    ]
    rows = None if len(samples) == len(dataset) else samples
    expected = padded_fraction(dataset, samples, transform.horizon)
    return PreparedData(dataset, preprocessor, rows, len(samples), findings, summary, expected)


def _prompt_findings(config: RunConfig, dataset: RobotDataset, tokenizer: SentencePieceTokenizer) -> list[Finding]:
    data, model = config.data, config.family
    state_dim = dataset.state_ND.shape[-1] if data.prompt_state else None
    instructions = [text for text in dataset.table.instructions if text.strip()] or [""]
    return check_prompt_lengths(tokenizer, instructions, state_dim, model.max_prompt_length, data.prompt_overflow)


def format_range_table(table: list[dict[str, Any]]) -> list[str]:
    """Lines for people."""
    lines = [f"{'normalized':<10} {'dimension':<28} {'outside 1.5':>11} {'max':>10}"]
    return lines + [
        f"{row['feature']:<10} {row['dim']:>3} {row['name'][:24]:<24} {row['outside']:>11.1%} {row['max']:>10.3f}"
        for row in table
    ]
