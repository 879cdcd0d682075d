"""The LIBERO expert without a simulator: grasp candidates from shapes, phases against a hand that obeys, slips or misses."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_vla.evaluation.experts import grasp_candidates, pick_place
from megatron_vla.evaluation.experts.grasp_candidates import pinch_candidates, rim_candidates, wrapped_angle
from megatron_vla.evaluation.experts.libero_pick_place import is_same, single_goal
from megatron_vla.evaluation.experts.pick_place import PickPlaceController, PickPlacePlan, SceneState, servo_action
from megatron_vla.evaluation.experts.scene_geometry import about_horizontal, about_z, axis_angle, highest_between

DOWN_33 = np.diag([1.0, -1.0, -1.0])


def box_points(size: tuple[float, float, float], centre: tuple[float, float, float], yaw: float = 0.0) -> np.ndarray:
    """Points of a box that stands on z = centre z - size z / 2."""
    grid_N3 = np.stack(np.meshgrid(*[np.linspace(-0.5, 0.5, 7)] * 3), axis=-1).reshape(-1, 3) * size
    return grid_N3 @ about_z(yaw).T + centre


@pytest.mark.parametrize("yaw", [0.0, 0.5, -1.2])
def test_a_box_is_pinched_across_its_narrow_side(yaw: float) -> None:
    points_N3 = box_points((0.10, 0.04, 0.02), (0.3, -0.1, 0.01), yaw)
    best = pinch_candidates(points_N3, current_angle=np.pi / 2)[0]
    # Half a step of the angle grid.
    assert abs(wrapped_angle(best.closing_angle - (yaw + np.pi / 2))) < np.pi / grasp_candidates.NUM_PINCH_ANGLES / 2 + 1e-6
    np.testing.assert_allclose(best.position_3[:2], [0.3, -0.1], atol=1e-6)
    # The finger tips stay above what the box stands on, and the box is between the pads.
    assert grasp_candidates.TIP_LENGTH < best.position_3[2] <= 0.02


def test_what_is_too_wide_is_not_pinched_and_turning_costs() -> None:
    assert pinch_candidates(box_points((0.09, 0.09, 0.1), (0, 0, 0.05)), 0.0) == []
    square_N3 = box_points((0.05, 0.05, 0.1), (0, 0, 0.05))
    for now in (0.0, np.pi / 2):
        assert abs(wrapped_angle(pinch_candidates(square_N3, now)[0].closing_angle - now)) < 1e-6


def test_a_bowl_is_held_by_its_wall_radially() -> None:
    azimuth_N = np.linspace(0, 2 * np.pi, 200, endpoint=False)
    ring_N2 = np.concatenate([r * np.stack([np.cos(azimuth_N), np.sin(azimuth_N)], axis=1) for r in (0.046, 0.054)])
    points_N3 = np.concatenate([np.column_stack([ring_N2 + np.array([0.1, 0.2]), np.full(400, z)]) for z in (0.9, 0.93, 0.95)])
    candidates = rim_candidates(points_N3, current_angle=np.pi / 2)
    for candidate in candidates:
        radial_2 = candidate.position_3[:2] - [0.1, 0.2]
        assert np.linalg.norm(radial_2) == pytest.approx(0.05, abs=1e-3)
        closing_2 = np.array([np.cos(candidate.closing_angle), np.sin(candidate.closing_angle)])
        assert abs(closing_2 @ radial_2) == pytest.approx(0.05, abs=1e-3)
        assert 0.92 < candidate.position_3[2] < 0.95
    # The two sides that need no turn of the wrist come first; a failed one is not tried again next door.
    assert {round(c.position_3[1] - 0.2, 3) for c in candidates[:2]} == {0.05, -0.05}
    assert is_same(candidates[0], candidates[0]) and not is_same(candidates[0], candidates[1])


def test_rotations() -> None:
    turn_33 = about_z(0.4) @ about_horizontal(0.3, 0.2)
    angle = np.linalg.norm(axis_angle(turn_33))
    assert angle == pytest.approx(np.arccos((np.trace(turn_33) - 1) / 2))
    np.testing.assert_allclose(turn_33 @ axis_angle(turn_33), axis_angle(turn_33), atol=1e-12)
    np.testing.assert_allclose(axis_angle(about_z(-0.7)), [0, 0, -0.7], atol=1e-12)
    # About the x axis "down" leans to +y.
    assert (about_horizontal(0.0, 0.3) @ [0, 0, -1])[1] == pytest.approx(np.sin(0.3))
    assert not axis_angle(np.eye(3)).any()


def test_the_corridor_sees_what_is_in_it() -> None:
    """Three boxes: on the way, far beside it, and the carried one."""
    model = SimpleNamespace(
        geom_contype=np.ones(4),
        geom_conaffinity=np.zeros(4),
        geom_type=np.array([6, 6, 6, 0]),
        geom_bodyid=np.array([1, 2, 3, 0]),
        body_rootid=np.arange(4),
        geom_aabb=np.tile([0, 0, 0, 0.02, 0.02, 0.05], (4, 1)),
    )
    data = SimpleNamespace(
        geom_xpos=np.array([[0.2, 0.05, 0.1], [0.2, 0.5, 0.8], [0.0, 0.0, 0.7], [0, 0, 9]]),
        geom_xmat=np.tile(np.eye(3).ravel(), (4, 1)),
    )
    assert highest_between(model, data, np.zeros(2), np.array([0.4, 0.0]), (3,)) == pytest.approx(0.15)


class Plant:
    """A hand that does 60 % of each action; it holds what its fingers close on, unless it slips."""

    def __init__(self, slips_after: int | None = None, reach: float = 0.02) -> None:
        self.hand_3, self.rotation_33 = np.array([0.0, 0.0, 0.3]), DOWN_33
        self.object_3, self.place_2 = np.array([0.2, -0.1, 0.02]), np.array([-0.1, 0.2])
        self.finger, self.holds, self.held_steps = 0.04, False, 0
        self.slips_after, self.reach = slips_after, reach

    def state(self) -> SceneState:
        opening = 0.03 if self.holds else 2 * self.finger
        return SceneState(self.hand_3, self.rotation_33, opening, self.object_3, self.place_2)

    def step(self, action_7: np.ndarray) -> None:
        assert action_7.dtype == np.float32 and np.abs(action_7).max() <= 1.0
        moved_3 = 0.6 * pick_place.METRES_PER_ACTION * action_7[:3].astype(float) / pick_place.GAIN
        self.hand_3 = self.hand_3 + moved_3
        turn_3 = 0.6 * pick_place.RADIANS_PER_ACTION * action_7[3:6].astype(float) / pick_place.GAIN
        if np.linalg.norm(turn_3) > 0:
            self.rotation_33 = about_z(turn_3[2]) @ self.rotation_33
        step = pick_place.FINGER_PER_STEP * np.sign(action_7[6])
        self.finger = float(np.clip(self.finger - step, 0.0, 0.04))
        near = np.linalg.norm(self.object_3 - self.hand_3) < self.reach
        self.holds = action_7[6] >= 0 and (self.holds or (near and self.finger < 0.015))
        if self.holds:
            self.object_3 = self.object_3 + moved_3
            self.held_steps += 1
            if self.held_steps == self.slips_after:
                self.holds, self.slips_after = False, None
                self.object_3 = np.append(self.object_3[:2] + np.array([0.2, 0]), 0.02)
        elif action_7[6] < 0:
            self.object_3 = np.append(self.object_3[:2], 0.02)


def plan(closing_steps: int = 0, yaw: float = 0.6) -> PickPlacePlan:
    return PickPlacePlan(
        grasp_3=np.array([0.2, -0.1, 0.03]),
        rotation_33=about_z(yaw) @ DOWN_33,
        approach_height=0.13,
        carry_height=0.25,
        release_height=0.04,
        closing_steps=closing_steps,
    )


def run(plant: Plant, plan: PickPlacePlan, max_steps: int = 300) -> tuple[list[str], list[float]]:
    """(phases in order, gripper commands)."""
    controller = PickPlaceController(plan)
    phases: list[str] = []
    grippers = []
    for _ in range(max_steps):
        action_7 = controller.action(plant.state())
        if not phases or phases[-1] != controller.phase:
            phases.append(controller.phase)
        if controller.phase in ("done", "failed"):
            break
        grippers.append(float(action_7[6]))
        plant.step(action_7)
    return phases, grippers


def test_phases_bring_the_object_to_its_place() -> None:
    plant = Plant()
    phases, _ = run(plant, plan())
    assert phases == ["above", "descend", "close", "lift", "carry", "lower", "release", "retreat", "done"]
    assert np.abs(plant.object_3[:2] - plant.place_2).max() < 0.012
    np.testing.assert_allclose(plant.rotation_33, about_z(0.6) @ DOWN_33, atol=0.05)


def test_an_empty_grasp_and_a_slip_are_noticed() -> None:
    phases, grippers = run(Plant(reach=0.0), plan())
    assert phases == ["above", "descend", "close", "lift", "recover", "failed"]
    # Let go before the next plan is made.
    assert grippers[-pick_place.RECOVER_STEPS :] == [pick_place.OPEN] * pick_place.RECOVER_STEPS
    phases, _ = run(Plant(slips_after=25), plan())
    assert phases[-2:] == ["recover", "failed"] and "carry" in phases


def test_tight_places_are_entered_with_half_open_fingers() -> None:
    phases, grippers = run(Plant(), plan(closing_steps=4))
    assert phases[-1] == "done"
    assert grippers[:4] == [pick_place.CLOSE] * 4 and grippers[4] == pick_place.HOLD


def test_a_blocked_hand_gives_up() -> None:
    """The hand cannot get there (it does not move at all)."""
    controller = PickPlaceController(plan())
    state = Plant().state()
    for _ in range(pick_place.MAX_PHASE_STEPS + 1):
        controller.action(state)
    assert controller.phase == "recover"


def test_a_long_way_down_does_not_weaken_the_hold_on_the_line() -> None:
    state = Plant().state()
    far = servo_action(state, state.hand_3 + np.array([0.01, 0, -0.5]), DOWN_33, -1.0)
    near = servo_action(state, state.hand_3 + np.array([0.01, 0, 0]), DOWN_33, -1.0)
    assert far[0] == near[0] > 0.2 and far[2] == -1.0


def test_goals_that_the_expert_knows() -> None:
    assert single_goal([["on", "akita_black_bowl_1", "plate_1"]]) == ("on", "akita_black_bowl_1", "plate_1")
    for goal in ([["open", "cabinet"]], [["on", "a", "b"], ["on", "c", "d"]]):
        with pytest.raises(ValueError, match="one On or In"):
            single_goal(goal)
