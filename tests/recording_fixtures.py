"""A small recording, and a simulator for it that needs no package and crashes, raises or refuses on demand."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_vla.evaluation.environments.interface import Observation, StepResult, Trial
from megatron_vla.evaluation.environments.metaworld import USUAL_CAMERAS
from tools import record_demonstrations as recorder
from tools.record_demonstrations import Episode, Job, RecordingConfig

RECORD_EPISODES = recorder.record_episodes
CONFIG = RecordingConfig(
    tasks=("button-press-topdown", "window-close-v3"),
    episodes_per_task=1,
    image_size=64,
    action_repeat=4,
    noise_fraction=0.0,
    steps_after_success=2,
    seed=3,
)


class FakeEnvironment:
    """Succeeds at step `success_step`; its expert asks for 0.1, 0.2, ... and it remembers what was executed."""

    def __init__(self, *_: object, success_step: int = 5, **__: object):
        self.success_step, self.executed = success_step, list[np.ndarray]()

    def observe(self) -> Observation:
        step = len(self.executed)
        pictures = {camera: np.full((2, 2, 3), step, np.uint8) for camera in USUAL_CAMERAS}
        return Observation(pictures, np.full(4, step, np.float32), "")

    def reset(self, trial: Trial) -> Observation:
        self.executed = []
        return self.observe()

    def expert_action(self) -> np.ndarray:
        return np.full(4, 0.1 * (len(self.executed) + 1), np.float32)

    def step(self, action_A: np.ndarray, render: bool = True) -> StepResult:
        self.executed.append(action_A)
        return StepResult(self.observe(), len(self.executed) >= self.success_step)

    def close(self) -> None:
        pass


MARKS, FAULTS = "FAKE_MARKS", "FAKE_FAULTS"


class FaultyEnvironment(FakeEnvironment):
    """FAULTS: `kind:task:episode` entries. All but `always` happen once: MARKS is a folder that remembers it."""

    def reset(self, trial: Trial) -> Observation:
        self.start = trial.seed % 50
        for fault in os.environ.get(FAULTS, "").split():
            kind, task, number = fault.split(":")
            mark = Path(os.environ[MARKS]) / fault
            if (task, int(number)) != (trial.task, trial.index) or mark.exists():
                continue
            if kind != "always":
                mark.touch()
            if kind in ("crash", "always"):
                os._exit(9)
            raise ValueError("stopped here") if kind == "stop" else RuntimeError("physics exploded")
        return super().reset(trial)

    def observe(self) -> Observation:
        observation = super().observe()
        pictures = {camera: picture + np.uint8(self.start) for camera, picture in observation.images.items()}
        return dataclasses.replace(observation, images=pictures, state_D=observation.state_D + self.start)


def play_fakes(config: RecordingConfig, job: Job, done: int) -> Iterator[Episode | None]:
    """`record_episodes`, in the process that is started for it, with another simulator."""
    return played(config, job, done, FaultyEnvironment() if FAULTS in os.environ else FakeEnvironment())


def play_hopeless_fakes(config: RecordingConfig, job: Job, done: int) -> Iterator[Episode | None]:
    return played(config, job, done, FakeEnvironment(success_step=1000))


def played(config: RecordingConfig, job: Job, done: int, environment: FakeEnvironment) -> Iterator[Episode | None]:
    recorder.simulator = lambda config: environment  # type: ignore[assignment]
    return RECORD_EPISODES(config, job, done)
