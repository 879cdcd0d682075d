"""Where a two-finger gripper that points down could take an object: candidates from geometry alone, best guess first.

Two styles. `pinch` (boxes, cans, bottles): the fingers close around the object, across a narrow side, through its middle.
`rim` (bowls): one finger inside, one outside, closing radially on the wall. Whether the arm reaches a candidate, and whether
the fingers collide on the way, is for `arm_probe` to find out; here is only geometry, so that it can be tested without MuJoCo.

Angles: the direction in which the fingers close, in the world's xy plane, radians from x; a gripper turned by 180 degrees is
the same, so they live in [-pi/2, pi/2). Lengths in metres. Shape legend: N points.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

GraspStyle = Literal["pinch", "rim"]

# The fingers open to 8 cm; less on each side what keeps a pad from touching while it goes down.
MAX_PINCH_WIDTH = 0.072
# How deep below the object's top the hand's reference point goes: it lies between the pads, the palm is 4.5 cm above it and the
# finger tips are 1.3 cm below it.
PINCH_DEPTHS = (0.034, 0.026, 0.018, 0.01, 0.002)
TIP_LENGTH = 0.013
RIM_DEPTHS = (0.024, 0.018, 0.012)
NUM_PINCH_ANGLES = 24
NUM_RIM_ANGLES = 32


@dataclass(frozen=True)
class GraspCandidate:
    """Middle of the finger pads, world frame; closing direction; cost (lower is tried first)."""

    position_3: np.ndarray
    closing_angle: float
    cost: float


def wrapped_angle(angle: float) -> float:
    """`angle` in [-pi/2, pi/2): closing directions that differ by half a turn are one."""
    return float((angle + np.pi / 2) % np.pi - np.pi / 2)


def pinch_candidates(points_N3: np.ndarray, current_angle: float) -> list[GraspCandidate]:
    """Grasps across the object's narrow sides.

    points_N3: samples of the object's surface or volume, dense enough that every 2 cm slice has some.
    current_angle: closing direction of the gripper now; turning the wrist costs.
    """
    top, bottom = points_N3[:, 2].max(), points_N3[:, 2].min()
    candidates = []
    for depth in PINCH_DEPTHS:
        # Tips 4 mm above what the object stands on.
        height = max(top - depth, bottom + TIP_LENGTH + 0.004)
        # What the pads can touch; the wider parts above matter too, since the fingers pass them on the way down.
        passed_N2 = points_N3[points_N3[:, 2] > height - TIP_LENGTH][:, :2]
        for step in range(NUM_PINCH_ANGLES):
            angle = wrapped_angle(step * np.pi / NUM_PINCH_ANGLES)
            closing, across = direction(angle), direction(angle + np.pi / 2)
            along_N, across_N = passed_N2 @ closing, passed_N2 @ across
            width = float(np.ptp(along_N))
            if width > MAX_PINCH_WIDTH:
                continue
            middle_2 = closing * (along_N.max() + along_N.min()) / 2 + across * (across_N.max() + across_N.min()) / 2
            # A narrow side held square is worth a turn of the wrist: 1 cm of width against about 40 degrees.
            turn = abs(wrapped_angle(angle - current_angle))
            cost = 100.0 * width + 1.4 * turn + 20.0 * abs(height - (top + bottom) / 2)
            candidates.append(GraspCandidate(np.append(middle_2, height), angle, float(cost)))
    return sorted(unique(candidates), key=lambda candidate: candidate.cost)


def rim_candidates(points_N3: np.ndarray, current_angle: float) -> list[GraspCandidate]:
    """Grasps of a round wall. points_N3: samples of the bowl; its axis is vertical."""
    top = points_N3[:, 2].max()
    wall_N2 = points_N3[points_N3[:, 2] > top - 0.02][:, :2]
    middle_2 = (wall_N2.max(axis=0) + wall_N2.min(axis=0)) / 2
    distance_N = np.linalg.norm(wall_N2 - middle_2, axis=1)
    radius = float((distance_N.max() + distance_N.min()) / 2)
    candidates = []
    for rank, depth in enumerate(RIM_DEPTHS):
        for step in range(NUM_RIM_ANGLES):
            azimuth = 2 * np.pi * step / NUM_RIM_ANGLES
            position_3 = np.append(middle_2 + radius * direction(azimuth), top - depth)
            turn = abs(wrapped_angle(azimuth - current_angle))
            candidates.append(GraspCandidate(position_3, wrapped_angle(azimuth), 1.4 * turn + 0.3 * rank))
    return sorted(candidates, key=lambda candidate: candidate.cost)


def direction(angle: float) -> np.ndarray:
    """Unit vector [2] at `angle`."""
    return np.array([np.cos(angle), np.sin(angle)])


def unique(candidates: list[GraspCandidate]) -> list[GraspCandidate]:
    """Without those that a shorter object made equal (depths are limited by its bottom)."""
    seen: set[tuple[float, ...]] = set()
    kept = []
    for candidate in candidates:
        key = (*np.round(candidate.position_3, 4), round(candidate.closing_angle, 4))
        if key not in seen:
            seen.add(key)
            kept.append(candidate)
    return kept
