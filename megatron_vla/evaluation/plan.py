"""From flags to trials: which simulator settings, which tasks, which starts; and whether a checkpoint fits the simulator."""

from __future__ import annotations

import dataclasses
import json
import platform
import zlib
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vla.config.evaluation import EvaluationConfig
from megatron_vla.data.load_preprocessor import ServedPreprocessor, ServedSettings
from megatron_vla.data.recorded_pictures import RecordedPictures
from megatron_vla.evaluation.environments.interface import (
    EnvironmentBackend,
    EnvironmentSettings,
    TaskSpec,
    Trial,
    environment_backend,
)
from megatron_vla.evaluation.gate import Gate, parse_gate
from megatron_vla.findings import Finding, error, warning
from megatron_vla.version import __version__


def parse_options(entries: Sequence[str]) -> dict[str, Any]:
    """("fps=10",) -> {"fps": 10}; a value that is no JSON is text. Raises ValueError for an entry without a key."""
    options: dict[str, Any] = {}
    for entry in entries:
        key, sign, text = entry.partition("=")
        if not (key and sign):
            raise ValueError(f"--eval-options {entry!r}: write KEY=JSON")
        try:
            options[key] = json.loads(text)
        except json.JSONDecodeError:
            options[key] = text
    return options


def environment_settings(
    config: EvaluationConfig, backend: EnvironmentBackend, data: RecordedPictures | None = None
) -> EnvironmentSettings:
    """Flags -> what decides how a trial looks. data: of the policy; how its pictures look unless flags say otherwise."""
    side, fast_rendering = config.eval_image_size, config.eval_fast_rendering
    if side is None:
        side = (data.side if data is not None else None) or EnvironmentSettings.image_size
    if fast_rendering is None and data is not None and data.environment == backend.name:
        fast_rendering = data.fast_rendering
    return EnvironmentSettings(
        suite=backend.suites[0] if config.eval_suite is None else config.eval_suite,
        tasks=config.eval_tasks,
        image_size=side,
        action_repeat=config.eval_action_repeat,
        max_steps=config.eval_max_steps,
        wait_steps=config.eval_wait_steps,
        initial_states=config.eval_initial_states,
        rotate_images=config.eval_rotate_images,
        fast_rendering=EnvironmentSettings.fast_rendering if fast_rendering is None else fast_rendering,
        options=parse_options(config.eval_options),
    )


