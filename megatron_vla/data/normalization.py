"""Normalization of states and actions, forward and back. No clipping anywhere.

openpi works in float64 and adds 1e-6 to every range. LeRobot works in the statistics' own float32 and replaces a range only
when it is exactly 0, by 1e-8; its mean/std inverse leaves that epsilon out. Both explode on (nearly) constant dimensions:
`statistics.py` checks that.

Shape legend: D dimensions of the values, S dimensions of the statistics; leading `...` are batch dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

Normalization = Literal["quantile", "mean_std", "identity"]
NormalizationVariant = Literal["openpi", "lerobot"]
OPENPI_EPSILON = 1e-6
LEROBOT_EPSILON = 1e-8


def _lerobot_range(low_S: np.ndarray, high_S: np.ndarray) -> np.ndarray:
    # Only an exact zero is replaced: a range of 1e-7 stays and explodes, as in the code that made the checkpoints.
    span_S = high_S - low_S
    return np.where(span_S == 0, np.asarray(LEROBOT_EPSILON, dtype=span_S.dtype), span_S)


def normalize_range(x_D: np.ndarray, low_S: np.ndarray, high_S: np.ndarray, variant: NormalizationVariant) -> np.ndarray:
    """low -> -1 and high -> 1: quantiles or min/max. [..., D] -> [..., D]."""
    if variant == "openpi":
        return (x_D - low_S) / (high_S - low_S + OPENPI_EPSILON) * 2.0 - 1.0
    return 2 * (x_D - low_S) / _lerobot_range(low_S, high_S) - 1


def unnormalize_range(y_D: np.ndarray, low_S: np.ndarray, high_S: np.ndarray, variant: NormalizationVariant) -> np.ndarray:
    """Inverse of `normalize_range`."""
    if variant == "openpi":
        return (y_D + 1.0) / 2.0 * (high_S - low_S + OPENPI_EPSILON) + low_S
    return (y_D + 1) * _lerobot_range(low_S, high_S) / 2 + low_S


def normalize_mean_std(x_D: np.ndarray, mean_S: np.ndarray, std_S: np.ndarray, variant: NormalizationVariant) -> np.ndarray:
    """Zero mean, unit standard deviation. [..., D] -> [..., D]."""
    epsilon = OPENPI_EPSILON if variant == "openpi" else LEROBOT_EPSILON
    return (x_D - mean_S) / (std_S + np.asarray(epsilon, dtype=std_S.dtype))


def unnormalize_mean_std(y_D: np.ndarray, mean_S: np.ndarray, std_S: np.ndarray, variant: NormalizationVariant) -> np.ndarray:
    """Inverse of `normalize_mean_std` as each code base writes it (LeRobot: without the epsilon)."""
    if variant == "openpi":
        return y_D * (std_S + OPENPI_EPSILON) + mean_S
    return y_D * std_S + mean_S


@dataclass(frozen=True)
class Normalizer:
    """Normalization of one feature.

    `statistics` maps q01, q99, mean, std to arrays [S]. Values narrower than the statistics use their first dimensions.
    Values wider than them are refused, except by openpi's inverse, where extra columns (the model's padding) pass:
    unchanged, or as mean 0, std 1.
    """

    mode: Normalization
    variant: NormalizationVariant
    statistics: Mapping[str, np.ndarray]

    def _pair(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        names = ("q01", "q99") if self.mode == "quantile" else ("mean", "std")
        # float32 statistics would move states across bin edges of the prompt: the variant fixes the precision too.
        dtype = np.float64 if self.variant == "openpi" else np.float32
        first_S, second_S = (np.asarray(self.statistics[name], dtype=dtype)[..., :width] for name in names)
        return first_S, second_S

    def normalize(self, x_D: np.ndarray) -> np.ndarray:
        """[..., D] physical -> [..., D] normalized; float64 for openpi, the input's own float type for lerobot."""
        if self.mode == "identity":
            return x_D
        first_S, second_S = self._pair(x_D.shape[-1])
        # Passing wider values through unnormalized is how models get trained on raw joint angles.
        if first_S.shape[-1] < x_D.shape[-1]:
            raise ValueError(
                f"values have {x_D.shape[-1]} dimensions, the statistics {first_S.shape[-1]}; "
                "recompute the statistics with tools/compute_norm_stats.py"
            )
        forward = normalize_range if self.mode == "quantile" else normalize_mean_std
        return forward(x_D, first_S, second_S, self.variant)

    def unnormalize(self, y_D: np.ndarray) -> np.ndarray:
        """[..., D] normalized -> [..., D] physical, inverse of `normalize`."""
        if self.mode == "identity":
            return y_D
        first_S, second_S = self._pair(y_D.shape[-1])
        width = first_S.shape[-1]
        inverse = unnormalize_range if self.mode == "quantile" else unnormalize_mean_std
        known_D = inverse(y_D[..., :width], first_S, second_S, self.variant)
        if width == y_D.shape[-1]:
            return known_D
        extra_D = y_D[..., width:]
        if self.variant != "openpi":
            raise ValueError(
                f"values have {y_D.shape[-1]} dimensions, the statistics {width}; slice the model's padding off first"
            )
        if self.mode == "mean_std":
            # openpi pads mean with 0 and std with 1, and then adds its epsilon to that 1.
            extra_D = extra_D * (1.0 + OPENPI_EPSILON)
        return np.concatenate([known_D, extra_D], axis=-1)
