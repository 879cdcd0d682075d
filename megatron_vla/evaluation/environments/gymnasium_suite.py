"""Any Gymnasium environment behind the simulator interface: the suite is its id, a map says where pictures and state are.

--eval-suite takes an id of PRESETS, or any id, with the module that registers it in front: `gym_pusht:gym_pusht/PushT-v0`.
--eval-options (each KEY=JSON), over the preset's:
    images        {dataset camera: path in the observation}; "render" is the environment's own picture
    state         path, or list of paths, whose numbers are joined
    instruction   what the policy is told
    success       "info:is_success" (a key of `info`), "terminated", or "reward>=4"
    fps           actions per second of the environment
    kwargs        keyword arguments of gymnasium.make
    mujoco        true when it renders with MuJoCo: picks the GL library
A path names nested dictionary keys with slashes: "pixels/top". Written against gymnasium 1.4, gym-pusht 0.1.8, gym-aloha 0.1.5.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
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

OPTIONS = ("images", "state", "instruction", "success", "fps", "kwargs", "mujoco")
_ALOHA = {
    "images": {"observation.images.top": "pixels/top"},
    "state": "agent_pos",
    "success": "reward>=4",
    "fps": 50,
    "kwargs": {"obs_type": "pixels_agent_pos", "render_mode": "rgb_array"},
    "mujoco": True,
}
PRESETS: dict[str, dict[str, Any]] = {
    "gym_pusht:gym_pusht/PushT-v0": {
        "images": {"observation.image": "pixels"},
        "state": "agent_pos",
        "instruction": "Push the T-shaped block onto the T-shaped target",
        "success": "info:is_success",
        "fps": 10,
        "kwargs": {"obs_type": "pixels_agent_pos", "render_mode": "rgb_array"},
    },
    "gym_aloha:gym_aloha/AlohaTransferCube-v0": {
        **_ALOHA,
        "instruction": "Pick up the cube with the right arm and transfer it to the left arm",
    },
    "gym_aloha:gym_aloha/AlohaInsertion-v0": {**_ALOHA, "instruction": "Insert the peg into the socket"},
}
EXTRAS = {"gym_pusht": "pusht", "gym_aloha": "aloha"}
DEFAULT_MAX_STEPS = 300


def options_of(settings: EnvironmentSettings) -> dict[str, Any]:
    """The preset of the id, under the user's own options. Raises ValueError naming what is missing."""
    refuse_options(settings, OPTIONS)
    options = {"kwargs": {"render_mode": "rgb_array"}, **PRESETS.get(settings.suite, {}), **settings.options}
    missing = [name for name in ("images", "state", "instruction", "success", "fps") if name not in options]
    if missing:
        presets = ", ".join(PRESETS)
        raise ValueError(f"--eval-suite {settings.suite}: add --eval-options {missing[0]}=..., or use one of {presets}")
    check_observation_options(options)
    success_test(str(options["success"]))
    if not isinstance(options["kwargs"], dict):
        raise ValueError(f"--eval-options kwargs={options['kwargs']}: write a JSON object: kwargs='{{\"maze\": 1}}'")
    return options


