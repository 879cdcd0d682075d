"""Records demonstrations of scripted experts as a LeRobot v3.0 dataset: cameras, state, action, instruction.

    python tools/record_demonstrations.py --output outputs/demonstrations --tasks door-open drawer-close --episodes-per-task 20
    python tools/record_demonstrations.py --output outputs/mt10 --suite mt10 --num-processes 16 --picture-format png

Only successful episodes are kept. In a share of the episodes the executed action is the expert's plus noise while the recorded
action stays the expert's own, so that the data shows how to come back from a mistake (DART, arXiv:1703.09327).
Every episode is a function of (--seed, task, episode number): the number of processes and the order of tasks change nothing.
A simulator process that dies or hangs is replaced; an interrupted recording goes on when the same command is given again.

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
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_vla.config.cli import StrictParser, add_section, build_section
from megatron_vla.data.frame_source import FrameSource
from megatron_vla.data.lerobot_writer import EncodedPictures
from megatron_vla.data.metadata import read_metadata
from megatron_vla.data.recording_shards import RecordedEpisode, ShardedRecording, differences, go_on_or_begin
from megatron_vla.evaluation.environments.interface import (
    Environment,
    EnvironmentBackend,
    EnvironmentSettings,
    Observation,
    TaskSpec,
    Trial,
    environment_backend,
)
from megatron_vla.evaluation.environments.rendering import choose_backend
from megatron_vla.evaluation.ordered_processes import OrderedProcesses
from megatron_vla.file_lock import alone_in

RECORDING_FILE = "meta/recording.json"
REPLACED = "replaced"
MAX_ATTEMPTS = 20
# Then an episode that was to have noise is recorded without.
NOISY_ATTEMPTS = 15
# Episodes of a task that one process records one after the other: changing the task takes longer than an episode.
EPISODES_PER_JOB = 4


@dataclass(frozen=True, kw_only=True)
class RecordingConfig:
    """Recording: scripted experts in a simulator -> a LeRobot v3.0 dataset"""

    output: str = ""
    """Folder of the new dataset (required). A complete one with the same settings is reused."""

    environment: Literal["metaworld", "libero"] = "metaworld"
    """Simulator, with a scripted expert for its tasks."""

    suite: str | None = None
    """Task suite (mt10, libero_object, ...). Not set: the simulator's first one that has all of --tasks."""

    tasks: tuple[str, ...] = ()
    """Tasks of the suite. None: all of them."""

    episodes_per_task: int = 50
    """Successful episodes to record of each task."""

    image_size: int = 224
    """Side of the square pictures in pixels."""

    cameras: tuple[str, ...] = ()
    """Cameras to record (MetaWorld: top, wrist, behind; LIBERO: agentview, wrist). None: the usual two."""

    action_repeat: int = 1
    """Control steps that an action is held for: the dataset's fps is the simulator's (MetaWorld 80, LIBERO 20) over this."""

    noise_fraction: float = 0.5
    """Share of the episodes that are executed with noise; the recorded action is the expert's clean one."""

    noise_sigma: float = 0.3
    """Standard deviation of that noise on all actions but the last, the gripper's; their range is [-1, 1]."""

    noise_hold: int = 1
    """Recorded steps that drawn noise lasts. 1 shakes the hand by millimetres; 10 pushes it centimetres aside, so that the data
    shows the way back from there."""

    max_steps: int = 200
    """Control steps after which an attempt counts as failed (MetaWorld's experts need up to 140, LIBERO's up to 300)."""

    steps_after_success: int = 5
    """Recorded steps that follow the first successful one."""

    fast_rendering: bool = True
    """No shadows, multisampling or reflections: 5 to 10 times faster on CPUs. Recorded; evaluate with the same setting."""

    picture_format: Literal["video", "png"] = "video"
    """video: mp4 files, small, encoded by one process. png: exact pictures inside the parquet files, encoded by the simulator
    processes, no video library needed; about 10 times as large."""

    video_codec: str = "h264"
    """Codec of the mp4 files: h264, hevc or av1."""

    seed: int = 0
    """Goals, object positions and noise follow from it."""

    num_processes: int = 1
    """Processes that simulate; the result does not depend on it."""

    answer_timeout_seconds: float = 600.0
    """A simulator process that needs longer for one attempt is replaced, and its episode begun again."""

    overwrite: bool = False
    """Replace a dataset at --output that was recorded with other settings, once the new one is complete; delete at once what an
    interrupted recording with other settings has left."""


