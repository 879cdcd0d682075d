"""Statistics of GR00T's keys in one pass: of all states and actions per frame, and of relative actions per step of the chunk.

They are kept in the project's own statistics file (data/statistics.py) as features "state", "actions" and "relative_actions";
the last is flattened, step after step. Released statistics.json files, one entry per embodiment tag, are read as well.

Shape legend: N dataset rows, T steps of the chunk, D dimensions of all keys, K of one key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_vla.data.action_steps import ActionSteps
from megatron_vla.data.groot.modality import ModalityConfig
from megatron_vla.data.groot.state_action import STATISTICS, KeyStatistics, RelativeActions, key_slices
from megatron_vla.data.sample_shape import KeyPlace, SampleShape
from megatron_vla.data.statistics import FeatureStatistics, QuantileMethod, Statistics, StatisticsAccumulator
from megatron_vla.data.statistics_pass import EXACT_LIMIT, ROWS_PER_BLOCK, LowDimColumns, last_rows

RELATIVE = "relative_actions"
RELEASED = "released"  # stands for the fingerprint and the transforms of a file that knows neither


@dataclass(frozen=True)
class KeyStream:
    """Everything that shapes the numbers that statistics are made of."""

    modality: ModalityConfig
    state: tuple[KeyPlace, ...]
    action: tuple[KeyPlace, ...]
    steps: ActionSteps
    use_relative_action: bool

    @staticmethod
    def of(modality: ModalityConfig, shape: SampleShape, use_relative_action: bool) -> KeyStream:
        """Stream of a dataset."""
        return KeyStream(modality, shape.state, shape.action, shape.steps, use_relative_action)

    @property
    def horizon(self) -> int:
        """T."""
        return self.steps.horizon

    @property
    def relative(self) -> RelativeActions:
        """Which keys are relative. Raises ValueError for widths that do not fit."""
        states = key_slices(self.modality.state.keys, [place.width for place in self.state])
        return RelativeActions(self.modality, states, self.action_slices, self.use_relative_action)

    @property
    def action_slices(self) -> dict[str, slice]:
        """Place of each action key in the concatenation."""
        return key_slices(self.modality.action.keys, [place.width for place in self.action])

    def about(self, num_samples: int) -> dict[str, Any]:
        """What the hash is made of."""
        places = {"state": self.state, "action": self.action}
        content: dict[str, Any] = {
            name: [f"{p.key}={p.column}[{p.start}:{p.end}]" for p in pieces] for name, pieces in places.items()
        }
        relative = self.relative
        for number, (key, spec) in enumerate(zip(self.modality.action.keys, self.modality.action_specs, strict=True)):
            if key in relative.keys:
                content[f"relative {key}"] = f"{self.modality.state_key_of(number)} {spec.pose_format or spec.type}"
        # The chunk matters to relative actions only; the others are counted frame by frame.
        if relative.keys:
            content |= {"horizon": self.horizon, "frames_per_step": self.steps.frames_per_step, "num_samples": num_samples}
        return content

    def hash(self, num_samples: int) -> str:
        """16 hex digits."""
        text = json.dumps(self.about(num_samples), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def relative_columns(self) -> np.ndarray:
        """Which columns of the concatenated actions are relative, int64."""
        slices = self.action_slices
        chosen = [np.arange(slices[key].start, slices[key].stop) for key in self.relative.keys]
        return np.concatenate(chosen) if chosen else np.empty(0, dtype=np.int64)


def compute_key_statistics(
    columns: LowDimColumns,
    stream: KeyStream,
    samples: np.ndarray,
    quantiles: Literal["auto", "exact", "histogram"],
    progress: Callable[[int], object] = lambda num_samples: None,
) -> Statistics:
    """Statistics of a dataset, the same on every rank.

    States and actions of all finite rows; relative actions of `samples` (rows that chunks start at), a step only where it lies
    inside its episode. quantiles "auto" is exact up to 100 million values.
    """
    relative_columns = stream.relative_columns()
    method: QuantileMethod = "exact" if quantiles == "exact" else "histogram"
    if quantiles == "auto" and len(samples) * max(1, stream.horizon * bool(len(relative_columns))) <= EXACT_LIMIT:
        method = "exact"
    states_ND, actions_ND = np.asarray(columns.state_ND), np.asarray(columns.actions_ND)
    is_finite_N = np.isfinite(states_ND).all(axis=-1) & np.isfinite(actions_ND).all(axis=-1)
    features = {}
    for name, values_ND in (("state", states_ND), ("actions", actions_ND)):
        accumulator = StatisticsAccumulator(method)
        for start in range(0, len(values_ND), ROWS_PER_BLOCK):
            part = slice(start, start + ROWS_PER_BLOCK)
            accumulator.update(values_ND[part][is_finite_N[part]])
        features[name] = accumulator.result()
    if len(relative_columns):
        features[RELATIVE] = _relative_statistics(columns, stream, samples, relative_columns, method, progress)
    else:
        progress(len(samples))
    about = stream.about(len(samples))
    return Statistics(features, columns.fingerprint(), stream.hash(len(samples)), method, about)


def _relative_statistics(
    columns: LowDimColumns,
    stream: KeyStream,
    samples: np.ndarray,
    relative_columns: np.ndarray,
    method: QuantileMethod,
    progress: Callable[[int], object],
) -> FeatureStatistics:
    steps = [StatisticsAccumulator(method) for _ in range(stream.horizon)]
    last_row_N, relative = last_rows(columns), stream.relative
    for start in range(0, len(samples), ROWS_PER_BLOCK):
        rows = samples[start : start + ROWS_PER_BLOCK]
        actions_nTD, is_inside_nT = stream.steps.chunks(np.asarray(columns.actions_ND), rows, last_row_N[rows])
        relative_nTD = relative.to_relative(actions_nTD, np.asarray(columns.state_ND[rows]))[..., relative_columns]
        for step, accumulator in enumerate(steps):
            # Released files hold float32 statistics of float32 chunks.
            accumulator.update(relative_nTD[is_inside_nT[:, step], step].astype(np.float32))
        progress(len(rows))
    results = [accumulator.result() for accumulator in steps]
    names = results[0].values
    return FeatureStatistics(results[0].count, {n: np.concatenate([r.values[n] for r in results]) for n in names})


def key_statistics(statistics: Statistics, stream: KeyStream) -> KeyStatistics:
    """The project's statistics, taken apart by key. Raises ValueError for another number of steps or dimensions."""
    states = key_slices(stream.modality.state.keys, [place.width for place in stream.state])
    parts = {
        "state": _split(statistics.features["state"], states),
        "action": _split(statistics.features["actions"], stream.action_slices),
    }
    relative: dict[str, dict[str, np.ndarray]] = {}
    keys = stream.relative.keys
    if keys:
        if RELATIVE not in statistics.features:
            raise ValueError(
                f"statistics of relative actions ({', '.join(keys)}) are missing; recompute with tools/compute_norm_stats.py"
            )
        widths = [stream.action_slices[key].stop - stream.action_slices[key].start for key in keys]
        values, expected = statistics.features[RELATIVE].values, stream.horizon * sum(widths)
        if len(values["mean"]) != expected:
            raise ValueError(
                f"statistics of relative actions have {len(values['mean'])} numbers; {stream.horizon} steps of {sum(widths)} "
                "dimensions are needed: recompute with tools/compute_norm_stats.py"
            )
        for key, place in key_slices(keys, widths).items():
            relative[key] = {n: values[n].reshape(stream.horizon, -1)[:, place] for n in STATISTICS}
    return KeyStatistics(parts["state"], parts["action"], relative)


