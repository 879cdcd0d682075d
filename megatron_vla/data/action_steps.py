"""Which frames an action chunk is made of when its rate differs from the dataset's.

Shape legend: N samples, T action horizon, D dimensions, R rows of the dataset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_vla.config.data import DataConfig
from megatron_vla.data.video_encoder import fps_fraction
from megatron_vla.findings import CheckError, error

Resampling = Literal["exact", "nearest", "linear"]


@dataclass(frozen=True)
class ActionSteps:
    """Step k of a chunk is k * frames_per_step frames after the sample's own frame; steps beyond the episode repeat its last
    action. linear mixes the two frames around a step, the others take one."""

    horizon: int
    frames_per_step: float = 1.0
    resampling: Resampling = "exact"

    def offsets_T(self) -> np.ndarray:
        """float64 [T], frames."""
        # Rates are ratios of integers, so a product within rounding of an integer is that integer.
        offsets_T = np.round(np.arange(self.horizon) * self.frames_per_step, 9)
        return offsets_T if self.resampling == "linear" else np.floor(offsets_T + 0.5)

    @property
    def reach(self) -> int:
        """Frames after the sample's own that a chunk may touch, plus one."""
        return int(np.ceil(self.offsets_T()[-1])) + 1

    def chunks(self, actions_RD: np.ndarray, row_N: np.ndarray, last_row_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(actions float32 [N, T, D], is_in_episode bool [N, T]) of samples at `row_N`; `last_row_N`: their episodes' last."""
        offsets_T = self.offsets_T()
        before_T = np.floor(offsets_T).astype(np.int64)
        rows_NT = row_N[:, None] + before_T[None, :]
        last_N1 = last_row_N[:, None]
        actions_NTD = actions_RD[np.minimum(rows_NT, last_N1)]
        weight_T = (offsets_T - before_T).astype(np.float32)
        if not weight_T.any():
            return actions_NTD, rows_NT <= last_N1
        after_NTD = actions_RD[np.minimum(rows_NT + 1, last_N1)]
        # Where no mixing is needed the frame itself, bit by bit, whatever its neighbour holds.
        is_between_T1 = (weight_T > 0)[:, None]
        mixed_NTD = (np.float32(1.0) - weight_T[:, None]) * actions_NTD + weight_T[:, None] * after_NTD
        return np.where(is_between_T1, mixed_NTD, actions_NTD), rows_NT + (weight_T > 0) <= last_N1

    def padded_share(self, length_E: np.ndarray) -> float:
        """Share of action steps beyond the end of their episode, over all samples of episodes of these lengths."""
        # A step between two frames needs both inside the episode.
        needed_T = np.ceil(self.offsets_T()).astype(np.int64)
        missing = sum(int(np.minimum(frames, length_E).sum()) for frames in needed_T)
        return missing / max(1, self.horizon * int(length_E.sum()))


def action_rate(data: DataConfig, horizon: int) -> float | None:
    """Steps per second that the flags ask for; None: the dataset's own rate. Raises CheckError for two answers."""
    if data.action_horizon_seconds is None:
        return data.action_fps
    if data.action_fps is not None:
        what = "both are set, and --action-horizon is the number of steps"
        raise CheckError([error("--action-fps, --action-horizon-seconds", what, "drop one of them")])
    return horizon / data.action_horizon_seconds


def action_steps(data: DataConfig, horizon: int, dataset_fps: float) -> ActionSteps:
    """Steps of one dataset. Raises CheckError when the wanted rate would need resampling that was not asked for."""
    rate = action_rate(data, horizon)
    flag = "--action-fps" if data.action_horizon_seconds is None else "--action-horizon-seconds"
    if rate is None:
        return ActionSteps(horizon)
    if not rate > 0:
        raise CheckError([error(flag, f"gives {rate:g} steps per second", "use a value above 0")])
    # As fractions: 30 / 10 is exactly 3, and 29.97 / 9.99 too.
    ratio = fps_fraction(dataset_fps) / fps_fraction(rate)
    if ratio == 1:
        return ActionSteps(horizon)
    # Deltas would have to be summed over skipped frames, and grippers among them must not be.
    if data.dataset_action_representation == "delta":
        what = f"{rate:g} steps per second of a {dataset_fps:g} fps dataset of delta actions: skipping some loses motion"
        raise CheckError([error(flag, what, f"use {dataset_fps:g} steps per second, or a dataset of absolute actions")])
    if data.action_resampling == "exact" and ratio.denominator != 1:
        divisors = [f"{dataset_fps / k:g}" for k in range(1, 6)]
        what = f"{rate:g} steps per second of a {dataset_fps:g} fps dataset: a step would be {float(ratio):.4g} frames long"
        fix = f"use one of {', '.join(divisors)} (or dataset rate / integer), or --action-resampling nearest or linear"
        raise CheckError([error(flag, what, fix)])
    return ActionSteps(horizon, float(ratio), data.action_resampling)
