"""Records demonstrations of MetaWorld's scripted experts as a LeRobot v3.0 dataset: two cameras, state, action, instruction.

    python tools/record_demonstrations.py --output outputs/demonstrations --tasks door-open drawer-close --episodes-per-task 20

Only successful episodes are kept. In a share of the episodes the executed action is the expert's plus noise while the recorded
action stays the expert's own, so that the data shows how to come back from a mistake (DART, arXiv:1703.09327).
Every episode is a function of (--seed, task, episode number): the number of processes and the order of tasks change nothing.

Shape legend: T recorded steps, H height, W width, C channels, D state, A action.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vla.config.cli import StrictParser, add_section, build_section
from megatron_vla.data.lerobot_writer import LeRobotWriter
from megatron_vla.evaluation.environments.metaworld import (
    ACTION_NAMES,
    CAMERAS,
    CONTROL_HZ,
    STATE_NAMES,
    MetaWorldEnvironment,
    task_name,
)
from megatron_vla.evaluation.environments.rendering import choose_backend

RECORDING_FILE = "meta/recording.json"
MAX_ATTEMPTS = 20
# Episodes that one process records with one simulator before it hands them over: bounds memory at a few hundred MB.
EPISODES_PER_JOB = 4


@dataclass(frozen=True, kw_only=True)
class RecordingConfig:
    """Recording: MetaWorld's scripted experts -> a LeRobot v3.0 dataset"""

    output: str = ""
    """Folder of the new dataset (required). A complete one with the same settings is reused."""

    tasks: tuple[str, ...] = ("door-open", "drawer-close", "window-close", "button-press-topdown", "drawer-open", "window-open")
    """MetaWorld tasks, with or without -v3."""

    episodes_per_task: int = 50
    """Successful episodes to record of each task."""

    image_size: int = 224
    """Side of the square pictures of both cameras in pixels."""

    action_repeat: int = 1
    """Control steps (80 per second) that an action is held for: the dataset's fps is 80 divided by this."""

    noise_fraction: float = 0.5
    """Share of the episodes that are executed with noise; the recorded action is the expert's clean one."""

    noise_sigma: float = 0.3
    """Standard deviation of that noise on the x, y and z actions, whose range is [-1, 1]."""

    max_steps: int = 200
    """Control steps after which an attempt counts as failed."""

    steps_after_success: int = 5
    """Recorded steps that follow the first successful one."""

    fast_rendering: bool = True
    """No shadows, multisampling or reflections: 5 to 10 times faster on CPUs. Recorded; evaluate with the same setting."""

    video_codec: str = "h264"
    """Codec of the mp4 files: h264, hevc or av1."""

    seed: int = 0
    """Goals, object positions and noise follow from it."""

    num_processes: int = 1
    """Processes that simulate; the result does not depend on it."""

    overwrite: bool = False
    """Delete an existing dataset at --output that was recorded with other settings."""


@dataclass(frozen=True)
class Episode:
    """One successful demonstration. images: camera -> uint8 THWC; state_TD and actions_TA float32."""

    task: str
    instruction: str
    number: int
    attempts: int
    environment_seed: int
    noisy: bool
    images: dict[str, np.ndarray]
    state_TD: np.ndarray
    actions_TA: np.ndarray


def settings(config: RecordingConfig) -> dict[str, Any]:
    """What decides the recorded numbers: all flags but where and how fast."""
    values = dataclasses.asdict(config)
    for name in ("output", "num_processes", "overwrite"):
        del values[name]
    values["tasks"] = [task_name(task) for task in config.tasks]
    return values


def check(config: RecordingConfig) -> None:
    """Raise ValueError for flags that cannot work."""
    if not config.output:
        raise ValueError("--output is not set -> name the folder of the new dataset")
    if config.image_size % 2:
        raise ValueError(f"--image-size {config.image_size}: H.264 needs an even number of pixels -> {config.image_size + 1}")
    if not config.tasks or len(set(map(task_name, config.tasks))) < len(config.tasks):
        raise ValueError(f"--tasks {' '.join(config.tasks)}: needs at least one task and none twice")
    if min(config.episodes_per_task, config.action_repeat, config.num_processes) < 1:
        raise ValueError("--episodes-per-task, --action-repeat and --num-processes must be 1 or more")
    if not 0 <= config.noise_fraction <= 1:
        raise ValueError(f"--noise-fraction {config.noise_fraction}: a share between 0 and 1 is needed")


