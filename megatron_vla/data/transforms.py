"""Pure transforms of actions and states, each with its inverse.

Shape legend: T action horizon, D robot dimensions, A padded action dimensions; leading `...` are batch dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def _offset(actions_TD: np.ndarray, state_D: np.ndarray, dims: Sequence[int]) -> np.ndarray:
    """State at the chosen dimensions, 0 elsewhere: [..., 1, D], in the actions' dtype."""
    width = actions_TD.shape[-1]
    wrong = [dim for dim in dims if not 0 <= dim < min(width, state_D.shape[-1])]
    if wrong:
        raise ValueError(
            f"--delta-action-dims {' '.join(map(str, wrong))}: actions have {width} dimensions and the state "
            f"{state_D.shape[-1]}; a delta dimension must exist in both"
        )
    # Zero elsewhere, so that one subtraction serves all dimensions and the inverse is its mirror.
    offset = np.zeros((*state_D.shape[:-1], width), dtype=actions_TD.dtype)
    chosen = list(dims)
    offset[..., chosen] = state_D[..., chosen]
    return offset[..., None, :]


def absolute_to_delta(actions_TD: np.ndarray, state_D: np.ndarray, dims: Sequence[int]) -> np.ndarray:
    """Actions minus the *current* state on `dims`: [..., T, D].

    Every step of the chunk subtracts the same state, repeated steps beyond the episode's end too, so `delta_to_absolute` is
    exact there.
    """
    return actions_TD - _offset(actions_TD, state_D, dims)


def delta_to_absolute(actions_TD: np.ndarray, state_D: np.ndarray, dims: Sequence[int]) -> np.ndarray:
    """Inverse of `absolute_to_delta`: [..., T, D]."""
    return actions_TD + _offset(actions_TD, state_D, dims)


def pad_last_dim(values_D: np.ndarray, width: int) -> np.ndarray:
    """Zeros appended to the last dimension: [..., D] -> [..., width].

    Done after normalization, so padded dimensions are exactly 0 for the model. Raises ValueError when D > width.
    """
    # Silently cutting here would train on half a robot.
    missing = width - values_D.shape[-1]
    if missing < 0:
        raise ValueError(f"{values_D.shape[-1]} dimensions do not fit into {width}; raise --max-action-dim")
    # Not np.pad: for arrays this small its set-up costs more than the rest of a sample's arithmetic.
    padded = np.zeros((*values_D.shape[:-1], width), dtype=values_D.dtype)
    padded[..., : values_D.shape[-1]] = values_D
    return padded


def action_loss_mask(
    action_loss: str, action_is_in_episode_T: np.ndarray, action_dim: int, max_action_dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """(elements of the loss [..., T, A], real dimensions of the robot [A]), both bool.

    valid: real dimensions at steps inside the episode. real_dims: also repeated steps beyond its end (LeRobot's recipe).
    all: padded dimensions too (openpi's recipe).
    """
    # The robot's dimensions come first; padding follows.
    is_real_A = np.arange(max_action_dim) < action_dim
    shape = (*action_is_in_episode_T.shape, max_action_dim)
    if action_loss == "valid":
        return action_is_in_episode_T[..., None] & is_real_A, is_real_A
    if action_loss == "real_dims":
        return np.broadcast_to(is_real_A, shape).copy(), is_real_A
    if action_loss == "all":
        return np.ones(shape, dtype=bool), is_real_A
    raise ValueError(f"--action-loss {action_loss}: known are valid, real_dims, all")
