"""One pass over the low-dimensional columns: what the model will really see, its statistics, and what must not be seen.

Shape legend: N frames (= samples), T action horizon, D dimensions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from megatron_vla.data.action_steps import ActionSteps, Resampling
from megatron_vla.data.statistics import QuantileMethod, Statistics, StatisticsAccumulator
from megatron_vla.data.transforms import absolute_to_delta
from megatron_vla.findings import Finding, error, warning

ROWS_PER_BLOCK = 16384
EXACT_LIMIT = 100_000_000  # values per dimension that are sorted in memory (0.4 GB of float32 for each dimension)


class LowDimColumns(Protocol):
    """The columns of a RobotDataset that need no video decoding; rows of an episode are consecutive."""

    @property
    def state_ND(self) -> np.ndarray:
        """float32 [N, D]."""
        ...

    @property
    def actions_ND(self) -> np.ndarray:
        """float32 [N, D]."""
        ...

    @property
    def episode_of_N(self) -> np.ndarray:
        """int [N]: the dataset's own episode number."""
        ...

    @property
    def embodiment(self) -> str | None:
        """The robot's type; None when the dataset does not state it."""
        ...

    def fingerprint(self) -> str:
        """Hash of metadata and low-dimensional columns."""
        ...


@dataclass(frozen=True)
class StreamTransform:
    """Everything that shapes the stream that statistics are computed on."""

    horizon: int
    delta_action_dims: tuple[int, ...]
    state_key: str
    action_key: str
    frames_per_step: float = 1.0
    resampling: Resampling = "exact"

    @property
    def steps(self) -> ActionSteps:
        """Which frames a chunk is made of."""
        return ActionSteps(self.horizon, self.frames_per_step, self.resampling)

    def about(self, num_samples: int) -> dict[str, Any]:
        """What the hash is made of; the resampling only where there is any."""
        content = {**asdict(self), "num_samples": num_samples}
        if self.frames_per_step == 1.0:
            del content["frames_per_step"], content["resampling"]
        return content

    def hash(self, num_samples: int) -> str:
        """16 hex digits; `num_samples` because leaving out samples changes the stream."""
        # Normalization mode is not in it: the file holds what every mode needs.
        text = json.dumps(self.about(num_samples), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def actions(self, actions_TD: np.ndarray, state_D: np.ndarray) -> np.ndarray:
        """Dataset actions -> what the model predicts, in physical units: [..., T, D]."""
        return absolute_to_delta(actions_TD, state_D, self.delta_action_dims) if self.delta_action_dims else actions_TD


def last_rows(columns: LowDimColumns) -> np.ndarray:
    """int64 [N]: the last row of the episode that each row belongs to."""
    episode_of_N = np.asarray(columns.episode_of_N)
    ends = np.append(np.flatnonzero(np.diff(episode_of_N)), len(episode_of_N) - 1)
    return ends[np.searchsorted(ends, np.arange(len(episode_of_N)))]


def transformed_blocks(
    columns: LowDimColumns, transform: StreamTransform, samples: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(states [n, D], action chunks [n, T, D]) of the given samples, block by block."""
    # Blocks bound the memory: a chunk stream is the horizon times larger than the columns.
    last_row_N = last_rows(columns)
    for start in range(0, len(samples), ROWS_PER_BLOCK):
        rows = samples[start : start + ROWS_PER_BLOCK]
        states_nD = np.asarray(columns.state_ND[rows])
        actions_nTD, _ = transform.steps.chunks(np.asarray(columns.actions_ND), rows, last_row_N[rows])
        yield states_nD, transform.actions(actions_nTD, states_nD)


def windows_with_nonfinite(columns: LowDimColumns, num_frames: int) -> np.ndarray:
    """bool [N]: the sample's state or any action of the `num_frames` frames from it on holds NaN or Inf."""
    bad_action_N = ~np.isfinite(np.asarray(columns.actions_ND)).all(axis=-1)
    bad_state_N = ~np.isfinite(np.asarray(columns.state_ND)).all(axis=-1)
    # Prefix sums answer every window in one pass, whatever the horizon.
    num_bad_before = np.concatenate([[0], np.cumsum(bad_action_N)])
    first = np.arange(len(bad_action_N))
    after_last = np.minimum(first + num_frames, last_rows(columns) + 1)
    return bad_state_N | (num_bad_before[after_last] > num_bad_before[first])


def compute_statistics(
    columns: LowDimColumns,
    transform: StreamTransform,
    samples: np.ndarray,
    quantiles: Literal["auto", "exact", "histogram"],
    progress: Callable[[int], object] = lambda num_samples: None,
) -> Statistics:
    """Statistics of the transformed stream of `samples` (finite dataset rows), deterministic on every rank.

    quantiles "auto" is exact up to 100 million values per dimension. `progress` is called with the samples of each block.
    """
    return merged_statistics([(columns, transform, samples)], quantiles, progress)[0]


def merged_statistics(
    streams: Sequence[tuple[LowDimColumns, StreamTransform, np.ndarray]],
    quantiles: Literal["auto", "exact", "histogram"],
    progress: Callable[[int], object] = lambda num_samples: None,
) -> list[Statistics]:
    """Statistics of all streams (columns, transform, samples) together, once for each of them with its own identity.

    Every sample counts once, whatever a mixture's weights: a weight is changed more often than a model is trained anew.
    """
    # The choice is stored in the file, so two files can be told apart.
    method: QuantileMethod = "exact" if quantiles == "exact" else "histogram"
    num_values = sum(len(samples) * transform.horizon for _, transform, samples in streams)
    if quantiles == "auto" and num_values <= EXACT_LIMIT:
        method = "exact"
    states, actions = StatisticsAccumulator(method), StatisticsAccumulator(method)
    for columns, transform, samples in streams:
        for states_nD, actions_nTD in transformed_blocks(columns, transform, samples):
            states.update(states_nD)
            actions.update(actions_nTD.reshape(-1, actions_nTD.shape[-1]))
            progress(len(states_nD))
    features = {"state": states.result(), "actions": actions.result()}
    return [
        Statistics(
            features,
            dataset_fingerprint=columns.fingerprint(),
            transform_hash=transform.hash(len(samples)),
            quantiles=method,
            about=transform.about(len(samples)),
            embodiment=columns.embodiment,
        )
        for columns, transform, samples in streams
    ]


def load_statistics(
    path: str,
    columns: LowDimColumns,
    transform: StreamTransform,
    num_samples: int,
    allow_foreign: bool,
    command: str,
) -> tuple[Statistics | None, list[Finding]]:
    """Statistics from --statistics-path; refused when made on other data or with other transforms unless `allow_foreign`."""
    try:
        statistics = Statistics.load(Path(path), columns.fingerprint(), transform.hash(num_samples), columns.embodiment)
    except ValueError as problem:
        return None, [error("--statistics-path", str(problem), command)]
    findings = []
    for feature, width in (("state", columns.state_ND.shape[-1]), ("actions", columns.actions_ND.shape[-1])):
        known = len(statistics.features[feature].values["mean"])
        if known < width:
            what = f"{path} has {known} {feature} dimensions, the dataset {width}"
            findings.append(error("--statistics-path", what, f"recompute: {command}"))
    differences = []
    # Both are reported, so that one recomputation repairs both.
    if statistics.dataset_fingerprint != columns.fingerprint():
        differences.append(f"other data (fingerprint {statistics.dataset_fingerprint}, here {columns.fingerprint()})")
    if statistics.embodiment is not None and statistics.embodiment != columns.embodiment:
        differences.append(f"another robot ({statistics.embodiment}, here {columns.embodiment or 'not stated'})")
    if statistics.transform_hash != transform.hash(num_samples):
        here = transform.about(num_samples)
        changed = [f"{k} {statistics.about.get(k)} -> {v}" for k, v in here.items() if not _same(statistics.about.get(k), v)]
        differences.append("other transforms (" + ("; ".join(changed) or "not recorded") + ")")
    if differences:
        what = f"{path} was computed on " + " and ".join(differences)
        if allow_foreign:
            findings.append(warning("--statistics-path", what, "used as --allow-foreign-statistics says"))
        else:
            fix = f"recompute: {command}  (or --allow-foreign-statistics to keep a released checkpoint's own statistics)"
            findings.append(error("--statistics-path", what, fix))
    return (None if any(f.severity == "error" for f in findings) else statistics), findings


def _same(stored: object, here: object) -> bool:
    """JSON turns tuples into lists."""
    return (list(here) if isinstance(here, tuple) else here) == (list(stored) if isinstance(stored, tuple) else stored)