def attempt_episode(environment: MetaWorldEnvironment, config: RecordingConfig, number: int, attempt: int) -> Episode | None:
    """Play the expert once; None when it did not succeed within --max-steps."""
    words = (config.seed, zlib.crc32(environment.task.encode()), number, attempt)
    random = np.random.default_rng(np.random.SeedSequence(words))
    environment_seed = int(random.integers(2**31))
    noisy = bool(random.random() < config.noise_fraction)
    observation = environment.reset(environment_seed)
    observations, actions = [], []
    steps_left = config.max_steps // config.action_repeat
    has_succeeded = False
    while steps_left > 0:
        action_A = environment.expert_action()
        noise_A = np.append(random.standard_normal(3) * config.noise_sigma, 0.0) if noisy else np.zeros(4)
        observations.append(observation)
        actions.append(action_A)
        observation, succeeded = environment.step(action_A + noise_A)
        steps_left -= 1
        if succeeded and not has_succeeded:
            has_succeeded, steps_left = True, config.steps_after_success
    if not has_succeeded:
        return None
    return Episode(
        environment.task,
        environment.instruction,
        number,
        attempt + 1,
        environment_seed,
        noisy,
        {camera: np.stack([o[camera] for o in observations]) for camera in CAMERAS},
        np.stack([o["observation.state"] for o in observations]),
        np.stack(actions),
    )


def record_episodes(config: RecordingConfig, task: str, numbers: Sequence[int]) -> list[Episode]:
    """The successful episodes `numbers` of `task`. Raises ValueError when MAX_ATTEMPTS attempts at one all fail."""
    environment = MetaWorldEnvironment(
        task,
        image_size=config.image_size,
        fast_rendering=config.fast_rendering,
        action_repeat=config.action_repeat,
    )
    episodes = []
    try:
        for number in numbers:
            attempts = (attempt_episode(environment, config, number, attempt) for attempt in range(MAX_ATTEMPTS))
            episode = next((e for e in attempts if e is not None), None)
            if episode is None:
                raise ValueError(
                    f"task {task}, episode {number}: the expert failed {MAX_ATTEMPTS} times in a row"
                    f" -> raise --max-steps ({config.max_steps}), or lower --noise-sigma or --action-repeat"
                )
            episodes.append(episode)
    finally:
        environment.close()
    return episodes


def simulate(config: RecordingConfig) -> Iterator[Episode]:
    """All episodes, task by task in the order of their numbers, whatever the number of processes."""
    jobs = [
        (task_name(task), range(first, min(first + EPISODES_PER_JOB, config.episodes_per_task)))
        for task in config.tasks
        for first in range(0, config.episodes_per_task, EPISODES_PER_JOB)
    ]
    if config.num_processes == 1:
        for task, numbers in jobs:
            yield from record_episodes(config, task, numbers)
        return
    # spawn: a GL context does not survive a fork.
    with ProcessPoolExecutor(config.num_processes, mp_context=get_context("spawn")) as pool:
        waiting = iter(jobs)
        running: list[Future[list[Episode]]] = []
        # A short window, since finished episodes wait in memory for their turn to be encoded.
        for task, numbers in islice(waiting, config.num_processes + 1):
            running.append(pool.submit(record_episodes, config, task, numbers))
        while running:
            episodes = running.pop(0).result()
            for task, numbers in islice(waiting, 1):
                running.append(pool.submit(record_episodes, config, task, numbers))
            yield from episodes


def dataset_features(image_size: int) -> dict[str, dict[str, Any]]:
    """LeRobot features of a recording."""
    picture = {"dtype": "video", "shape": [image_size, image_size, 3], "names": ["height", "width", "channels"]}
    return {
        **{camera: dict(picture) for camera in CAMERAS},
        "observation.state": {"dtype": "float32", "shape": [len(STATE_NAMES)], "names": list(STATE_NAMES)},
        "action": {"dtype": "float32", "shape": [len(ACTION_NAMES)], "names": list(ACTION_NAMES)},
    }


def save_montage(rows: Sequence[tuple[str, list[np.ndarray]]], path: Path) -> None:
    """One row per task: title and pictures (uint8 HWC, all of one size)."""
    from PIL import Image, ImageDraw

    height, width = rows[0][1][0].shape[:2]
    title = 14
    sheet = Image.new("RGB", (width * max(len(p) for _, p in rows), (height + title) * len(rows)), "white")
    draw = ImageDraw.Draw(sheet)
    for row, (text, pictures) in enumerate(rows):
        top = row * (height + title)
        draw.text((2, top + 1), text, fill="black")
        for column, picture_HWC in enumerate(pictures):
            sheet.paste(Image.fromarray(picture_HWC), (column * width, top + title))
    sheet.save(path)