@dataclass(frozen=True)
class Episode:
    """One successful demonstration. images: camera -> uint8 THWC, or T encoded ones; state_TD and actions_TA float32."""

    task: str
    instruction: str
    number: int
    attempts: int
    environment_seed: int
    noisy: bool
    images: dict[str, np.ndarray | EncodedPictures]
    state_TD: np.ndarray
    actions_TA: np.ndarray

    def recorded(self) -> RecordedEpisode:
        """As it is written."""
        fields = ("task", "number", "attempts", "environment_seed", "noisy")
        facts = {name: getattr(self, name) for name in fields} | {"length": len(self.actions_TA)}
        columns = {"observation.state": self.state_TD, "action": self.actions_TA}
        return RecordedEpisode(columns, self.images, self.instruction, facts)


def cameras_of(config: RecordingConfig, backend: EnvironmentBackend) -> tuple[str, ...]:
    """Names of the recorded cameras in the dataset. Raises ValueError for one that the simulator does not have."""
    known = {camera.rsplit(".", 1)[-1]: camera for camera in (*backend.cameras, *backend.extra_cameras)}
    for name in config.cameras:
        if name not in known or config.cameras.count(name) > 1:
            raise ValueError(f"--cameras {name}: {backend.name} has {', '.join(known)}, each once")
    return tuple(known[name] for name in config.cameras) or backend.cameras


def chosen(config: RecordingConfig) -> tuple[EnvironmentBackend, EnvironmentSettings, list[TaskSpec]]:
    """Simulator, its settings and the tasks. Starts are drawn from seeds: official ones are kept for evaluation."""
    backend = environment_backend(config.environment)
    problem: ValueError | None = None
    for suite in (config.suite,) if config.suite is not None else backend.suites:
        environment = EnvironmentSettings(
            suite=suite,
            tasks=config.tasks,
            image_size=config.image_size,
            action_repeat=config.action_repeat,
            initial_states="random",
            fast_rendering=config.fast_rendering,
            cameras=cameras_of(config, backend),
        )
        try:
            return backend, environment, backend.tasks(environment)
        except ValueError as failure:
            problem = problem or failure
    raise ValueError(str(problem).replace("--eval-", "--"))


def settings(config: RecordingConfig) -> dict[str, Any]:
    """What decides the recorded numbers: all flags but where and how fast."""
    values = dataclasses.asdict(config)
    for name in ("output", "num_processes", "answer_timeout_seconds", "overwrite"):
        del values[name]
    backend, environment, tasks = chosen(config)
    values["suite"], values["tasks"] = environment.suite, [task.name for task in tasks]
    values["cameras"], values["revision"] = list(environment.cameras), backend.revision
    return values


def check(config: RecordingConfig) -> None:
    """Raise ValueError for flags that cannot work."""
    if not config.output:
        raise ValueError("--output is not set -> name the folder of the new dataset")
    if config.image_size % 2 and config.picture_format == "video":
        raise ValueError(f"--image-size {config.image_size}: H.264 needs an even number of pixels -> {config.image_size + 1}")
    chosen(config)
    if min(config.episodes_per_task, config.action_repeat, config.noise_hold, config.num_processes) < 1:
        raise ValueError("--episodes-per-task, --action-repeat, --noise-hold and --num-processes must be 1 or more")
    if not 0 <= config.noise_fraction <= 1:
        raise ValueError(f"--noise-fraction {config.noise_fraction}: a share between 0 and 1 is needed")
    if config.answer_timeout_seconds <= 0:
        raise ValueError(f"--answer-timeout-seconds {config.answer_timeout_seconds:g}: a positive number is needed")


def attempt_draws(config: RecordingConfig, task: TaskSpec, number: int, attempt: int) -> tuple[int, np.random.Generator]:
    """(seed of the simulator, generator of the noise) of one attempt at an episode."""
    random = np.random.default_rng(np.random.SeedSequence((config.seed, zlib.crc32(task.name.encode()), number, attempt)))
    return int(random.integers(2**31)), random


