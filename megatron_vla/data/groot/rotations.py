"""Poses of an end effector in the formats that robot data uses, as rotation matrices and back; float64 inside.

Source: textbook formulas (Shepperd's method for matrix -> quaternion, Rodrigues' for axis-angle); rot6d is the first two rows
of the matrix, rebuilt by Gram-Schmidt and a cross product (spec of GR00T N1.7, section 5.2).

Shape legend: leading `...` are batch dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

SMALL_ANGLE = 1e-8


def matrix_from_rot6d(rows: np.ndarray) -> np.ndarray:
    """[..., 6] -> [..., 3, 3]: both rows made orthonormal, the third their cross product."""
    first = _unit(rows[..., :3])
    second = rows[..., 3:]
    second = _unit(second - (first * second).sum(axis=-1, keepdims=True) * first)
    return np.stack([first, second, np.cross(first, second)], axis=-2)


def rot6d_from_matrix(matrix: np.ndarray) -> np.ndarray:
    """[..., 3, 3] -> [..., 6]."""
    return matrix[..., :2, :].reshape(*matrix.shape[:-2], 6)


def matrix_from_rotvec(vector: np.ndarray) -> np.ndarray:
    """Axis times angle in radians, [..., 3] -> [..., 3, 3]."""
    angle = np.linalg.norm(vector, axis=-1)[..., None, None]
    cross = _cross_matrix(vector)
    is_small = angle < SMALL_ANGLE
    safe = np.where(is_small, 1.0, angle)
    # Series near zero, where both quotients are 0 / 0.
    first = np.where(is_small, 1.0 - angle**2 / 6.0, np.sin(safe) / safe)
    second = np.where(is_small, 0.5 - angle**2 / 24.0, (1.0 - np.cos(safe)) / safe**2)
    return np.eye(3) + first * cross + second * (cross @ cross)


def rotvec_from_matrix(matrix: np.ndarray) -> np.ndarray:
    """[..., 3, 3] -> [..., 3], angle in [0, pi]."""
    quaternion = quaternion_from_matrix(matrix)
    # The half with positive scalar part: the shorter way round.
    quaternion = np.where(quaternion[..., 3:] < 0, -quaternion, quaternion)
    sine = np.linalg.norm(quaternion[..., :3], axis=-1, keepdims=True)
    angle = 2.0 * np.arctan2(sine, quaternion[..., 3:])
    factor = np.where(sine < SMALL_ANGLE, 2.0, angle / np.where(sine < SMALL_ANGLE, 1.0, sine))
    return quaternion[..., :3] * factor


def matrix_from_quaternion(quaternion: np.ndarray) -> np.ndarray:
    """(x, y, z, w) of any length above zero, [..., 4] -> [..., 3, 3]."""
    x, y, z, w = np.moveaxis(_unit(quaternion), -1, 0)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ]
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)


def quaternion_from_matrix(matrix: np.ndarray) -> np.ndarray:
    """[..., 3, 3] -> unit (x, y, z, w) [..., 4]; of both signs the one whose largest component is positive."""
    m = np.moveaxis(matrix, (-2, -1), (0, 1))
    trace = m[0, 0] + m[1, 1] + m[2, 2]
    # Four ways to write it; the one with the largest divisor is exact everywhere.
    squares = np.stack([m[0, 0] * 2 - trace, m[1, 1] * 2 - trace, m[2, 2] * 2 - trace, trace], axis=-1) + 1.0
    xy, xz, yz = m[0, 1] + m[1, 0], m[0, 2] + m[2, 0], m[1, 2] + m[2, 1]
    xw, yw, zw = m[2, 1] - m[1, 2], m[0, 2] - m[2, 0], m[1, 0] - m[0, 1]
    candidates = np.stack(
        [
            np.stack([squares[..., 0], xy, xz, xw], axis=-1),
            np.stack([xy, squares[..., 1], yz, yw], axis=-1),
            np.stack([xz, yz, squares[..., 2], zw], axis=-1),
            np.stack([xw, yw, zw, squares[..., 3]], axis=-1),
        ],
        axis=-2,
    )
    best = np.argmax(squares, axis=-1)[..., None, None]
    return _unit(np.take_along_axis(candidates, best, axis=-2)[..., 0, :])


def matrix_from_euler(angles: np.ndarray) -> np.ndarray:
    """Roll, pitch, yaw (radians, about fixed x, y, z in turn), [..., 3] -> [..., 3, 3]: R = Rz(yaw) Ry(pitch) Rx(roll)."""
    roll, pitch, yaw = np.moveaxis(np.asarray(angles, dtype=np.float64), -1, 0)
    sr, cr, sp, cp, sy, cy = np.sin(roll), np.cos(roll), np.sin(pitch), np.cos(pitch), np.sin(yaw), np.cos(yaw)
    rows = [
        [cy * cp, cy * sp * sr - sy * cr, cy * sp * cr + sy * sr],
        [sy * cp, sy * sp * sr + cy * cr, sy * sp * cr - cy * sr],
        [-sp, cp * sr, cp * cr],
    ]
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)


def euler_from_matrix(matrix: np.ndarray) -> np.ndarray:
    """Inverse of `matrix_from_euler`, pitch in [-pi/2, pi/2]; at pitch +-pi/2, where only a sum is defined, yaw is 0."""
    cosine = np.hypot(matrix[..., 0, 0], matrix[..., 1, 0])
    is_locked = cosine < SMALL_ANGLE
    pitch = np.arctan2(-matrix[..., 2, 0], cosine)
    roll = np.where(
        is_locked,
        np.arctan2(-matrix[..., 1, 2], matrix[..., 1, 1]),
        np.arctan2(matrix[..., 2, 1], matrix[..., 2, 2]),
    )
    yaw = np.where(is_locked, 0.0, np.arctan2(matrix[..., 1, 0], matrix[..., 0, 0]))
    return np.stack([roll, pitch, yaw], axis=-1)


def _unit(vectors: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    if not (length > 0).all():
        raise ValueError(
            "a rotation of length 0 (rot6d row or quaternion): the state or action column does not hold rotations there; "
            "check the slices in modality.json and the action format"
        )
    return vectors / length


def _cross_matrix(vector: np.ndarray) -> np.ndarray:
    x, y, z = np.moveaxis(vector, -1, 0)
    zero = np.zeros_like(x)
    return np.stack([np.stack(r, axis=-1) for r in ((zero, -z, y), (z, zero, -x), (-y, x, zero))], axis=-2)


Conversion = tuple[int, Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]
# Action format -> (numbers of the rotation, to matrix, from matrix); each follows x, y, z. The first two are the released ones.
ROTATION_FORMATS: Mapping[str, Conversion] = {
    "XYZ_ROT6D": (6, matrix_from_rot6d, rot6d_from_matrix),
    "XYZ_ROTVEC": (3, matrix_from_rotvec, rotvec_from_matrix),
    "XYZ_QUATERNION": (4, matrix_from_quaternion, quaternion_from_matrix),
    "XYZ_EULER": (3, matrix_from_euler, euler_from_matrix),
}


def pose_width(rotation_format: str) -> int:
    """Numbers of a pose: position and rotation."""
    return 3 + ROTATION_FORMATS[rotation_format][0]


def relative_pose(pose: np.ndarray, reference: np.ndarray, rotation_format: str) -> np.ndarray:
    """Pose in the frame of a reference pose, T_ref^-1 T: [..., width] each, broadcast against each other; float64."""
    _, to_matrix, from_matrix = ROTATION_FORMATS[rotation_format]
    pose, reference = np.asarray(pose, dtype=np.float64), np.asarray(reference, dtype=np.float64)
    inverse = np.swapaxes(to_matrix(reference[..., 3:]), -1, -2)
    position = (inverse @ (pose[..., :3] - reference[..., :3])[..., None])[..., 0]
    return np.concatenate([position, from_matrix(inverse @ to_matrix(pose[..., 3:]))], axis=-1)


def absolute_pose(relative: np.ndarray, reference: np.ndarray, rotation_format: str) -> np.ndarray:
    """Inverse of `relative_pose`."""
    _, to_matrix, from_matrix = ROTATION_FORMATS[rotation_format]
    relative, reference = np.asarray(relative, dtype=np.float64), np.asarray(reference, dtype=np.float64)
    turn = to_matrix(reference[..., 3:])
    position = (turn @ relative[..., :3, None])[..., 0] + reference[..., :3]
    return np.concatenate([position, from_matrix(turn @ to_matrix(relative[..., 3:]))], axis=-1)
