"""Asks MuJoCo what would happen if the hand were somewhere: inverse kinematics and contacts in a copy of the simulator's data.

Nothing here moves the simulator. The arm is a 7-joint Panda with robosuite's names.

Shape legend: 7 arm joints, 3 x 3 rotation matrices (world from hand).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from megatron_vla.evaluation.environments.interface import SimulatorError
from megatron_vla.evaluation.experts.scene_geometry import axis_angle

GRIP_SITE = "gripper0_grip_site"
ARM_JOINTS = tuple(f"robot0_joint{i}" for i in range(1, 8))
FINGER_JOINTS = ("gripper0_finger_joint1", "gripper0_finger_joint2")
PADS = ("gripper0_finger1_pad_collision", "gripper0_finger2_pad_collision")
# Opening of one finger, metres: joint 1 runs from 0 to 0.04, joint 2 from 0 to -0.04.
FINGER_OPEN = 0.04
CLEARANCE = 0.003
# Radians that stay free towards each joint's limits; the elbow (joint 4) needs more, since a straight arm cannot be controlled.
JOINT_MARGINS_LOW = np.array([0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
JOINT_MARGINS_HIGH = np.array([0.1, 0.1, 0.1, 0.35, 0.1, 0.1, 0.1])
_MAX_IK_STEPS = 40
# Steps after which the error must have been halved, or there is no solution nearby.
_PATIENCE = 8


class ArmProbe:
    """One robot model. `model` and `data` are MuJoCo's own objects; they are read, never changed."""

    def __init__(self, model: Any, data: Any) -> None:
        import mujoco

        self.mujoco, self.model, self.data = mujoco, model, data
        self.scratch = mujoco.MjData(model)
        self.site = self._id("SITE", GRIP_SITE)
        joints = [self._id("JOINT", name) for name in ARM_JOINTS]
        self.arm_qpos = model.jnt_qposadr[joints]
        self.arm_dof = model.jnt_dofadr[joints]
        self.first_joints_7 = data.qpos[self.arm_qpos].copy()
        low_7, high_7 = model.jnt_range[joints].T
        self.low_7, self.high_7 = low_7 + JOINT_MARGINS_LOW, high_7 - JOINT_MARGINS_HIGH
        self.shoulder_body = int(model.jnt_bodyid[joints[0]])
        self.finger_qpos = model.jnt_qposadr[[self._id("JOINT", name) for name in FINGER_JOINTS]]
        self.pads = [self._id("GEOM", name) for name in PADS]
        self.root_of_geom = model.body_rootid[model.geom_bodyid]
        self.robot_root = int(model.body_rootid[model.jnt_bodyid[joints[0]]])
        # What is welded to the world (base, mount) may touch the table for ever: only what moves counts as the robot.
        self.is_robot_geom = (self.root_of_geom == self.robot_root) & (model.body_weldid[model.geom_bodyid] != 0)

    def _id(self, kind: str, name: str) -> int:
        number = self.mujoco.mj_name2id(self.model, getattr(self.mujoco.mjtObj, f"mjOBJ_{kind}"), name)
        if number < 0:
            told = f"the simulator's model has no {kind.lower()} {name!r}"
            raise SimulatorError(f"{told}: the expert knows robosuite's Panda only")
        return int(number)

    def hand_pose(self) -> tuple[np.ndarray, np.ndarray]:
        """Position [3] between the finger pads and rotation [3, 3], in the simulator now."""
        return self.data.site_xpos[self.site].copy(), self.data.site_xmat[self.site].reshape(3, 3).copy()

    def closing_angle(self) -> float:
        """Direction in which the fingers close now, in the xy plane."""
        x, y, _ = self.data.geom_xpos[self.pads[1]] - self.data.geom_xpos[self.pads[0]]
        return float(np.arctan2(y, x))

    def opening(self) -> float:
        """Distance between the fingers now, metres."""
        first, second = self.data.qpos[self.finger_qpos]
        return float(first - second)

    def joints_for(self, position_3: np.ndarray, rotation_33: np.ndarray) -> np.ndarray | None:
        """Joint angles [7] that bring the hand there (1 mm, 1 degree), searched from the present and the first, or None."""
        for seed_7 in (self.data.qpos[self.arm_qpos], self.first_joints_7):
            joints_7 = self._solve(position_3, rotation_33, seed_7)
            if joints_7 is not None:
                return joints_7
        return None

    def _solve(self, position_3: np.ndarray, rotation_33: np.ndarray, seed_7: np.ndarray) -> np.ndarray | None:
        """Damped least squares from `seed_7`."""
        mujoco, scratch = self.mujoco, self.scratch
        scratch.qpos[:] = self.data.qpos
        scratch.qpos[self.arm_qpos] = seed_7
        jacobian = np.zeros((6, self.model.nv))
        errors: list[float] = []
        for _ in range(_MAX_IK_STEPS):
            mujoco.mj_kinematics(self.model, scratch)
            mujoco.mj_comPos(self.model, scratch)
            rotation_error = axis_angle(rotation_33 @ scratch.site_xmat[self.site].reshape(3, 3).T)
            error_6 = np.concatenate([position_3 - scratch.site_xpos[self.site], rotation_error])
            if np.linalg.norm(error_6[:3]) < 1e-3 and np.linalg.norm(error_6[3:]) < 0.017:
                return scratch.qpos[self.arm_qpos].copy()
            errors.append(float(np.linalg.norm(error_6)))
            if len(errors) > _PATIENCE and errors[-1] > errors[-1 - _PATIENCE] / 2:
                return None
            mujoco.mj_jacSite(self.model, scratch, jacobian[:3], jacobian[3:], self.site)
            arm_67 = jacobian[:, self.arm_dof]
            inverse_76 = arm_67.T @ np.linalg.inv(arm_67 @ arm_67.T + 1e-4 * np.eye(6))
            # The arm has one joint more than needed. The controller pulls it to the first posture, so that is where it will be.
            spare_7 = 0.5 * (self.first_joints_7 - scratch.qpos[self.arm_qpos])
            step_7 = inverse_76 @ error_6 + spare_7 - inverse_76 @ (arm_67 @ spare_7)
            step_7 *= min(1.0, 0.3 / max(np.abs(step_7).max(), 1e-9))
            scratch.qpos[self.arm_qpos] = np.clip(scratch.qpos[self.arm_qpos] + step_7, self.low_7, self.high_7)
        return None

    def touched(self, joints_7: np.ndarray, finger: float, ignored_root: int = -1) -> list[tuple[int, int, np.ndarray]]:
        """Contacts of the robot with the rest of the scene, arm at joints_7, each finger open by `finger` metres.

        Each: (robot geom, other geom, contact normal [3]). Bodies under `ignored_root` do not count.
        """
        scratch = self.scratch
        scratch.qpos[:] = self.data.qpos
        scratch.qpos[self.arm_qpos] = joints_7
        scratch.qpos[self.finger_qpos] = finger, -finger
        self.mujoco.mj_kinematics(self.model, scratch)
        self.mujoco.mj_collision(self.model, scratch)
        found = []
        for contact in range(scratch.ncon):
            first, second = scratch.contact.geom[contact]
            robot, other = (first, second) if self.is_robot_geom[first] else (second, first)
            if self.is_robot_geom[robot] and self.root_of_geom[other] not in (self.robot_root, ignored_root):
                found.append((int(robot), int(other), scratch.contact.frame[contact][:3].copy()))
        return found

    @contextmanager
    def clearance(self, metres: float = CLEARANCE) -> Iterator[None]:
        """Within it, robot geoms `touch` what is nearer than `metres`."""
        # The margin is the model's, which the simulator shares, so it is put back whatever happens.
        before = self.model.geom_margin.copy()
        self.model.geom_margin[self.is_robot_geom] = metres
        try:
            yield
        finally:
            self.model.geom_margin[:] = before

    def closes_on(self, joints_7: np.ndarray, target_root: int, closing_3: np.ndarray) -> float | None:
        """How squarely both pads meet the target when the fingers close, cosine in (0.8, 1]; None when they do not.

        A finger that touches early pushes the object, so it is not asked that both touch at once: 12 mm apart will do.
        """
        first_touch: dict[int, tuple[float, float]] = {}
        for finger in np.arange(FINGER_OPEN, 0.0, -0.002):
            for robot, other, normal_3 in self.touched(joints_7, float(finger)):
                if robot not in self.pads or self.root_of_geom[other] != target_root:
                    continue
                squareness = float(abs(normal_3 @ closing_3))
                if robot not in first_touch or (first_touch[robot][0] == finger and first_touch[robot][1] < squareness):
                    first_touch[robot] = float(finger), squareness
            if len(first_touch) == 2:
                openings, cosines = zip(*first_touch.values(), strict=True)
                is_good = max(openings) - min(openings) <= 0.012 and min(cosines) > 0.8
                return min(cosines) if is_good else None
        return None
