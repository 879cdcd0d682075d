"""A simulator for tests: a point on a line that has to reach its goal; some trials crash, hang or raise on demand.

State (2): position, goal. Action (1): step. Options: crash/hang/raise = list of trial indices; `marks` = a folder: only the
first attempt misbehaves, else all do. refuse = as raise, with what no repetition helps against; environment_file = where to
write the process's environment.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np

from megatron_vla.evaluation.environments.interface import (
    EnvironmentBackend,
    EnvironmentSettings,
    Observation,
    SimulatorError,
    StepResult,
    TaskSpec,
    Trial,
    chosen_tasks,
)

TASKS = ("near", "far")


class PointEnvironment:
    def __init__(self, settings: EnvironmentSettings) -> None:
        if settings.options.get("missing"):
            raise ValueError("the point is not installed -> pip install point")
        self.settings = settings
        if "environment_file" in settings.options:
            Path(settings.options["environment_file"]).write_text(json.dumps(dict(os.environ)))

    def _misbehaves(self, kind: str) -> bool:
        if self.trial.index not in self.settings.options.get(kind, ()):
            return False
        folder = self.settings.options.get("marks")
        if folder is None:
            return True
        mark = Path(folder) / f"{kind}_{self.trial.task}_{self.trial.index}"
        first = not mark.exists()
        mark.touch()
        return first

    def reset(self, trial: Trial) -> Observation:
        self.trial, self.position, self.steps = trial, 0.0, 0
        self.goal = (1.0 if trial.task == "near" else 3.0) + (trial.seed % 100) / 100
        return self.observe()

    def observe(self) -> Observation:
        state = np.array([self.position, self.goal], np.float32)
        return Observation({"camera": np.full((8, 8, 3), self.steps % 256, np.uint8)}, state, f"go {self.trial.task}")

    def step(self, action_A: np.ndarray, render: bool = True) -> StepResult:
        if self._misbehaves("crash"):
            os._exit(9)
        if self._misbehaves("hang"):
            time.sleep(60)
        if self._misbehaves("raise"):
            raise np.linalg.LinAlgError("physics exploded")  # a ValueError
        if self._misbehaves("refuse"):
            raise SimulatorError("the line has no such point -> --eval-options")
        self.position += float(action_A[0])
        self.steps += 1
        return StepResult(self.observe(), self.position >= self.goal, ended=self.position < -1)

    def picture(self) -> np.ndarray:
        return np.full((8, 8, 3), self.steps % 256, np.uint8)

    def expert_action(self) -> np.ndarray:
        return np.array([0.25], np.float32)

    def close(self) -> None:
        pass


def tasks(settings: EnvironmentSettings) -> list[TaskSpec]:
    names = chosen_tasks(TASKS, settings.tasks)
    return [TaskSpec(name=n, instruction=f"go {n}", max_steps=settings.max_steps or 13, num_initial_states=3) for n in names]


BACKEND = EnvironmentBackend(
    name="fake",
    suites=("line",),
    tasks=tasks,
    build=PointEnvironment,
    fps=lambda settings: 10.0,
    robot_type="point",
    has_expert=True,
    uses_mujoco=lambda settings: "environment_file" in settings.options,
)
