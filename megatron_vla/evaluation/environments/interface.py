"""The one interface of all simulators: what a suite offers, and how trials of it are run.

A simulator's module (ENVIRONMENTS, imported when it is first asked for) has one object `BACKEND = EnvironmentBackend(...)`. Its
`build` makes one simulator (`Environment`), which runs any task of the suite, one trial at a time; `StackedEnvironment` and the
worker processes of the rollout make vectors of them. A simulator that is batched by itself (Isaac Lab) gives `build_vector`.

There is no automatic reset: a slot whose trial has ended is reset by whoever drives it, so the observation of a step always
belongs to the trial that was stepped.

Shape legend: E environments, H height, W width, D state, A action.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, Protocol

import numpy as np

InitialStates = Literal["official", "random"]


class SimulatorError(ValueError):
    """What no repetition helps against: a missing package, a wrong name or setting. It ends an evaluation; whatever else a
    simulator raises (a ValueError of its physics, too) costs the trial one of its attempts."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings:
    """Everything that decides what a trial looks like; JSON-ready. None means: as the suite's official protocol has it."""

    suite: str
    """`mt10`, `mt1`, `libero_object`, a Gymnasium id, ..."""
    tasks: tuple[str, ...] = ()
    """Subset of the suite's tasks; empty: all."""
    image_size: int = 224
    """Side of the pictures that the simulator renders, in pixels."""
    action_repeat: int = 1
    """Control steps that an action is held for."""
    max_steps: int | None = None
    """Actions after which a trial has failed."""
    wait_steps: int | None = None
    """Do-nothing steps after a reset, while objects settle; they do not count as steps."""
    initial_states: InitialStates = "official"
    """official: the suite's fixed list (trial k takes state k), where there is one; random: placements drawn from the seed."""
    rotate_images: bool | None = None
    """Whether pictures are turned by 180 degrees before the policy sees them."""
    fast_rendering: bool = True
    """Shadows, reflections and multisampling off: 5 to 10 times as fast on CPUs, and another look. As in the training data."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What only this backend knows (observation map, keyword arguments of its constructor); JSON-ready."""
    cameras: tuple[str, ...] = ()
    """Cameras that observations must hold (they may hold more); empty: the backend's usual ones. They change nothing that
    happens in a trial."""


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """One task of a suite. `name` is unique in the suite; `max_steps` counts actions (each held for `action_repeat`)."""

    name: str
    instruction: str
    max_steps: int
    num_initial_states: int = 0
    """Length of the official list of initial states; 0: placements are drawn from the seed."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """All that decides one episode, besides the policy: listed before anything runs, so that none is lost or run twice."""

    task: str
    index: int
    """Number of the trial within its task."""
    seed: int
    initial_state: int | None = None
    """Which official initial state; None: drawn from the seed."""

    @property
    def key(self) -> str:
        """`door-open-v3/7`: unique within a suite."""
        return f"{self.task}/{self.index}"


@dataclass(frozen=True)
class Observation:
    """What a policy sees. images: camera (as in the backend's datasets) -> uint8 [H, W, 3]; state_D: float32, physical."""

    images: Mapping[str, np.ndarray]
    state_D: np.ndarray
    instruction: str


@dataclass(frozen=True)
class StepResult:
    """After one action. `ended`: the simulator itself ended the trial (success or not); further steps are pointless."""

    observation: Observation
    succeeded: bool
    ended: bool = False


class Environment(Protocol):
    """One simulator. It is made in the process that uses it (GL contexts do not survive a fork)."""

    def reset(self, trial: Trial) -> Observation:
        """Begin `trial`: its task, its initial state or the placement of its seed, wait steps included."""
        ...

    def step(self, action_A: np.ndarray, render: bool = True) -> StepResult:
        """Hold one physical action float32 [A] for `action_repeat` control steps.

        `succeeded` when the task succeeded in any of them. `render=False` leaves `images` empty: inside a chunk nobody looks.
        """
        ...

    def picture(self) -> np.ndarray:
        """The scene now for a video, uint8 [H, W, 3] as a person would see it."""
        ...

    def expert_action(self) -> np.ndarray:
        """The scripted expert's action now, float32 [A], from hidden state. ValueError where the task has no expert."""
        ...

    def close(self) -> None:
        """Free the GL context."""
        ...


class VectorEnvironment(Protocol):
    """E simulators that are reset and stepped together, each in a trial of its own."""

    num_environments: int

    def reset(self, trials: Sequence[Trial | None]) -> list[Observation | None]:
        """Begin trials[e] in slot e; None leaves that slot as it is (and gives None)."""
        ...

    def step(self, actions_EA: np.ndarray, is_active_E: np.ndarray, render: bool = True) -> list[StepResult | None]:
        """One action per slot; slots with is_active_E False are not stepped (and give None)."""
        ...

    def pictures(self) -> list[np.ndarray]:
        """For videos: one uint8 [H, W, 3] per slot."""
        ...

    def expert_actions(self, is_active_E: np.ndarray) -> np.ndarray:
        """[E, A]; zeros in inactive slots."""
        ...

    def close(self) -> None:
        """Close all."""
        ...


@dataclass(frozen=True, kw_only=True)
class EnvironmentBackend:
    """A simulator as the rest of the project knows it. Nothing here needs the simulator's packages to be installed.

    suites: names, the default first (Gymnasium: empty, any id goes).
    tasks(settings): the chosen tasks in official order; ValueError naming near ones for an unknown name.
    build(settings): one simulator; ValueError with the pip command when its package is missing (SimulatorError where that only
        shows when a trial begins).
    cameras, state_names, action_names: what observations hold and what the recorder writes.  fps(settings): actions per second.
    extra_cameras: further ones, rendered where `EnvironmentSettings.cameras` names them.
    revision: raised when a trial of the same seed begins or looks otherwise than before: neither recordings nor trials of
    different revisions are mixed.
    """

    name: str
    suites: tuple[str, ...]
    tasks: Callable[[EnvironmentSettings], list[TaskSpec]]
    build: Callable[[EnvironmentSettings], Environment] | None = None
    build_vector: Callable[[EnvironmentSettings, int], VectorEnvironment] | None = None
    cameras: tuple[str, ...] = ()
    extra_cameras: tuple[str, ...] = ()
    state_names: tuple[str, ...] = ()
    action_names: tuple[str, ...] = ()
    fps: Callable[[EnvironmentSettings], float]
    robot_type: str
    revision: int = 1
    has_expert: bool = False
    uses_mujoco: Callable[[EnvironmentSettings], bool] = lambda settings: True
    """Whether MUJOCO_GL has to be chosen before it is imported (see rendering.py)."""
    packages: tuple[str, ...] = ()
    """Distributions whose versions belong into a report."""


ENVIRONMENTS: dict[str, str] = {
    "metaworld": "megatron_vla.evaluation.environments.metaworld_suite",
    "libero": "megatron_vla.evaluation.environments.libero_suite",
    "gymnasium": "megatron_vla.evaluation.environments.gymnasium_suite",
    "isaac_lab": "megatron_vla.evaluation.environments.isaac_lab_suite",
}


def environment_backend(name: str) -> EnvironmentBackend:
    """The simulator called `name`. Raises ValueError naming the known ones."""
    if name not in ENVIRONMENTS:
        raise ValueError(f"--eval-environment {name}: no such simulator; known: {', '.join(ENVIRONMENTS)}")
    return load_backend(ENVIRONMENTS[name])


def load_backend(module: str) -> EnvironmentBackend:
    """The BACKEND of a simulator's module."""
    backend: EnvironmentBackend = import_module(module).BACKEND
    return backend


def chosen_tasks(known: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """`names` (all, if empty), in the suite's order. Raises ValueError for a repeated or unknown name, naming near ones."""
    unknown = [name for name in names if name not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=3) or list(known[:10])
        raise ValueError(f"--eval-tasks {unknown[0]}: not in this suite; near: {', '.join(near)}")
    if len(set(names)) < len(names):
        raise ValueError(f"--eval-tasks {' '.join(names)}: a task is named twice")
    return tuple(name for name in known if name in names or not names)


def refuse_options(settings: EnvironmentSettings, known: Sequence[str]) -> None:
    """Raise ValueError for an --eval-options key that the backend does not read."""
    unknown = sorted(set(settings.options) - set(known))
    if unknown:
        raise ValueError(f"--eval-options {unknown[0]}: this simulator reads {', '.join(known) or 'none'}")


class StackedEnvironment:
    """Several simulators in one process, one after the other, as one VectorEnvironment."""

    def __init__(self, environments: Sequence[Environment]) -> None:
        self.environments = list(environments)
        self.num_environments = len(self.environments)

    def reset(self, trials: Sequence[Trial | None]) -> list[Observation | None]:
        """See VectorEnvironment."""
        pairs = zip(self.environments, trials, strict=True)
        return [None if trial is None else environment.reset(trial) for environment, trial in pairs]

    def step(self, actions_EA: np.ndarray, is_active_E: np.ndarray, render: bool = True) -> list[StepResult | None]:
        """See VectorEnvironment."""
        slots = zip(self.environments, actions_EA, is_active_E, strict=True)
        return [environment.step(action_A, render) if active else None for environment, action_A, active in slots]

    def pictures(self) -> list[np.ndarray]:
        """See VectorEnvironment."""
        return [environment.picture() for environment in self.environments]

    def expert_actions(self, is_active_E: np.ndarray) -> np.ndarray:
        """See VectorEnvironment."""
        assert np.any(is_active_E), "nobody acts"
        actions = [e.expert_action() if active else None for e, active in zip(self.environments, is_active_E, strict=True)]
        width = max(len(a) for a in actions if a is not None)
        return np.stack([np.zeros(width, np.float32) if a is None else a for a in actions])

    def close(self) -> None:
        """See VectorEnvironment."""
        for environment in self.environments:
            environment.close()


def build_vector(backend: EnvironmentBackend, settings: EnvironmentSettings, num_environments: int) -> VectorEnvironment:
    """`num_environments` simulators of a backend in this process, batched by the simulator itself where it can."""
    if backend.build_vector is not None:
        return backend.build_vector(settings, num_environments)
    assert backend.build is not None, f"{backend.name} declares neither build nor build_vector"
    return StackedEnvironment([backend.build(settings) for _ in range(num_environments)])