def attempt_episode(
    environment: Environment, task: TaskSpec, config: RecordingConfig, number: int, attempt: int
) -> Episode | None:
    """Play the expert once; None when it did not succeed within --max-steps."""
    environment_seed, random = attempt_draws(config, task, number, attempt)
    # Drawn once per episode: drawn per attempt, hard tasks, whose noisy attempts fail, would end with half the noise asked for.
    words = (config.seed, zlib.crc32(task.name.encode()), number)
    of_episode = np.random.default_rng(np.random.SeedSequence((*words, MAX_ATTEMPTS)))  # no attempt's own stream
    noisy = bool(of_episode.random() < config.noise_fraction) and attempt < NOISY_ATTEMPTS
    observation = environment.reset(Trial(task=task.name, index=number, seed=environment_seed))
    observations: list[Observation] = []
    actions: list[np.ndarray] = []
    cameras = cameras_of(config, environment_backend(config.environment))
    steps_left = config.max_steps // config.action_repeat
    has_succeeded = False
    while steps_left > 0:
        action_A = environment.expert_action()
        if len(actions) % config.noise_hold == 0:
            noise_A = np.zeros(len(action_A))
            if noisy:
                # A gripper that opens by noise loses what it holds: nothing to learn from.
                noise_A[:-1] = random.standard_normal(len(action_A) - 1) * config.noise_sigma
        observations.append(observation)
        actions.append(action_A)
        result = environment.step(action_A + noise_A)
        observation = result.observation
        steps_left -= 1
        if result.succeeded and not has_succeeded:
            has_succeeded, steps_left = True, config.steps_after_success
        if result.ended:
            break
    if not has_succeeded:
        return None
    images: dict[str, Any] = {c: np.stack([o.images[c] for o in observations]) for c in cameras}
    if config.picture_format == "png":
        images = {camera: EncodedPictures.of(pictures_THWC) for camera, pictures_THWC in images.items()}
    return Episode(
        task.name,
        task.instruction,
        number,
        attempt + 1,
        environment_seed,
        noisy,
        images,
        np.stack([o.state_D for o in observations]),
        np.stack(actions),
    )


@lru_cache(maxsize=1)
def simulator(config: RecordingConfig) -> Environment:
    """This process's simulator: making one takes longer than an episode."""
    backend, environment, _ = chosen(config)
    assert backend.build is not None
    return backend.build(environment)


@dataclass(frozen=True)
class Job:
    """Episodes `numbers` of a task, for one process."""

    task: TaskSpec
    numbers: range


def record_episodes(config: RecordingConfig, job: Job, done: int) -> Iterator[Episode | None]:
    """The successful episodes of `job` from its number `done` on, and None for each failed attempt.

    Raises ValueError when MAX_ATTEMPTS attempts at an episode all fail.
    """
    environment = simulator(config)
    for number in job.numbers[done:]:
        for attempt in range(MAX_ATTEMPTS):
            episode = attempt_episode(environment, job.task, config, number, attempt)
            yield episode
            if episode is not None:
                break
        else:
            raise ValueError(
                f"task {job.task.name}, episode {number}: the expert failed {MAX_ATTEMPTS} times in a row"
                f" -> raise --max-steps ({config.max_steps}), or lower --noise-sigma or --action-repeat"
            )


def described(config: RecordingConfig, job: Job, done: int, failed: int) -> str:
    """Which attempt a process was at after `done` episodes of its job and `failed` attempts at the next."""
    number = job.numbers[min(done, len(job.numbers) - 1)]
    seed, _ = attempt_draws(config, job.task, number, failed)
    return f"task {job.task.name}, episode {number}, attempt {failed + 1} (simulator seed {seed})"


def jobs_from(config: RecordingConfig, tasks: Sequence[TaskSpec], first: int) -> Iterator[Job]:
    """Jobs for all episodes, counted through all tasks, but the `first` ones."""
    total = config.episodes_per_task
    for place, task in enumerate(tasks):
        for start in range(max(0, first - place * total), total, EPISODES_PER_JOB):
            yield Job(task, range(start, min(start + EPISODES_PER_JOB, total)))


def simulate(config: RecordingConfig, first: int = 0) -> Generator[Episode, None, None]:
    """All episodes but the `first` ones, task by task in the order of their numbers, whatever the number of processes."""
    processes: OrderedProcesses[Job, Episode] = OrderedProcesses(
        partial(record_episodes, config),
        config.num_processes,
        config.answer_timeout_seconds,
        partial(described, config),
        "lower --num-processes if memory is short, raise --answer-timeout-seconds if the simulator is slow, or leave the task "
        "out with --tasks; the same command goes on after the episodes that are written",
    )
    yield from processes.results(jobs_from(config, chosen(config)[2], first))


