"""Which robot a dataset shows: modality configuration, cameras, columns, embodiment slot; from flags and files, or errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_vla.config.run import RunConfig
from megatron_vla.data.action_steps import ActionSteps, action_rate, action_steps
from megatron_vla.data.cameras import parse_camera_map
from megatron_vla.data.episode_table import EpisodeTable
from megatron_vla.data.groot.column_layout import (
    MODALITY_FILE,
    ColumnLayout,
    default_modality,
    read_layout,
    split_dimensions,
)
from megatron_vla.data.groot.modality import RELEASED_EMBODIMENTS, ModalityConfig
from megatron_vla.data.groot.processor_files import (
    EMBODIMENT_FILE,
    PROCESSOR_FILE,
    option_differences,
    read_embodiments,
    read_modalities,
)
from megatron_vla.data.groot.statistics import KeyStream
from megatron_vla.data.sample_shape import SampleShape
from megatron_vla.findings import CheckError, Finding, error, warning


@dataclass(frozen=True)
class ResolvedRobot:
    """views and cameras pair up by position; lines: for the log."""

    modality: ModalityConfig
    views: tuple[str, ...]
    cameras: tuple[str, ...]
    shape: SampleShape
    embodiment_id: int
    stream: KeyStream
    lines: list[str]


def resolve_robot(
    config: RunConfig, table: EpisodeTable, with_cameras: bool = True
) -> tuple[ResolvedRobot | None, list[Finding]]:
    """(the robot, or None with errors). Without cameras only states and actions are looked at (statistics)."""
    data, family = config.data, config.family
    layout, findings = read_layout(table, data.state_key, data.action_key)
    slot, problems = embodiment_slot(config)
    findings += problems
    if layout is None:
        return None, findings
    video, problems = _cameras(config, table, layout, with_cameras)
    findings += problems
    if any(finding.severity == "error" for finding in findings):
        return None, findings
    modality, layout, source, problems = _modality(config, layout, video)
    findings += problems
    if modality is None:
        return None, findings
    if modality.num_action_steps > family.action_horizon:
        what = f"the modality configuration has chunks of {modality.num_action_steps} steps, the model {family.action_horizon}"
        findings.append(error("--action-horizon", what, f"use --action-horizon {modality.num_action_steps} or fewer steps"))
    if len(modality.state.delta_indices) != family.state_history_length:
        what = f"the modality configuration has {len(modality.state.delta_indices)} state step(s), the model reads "
        findings.append(error("--state-history-length", what + str(family.state_history_length), "make them agree"))
    missing = [key for key in modality.video.keys if key not in video] if with_cameras else []
    if missing:
        what = f"video keys {', '.join(missing)} of the modality configuration have no camera; there are {', '.join(video)}"
        findings.append(error(layout.where, what, "map them: --camera-map KEY=DATASET_KEY ..."))
    state, problems = layout.places("state", modality.state.keys)
    action, more = layout.places("action", modality.action.keys)
    task_column, last = layout.task_column(modality.language.keys[0])
    findings += [*problems, *more, *last]
    steps, problems = _steps(config, table, modality)
    findings += problems
    if steps is None or any(finding.severity == "error" for finding in findings):
        return None, findings
    state_deltas = modality.state.delta_indices
    shape = SampleShape(tuple(state), tuple(action), modality.video.delta_indices, steps, task_column, state_deltas)
    stream = KeyStream.of(modality, shape, family.use_relative_action)
    try:
        relative = stream.relative.keys
    except ValueError as problem:
        return None, [*findings, error(layout.where, str(problem), "correct the slices or the configuration")]
    views = modality.video.keys if with_cameras else ()
    findings += _option_findings(config)
    lines = [
        f"robot: {data.embodiment_tag}, slot {slot} of {family.num_embodiments}; modality configuration: {source}",
        f"  state {', '.join(modality.state.keys)}; action {', '.join(modality.action.keys)}"
        f" (relative: {', '.join(relative) or 'none'}); instruction from {modality.language.keys[0]}",
        f"  pictures {', '.join(f'{view} <- {video[view]}' for view in views)} at steps {list(modality.video.delta_indices)}",
    ]
    cameras = tuple(video[view] for view in views)
    return ResolvedRobot(modality, tuple(views), cameras, shape, slot, stream, lines), findings


def _option_findings(config: RunConfig) -> list[Finding]:
    """A fine-tuning whose pictures or normalization are not those of its checkpoint should know it."""
    checkpoint = config.model.pretrained_checkpoint
    if checkpoint is None or not (Path(checkpoint) / PROCESSOR_FILE).is_file():
        return []
    path = Path(checkpoint) / PROCESSOR_FILE
    return [
        warning(flag, f"{here} in this run, {stated} in {path}", f"use {flag} to make them agree")
        for flag, stated, here in option_differences(path, config.family)
    ]


def embodiment_slot(config: RunConfig) -> tuple[int, list[Finding]]:
    """(slot of the per-embodiment weights, errors)."""
    data, checkpoint = config.data, config.model.pretrained_checkpoint
    known: Mapping[str, int] = RELEASED_EMBODIMENTS
    if checkpoint is not None and (Path(checkpoint) / EMBODIMENT_FILE).is_file():
        try:
            # What the checkpoint says wins; tags that it does not have keep their released slots.
            known = {**known, **read_embodiments(Path(checkpoint))}
        except ValueError as problem:
            return 0, [error("--pretrained-checkpoint", str(problem), "restore the file")]
    slot = known.get(data.embodiment_tag) if data.embodiment_id is None else data.embodiment_id
    if slot is None:
        what = f"{data.embodiment_tag!r} is unknown; known are {', '.join(known)}"
        return 0, [error("--embodiment-tag", what, "use one of them (new_embodiment for a new robot), or --embodiment-id")]
    # Small models have few slots; a released number would be out of range there.
    if not 0 <= slot < config.family.num_embodiments:
        what = f"{data.embodiment_tag} has slot {slot}, the model {config.family.num_embodiments}"
        return 0, [error("--embodiment-id", what, f"use --embodiment-id 0 ... {config.family.num_embodiments - 1}")]
    return slot, []


def _cameras(
    config: RunConfig, table: EpisodeTable, layout: ColumnLayout, with_cameras: bool
) -> tuple[dict[str, str], list[Finding]]:
    """View -> camera: --camera-map, else modality.json's video keys."""
    if not with_cameras:
        return dict(layout.video), []
    has_file = (Path(table.root) / MODALITY_FILE).is_file()
    if config.data.camera_map or not has_file:
        cameras, findings = parse_camera_map(config.data.camera_map, None, table.cameras)
        return ({} if cameras is None else dict(zip(cameras.views, cameras.keys, strict=True))), findings
    unknown = sorted(set(layout.video.values()) - set(table.cameras))
    if unknown:
        what = f"video keys point to {', '.join(unknown)}; the dataset has cameras {', '.join(table.cameras) or 'none'}"
        return {}, [error(layout.where, what, "correct original_key, or use --camera-map")]
    return dict(layout.video), []