def conditions(
    config: EvaluationConfig, backend: EnvironmentBackend, settings: EnvironmentSettings, action_horizon: int
) -> dict[str, Any]:
    """What two evaluations must have in common to be compared trial by trial, JSON-ready."""
    return {
        "environment": backend.name,
        # None where nothing is unusual: evaluations that were begun before these were told go on.
        "revision": backend.revision if backend.revision > 1 else None,
        # Which cameras are rendered changes nothing that happens in a trial.
        "settings": {name: value for name, value in dataclasses.asdict(settings).items() if name != "cameras"},
        "seed": config.eval_seed,
        "replan_interval": config.eval_replan_interval or max(1, action_horizon // 2),
    }


def picture_findings(
    settings: EnvironmentSettings, backend: EnvironmentBackend, data: RecordedPictures | None
) -> Iterator[Finding]:
    """Warnings about pictures that differ from those that the policy was trained on: it may still act, but worse."""
    if data is None:
        return
    if data.side is not None and data.side != settings.image_size:
        what = f"renders pictures of {settings.image_size} pixels; those of the training data have {data.side}"
        yield warning(f"--eval-image-size {settings.image_size}", what, "leave the flag out to render as in the training data")
    if data.environment != backend.name:
        return
    if data.fast_rendering is not None and data.fast_rendering != settings.fast_rendering:
        on_off = {True: "on", False: "off"}
        what = f"is {on_off[settings.fast_rendering]}; the training data was recorded with it {on_off[data.fast_rendering]}"
        yield warning("--eval-fast-rendering", what, "leave the flag out to render as in the training data")
    if data.revision is not None and data.revision != backend.revision:
        what = f"{backend.name} is revision {backend.revision} here; the training data was recorded with {data.revision}"
        yield warning("--eval-environment", what, "record the demonstrations again and train on them, or expect less success")


def list_trials(tasks: Sequence[TaskSpec], trials_per_task: int, seed: int, settings: EnvironmentSettings) -> list[Trial]:
    """All trials. Their seeds depend on (seed, task, number) only, so that every checkpoint meets the same ones."""
    trials = []
    for task in tasks:
        official = task.num_initial_states if settings.initial_states == "official" else 0
        for index in range(trials_per_task):
            words = np.random.SeedSequence((seed, zlib.crc32(task.name.encode()), index))
            state = index % official if official else None
            trials.append(Trial(task=task.name, index=index, seed=int(words.generate_state(1)[0] >> 1), initial_state=state))
    return trials


def parse_camera_names(entries: Sequence[str]) -> dict[str, str]:
    """("checkpoint=simulator",) -> {"checkpoint": "simulator"}. Raises ValueError naming the entry that is no pair."""
    pairs = [entry.partition("=") for entry in entries]
    wrong = [entry for entry, (left, sign, right) in zip(entries, pairs, strict=True) if not (left and sign and right)]
    if wrong:
        raise ValueError(f"--eval-camera-map {wrong[0]!r}: write CHECKPOINT_CAMERA=SIMULATOR_CAMERA")
    return {left: right for left, _, right in pairs}


def simulator_cameras(camera_keys: Sequence[str | None], config: EvaluationConfig) -> dict[str, str]:
    """Checkpoint's camera -> the simulator's that it looks through."""
    names = parse_camera_names(config.eval_camera_map)
    return {key: names.get(key, key) for key in camera_keys if key}


def compatibility(
    own: ServedSettings, backend: EnvironmentBackend, settings: EnvironmentSettings, config: EvaluationConfig
) -> None:
    """Raise ValueError when the checkpoint cannot be meant for this simulator: cameras, state, actions, rate."""
    cameras = tuple(key for key in own.camera_keys if key)
    unknown = [key for key in parse_camera_names(config.eval_camera_map) if key not in cameras]
    if unknown:
        raise ValueError(f"--eval-camera-map {unknown[0]}: the checkpoint has cameras {', '.join(cameras)}")
    known = (*backend.cameras, *backend.extra_cameras)
    missing = [camera for camera in simulator_cameras(own.camera_keys, config).values() if camera not in known]
    if known and missing:
        raise ValueError(
            f"the checkpoint needs camera {', '.join(missing)}; {backend.name} has {', '.join(known)} "
            "-> pair them with --eval-camera-map CHECKPOINT_CAMERA=SIMULATOR_CAMERA"
        )
    for what, width, its in (("state", own.state_dim, backend.state_names), ("action", own.action_dim, backend.action_names)):
        if its and width != len(its):
            raise ValueError(f"the checkpoint's {what} has {width} dimensions, {backend.name}'s {len(its)} ({', '.join(its)})")
    for what, steps in (("pictures", own.frame_steps), ("states", own.state_steps)):
        if steps != (0,):
            told = f"the checkpoint sees {what} of the steps {list(steps)} relative to now, simulators show the present"
            raise ValueError(f"{told} -> let a client that keeps them ask tools/serve_policy.py")
    rate = backend.fps(settings)
    if config.eval_check_rate and own.action_fps is not None and abs(own.action_fps - rate) > 0.01 * rate:
        repeat = backend.fps(dataclasses.replace(settings, action_repeat=1)) / own.action_fps
        raise ValueError(
            f"the checkpoint predicts {own.action_fps:g} actions per second, the simulator would take {rate:g} "
            f"-> use --eval-action-repeat {repeat:g}, or --no-eval-check-rate if the data's rate is wrong"
        )
    if config.eval_replan_interval is not None and not 1 <= config.eval_replan_interval <= own.num_steps:
        raise ValueError(f"--eval-replan-interval {config.eval_replan_interval}: the chunk has {own.num_steps} actions")


def package_versions(backend: EnvironmentBackend) -> dict[str, str]:
    """What to install to run this again."""
    versions = {"megatron_vla": __version__, "python": platform.python_version()}
    for package in ("torch", "numpy", *backend.packages):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def plan_findings(config: EvaluationConfig, preprocessor: ServedPreprocessor, root: Path) -> Iterator[Finding]:
    """What --eval-interval would stumble over after hours of training: suite, tasks, cameras, widths, rate, and a promoted
    checkpoint in `root` (--save) that was evaluated differently."""
    try:
        backend = environment_backend(config.eval_environment)
        settings = environment_settings(config, backend, preprocessor.pictures)
        backend.tasks(settings)
        compatibility(preprocessor.settings, backend, settings, config)
        yield from picture_findings(settings, backend, preprocessor.pictures)
        gate = Gate(rules=parse_gate(config.eval_gate), root=root)
        gate.reference(conditions(config, backend, settings, preprocessor.settings.num_steps))
    except ValueError as problem:
        what, _, fix = str(problem).partition(" -> ")
        yield error("--eval-interval", what, fix or "correct the --eval-* flags")
