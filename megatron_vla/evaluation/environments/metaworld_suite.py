"""MetaWorld behind the simulator interface: mt10 (its ten multi-task tasks), mt50 (all), mt1 (one task of your choice).

Placements are drawn from a trial's seed; MetaWorld has no official list of initial states. Its horizon is 500 control steps,
of which those of waiting (--eval-wait-steps) are a part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_vla.evaluation.environments.interface import (
    EnvironmentBackend,
    EnvironmentSettings,
    Observation,
    StepResult,
    TaskSpec,
    Trial,
    chosen_tasks,
    refuse_options,
)
from megatron_vla.evaluation.environments.metaworld import (
    ACTION_NAMES,
    CAMERAS,
    CONTROL_HZ,
    INSTRUCTIONS,
    STATE_NAMES,
    USUAL_CAMERAS,
    MetaWorldEnvironment,
    task_name,
)

OFFICIAL_CONTROL_STEPS = 500
MT10 = (
    "reach-v3",
    "push-v3",
    "pick-place-v3",
    "door-open-v3",
    "drawer-open-v3",
    "drawer-close-v3",
    "button-press-topdown-v3",
    "peg-insert-side-v3",
    "window-open-v3",
    "window-close-v3",
)
SUITES = {"mt10": MT10, "mt50": tuple(INSTRUCTIONS), "mt1": tuple(INSTRUCTIONS)}


def step_limit(settings: EnvironmentSettings) -> int:
    """Actions of a trial: MetaWorld refuses every control step of an episode after its 500th, those of waiting included.

    Raises ValueError naming the flags that ask for more.
    """
    repeat, wait = settings.action_repeat, settings.wait_steps or 0
    actions = OFFICIAL_CONTROL_STEPS // repeat
    most = actions - wait
    if most < 1 or (settings.max_steps or most) > most:
        fix = f"--eval-max-steps {most} or less" if most >= 1 else f"--eval-wait-steps {actions - 1} or less"
        raise ValueError(
            f"--eval-max-steps {settings.max_steps or 'not set'} after --eval-wait-steps {wait}: MetaWorld's episodes have "
            f"{OFFICIAL_CONTROL_STEPS} control steps, {actions} actions with --eval-action-repeat {repeat} -> use {fix}"
        )
    return settings.max_steps or most


def tasks(settings: EnvironmentSettings) -> list[TaskSpec]:
    """See EnvironmentBackend."""
    if settings.suite not in SUITES:
        raise ValueError(f"--eval-suite {settings.suite}: MetaWorld has {', '.join(SUITES)}")
    names = tuple(task_name(name) for name in settings.tasks)
    if settings.suite == "mt1" and len(names) != 1:
        raise ValueError(f"--eval-suite mt1 is one task, {len(names)} are chosen -> name one with --eval-tasks")
    max_steps = step_limit(settings)
    known = SUITES[settings.suite]
    chosen = chosen_tasks(known, names)
    return [TaskSpec(name=name, instruction=INSTRUCTIONS[name], max_steps=max_steps) for name in chosen]


@dataclass
class MetaWorldSuite:
    """One simulator; changing the task builds it anew (half a second), the same task again only resets it."""

    settings: EnvironmentSettings
    environment: MetaWorldEnvironment | None = None

    def _of_task(self, name: str) -> MetaWorldEnvironment:
        if self.environment is not None and self.environment.task != name:
            self.close()
        if self.environment is None:
            settings = self.settings
            self.environment = MetaWorldEnvironment(
                name,
                image_size=settings.image_size,
                fast_rendering=settings.fast_rendering,
                action_repeat=settings.action_repeat,
                cameras=settings.cameras or USUAL_CAMERAS,
            )
        return self.environment

    @property
    def _running(self) -> MetaWorldEnvironment:
        assert self.environment is not None, "reset() comes first"
        return self.environment

    def _observation(self, arrays: dict[str, np.ndarray]) -> Observation:
        images = {name: picture for name, picture in arrays.items() if name in CAMERAS}
        if self.settings.rotate_images:
            images = {name: np.ascontiguousarray(picture_HWC[::-1, ::-1]) for name, picture_HWC in images.items()}
        return Observation(images, arrays["observation.state"], self._running.instruction)

    def reset(self, trial: Trial) -> Observation:
        """See Environment."""
        environment = self._of_task(trial.task)
        arrays = environment.reset(trial.seed)
        for _ in range(self.settings.wait_steps or 0):
            arrays, _ = environment.step(np.zeros(len(ACTION_NAMES), np.float32))
        return self._observation(arrays)

    def step(self, action_A: np.ndarray, render: bool = True) -> StepResult:
        """See Environment."""
        arrays, succeeded = self._running.step(action_A, render)
        return StepResult(self._observation(arrays), succeeded)

    def picture(self) -> np.ndarray:
        """See Environment."""
        return self._running.picture(USUAL_CAMERAS[0])

    def expert_action(self) -> np.ndarray:
        """See Environment."""
        return self._running.expert_action()

    def close(self) -> None:
        """See Environment."""
        if self.environment is not None:
            self.environment.close()
            self.environment = None


def build(settings: EnvironmentSettings) -> MetaWorldSuite:
    """See EnvironmentBackend. The packages are imported when the first trial begins."""
    refuse_options(settings, ())
    return MetaWorldSuite(settings)


BACKEND = EnvironmentBackend(
    name="metaworld",
    suites=tuple(SUITES),
    tasks=tasks,
    build=build,
    cameras=USUAL_CAMERAS,
    extra_cameras=tuple(camera for camera in CAMERAS if camera not in USUAL_CAMERAS),
    state_names=STATE_NAMES,
    action_names=ACTION_NAMES,
    fps=lambda settings: CONTROL_HZ / settings.action_repeat,
    robot_type="sawyer_metaworld",
    revision=3,  # 2: the first observation shows the new placement; 3: experts for reach bring their fingers to the goal
    has_expert=True,
    packages=("metaworld", "mujoco"),
)
