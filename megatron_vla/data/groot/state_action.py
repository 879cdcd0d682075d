"""States and actions of one embodiment: relative actions, normalization, and both back; the released arithmetic in float64.

Per dimension one of three rules (spec of GR00T N1.7, section 5.3): bounds (percentiles, or min and max; always min and max per
step for relative actions) to [-1, 1], clipped; mean and deviation; sine and cosine of angles (states only). A dimension whose
bounds are equal normalizes to 0.

Shape legend: T steps of the chunk, D dimensions of all keys in order, K dimensions of one key; leading `...` are batch
dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_vla.data.groot.modality import ModalityConfig
from megatron_vla.data.groot.rotations import absolute_pose, pose_width, relative_pose

Bounds = Mapping[
    str, Mapping[str, np.ndarray]
]  # key -> statistic (min, max, mean, std, q01, q99) -> [K], relative actions [T, K]
STATISTICS = ("mean", "std", "min", "max", "q01", "q99")


@dataclass(frozen=True)
class KeyStatistics:
    """Statistics by key: of states and actions [K], of relative actions per step [T, K]."""

    state: Bounds
    action: Bounds
    relative_action: Bounds

    @staticmethod
    def from_dict(content: Mapping[str, Any], where: str) -> KeyStatistics:
        """One tag of a released statistics.json. Raises ValueError naming a missing or non-finite statistic."""
        parts: dict[str, dict[str, dict[str, np.ndarray]]] = {}
        for part in ("state", "action", "relative_action"):
            parts[part] = {}
            for key, values in content.get(part, {}).items():
                missing = [name for name in STATISTICS if name not in values]
                if missing:
                    raise ValueError(f"{where}: {part}.{key} has no {', '.join(missing)}")
                arrays = {name: np.asarray(values[name], dtype=np.float64) for name in STATISTICS}
                bad = [name for name, array in arrays.items() if not np.isfinite(array).all()]
                if bad:
                    raise ValueError(f"{where}: {part}.{key}: {', '.join(bad)} not finite")
                parts[part][key] = arrays
        return KeyStatistics(parts["state"], parts["action"], parts["relative_action"])

    def to_dict(self) -> dict[str, Any]:
        """Inverse of `from_dict`; floats survive bit by bit."""
        parts = {"state": self.state, "action": self.action, "relative_action": self.relative_action}
        return {
            part: {key: {name: array.tolist() for name, array in values.items()} for key, values in keys.items()}
            for part, keys in parts.items()
            if keys or part != "relative_action"
        }


@dataclass(frozen=True)
class KeyNormalizer:
    """One key. method bounds: low and high; mean_std: mean and deviation; sin_cos: neither."""

    method: str
    first: np.ndarray
    second: np.ndarray

    def normalize(self, values: np.ndarray, clip_mean_std: bool) -> np.ndarray:
        """[..., K] -> [..., K], or [..., 2 K] for sin_cos. clip_mean_std: the released code clips actions, not states."""
        scaled = self.scaled(values)
        return np.clip(scaled, -1.0, 1.0) if self.method == "bounds" or clip_mean_std else scaled

    def scaled(self, values: np.ndarray) -> np.ndarray:
        """`normalize` without clipping."""
        if self.method == "sin_cos":
            return np.concatenate([np.sin(values), np.cos(values)], axis=-1)
        if self.method == "mean_std":
            moves = self.second != 0
            return np.where(moves, (values - self.first) / np.where(moves, self.second, 1.0), values)
        moves = ~np.isclose(self.second, self.first)
        span = np.where(moves, self.second - self.first, 1.0)
        return np.where(moves, 2.0 * ((values - self.first) / span) - 1.0, 0.0)

    def unnormalize(self, values: np.ndarray) -> np.ndarray:
        """Inverse of `normalize` (not of sin_cos): clipped to [-1, 1] first, as released."""
        assert self.method != "sin_cos", "only states are encoded so, and states are never decoded"
        if self.method == "mean_std":
            return np.where(self.second != 0, values * self.second + self.first, values)
        return (np.clip(values, -1.0, 1.0) + 1.0) / 2.0 * (self.second - self.first) + self.first


@dataclass(frozen=True)
class StateActionOptions:
    """use_percentiles: q01 and q99 instead of min and max; sin_cos: honour the configuration's sine and cosine keys.

    use_relative_action: honour RELATIVE representations (off: all actions as the dataset writes them).
    """

    use_percentiles: bool = True
    sin_cos: bool = False
    use_relative_action: bool = True


class StateActionTransform:
    """Physical states and actions <-> what the model sees, without padding. widths: numbers of each key."""

    def __init__(
        self,
        modality: ModalityConfig,
        state_widths: Sequence[int],
        action_widths: Sequence[int],
        statistics: KeyStatistics,
        options: StateActionOptions,
    ) -> None:
        self.modality = modality
        self.options = options
        self.state_slices = key_slices(modality.state.keys, state_widths)
        self.action_slices = key_slices(modality.action.keys, action_widths)
        self.relative = RelativeActions(modality, self.state_slices, self.action_slices, options.use_relative_action)
        sin_cos = set(modality.state.sin_cos_keys or ()) if options.sin_cos else set()
        self._state = {
            key: self._normalizer("state", statistics.state, key, key in sin_cos, modality.state.mean_std_keys)
            for key in modality.state.keys
        }
        self._action = {}
        for key in modality.action.keys:
            is_relative = key in self.relative.keys
            bounds = statistics.relative_action if is_relative else statistics.action
            part = "relative_action" if is_relative else "action"
            self._action[key] = self._normalizer(part, bounds, key, False, modality.action.mean_std_keys)
            self._check_width(part, key)

    def _normalizer(
        self, part: str, bounds: Bounds, key: str, is_sin_cos: bool, mean_std_keys: Sequence[str] | None
    ) -> KeyNormalizer:
        if is_sin_cos:
            return KeyNormalizer("sin_cos", np.empty(0), np.empty(0))
        if key not in bounds:
            raise ValueError(
                f"statistics of {part} key {key!r} are missing (there are {', '.join(bounds) or 'none'}); "
                "recompute them with tools/compute_norm_stats.py"
            )
        values = bounds[key]
        if key in (mean_std_keys or ()):
            return KeyNormalizer("mean_std", values["mean"], values["std"])
        # Relative actions have bounds per step, which percentiles of single steps would cut too far.
        names = ("q01", "q99") if self.options.use_percentiles and part != "relative_action" else ("min", "max")
        return KeyNormalizer("bounds", values[names[0]], values[names[1]])

    def _check_width(self, part: str, key: str) -> None:
        width = self.action_slices[key].stop - self.action_slices[key].start
        expected = [width] if part == "action" else [self.modality.num_action_steps, width]
        found = list(self._action[key].first.shape)
        if found != expected:
            raise ValueError(
                f"statistics of {part} key {key!r} have shape {found}, the modality configuration needs {expected}; "
                "per-step bounds belong to one horizon: recompute them with tools/compute_norm_stats.py"
            )

    @property
    def state_width(self) -> int:
        """Numbers of the normalized state (sine and cosine double a key)."""
        doubled = {key for key, normalizer in self._state.items() if normalizer.method == "sin_cos"}
        return sum((s.stop - s.start) * (2 if key in doubled else 1) for key, s in self.state_slices.items())

    def normalize_state(self, state_D: np.ndarray) -> np.ndarray:
        """Physical [..., D] -> float32 [..., state_width]."""
        state_D = np.asarray(state_D, dtype=np.float64)
        parts = [self._state[key].normalize(state_D[..., place], False) for key, place in self.state_slices.items()]
        return np.concatenate(parts, axis=-1).astype(np.float32)

    def normalize_actions(self, actions_TD: np.ndarray, state_D: np.ndarray) -> np.ndarray:
        """Physical actions as the dataset writes them [..., T, D] -> float32 [..., T, D]."""
        relative_TD = self.relative.to_relative(actions_TD, state_D)
        parts = [self._action[key].normalize(relative_TD[..., place], True) for key, place in self.action_slices.items()]
        return np.concatenate(parts, axis=-1).astype(np.float32)

    def unnormalize_actions(self, actions_TD: np.ndarray, state_D: np.ndarray) -> np.ndarray:
        """Inverse: [..., T, D] -> float32 physical; `state_D` is the physical state the actions were predicted from."""
        return self.relative.to_absolute(self.unnormalize_relative(actions_TD), state_D).astype(np.float32)

    def unnormalize_relative(self, actions_TD: np.ndarray) -> np.ndarray:
        """Without the state: relative keys stay relative, in physical units. Float64 [..., T, D]."""
        actions_TD = np.asarray(actions_TD, dtype=np.float64)
        parts = [self._action[key].unnormalize(actions_TD[..., place]) for key, place in self.action_slices.items()]
        return np.concatenate(parts, axis=-1)

    def unclipped(self, actions_TD: np.ndarray, state_D: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(states [..., D'], actions [..., T, D]) normalized but not clipped: shows bounds that do not belong to the data."""
        relative_TD = self.relative.to_relative(actions_TD, state_D)
        state_D = np.asarray(state_D, dtype=np.float64)
        states = [self._state[key].scaled(state_D[..., place]) for key, place in self.state_slices.items()]
        actions = [self._action[key].scaled(relative_TD[..., place]) for key, place in self.action_slices.items()]
        return np.concatenate(states, axis=-1), np.concatenate(actions, axis=-1)