def dataset_features(config: RecordingConfig, backend: EnvironmentBackend) -> dict[str, dict[str, Any]]:
    """LeRobot features of a recording."""
    side, dtype = config.image_size, "video" if config.picture_format == "video" else "image"
    picture = {"dtype": dtype, "shape": [side, side, 3], "names": ["height", "width", "channels"]}
    state, action = backend.state_names, backend.action_names
    return {
        **{camera: dict(picture) for camera in cameras_of(config, backend)},
        "observation.state": {"dtype": "float32", "shape": [len(state)], "names": list(state)},
        "action": {"dtype": "float32", "shape": [len(action)], "names": list(action)},
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


def montage_rows(dataset: Path, log: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[np.ndarray]]]:
    """Of each task's first episode: title, and the first, middle and last picture of each camera."""
    table, _ = read_metadata(dataset)
    source = FrameSource(table, "pyav", len(table.cameras))
    first = {row["task"]: number for number, row in reversed(list(enumerate(log)))}
    rows = []
    for task, number in sorted(first.items(), key=lambda entry: entry[1]):
        length = log[number]["length"]
        steps = (0, (length - 1) // 2, length - 1)
        # One by one: an episode of one or two steps shows a picture twice.
        pictures = [source.frames(camera, number, [step])[0] for camera in table.cameras for step in steps]
        cameras = ", ".join(camera.rsplit(".", 1)[-1] for camera in table.cameras)
        rows.append((f"{task}: {table.instruction(number)} ({length} steps; {cameras})", pictures))
    return rows


def is_reusable(config: RecordingConfig) -> bool:
    """Whether --output already holds exactly this recording. Raises ValueError when it holds something else."""
    root = Path(config.output)
    if not root.exists() or not any(root.iterdir()):
        return False
    if not (root / RECORDING_FILE).exists():
        raise ValueError(f"--output {root}: holds files that were not recorded by this tool -> name a new folder")
    recorded = json.loads((root / RECORDING_FILE).read_text())["settings"]
    # What recordings were made with before they told it.
    recorded = {"cameras": list(environment_backend(config.environment).cameras), "revision": 1, "noise_hold": 1, **recorded}
    other = differences(recorded, settings(config))
    if other and not config.overwrite:
        raise ValueError(
            f"--output {root}: recorded with other settings ({'; '.join(other)}) -> name a new folder or add --overwrite"
        )
    return not other


def record(config: RecordingConfig) -> Path:
    """Record everything and return the dataset's folder, which appears (or, with --overwrite, changes) when it is complete."""
    check(config)
    root = Path(config.output)
    if is_reusable(config):
        print(f"{root}: complete with these settings, reused")
        return root
    work = root.with_name(root.name + ".partial")
    with alone_in(work, "recording"):
        # Again: another recording may have just ended.
        if not is_reusable(config):
            dataset = _record_in(work, config)
            if root.exists():
                shutil.rmtree(work / REPLACED, ignore_errors=True)  # left by a stop between the two renames
                root.rename(work / REPLACED)
            dataset.rename(root)
        shutil.rmtree(work)
    return root


def _record_in(work: Path, config: RecordingConfig) -> Path:
    """Record the episodes that are missing in `work`, then what is told about them; the complete dataset."""
    from tqdm import tqdm

    os.environ["MUJOCO_GL"] = gl = choose_backend()
    print(f"rendering with MUJOCO_GL={gl}, fast rendering {'on' if config.fast_rendering else 'off'}")
    backend, environment, tasks = chosen(config)
    fps = backend.fps(environment)
    facts = {
        "settings": json.loads(json.dumps(settings(config))),  # lists for tuples, as it is read again
        "gl_backend": gl,
        "versions": {package: version(package) for package in backend.packages},
    }
    # Other versions or another GL library give other pictures: they must not go on with these.
    go_on_or_begin(work, {**facts["settings"], "gl_backend": gl, "versions": facts["versions"]}, config.overwrite)
    writer_options = {
        "fps": int(fps) if fps.is_integer() else fps,
        "features": dataset_features(config, backend),
        "robot_type": backend.robot_type,
        "codebase_version": "v3.0",
        "video_codec": config.video_codec,  # the writer names the known ones
    }
    total = len(tasks) * config.episodes_per_task
    recording = ShardedRecording(work, facts, total, [task.instruction for task in tasks], writer_options)
    first = recording.num_finished
    if first:
        print(f"{work}: {first} of {total} episodes are there, recording the others")
    with tqdm(total=total, initial=first, unit="episode") as bar, closing(simulate(config, first)) as simulated:

        def episodes() -> Iterator[RecordedEpisode]:
            for episode in simulated:
                bar.update()
                yield episode.recorded()

        recording.write(episodes())
    dataset = recording.merge()
    save_montage(montage_rows(dataset, recording.log), dataset / "montage.png")
    (dataset / RECORDING_FILE).write_text(json.dumps({**facts, "episodes": recording.log}, indent=1))
    return dataset


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