def montage_row(episode: Episode) -> tuple[str, list[np.ndarray]]:
    """Title and the first, middle and last picture of each camera."""
    last = len(episode.actions_TA) - 1
    pictures = [episode.images[camera][step] for camera in CAMERAS for step in (0, last // 2, last)]
    return f"{episode.task}: {episode.instruction} ({last + 1} steps; top, wrist)", pictures


def is_reusable(config: RecordingConfig) -> bool:
    """Whether --output already holds exactly this recording. Raises ValueError when it holds something else."""
    root = Path(config.output)
    if not root.exists() or not any(root.iterdir()):
        return False
    if not (root / RECORDING_FILE).exists():
        raise ValueError(f"--output {root}: holds files that were not recorded by this tool -> name a new folder")
    recorded = json.loads((root / RECORDING_FILE).read_text())["settings"]
    wanted = settings(config)
    differences = [f"{k}: {recorded.get(k)} there, {v} asked" for k, v in wanted.items() if recorded.get(k) != v]
    if not differences:
        return True
    if not config.overwrite:
        raise ValueError(
            f"--output {root}: recorded with other settings ({'; '.join(differences)}) -> name a new folder or add --overwrite"
        )
    shutil.rmtree(root)
    return False


def record(config: RecordingConfig) -> Path:
    """Record everything and return the dataset's folder, which appears only when it is complete."""
    from tqdm import tqdm

    check(config)
    root = Path(config.output)
    if is_reusable(config):
        print(f"{root}: complete with these settings, reused")
        return root
    partial = root.with_name(root.name + ".partial")
    if partial.exists():
        print(f"{partial}: left by an interrupted recording, removed")
        shutil.rmtree(partial)
    os.environ["MUJOCO_GL"] = backend = choose_backend()
    print(f"rendering with MUJOCO_GL={backend}, fast rendering {'on' if config.fast_rendering else 'off'}")
    fps = CONTROL_HZ / config.action_repeat
    writer = LeRobotWriter(
        partial,
        fps=int(fps) if fps.is_integer() else fps,
        features=dataset_features(config.image_size),
        robot_type="sawyer_metaworld",
        codebase_version="v3.0",
        video_codec=config.video_codec,  # type: ignore[arg-type]  # the writer names the known ones
    )
    log: list[dict[str, Any]] = []
    montage: dict[str, tuple[str, list[np.ndarray]]] = {}
    for episode in tqdm(simulate(config), total=len(config.tasks) * config.episodes_per_task, unit="episode"):
        columns = {"observation.state": episode.state_TD, "action": episode.actions_TA}
        writer.add_episode(columns, episode.images, episode.instruction)
        montage.setdefault(episode.task, montage_row(episode))
        fields = ("task", "number", "attempts", "environment_seed", "noisy")
        log.append({f: getattr(episode, f) for f in fields} | {"length": len(episode.actions_TA)})
    writer.finalize()
    save_montage(list(montage.values()), partial / "montage.png")
    versions = {package: version(package) for package in ("metaworld", "mujoco")}
    recording = {"settings": settings(config), "gl_backend": backend, "versions": versions, "episodes": log}
    (partial / RECORDING_FILE).write_text(json.dumps(recording, indent=1))
    if root.exists():
        root.rmdir()
    partial.rename(root)
    return root


def print_summary(root: Path) -> None:
    """Per task: episodes, attempts, mean length."""
    recording = json.loads((root / RECORDING_FILE).read_text())
    for task in recording["settings"]["tasks"]:
        episodes = [e for e in recording["episodes"] if e["task"] == task]
        attempts, steps = sum(e["attempts"] for e in episodes), sum(e["length"] for e in episodes)
        share = f"{len(episodes)} of {attempts} attempts succeeded ({len(episodes) / attempts:.0%})"
        print(f"{task:28s} {share}, {steps / len(episodes):.0f} steps each, {sum(e['noisy'] for e in episodes)} with noise")
    size = sum(f.stat().st_size for f in root.rglob("*") if f.is_file()) / 1e6
    print(f"{root}: {len(recording['episodes'])} episodes, {size:.1f} MB; pictures in {root / 'montage.png'}")


def parse(arguments: Sequence[str]) -> RecordingConfig:
    """Flags -> RecordingConfig."""
    parser = StrictParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_section(parser, RecordingConfig)
    config: RecordingConfig = build_section(RecordingConfig, parser.parse_flags(arguments))
    return config


if __name__ == "__main__":
    try:
        print_summary(record(parse(sys.argv[1:])))
    except ValueError as failure:
        raise SystemExit(f"error: {failure}") from None
