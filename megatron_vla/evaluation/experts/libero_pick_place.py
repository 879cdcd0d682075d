"""The scripted expert of LIBERO's pick-and-place tasks (all of libero_object and libero_spatial), bound to a simulator.

It knows the goal from the task's BDDL file, `On(object, plate)` or `In(object, basket region)`, reads all poses and shapes from
the simulator, looks for a grasp that the arm can reach without touching anything else (see arm_probe), and acts through the
policy's own seven numbers. When a grasp comes up empty it plans another one from where it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_vla.evaluation.environments.interface import SimulatorError
from megatron_vla.evaluation.experts.arm_probe import FINGER_OPEN, ArmProbe
from megatron_vla.evaluation.experts.grasp_candidates import (
    GraspCandidate,
    GraspStyle,
    pinch_candidates,
    rim_candidates,
    wrapped_angle,
)
from megatron_vla.evaluation.experts.pick_place import FINGER_PER_STEP, OPEN, PickPlaceController, PickPlacePlan, SceneState
from megatron_vla.evaluation.experts.scene_geometry import about_horizontal, about_z, body_points, highest_between

# How an object of a category is taken. Everything else is pinched.
GRASP_STYLES: dict[str, GraspStyle] = {"akita_black_bowl": "rim", "white_bowl": "rim"}
# Free heights above the grasp at which the open hand must not touch anything, metres.
APPROACH_CHECKS = (0.0, 0.02, 0.045, 0.08)
APPROACH_HEIGHT = 0.10
CARRY_MARGIN = 0.05
MIN_LIFT = 0.08
# Steps between two searches for a grasp when the first found none.
IDLE_STEPS = 25
HALF_OPEN = 0.02
# The hand may lean by so much (radians) about the direction in which the fingers close, to reach farther.
TILTS = (0.0, 0.25, 0.5)
TILT_COST = 2.5
UNSQUARE_COST = 8.0
# Feasible grasps that are compared by how squarely the pads meet the object.
MAX_COMPARED = 6


class LiberoExpert:
    """One episode of one task. `environment` is LIBERO's own (robosuite) environment after its reset and wait steps."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        simulator = environment.sim
        self.model, self.data = simulator.model._model, simulator.data._data
        self.probe = ArmProbe(self.model, self.data)
        relation, object_name, target_name = single_goal(environment.parsed_problem["goal_state"])
        self.object_name, self.target_name, self.relation = object_name, target_name, relation
        category = environment.get_object(object_name).category_name
        self.style: GraspStyle = GRASP_STYLES.get(category, "pinch")
        self.object_body = environment.obj_body_id[object_name]
        self.tried: list[GraspCandidate] = []
        self._idle_steps = 0
        self.controller: PickPlaceController | None = None
        self.attempts = 0

    def action(self) -> np.ndarray:
        """The next action, float32 [7]."""
        if self.controller is None or self.controller.phase in ("failed", "done"):
            self._idle_steps -= 1
            plan = self._plan() if self._idle_steps < 0 else None
            if plan is None:
                # Nothing that was not tried before can be reached: wait, begin again, and in the end the trial runs out.
                if self._idle_steps < 0:
                    self.tried.clear()
                    self._idle_steps = IDLE_STEPS
                return np.array([0, 0, 0, 0, 0, 0, OPEN], np.float32)
            self.controller = PickPlaceController(plan)
            self.attempts += 1
        return self.controller.action(self.state())

    def state(self) -> SceneState:
        """Everything that the controller looks at, now."""
        hand_3, rotation_33 = self.probe.hand_pose()
        return SceneState(hand_3, rotation_33, self.probe.opening(), self._object_position(), self._place_2())

    def _object_position(self) -> np.ndarray:
        return self.data.xpos[self.object_body].copy()

    def _place_2(self) -> np.ndarray:
        """Where the object's origin has to go."""
        if self.relation == "on":
            return self.data.xpos[self.environment.obj_body_id[self.target_name]][:2].copy()
        return self.data.site_xpos[self.environment.sim.model.site_name2id(self.target_name)][:2].copy()

    def _release_height(self, hangs: float) -> float:
        """z of the hand at which an object may be let go whose lowest point is `hangs` below the hand."""
        if self.relation == "on":
            points_N3 = body_points(self.model, self.data, self.environment.obj_body_id[self.target_name])
            # A plate's middle is lower than its edge. 4 mm below: until it touches.
            is_inner_N = np.linalg.norm(points_N3[:, :2] - self._place_2(), axis=1) < 0.04
            return float(points_N3[is_inner_N, 2].max(initial=points_N3[:, 2].min())) + hangs - 0.004
        # As deep in the basket as the palm, 4.5 cm above the hand's reference point, goes.
        site = self.environment.sim.model.site_name2id(self.target_name)
        return float(self.data.site_xpos[site][2] + self.model.site_size[site][2]) - 0.03

    def _plan(self) -> PickPlacePlan | None:
        """The best grasp that was not tried before; None when none can be reached."""
        points_N3 = body_points(self.model, self.data, self.object_body)
        rotation_33, angle_now = upright_hand(self.probe)
        make = rim_candidates if self.style == "rim" else pinch_candidates
        candidates = [c for c in make(points_N3, angle_now) if not any(is_same(c, tried) for tried in self.tried)]
        options = [(candidate.cost + TILT_COST * tilt, tilt, candidate) for candidate in candidates for tilt in TILTS]
        options.sort(key=lambda option: option[0])
        ignored_roots = int(self.model.body_rootid[self.object_body]), self.probe.robot_root
        highest = highest_between(self.model, self.data, self._object_position()[:2], self._place_2(), ignored_roots)
        # Wide open where there is room; in a drawer the fingers go down half closed.
        for finger in (FINGER_OPEN, HALF_OPEN):
            feasible: list[tuple[float, GraspCandidate, PickPlacePlan]] = []
            for cost, tilt, candidate in options:
                turn = wrapped_angle(candidate.closing_angle - angle_now)
                grasp_33 = self._lean_out(candidate, tilt) @ about_z(turn) @ rotation_33
                hangs = float(candidate.position_3[2] - points_N3[:, 2].min())
                plan = PickPlacePlan(
                    grasp_3=candidate.position_3,
                    rotation_33=grasp_33,
                    approach_height=candidate.position_3[2] + APPROACH_HEIGHT,
                    carry_height=max(highest + hangs + CARRY_MARGIN, candidate.position_3[2] + MIN_LIFT),
                    release_height=self._release_height(hangs),
                    closing_steps=round((FINGER_OPEN - finger) / FINGER_PER_STEP),
                )
                squareness = self._squareness(candidate, plan, finger)
                if squareness is not None:
                    feasible.append((cost + UNSQUARE_COST * (1.0 - squareness), candidate, plan))
                if len(feasible) == MAX_COMPARED:
                    break
            if feasible:
                _, candidate, plan = min(feasible, key=lambda entry: entry[0])
                self.tried.append(candidate)
                return plan
        return None

    def _lean_out(self, candidate: GraspCandidate, tilt: float) -> np.ndarray:
        """Rotation [3, 3] about the closing direction: finger tips away from the robot, which reaches farther so."""
        away_2 = candidate.position_3[:2] - self.data.xpos[self.probe.shoulder_body][:2]
        angle = candidate.closing_angle
        # Turning "down" about (cos, sin, 0) moves it towards (-sin, cos, 0).
        sign = 1.0 if away_2 @ [-np.sin(angle), np.cos(angle)] >= 0 else -1.0
        return about_horizontal(angle, sign * tilt)

    def _squareness(self, candidate: GraspCandidate, plan: PickPlacePlan, finger: float) -> float | None:
        """See ArmProbe.closes_on; None also when the arm cannot go there and on to the place without touching anything."""
        probe, target_root = self.probe, int(self.model.body_rootid[self.object_body])
        grasp_joints_7 = None
        with probe.clearance():
            # Down to up: most of what is not feasible is so at the grasp itself.
            for rise in APPROACH_CHECKS:
                joints_7 = probe.joints_for(plan.grasp_3 + np.array([0.0, 0.0, rise]), plan.rotation_33)
                if joints_7 is None or probe.touched(joints_7, finger):
                    return None
                grasp_joints_7 = joints_7 if grasp_joints_7 is None else grasp_joints_7
        offset_2 = plan.grasp_3[:2] - self._object_position()[:2]
        for height in (plan.carry_height, plan.release_height):
            position_3 = np.append(self._place_2() + offset_2, height)
            joints_7 = probe.joints_for(position_3, plan.rotation_33)
            if joints_7 is None or probe.touched(joints_7, finger, ignored_root=target_root):
                return None
        assert grasp_joints_7 is not None
        closing_3 = np.array([np.cos(candidate.closing_angle), np.sin(candidate.closing_angle), 0.0])
        return probe.closes_on(grasp_joints_7, target_root, closing_3)


