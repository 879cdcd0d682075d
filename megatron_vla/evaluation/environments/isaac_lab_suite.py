"""Connector for Isaac Lab: its batched simulation, driven trial by trial through the simulator interface.

Isaac Lab is not a dependency: it is imported when the first trial begins, in a process of its own, as it demands (AppLauncher
before anything else of it, one per process). Written for manager-based environments of Isaac Lab 2 and 3, as documented:
`reset(seed, env_ids)`, five-tuple steps of batched tensors, `termination_manager.get_term`.

--eval-suite is the id of its task (Isaac-Lift-Cube-Franka-v0). --eval-options (each KEY=JSON):
    images        {dataset camera: "GROUP/NAME" in the observation dictionary}: uint8 or float [N, H, W, 3]
    state         "GROUP/NAME", or a list of them; "policy" alone where the group is one tensor
    instruction   what the policy is told
    success       name of the termination term that means success (default "success")
    fps           actions per second
    device        device of the simulation (default "cuda:0")

Isaac Lab resets an environment by itself inside the step that ends it, and returns the first observation of the next episode.
So a slot whose step ended is reported as ended, its observation is not used, and it is reset again with its next trial's seed.

Shape legend: N = E environments, H height, W width, D state, A action.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_vla.evaluation.environments.gymnasium_suite import at_path
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

OPTIONS = ("images", "state", "instruction", "success", "fps", "device")
DEFAULT_MAX_STEPS = 500


def options_of(settings: EnvironmentSettings) -> dict[str, Any]:
    """The user's options over the defaults. Raises ValueError naming what is missing."""
    refuse_options(settings, OPTIONS)
    options = {"success": "success", "device": "cuda:0", **settings.options}
    missing = [name for name in ("images", "state", "instruction", "fps") if name not in options]
    if missing:
        raise ValueError(f"--eval-environment isaac_lab: add --eval-options {missing[0]}=...")
    return options


def tasks(settings: EnvironmentSettings) -> list[TaskSpec]:
    """See EnvironmentBackend: one task, named as the environment."""
    options = options_of(settings)
    if not settings.suite:
        raise ValueError("--eval-suite: name the id of an Isaac Lab task, for example Isaac-Lift-Cube-Franka-v0")
    chosen_tasks((settings.suite,), settings.tasks)
    max_steps = settings.max_steps or DEFAULT_MAX_STEPS // settings.action_repeat
    return [TaskSpec(name=settings.suite, instruction=str(options["instruction"]), max_steps=max_steps)]


def as_numpy(tensor: Any) -> np.ndarray:
    """Tensor on any device -> host array."""
    array: np.ndarray = tensor.detach().cpu().numpy() if hasattr(tensor, "detach") else np.asarray(tensor)
    return array


class IsaacLabEnvironment:
    """N environments of one Isaac Lab task (VectorEnvironment)."""

    def __init__(self, settings: EnvironmentSettings, num_environments: int) -> None:
        self.settings, self.num_environments = settings, num_environments
        self._options = options_of(settings)
        if settings.wait_steps or settings.rotate_images:
            raise ValueError("--eval-wait-steps, --eval-rotate-images: not part of the Isaac Lab connector")
        try:
            from isaaclab.app import AppLauncher
        except ImportError as failure:
            raise ValueError(
                f"Isaac Lab is not installed ({failure}) -> see its installation guide (pip install isaaclab)"
            ) from failure
        self._app = AppLauncher(headless=True, enable_cameras=True).app
        # Only importable while the application runs.
        import gymnasium
        import isaaclab_tasks  # noqa: F401  registers the tasks
        from isaaclab_tasks.utils import parse_env_cfg

        configuration = parse_env_cfg(settings.suite, device=self._options["device"], num_envs=num_environments)
        self._environment: Any = gymnasium.make(settings.suite, cfg=configuration)
        self._last: Any = None

    def reset(self, trials: Sequence[Trial | None]) -> list[Observation | None]:
        """See VectorEnvironment. One at a time: the simulation has one random stream, and a trial's start is its seed's."""
        import torch

        for slot, trial in enumerate(trials):
            if trial is not None:
                numbers = torch.tensor([slot], dtype=torch.int64, device=self._options["device"])
                self._last, _ = self._environment.unwrapped.reset(seed=trial.seed, env_ids=numbers)
        return [None if trial is None else self._observation(slot, True) for slot, trial in enumerate(trials)]

    def step(self, actions_EA: np.ndarray, is_active_E: np.ndarray, render: bool = True) -> list[StepResult | None]:
        """See VectorEnvironment. Inactive slots are moved by zeros, since the simulation steps all."""
        import torch

        actions_EA = np.where(is_active_E[:, None], actions_EA, 0.0).astype(np.float32)
        actions = torch.as_tensor(actions_EA, device=self._options["device"])
        succeeded_E, ended_E = np.zeros(self.num_environments, bool), np.zeros(self.num_environments, bool)
        for _ in range(self.settings.action_repeat):
            self._last, _, terminated, truncated, _ = self._environment.step(actions)
            term = self._environment.unwrapped.termination_manager.get_term(self._options["success"])
            # What follows an automatic reset belongs to another episode.
            succeeded_E |= as_numpy(term).astype(bool) & ~ended_E
            ended_E |= as_numpy(terminated).astype(bool) | as_numpy(truncated).astype(bool)
        return [
            StepResult(self._observation(slot, render), bool(succeeded_E[slot]), bool(ended_E[slot])) if active else None
            for slot, active in enumerate(is_active_E)
        ]

    def _observation(self, slot: int, render: bool) -> Observation:
        images = {}
        if render:
            for camera, path in self._options["images"].items():
                images[camera] = as_picture(as_numpy(at_path(self._last, path)[slot]))
        state = self._options["state"]
        paths = [state] if isinstance(state, str) else state
        parts = [as_numpy(at_path(self._last, path)[slot]).astype(np.float32).ravel() for path in paths]
        return Observation(images, np.concatenate(parts), str(self._options["instruction"]))

    def pictures(self) -> list[np.ndarray]:
        """See VectorEnvironment: the first camera."""
        path = next(iter(self._options["images"].values()))
        return [as_picture(picture_HWC) for picture_HWC in as_numpy(at_path(self._last, path))]

    def expert_actions(self, is_active_E: np.ndarray) -> np.ndarray:
        """See VectorEnvironment."""
        raise SimulatorError(f"{self.settings.suite} has no scripted expert")

    def close(self) -> None:
        """See VectorEnvironment."""
        self._environment.close()
        self._app.close()


def as_picture(picture_HWC: np.ndarray) -> np.ndarray:
    """uint8 [H, W, 3] from uint8, or from float in [0, 1]; an alpha channel is cut off."""
    picture_HWC = picture_HWC[..., :3]
    if picture_HWC.dtype != np.uint8:
        picture_HWC = np.clip(picture_HWC * 255.0 + 0.5, 0, 255).astype(np.uint8)
    return np.ascontiguousarray(picture_HWC)


BACKEND = EnvironmentBackend(
    name="isaac_lab",
    suites=("",),
    tasks=tasks,
    build_vector=IsaacLabEnvironment,
    fps=lambda settings: float(options_of(settings)["fps"]) / settings.action_repeat,
    robot_type="isaac_lab",
    uses_mujoco=lambda settings: False,
    packages=("isaaclab",),
)
