"""MetaWorld (3.1.1) as recorder and evaluator see it: cameras, state, instruction, action, success, scripted expert.

The same class makes the demonstrations and the closed-loop tests, so that a policy sees in evaluation what it was trained on.
Camera `top` is `corner2` moved to where LeRobot's MetaWorld data has it and rotated by 180 degrees; `wrist` is `gripperPOV`,
which looks down between the fingers. Where they are named, too: `behind`, `behindGripper`, which moves half a metre behind the
hand and shows how far to the side and how high a goal in the air is, while `top` alone cannot tell near from far.
State (4): hand x, y, z in metres, gripper opening in [0, 1]. Action (4): hand target shift x, y, z (1 = 1 cm) and gripper
effort, each in [-1, 1]. One control step is 0.0125 s; with `action_repeat` an action is held for several of them.

Shape legend: H height, W width, C channels, D state, A action.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_vla.evaluation.environments.interface import SimulatorError
from megatron_vla.evaluation.environments.rendering import set_fast_quality, set_fast_scene

CONTROL_HZ = 80
STATE_NAMES = ("hand_x", "hand_y", "hand_z", "gripper_opening")
ACTION_NAMES = ("delta_x", "delta_y", "delta_z", "gripper_effort")
# Dataset feature -> camera of the simulator.
CAMERAS: Mapping[str, str] = {
    "observation.images.top": "corner2",
    "observation.images.wrist": "gripperPOV",
    "observation.images.behind": "behindGripper",
}
USUAL_CAMERAS = ("observation.images.top", "observation.images.wrist")
_TOP_POSITION = (0.75, 0.075, 0.7)

INSTRUCTIONS: Mapping[str, str] = {
    "assembly-v3": "Pick up a nut and place it onto a peg",
    "basketball-v3": "Dunk the basketball into the basket",
    "bin-picking-v3": "Grasp the puck from one bin and place it into another bin",
    "box-close-v3": "Grasp the cover and close the box with it",
    "button-press-topdown-v3": "Press a button from the top",
    "button-press-topdown-wall-v3": "Bypass a wall and press a button from the top",
    "button-press-v3": "Press a button",
    "button-press-wall-v3": "Bypass a wall and press a button",
    "coffee-button-v3": "Push a button on the coffee machine",
    "coffee-pull-v3": "Pull a mug from a coffee machine",
    "coffee-push-v3": "Push a mug under a coffee machine",
    "dial-turn-v3": "Rotate a dial 180 degrees",
    "disassemble-v3": "Pick a nut out of a peg",
    "door-close-v3": "Close a door with a revolving joint",
    "door-lock-v3": "Lock the door by rotating the lock clockwise",
    "door-open-v3": "Open a door with a revolving joint",
    "door-unlock-v3": "Unlock the door by rotating the lock counter-clockwise",
    "drawer-close-v3": "Push and close a drawer",
    "drawer-open-v3": "Open a drawer",
    "faucet-close-v3": "Rotate the faucet clockwise",
    "faucet-open-v3": "Rotate the faucet counter-clockwise",
    "hammer-v3": "Hammer a screw on the wall",
    "hand-insert-v3": "Insert the gripper into a hole",
    "handle-press-side-v3": "Press a handle down sideways",
    "handle-press-v3": "Press a handle down",
    "handle-pull-side-v3": "Pull a handle up sideways",
    "handle-pull-v3": "Pull a handle up",
    "lever-pull-v3": "Pull a lever down 90 degrees",
    "peg-insert-side-v3": "Insert a peg sideways",
    "peg-unplug-side-v3": "Unplug a peg sideways",
    "pick-out-of-hole-v3": "Pick up a puck from a hole",
    "pick-place-v3": "Pick and place a puck to a goal",
    "pick-place-wall-v3": "Pick a puck, bypass a wall and place the puck",
    "plate-slide-back-side-v3": "Get a plate from the cabinet sideways",
    "plate-slide-back-v3": "Get a plate from the cabinet",
    "plate-slide-side-v3": "Slide a plate into a cabinet sideways",
    "plate-slide-v3": "Slide a plate into a cabinet",
    "push-back-v3": "Pull a puck to a goal",
    "push-v3": "Push the puck to a goal",
    "push-wall-v3": "Bypass a wall and push a puck to a goal",
    "reach-v3": "Reach a goal position",
    "reach-wall-v3": "Bypass a wall and reach a goal",
    "shelf-place-v3": "Pick and place a puck onto a shelf",
    "soccer-v3": "Kick a soccer into the goal",
    "stick-pull-v3": "Grasp a stick and pull a box with the stick",
    "stick-push-v3": "Grasp a stick and push a box using the stick",
    "sweep-into-v3": "Sweep a puck into a hole",
    "sweep-v3": "Sweep a puck off the table",
    "window-close-v3": "Push and close a window",
    "window-open-v3": "Push and open a window",
}


# Success asks for the point between the fingers within 5 cm of the goal, and MetaWorld's experts for these tasks bring the hand
# there: the fingers end 4.5 cm below it. Whoever imitates them with an error of a centimetre fails.
_FINGERS_TO_GOAL = frozenset({"reach-v3", "reach-wall-v3"})


def task_name(name: str) -> str:
    """`drawer-open` or `drawer-open-v3` -> `drawer-open-v3`. Raises ValueError naming the nearest tasks."""
    import difflib

    full = name if re.search(r"-v\d+$", name) else f"{name}-v3"
    if full not in INSTRUCTIONS:
        near = difflib.get_close_matches(full, INSTRUCTIONS, n=3)
        known = f"near: {', '.join(near)}" if near else f"known: {', '.join(INSTRUCTIONS)}"
        raise ValueError(f"--eval-tasks {name}: MetaWorld has no such task -> {known}")
    return full


class MetaWorldEnvironment:
    """One task. Goals and object positions are functions of the seed given to `reset`.

    Choose MUJOCO_GL (see `rendering.choose_backend`) before the first one is made.
    """

    def __init__(
        self,
        task: str,
        *,
        image_size: int = 224,
        fast_rendering: bool = True,
        action_repeat: int = 1,
        cameras: Sequence[str] = USUAL_CAMERAS,
    ):
        if action_repeat < 1:
            raise ValueError(f"action_repeat is {action_repeat}: it counts control steps per action -> give 1 or more")
        try:
            import mujoco
            from metaworld.env_dict import ALL_V3_ENVIRONMENTS
            from metaworld.policies import ENV_POLICY_MAP
        except ImportError as failure:
            raise SimulatorError(
                f"the MetaWorld simulator is not installed ({failure}) -> pip install -e '.[eval]'"
            ) from failure

        self.task = task_name(task)
        self.instruction = INSTRUCTIONS[self.task]
        self.action_repeat = action_repeat
        self.cameras = tuple(cameras)
        self.fps = CONTROL_HZ / action_repeat
        self._fast_rendering = fast_rendering
        self._environment = ALL_V3_ENVIRONMENTS[self.task]()
        # The expert needs the goal; pictures, state and policies never see this vector. Goal markers stay visible:
        # reach, push and pick-place cannot be solved from pictures without them.
        self._environment._partially_observable = False
        # Cached for the partially observable case, in which the goal is clipped to zero.
        self._environment.__dict__.pop("sawyer_observation_space", None)
        self._environment._set_task_called = True
        self._environment._freeze_rand_vec = False
        self._environment.seeded_rand_vec = True
        self._environment.model.camera("corner2").pos[:] = _TOP_POSITION
        if fast_rendering:
            set_fast_quality(self._environment.model)
        self._renderer = mujoco.Renderer(self._environment.model, height=image_size, width=image_size)
        if fast_rendering:
            set_fast_scene(self._renderer.scene)
        self._expert = ENV_POLICY_MAP[self.task]()
        self._simulator_observation = np.zeros(39)
        self.step_count = 0

    def reset(self, seed: int) -> dict[str, np.ndarray]:
        """New goal and object positions from `seed`; the first observation (see `observe`)."""
        import mujoco

        self._environment.seed(seed)
        self._environment.reset(seed=seed)
        # MetaWorld writes the new positions of furniture and goal markers into the model and leaves it there: until the next
        # step pictures and handles would be those of the placement before (a window 12 cm beside where it is).
        mujoco.mj_forward(self._environment.model, self._environment.data)
        self._environment._prev_obs = self._environment._get_curr_obs_combined_no_goal()
        self._simulator_observation = self._environment._get_obs()
        self.step_count = 0
        return self.observe()

    def step(self, action_A: np.ndarray, render: bool = True) -> tuple[dict[str, np.ndarray], bool]:
        """Hold one action for `action_repeat` control steps -> (observation, has the task succeeded in any of them).

        `render=False` leaves the pictures out of the observation.
        """
        succeeded = False
        action_A = np.clip(np.asarray(action_A, dtype=np.float32), -1.0, 1.0)
        for _ in range(self.action_repeat):
            self._simulator_observation, _, _, _, information = self._environment.step(action_A)
            succeeded |= bool(information["success"])
        self.step_count += 1
        return self.observe(render), succeeded

    def observe(self, render: bool = True) -> dict[str, np.ndarray]:
        """{`observation.images.*`: uint8 HWC, `observation.state`: float32 D}."""
        observation = {"observation.state": self._simulator_observation[:4].astype(np.float32)}
        if render:
            observation |= {feature: self.picture(feature) for feature in self.cameras}
        return observation

    def expert_action(self) -> np.ndarray:
        """The scripted expert's action now: float32 A, clipped to [-1, 1]. Reads the simulator's hidden state."""
        import warnings

        observation = self._simulator_observation
        if self.task in _FINGERS_TO_GOAL:
            observation = observation.copy()
            observation[-3:] += observation[:3] - self._environment.tcp_center
        with warnings.catch_warnings():
            # Experts may ask for more than the simulator's limit and say so at every step; the limit is applied here.
            warnings.simplefilter("ignore")
            action = self._expert.get_action(observation)
        return np.clip(action, -1.0, 1.0).astype(np.float32)

    def picture(self, feature: str) -> np.ndarray:
        """One camera's picture now, uint8 HWC."""
        camera = CAMERAS[feature]
        self._renderer.update_scene(self._environment.data, camera=camera)
        picture_HWC: Any = self._renderer.render()
        return np.ascontiguousarray(picture_HWC[::-1, ::-1] if camera == "corner2" else picture_HWC)

    def close(self) -> None:
        """Free the GL context."""
        self._renderer.close()
        self._environment.close()