class RelativeActions:
    """Actions relative to the present state, and back; keys that are not RELATIVE pass. Float64 [..., T, D]."""

    def __init__(
        self, modality: ModalityConfig, state_slices: dict[str, slice], action_slices: dict[str, slice], enabled: bool
    ) -> None:
        self.keys: tuple[str, ...] = ()
        self._jobs: list[tuple[slice, slice, str | None]] = []
        for number, (key, spec) in enumerate(zip(modality.action.keys, modality.action_specs, strict=True)):
            if spec.rep != "RELATIVE" or not enabled:
                continue
            reference = modality.state_key_of(number)
            action, state = action_slices[key], state_slices[reference]
            widths = (action.stop - action.start, state.stop - state.start)
            wanted = widths[0] if spec.pose_format is None else pose_width(spec.pose_format)
            if widths != (wanted, wanted):
                kind = "" if spec.pose_format is None else f" as a pose in {spec.pose_format}"
                raise ValueError(
                    f"action {key!r} ({widths[0]} numbers) is relative to state {reference!r} ({widths[1]} numbers){kind}: "
                    f"both need {wanted}; correct the slices in modality.json or the modality configuration"
                )
            self.keys += (key,)
            self._jobs.append((action, state, spec.pose_format))

    def to_relative(self, actions_TD: np.ndarray, state_D: np.ndarray) -> np.ndarray:
        """Every step minus the same state (or in its frame), repeated steps too, so that the inverse is exact there."""
        relative_TD = np.array(actions_TD, dtype=np.float64)
        for action, state, pose_format in self._jobs:
            reference = np.asarray(state_D, dtype=np.float64)[..., None, state]
            values = relative_TD[..., action]
            relative_TD[..., action] = (
                values - reference if pose_format is None else relative_pose(values, reference, pose_format)
            )
        return relative_TD

    def to_absolute(self, relative_TD: np.ndarray, state_D: np.ndarray) -> np.ndarray:
        """Inverse of `to_relative`."""
        actions_TD = np.array(relative_TD, dtype=np.float64)
        for action, state, pose_format in self._jobs:
            reference = np.asarray(state_D, dtype=np.float64)[..., None, state]
            values = actions_TD[..., action]
            actions_TD[..., action] = (
                values + reference if pose_format is None else absolute_pose(values, reference, pose_format)
            )
        return actions_TD


def key_slices(keys: Sequence[str], widths: Sequence[int]) -> dict[str, slice]:
    """Place of each key in the concatenation."""
    ends = np.cumsum(widths).tolist()
    return {key: slice(end - width, end) for key, end, width in zip(keys, ends, widths, strict=True)}
