"""Pick and place as a closed loop: from what is where now to the next action, by phases. No simulator in here.

above -> descend -> close -> lift -> carry -> lower -> release -> retreat -> done; a phase ends when its goal is reached, or
when it takes too long. The object's pose is read at every step, so that a slip in the fingers is corrected on the way. A grasp
that comes up empty lets go and rises (`recover`), then has `failed`; whoever planned it plans another one.

Actions are those of robosuite's OSC_POSE controller at 20 Hz: [0:3] shift of the hand (1 = 5 cm), [3:6] rotation as axis times
angle in the world frame (1 = 0.5 rad), [6] gripper (-1 opens, +1 closes). Lengths in metres, world frame, z up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_vla.evaluation.experts.scene_geometry import axis_angle

Phase = Literal["above", "descend", "close", "lift", "carry", "lower", "release", "retreat", "recover", "done", "failed"]

METRES_PER_ACTION = 0.05
RADIANS_PER_ACTION = 0.5
OPEN, HOLD, CLOSE = -1.0, 0.0, 1.0
# One control step of CLOSE brings each finger this much nearer to the middle, metres.
FINGER_PER_STEP = 0.005

# The controller is a critically damped spring to (hand + shift) with 12.2 rad/s: a gain of 1 creeps to the goal in 0.5 s, 2 is
# quick and damped by 0.7.
GAIN = 2.0
CLOSE_STEPS = 9
RELEASE_STEPS = 6
RECOVER_STEPS = 12
# Steps after which a phase that has not reached its goal is given up: what blocks the hand will not go away.
MAX_PHASE_STEPS = 70
# The object has been taken when it is this much higher than before.
LIFTED = 0.015


@dataclass(frozen=True)
class SceneState:
    """What the expert sees. hand: between the finger pads. opening: distance between the fingers."""

    hand_3: np.ndarray
    hand_rotation_33: np.ndarray
    opening: float
    object_3: np.ndarray
    place_2: np.ndarray


@dataclass(frozen=True)
class PickPlacePlan:
    """Where to grasp and how high to travel.

    grasp_3, rotation_33: hand pose of the grasp; the rotation is kept until the end.
    approach_height: z from which the hand goes straight down.
    carry_height: z of the hand while it carries.  release_height: z of the hand at which the object may be let go.
    closing_steps: control steps for which the open fingers close before the hand goes down (tight places); 0: wide open.
    """

    grasp_3: np.ndarray
    rotation_33: np.ndarray
    approach_height: float
    carry_height: float
    release_height: float
    closing_steps: int = 0


class PickPlaceController:
    """Runs one plan. `phase` tells how far it is."""

    def __init__(self, plan: PickPlacePlan) -> None:
        self.plan = plan
        self.phase: Phase = "above"
        self._steps_in_phase = 0
        self._height_before_lift = 0.0
        self._resting_steps = 0
        self._last_hand_3 = np.full(3, np.inf)

    def action(self, state: SceneState) -> np.ndarray:
        """The next action, float32 [7]."""
        # One state may end several phases (each at most once).
        while (following := self._next_phase(state)) != self.phase:
            self.phase, self._steps_in_phase = following, 0
            if following == "lift":
                self._height_before_lift = float(state.object_3[2])
        self._steps_in_phase += 1
        goal_3, rotation_33, gripper = self._goal(state)
        self._last_hand_3 = state.hand_3
        return servo_action(state, goal_3, rotation_33, gripper)

    def _goal(self, state: SceneState) -> tuple[np.ndarray, np.ndarray, float]:
        """Hand position, hand rotation and gripper command of the present phase."""
        plan = self.plan
        if plan.closing_steps == 0:
            open_before_grasp = OPEN
        else:
            open_before_grasp = CLOSE if self.phase == "above" and self._steps_in_phase <= plan.closing_steps else HOLD
        over_place_2 = state.hand_3[:2] + state.place_2 - state.object_3[:2]
        match self.phase:
            case "above":
                return np.append(plan.grasp_3[:2], plan.approach_height), plan.rotation_33, open_before_grasp
            case "descend":
                return plan.grasp_3, plan.rotation_33, open_before_grasp
            case "close":
                return plan.grasp_3, plan.rotation_33, CLOSE
            case "lift":
                return np.append(plan.grasp_3[:2], plan.carry_height), plan.rotation_33, CLOSE
            case "carry":
                return np.append(over_place_2, plan.carry_height), plan.rotation_33, CLOSE
            case "lower":
                return np.append(over_place_2, plan.release_height), plan.rotation_33, CLOSE
            case "release":
                return state.hand_3, plan.rotation_33, OPEN
            case _:
                return np.append(state.hand_3[:2], plan.carry_height), plan.rotation_33, OPEN

    def _next_phase(self, state: SceneState) -> Phase:
        steps = self._steps_in_phase
        goal_3, rotation_33, _ = self._goal(state)
        error_3 = np.abs(goal_3 - state.hand_3)
        turned = float(np.linalg.norm(axis_angle(rotation_33 @ state.hand_rotation_33.T)))
        if steps >= MAX_PHASE_STEPS and self.phase not in ("done", "failed"):
            return "failed" if self.phase == "recover" else "recover"
        match self.phase:
            case "above":
                # Going down begins on the way: straight is only needed near the object.
                return "descend" if error_3[:2].max() < 0.008 and turned < 0.1 else "above"
            case "descend":
                if error_3.max() < 0.005 and turned < 0.06:
                    return "close"
                # Something is in the way: close where the hand is, when that is deep enough.
                stuck = steps > 12 and np.linalg.norm(state.hand_3 - self._last_hand_3) < 4e-4
                if stuck:
                    return "close" if error_3.max() < 0.015 else "recover"
                return "descend"
            case "close":
                return "lift" if steps >= CLOSE_STEPS else "close"
            case "lift":
                if error_3[2] < 0.03 or steps > 25:
                    return "carry" if state.object_3[2] - self._height_before_lift > LIFTED else "recover"
                return "lift"
            case "carry":
                if is_lost(state):
                    return "recover"
                return "lower" if error_3[:2].max() < 0.01 else "carry"
            case "lower":
                if is_lost(state):
                    return "recover"
                touching = steps > 6 and abs(state.hand_3[2] - self._last_hand_3[2]) < 1e-3
                arrived = error_3[2] < 0.006 or touching
                return "release" if arrived and error_3[:2].max() < 0.012 else "lower"
            case "release":
                return "retreat" if steps >= RELEASE_STEPS else "release"
            case "retreat":
                return "done" if error_3[2] < 0.03 else "retreat"
            case "recover":
                return "failed" if steps >= RECOVER_STEPS else "recover"
            case finished:
                return finished


def is_lost(state: SceneState) -> bool:
    """Whether the fingers hold nothing any more."""
    return state.opening < 0.002 or float(np.linalg.norm(state.object_3 - state.hand_3)) > 0.16


def servo_action(state: SceneState, goal_3: np.ndarray, rotation_33: np.ndarray, gripper: float) -> np.ndarray:
    """One step towards a hand pose on a straight line, float32 [7]."""
    shift_3 = GAIN * (goal_3 - state.hand_3) / METRES_PER_ACTION
    turn_3 = GAIN * axis_angle(rotation_33 @ state.hand_rotation_33.T) / RADIANS_PER_ACTION
    # Level and upright shifts are limited each for itself: a long way down must not weaken the hold on the line down.
    shift_3[:2] /= max(1.0, float(np.abs(shift_3[:2]).max()))
    shift_3[2] = np.clip(shift_3[2], -1.0, 1.0)
    turn_3 /= max(1.0, float(np.abs(turn_3).max()))
    return np.concatenate([shift_3, turn_3, [gripper]]).astype(np.float32)