def check_observation_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError naming the key of --eval-options whose value cannot be a map, a path or a rate."""
    images, state, fps = options["images"], options["state"], options["fps"]
    if not isinstance(images, dict) or not images or not all(isinstance(path, str) for path in images.values()):
        raise ValueError(f'--eval-options images={images}: write images=\'{{"CHECKPOINT_CAMERA": "PATH"}}\'')
    if not (isinstance(state, str) or (isinstance(state, list) and state and all(isinstance(path, str) for path in state))):
        raise ValueError(f'--eval-options state={state}: write state=PATH, or state=\'["PATH", "PATH"]\'')
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not fps > 0:
        raise ValueError(f"--eval-options fps={fps}: write the actions per second of the environment, for example fps=20")


def tasks(settings: EnvironmentSettings) -> list[TaskSpec]:
    """See EnvironmentBackend: one task, named as the environment."""
    options = options_of(settings)
    name = settings.suite.partition(":")[2] or settings.suite
    chosen_tasks((name,), settings.tasks)
    max_steps = settings.max_steps or DEFAULT_MAX_STEPS // settings.action_repeat
    return [TaskSpec(name=name, instruction=str(options["instruction"]), max_steps=max_steps)]


def at_path(content: Any, path: str) -> Any:
    """Entry of nested dictionaries. Raises SimulatorError with the keys that exist."""
    for key in path.split("/") if path else ():
        if not isinstance(content, Mapping) or key not in content:
            known = ", ".join(map(str, content)) if isinstance(content, Mapping) else f"no keys, it is {type(content).__name__}"
            raise SimulatorError(f"--eval-options: the observation has nothing at {path!r} ({known})")
        content = content[key]
    return content


def success_test(rule: str) -> Any:
    """(reward, terminated, info) -> bool. Raises ValueError for an unknown rule."""
    if rule == "terminated":
        return lambda reward, terminated, info: bool(terminated)
    if rule.startswith("info:"):
        key = rule.removeprefix("info:")

        def told(reward: float, terminated: bool, info: Mapping[str, Any]) -> bool:
            if key not in info:
                raise SimulatorError(f"--eval-options success={rule}: info has {', '.join(map(str, info)) or 'no keys'}")
            return bool(info[key])

        return told
    if rule.startswith("reward>="):
        try:
            threshold = float(rule.removeprefix("reward>="))
        except ValueError as problem:
            raise ValueError(f"--eval-options success={rule}: a number is needed, for example reward>=4") from problem
        return lambda reward, terminated, info: float(reward) >= threshold
    raise ValueError(f"--eval-options success={rule!r}: use info:KEY, terminated, or reward>=NUMBER")


class GymnasiumEnvironment:
    """One environment from gymnasium.make."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        options = options_of(settings)
        module = settings.suite.partition(":")[0]
        if settings.wait_steps or settings.rotate_images:
            raise ValueError(
                "--eval-wait-steps, --eval-rotate-images: a Gymnasium environment has no do-nothing action or cameras"
            )
        # pygame would open a window.
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        try:
            import gymnasium

            self.environment: Any = gymnasium.make(settings.suite, **options["kwargs"])
        except ImportError as failure:
            extra = EXTRAS.get(module, "eval")
            raise ValueError(f"{settings.suite} is not installed ({failure}) -> pip install -e '.[{extra}]'") from failure
        except (gymnasium.error.Error, TypeError) as failure:
            # An unknown id, or keywords that the environment does not take: no repetition helps.
            told = f"gymnasium.make with --eval-options kwargs={options['kwargs']} failed: {failure}"
            raise ValueError(f"--eval-suite {settings.suite}: {told}") from failure
        self.settings = settings
        self._images: dict[str, str] = dict(options["images"])
        self._state = [options["state"]] if isinstance(options["state"], str) else list(options["state"])
        self._instruction = str(options["instruction"])
        self._succeeded = success_test(str(options["success"]))

    def _observation(self, content: Any, render: bool) -> Observation:
        images = {}
        if render:
            images = {camera: self._picture_at(content, path) for camera, path in self._images.items()}
        parts = [np.asarray(at_path(content, path), dtype=np.float32).ravel() for path in self._state]
        return Observation(images, np.concatenate(parts), self._instruction)

    def _picture_at(self, content: Any, path: str) -> np.ndarray:
        picture = self.environment.render() if path == "render" else at_path(content, path)
        return np.ascontiguousarray(picture, dtype=np.uint8)

    def reset(self, trial: Trial) -> Observation:
        """See Environment."""
        content, _ = self.environment.reset(seed=trial.seed)
        return self._observation(content, render=True)

    def step(self, action_A: np.ndarray, render: bool = True) -> StepResult:
        """See Environment. Actions are clipped to the action space."""
        space = self.environment.action_space
        if np.shape(action_A) != space.shape:
            told = f"the policy's actions have shape {list(np.shape(action_A))}, its action space {list(space.shape)}"
            raise SimulatorError(f"--eval-suite {self.settings.suite}: {told} -> choose the environment that the data is from")
        action = np.clip(action_A, space.low, space.high).astype(space.dtype)
        succeeded = ended = False
        for _ in range(self.settings.action_repeat):
            content, reward, terminated, truncated, info = self.environment.step(action)
            succeeded |= self._succeeded(reward, terminated, info)
            ended |= bool(terminated or truncated)
            if ended:
                break
        return StepResult(self._observation(content, render), succeeded, ended)

    def picture(self) -> np.ndarray:
        """See Environment."""
        return np.ascontiguousarray(self.environment.render(), dtype=np.uint8)

    def expert_action(self) -> np.ndarray:
        """See Environment."""
        raise SimulatorError(f"{self.settings.suite} has no scripted expert")

    def close(self) -> None:
        """See Environment."""
        self.environment.close()


BACKEND = EnvironmentBackend(
    name="gymnasium",
    suites=tuple(PRESETS),
    tasks=tasks,
    build=GymnasiumEnvironment,
    fps=lambda settings: float(options_of(settings)["fps"]) / settings.action_repeat,
    robot_type="gymnasium",
    uses_mujoco=lambda settings: bool(options_of(settings).get("mujoco")),
    packages=("gymnasium",),
)
