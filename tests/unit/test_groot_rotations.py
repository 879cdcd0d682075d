"""Rotation formats: proper rotations, inverses, singular places, and actions relative -> absolute in float64."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_vla.data.groot.rotations import (
    ROTATION_FORMATS,
    absolute_pose,
    euler_from_matrix,
    matrix_from_euler,
    matrix_from_quaternion,
    matrix_from_rotvec,
    pose_width,
    quaternion_from_matrix,
    relative_pose,
    rotvec_from_matrix,
)

GENERATOR = np.random.default_rng(0)


@pytest.mark.parametrize("name", ROTATION_FORMATS)
def test_matrices_are_rotations_and_come_back(name: str) -> None:
    width, to_matrix, from_matrix = ROTATION_FORMATS[name]
    matrix = to_matrix(GENERATOR.normal(size=(500, width)))
    np.testing.assert_allclose(matrix @ np.swapaxes(matrix, -1, -2), np.broadcast_to(np.eye(3), matrix.shape), atol=1e-13)
    np.testing.assert_allclose(np.linalg.det(matrix), 1.0, atol=1e-13)
    np.testing.assert_allclose(to_matrix(from_matrix(matrix)), matrix, atol=1e-12)


@pytest.mark.parametrize("name", ROTATION_FORMATS)
def test_relative_pose_is_the_product_of_transforms_and_inverts(name: str) -> None:
    _, to_matrix, from_matrix = ROTATION_FORMATS[name]

    def transforms(pose: np.ndarray) -> np.ndarray:
        result = np.broadcast_to(np.eye(4), (*pose.shape[:-1], 4, 4)).copy()
        result[..., :3, :3], result[..., :3, 3] = to_matrix(pose[..., 3:]), pose[..., :3]
        return result

    pose, reference = GENERATOR.normal(size=(7, 5, pose_width(name))), GENERATOR.normal(size=(7, 1, pose_width(name)))
    relative = relative_pose(pose, reference, name)
    np.testing.assert_allclose(transforms(relative), np.linalg.inv(transforms(reference)) @ transforms(pose), atol=1e-12)
    back = absolute_pose(relative, reference, name)
    np.testing.assert_allclose(transforms(back), transforms(pose), atol=1e-12)
    np.testing.assert_allclose(back[..., 3:], from_matrix(to_matrix(pose[..., 3:])), atol=1e-10)


def test_special_rotations() -> None:
    for angle in (0.0, 1e-12, 1e-5, np.pi / 2, np.pi - 1e-7, np.pi):
        for axis in np.eye(3):
            vector = axis * angle
            matrix = matrix_from_rotvec(vector)
            expected = np.eye(3) + np.sin(angle) * _cross(axis) + (1 - np.cos(angle)) * _cross(axis) @ _cross(axis)
            np.testing.assert_allclose(matrix, expected, atol=1e-15)
            np.testing.assert_allclose(rotvec_from_matrix(matrix), vector, atol=1e-8)
    # A quarter turn about z takes x to y.
    quarter = np.array([0.0, 0.0, np.sqrt(0.5), np.sqrt(0.5)])
    np.testing.assert_allclose(matrix_from_quaternion(quarter) @ [1, 0, 0], [0, 1, 0], atol=1e-15)
    np.testing.assert_allclose(quaternion_from_matrix(matrix_from_quaternion(-quarter)), quarter, atol=1e-15)
    # Straight up, roll and yaw cannot be told apart: the rotation still comes back.
    for pitch in (np.pi / 2, -np.pi / 2):
        matrix = matrix_from_euler(np.array([0.4, pitch, 0.9]))
        np.testing.assert_allclose(matrix_from_euler(euler_from_matrix(matrix)), matrix, atol=1e-12)


def _cross(axis: np.ndarray) -> np.ndarray:
    x, y, z = axis
    return np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])


def test_columns_without_rotations_are_refused() -> None:
    with pytest.raises(ValueError, match="rotation of length 0"):
        relative_pose(np.zeros((2, 9)), np.zeros((1, 9)), "XYZ_ROT6D")