def single_goal(goal_state: list[list[str]]) -> tuple[str, str, str]:
    """(relation, object, target) of a task with one `on` or `in`. SimulatorError for any other task."""
    if len(goal_state) != 1 or goal_state[0][0] not in ("on", "in"):
        raise SimulatorError(
            f"goal {goal_state}: the scripted expert solves tasks with one On or In, as in libero_object and libero_spatial"
        )
    relation, object_name, target_name = goal_state[0]
    return relation, object_name, target_name


def upright_hand(probe: ArmProbe) -> tuple[np.ndarray, float]:
    """The hand's rotation with the fingers straight down, nearest to its present one, and its closing direction."""
    _, rotation_33 = probe.hand_pose()
    down_3 = np.array([0.0, 0.0, -1.0])
    x_3 = rotation_33[:, 0] - down_3 * (down_3 @ rotation_33[:, 0])
    x_3 /= np.linalg.norm(x_3)
    return np.stack([x_3, np.cross(down_3, x_3), down_3], axis=1), probe.closing_angle()


def is_same(one: GraspCandidate, other: GraspCandidate) -> bool:
    """Whether two candidates are so near that the second would fail as the first did."""
    near = np.linalg.norm(one.position_3 - other.position_3) < 0.012
    return bool(near and abs(wrapped_angle(one.closing_angle - other.closing_angle)) < 0.2)