def _split(feature: FeatureStatistics, slices: Mapping[str, slice]) -> dict[str, dict[str, np.ndarray]]:
    return {key: {name: feature.values[name][place] for name in STATISTICS} for key, place in slices.items()}


def from_key_statistics(statistics: KeyStatistics, modality: ModalityConfig, keys_relative: Sequence[str]) -> Statistics:
    """Released statistics in the project's form. Raises ValueError naming keys that they do not have."""
    features = {}
    for name, bounds, keys in (
        ("state", statistics.state, modality.state.keys),
        ("actions", statistics.action, modality.action.keys),
        (RELATIVE, statistics.relative_action, keys_relative),
    ):
        # A relative key may have no statistics of its absolute values.
        wanted = [key for key in keys if name != "actions" or key not in keys_relative or key in bounds]
        missing = [key for key in wanted if key not in bounds]
        if missing:
            raise ValueError(f"no {name} statistics of {', '.join(missing)}; there are {', '.join(bounds) or 'none'}")
        if not keys:
            continue
        joined = {}
        for statistic in STATISTICS:
            arrays = [
                bounds[key][statistic] if key in bounds else np.zeros(statistics.relative_action[key][statistic].shape[-1])
                for key in keys
            ]
            joined[statistic] = np.concatenate(arrays, axis=-1).reshape(-1)
        features[name] = FeatureStatistics(0, joined)
    return Statistics(features, RELEASED, RELEASED, "exact")


def read_released(path: Path, tag: str) -> KeyStatistics | None:
    """Statistics of `tag` in a released statistics.json; None for a file of this project. Raises ValueError."""
    try:
        content = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as problem:
        raise ValueError(f"{path}: no readable JSON ({problem})") from problem
    if "format_version" in content:
        return None
    if tag not in content:
        raise ValueError(f"{path}: no statistics of the embodiment tag {tag}; it has {', '.join(content)}")
    return KeyStatistics.from_dict(content[tag], f"{path}: {tag}")


def merge_key_statistics(parts: Sequence[Statistics], weights: Sequence[float]) -> Statistics:
    """Datasets of one tag together, as released: mean and second moment weighted by sampling weight, extremes by extremes.

    Percentiles are the outermost ones (q01 by min, q99 by max). All parts have the same dimensions.
    """
    share = np.asarray(weights, dtype=np.float64) / np.sum(weights)
    features = {}
    for name in parts[0].features:
        values = [part.features[name].values for part in parts]
        mean = sum(w * v["mean"] for w, v in zip(share, values, strict=True))
        second = sum(w * (v["std"] ** 2 + v["mean"] ** 2) for w, v in zip(share, values, strict=True))
        merged = {"mean": mean, "std": np.sqrt(np.maximum(0.0, second - mean**2))}
        for statistic in ("min", "q01"):
            merged[statistic] = np.min([v[statistic] for v in values], axis=0)
        for statistic in ("max", "q99"):
            merged[statistic] = np.max([v[statistic] for v in values], axis=0)
        features[name] = FeatureStatistics(sum(part.features[name].count for part in parts), merged)
    first = parts[0]
    return Statistics(features, first.dataset_fingerprint, first.transform_hash, first.quantiles, first.about)