def _modality(
    config: RunConfig, layout: ColumnLayout, video: Mapping[str, str]
) -> tuple[ModalityConfig | None, ColumnLayout, str, list[Finding]]:
    """(configuration or None, the layout it belongs to, where it comes from, errors)."""
    data, family, tag = config.data, config.family, config.data.embodiment_tag
    is_split = data.model_action_representation == "delta"
    try:
        if data.modality_config is not None:
            content = json.loads(Path(data.modality_config).read_text())
            return modality_of(content, tag, data.modality_config), layout, data.modality_config, []
        checkpoint = config.model.pretrained_checkpoint
        if checkpoint is not None and (Path(checkpoint) / PROCESSOR_FILE).is_file():
            modalities = read_modalities(Path(checkpoint) / PROCESSOR_FILE)
            if tag in modalities:
                return modalities[tag], layout, str(Path(checkpoint) / PROCESSOR_FILE), []
    except (OSError, ValueError) as problem:
        return None, layout, "", [error("--modality-config", str(problem), "correct the file")]
    num_steps = min(family.action_steps, family.action_horizon)
    if not is_split:
        modality = default_modality(layout, tuple(video), num_steps, data.language_key)
        return modality, layout, "every key, actions as the dataset has them (no --modality-config)", []
    if len(layout.action) > 1 or len(layout.state) > 1:
        what = "columns are described by meta/modality.json"
        fix = "say which keys are RELATIVE in --modality-config"
        return None, layout, "", [error("--delta-action-dims", what, fix)]
    split, specs = split_dimensions(layout, data.delta_action_dims)
    modality = default_modality(split, tuple(video), num_steps, data.language_key)
    action = replace(modality.action, action_specs=tuple(specs[key] for key in modality.action.keys))
    return replace(modality, action=action), split, "whole columns, --delta-action-dims relative", []


def modality_of(content: Mapping[str, Any], tag: str, where: str) -> ModalityConfig:
    """A configuration out of its own file, a file with one per tag, or a processor_config.json. Raises ValueError."""
    if not isinstance(content, Mapping):
        raise ValueError(f"{where}: a JSON object is needed")
    if "processor_kwargs" in content:
        content = content["processor_kwargs"].get("modality_configs", {})
    if "state" not in content:
        if tag not in content:
            raise ValueError(f"{where}: no modality configuration of {tag}; it has {', '.join(content) or 'none'}")
        content, where = content[tag], f"{where}: {tag}"
    return ModalityConfig.from_dict(content, where)


def _steps(config: RunConfig, table: EpisodeTable, modality: ModalityConfig) -> tuple[ActionSteps | None, list[Finding]]:
    stride = modality.frames_per_step
    try:
        if stride == 1:
            return action_steps(config.data, modality.num_action_steps, table.fps), []
        if action_rate(config.data, modality.num_action_steps) is not None:
            what = f"the modality configuration already takes every {stride}th frame"
            return None, [error("--action-fps, --action-horizon-seconds", what, "drop the flag")]
    except CheckError as problems:
        return None, list(problems.findings)
    return ActionSteps(modality.num_action_steps, float(stride)), []
