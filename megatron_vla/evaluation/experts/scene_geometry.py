"""Shapes of a MuJoCo scene as points, and the few rotations that the experts need.

Shape legend: N points. Lengths in metres, angles in radians, z up.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def axis_angle(rotation_33: np.ndarray) -> np.ndarray:
    """Rotation matrix -> axis times angle [3]."""
    cosine = np.clip((np.trace(rotation_33) - 1) / 2, -1.0, 1.0)
    angle = np.arccos(cosine)
    axis_3 = np.array(
        [
            rotation_33[2, 1] - rotation_33[1, 2],
            rotation_33[0, 2] - rotation_33[2, 0],
            rotation_33[1, 0] - rotation_33[0, 1],
        ]
    )
    norm = np.linalg.norm(axis_3)
    if norm < 1e-6:
        # No turn, or half a turn, which no error here comes near.
        return np.zeros(3)
    return axis_3 / norm * angle


def about_z(angle: float) -> np.ndarray:
    """Rotation matrix about the vertical."""
    cosine, sine = np.cos(angle), np.sin(angle)
    return np.array([[cosine, -sine, 0.0], [sine, cosine, 0.0], [0.0, 0.0, 1.0]])


def about_horizontal(angle: float, turn: float) -> np.ndarray:
    """Rotation matrix by `turn` about the level axis at `angle`; a vector that points down leans to the axis' left."""
    cosine, sine = np.cos(turn), np.sin(turn)
    lean_33 = np.array([[1.0, 0.0, 0.0], [0.0, cosine, -sine], [0.0, sine, cosine]])
    return about_z(angle) @ lean_33 @ about_z(-angle)


def solid_geoms(model: Any) -> np.ndarray:
    """Numbers of the geoms that collide."""
    return np.flatnonzero((model.geom_contype != 0) | (model.geom_conaffinity != 0))


def geom_points(model: Any, data: Any, geom: int, per_side: int = 4) -> np.ndarray:
    """A grid of points [N, 3] in the geom's bounding box, which is the geom itself for LIBERO's box decompositions."""
    centre_3, half_3 = model.geom_aabb[geom][:3], model.geom_aabb[geom][3:]
    grid_N3 = np.stack(np.meshgrid(*[np.linspace(-1, 1, per_side)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    return data.geom_xpos[geom] + (centre_3 + grid_N3 * half_3) @ data.geom_xmat[geom].reshape(3, 3).T


def body_points(model: Any, data: Any, body: int) -> np.ndarray:
    """Points [N, 3] of everything solid in the tree of a body."""
    root = model.body_rootid[body]
    geoms = [g for g in solid_geoms(model) if model.body_rootid[model.geom_bodyid[g]] == root]
    return np.concatenate([geom_points(model, data, g) for g in geoms])


def highest_between(model: Any, data: Any, start_2: np.ndarray, end_2: np.ndarray, ignored_roots: tuple[int, ...]) -> float:
    """z of the highest solid point within 10 cm of the line between two places; whole bodies may be left out."""
    path_2 = end_2 - start_2
    length = max(float(np.linalg.norm(path_2)), 1e-6)
    highest = 0.0
    for geom in solid_geoms(model):
        # The floor is a plane without bounds.
        if model.body_rootid[model.geom_bodyid[geom]] in ignored_roots or model.geom_type[geom] == 0:
            continue
        points_N3 = geom_points(model, data, geom)
        offset_N2 = points_N3[:, :2] - start_2
        along_N1 = np.clip(offset_N2 @ path_2 / length, 0.0, length)[:, None]
        is_near_N = np.linalg.norm(offset_N2 - along_N1 * path_2 / length, axis=1) < 0.10
        highest = max(highest, float(points_N3[is_near_N, 2].max(initial=0.0)))
    return highest
