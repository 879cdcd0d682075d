"""Statistics of the transformed stream (states; action chunks after the delta transform) and the checks on them.

Exact quantiles sort every value (linear interpolation, as numpy.quantile); histogram quantiles repeat openpi's running
histogram of 5000 bins, whose value is a bin's left edge. Repeated steps beyond an episode's end count, as in openpi.

Shape legend: N rows, D dimensions, K histogram bins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_vla.data.normalization import Normalization, Normalizer
from megatron_vla.findings import Finding, error, warning

QUANTILES: Mapping[str, float] = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
QuantileMethod = Literal["exact", "histogram"]
NUM_HISTOGRAM_BINS = 5000
FORMAT_VERSION = 1
OUTSIDE = 1.5  # a quantile-normalized value beyond this is out of range
FAR_OUTSIDE = 20.0  # one such value outweighs hundreds of ordinary ones in a squared error
SANITY_SAMPLES = 1000


class RunningHistogram:
    """openpi's streaming quantiles.

    Equal bins between the extremes so far; a new extreme re-bins the old counts by their left edges.
    """

    def __init__(self, num_bins: int = NUM_HISTOGRAM_BINS) -> None:
        self.num_bins = num_bins
        self.count = 0
        self.low_D = np.empty(0)
        self.high_D = np.empty(0)
        self.counts_DK = np.empty((0, num_bins))
        self.edges_DK1 = np.empty((0, num_bins + 1))

    def _edges(self, margin: float) -> np.ndarray:
        return np.linspace(self.low_D - margin, self.high_D + margin, self.num_bins + 1, axis=-1)

    def _extend(self, low_D: np.ndarray, high_D: np.ndarray) -> None:
        if self.count == 0:
            self.low_D, self.high_D = low_D, high_D
            self.counts_DK = np.zeros((len(low_D), self.num_bins))
            # The first margin keeps a constant first batch from having bins of width 0. As in openpi, re-binning may lose the
            # counts of the first bin to it: at most one bin, and released statistics were made so.
            self.edges_DK1 = self._edges(1e-10)
        elif np.any(low_D < self.low_D) or np.any(high_D > self.high_D):
            self.low_D, self.high_D = np.minimum(self.low_D, low_D), np.maximum(self.high_D, high_D)
            old_edges_DK1, self.edges_DK1 = self.edges_DK1, self._edges(0.0)
            self._add_weighted(old_edges_DK1[:, :-1], self.counts_DK, replace=True)

    def _add_weighted(self, values_DM: np.ndarray, weights_DM: np.ndarray, replace: bool) -> None:
        binned = [
            np.histogram(values, bins=edges, weights=weights)[0]
            for values, edges, weights in zip(values_DM, self.edges_DK1, weights_DM, strict=True)
        ]
        self.counts_DK = np.stack(binned) + (0 if replace else self.counts_DK)

    def update(self, values_ND: np.ndarray) -> None:
        """Add rows."""
        values_ND = values_ND.astype(np.float64)  # edges in float32 would put values near an edge into the other bin
        self._extend(values_ND.min(axis=0), values_ND.max(axis=0))
        self._add_weighted(values_ND.T, np.ones(values_ND.T.shape), replace=False)
        self.count += len(values_ND)

    def merge(self, other: RunningHistogram) -> None:
        """Add another histogram's counts (by the left edges of its bins)."""
        if other.count:
            self._extend(other.low_D, other.high_D)
            self._add_weighted(other.edges_DK1[:, :-1], other.counts_DK, replace=False)
            self.count += other.count

    def quantile(self, q: float) -> np.ndarray:
        """float64 [D]: left edge of the bin where the cumulated count reaches q times the number of rows."""
        places = [np.searchsorted(np.cumsum(counts), q * self.count) for counts in self.counts_DK]
        return np.array([edges[place] for edges, place in zip(self.edges_DK1, places, strict=True)], dtype=np.float64)


@dataclass(frozen=True)
class FeatureStatistics:
    """Statistics of one feature: `values` maps mean, std, min, max, q01, q10, q50, q90, q99 to float64 [D]."""

    count: int
    values: Mapping[str, np.ndarray]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` restores every bit."""
        return {"count": self.count, **{name: value.tolist() for name, value in self.values.items()}}

    @staticmethod
    def from_dict(content: Mapping[str, Any], where: str) -> FeatureStatistics:
        """Raises ValueError naming `where` when a statistic is missing or not finite."""
        names = ("mean", "std", "min", "max", *QUANTILES)
        # A partial file must not pass: quantile mode without quantiles trained silently in other code bases.
        missing = [name for name in ("count", *names) if name not in content]
        if missing:
            raise ValueError(f"{where}: {', '.join(missing)} missing; recompute with tools/compute_norm_stats.py")
        values = {name: np.asarray(content[name], dtype=np.float64) for name in names}
        bad = [name for name, value in values.items() if not np.isfinite(value).all()]
        if bad:
            raise ValueError(f"{where}: {', '.join(bad)} not finite; recompute with tools/compute_norm_stats.py")
        return FeatureStatistics(int(content["count"]), values)


class StatisticsAccumulator:
    """Streaming statistics of rows [n, D]; accumulators over disjoint rows merge."""

    def __init__(self, quantiles: QuantileMethod) -> None:
        self.count = 0
        self.mean_D: np.ndarray | float = 0.0
        self.squares_D: np.ndarray | float = 0.0  # sum of squared differences from the mean: no cancellation
        self.low_D: np.ndarray | float = np.inf
        self.high_D: np.ndarray | float = -np.inf
        self.histogram = RunningHistogram() if quantiles == "histogram" else None
        self.rows: list[np.ndarray] = []

    def update(self, values_ND: np.ndarray) -> None:
        """Add finite rows [n, D] (the caller refuses or leaves out the others)."""
        if not len(values_ND):
            return
        wide_ND = values_ND.astype(np.float64)
        mean_D = wide_ND.mean(axis=0)
        self._combine(len(wide_ND), mean_D, ((wide_ND - mean_D) ** 2).sum(axis=0), wide_ND.min(axis=0), wide_ND.max(axis=0))
        if self.histogram is None:
            self.rows.append(values_ND)
        else:
            self.histogram.update(values_ND)

    def merge(self, other: StatisticsAccumulator) -> None:
        """Add everything that `other` has seen."""
        if other.count:
            self._combine(other.count, other.mean_D, other.squares_D, other.low_D, other.high_D)
        self.rows += other.rows
        if self.histogram is not None and other.histogram is not None:
            self.histogram.merge(other.histogram)

    def _combine(self, count: int, mean_D: Any, squares_D: Any, low_D: Any, high_D: Any) -> None:
        total = self.count + count
        shift_D = mean_D - self.mean_D
        self.squares_D = self.squares_D + squares_D + shift_D**2 * (self.count * count / total)
        self.mean_D = self.mean_D + shift_D * (count / total)
        self.low_D, self.high_D = np.minimum(self.low_D, low_D), np.maximum(self.high_D, high_D)
        self.count = total

    def result(self) -> FeatureStatistics:
        """Statistics of all rows so far. Raises ValueError when there are none."""
        if self.count == 0:
            raise ValueError("no finite rows to compute statistics from")
        # Population standard deviation, as in both code bases.
        values = {"mean": self.mean_D, "std": np.sqrt(self.squares_D / self.count), "min": self.low_D, "max": self.high_D}
        if self.histogram is not None:
            values.update({name: self.histogram.quantile(q) for name, q in QUANTILES.items()})
        else:
            # One dimension at a time: the sort needs a float64 copy of a single column only.
            columns = zip(*(row.T for row in self.rows), strict=True)
            exact_DQ = [np.quantile(np.concatenate(column).astype(np.float64), list(QUANTILES.values())) for column in columns]
            values.update(dict(zip(QUANTILES, np.stack(exact_DQ, axis=1), strict=True)))
        return FeatureStatistics(self.count, {name: np.asarray(value, dtype=np.float64) for name, value in values.items()})


@dataclass(frozen=True)
class Statistics:
    """Statistics of state and actions with what they were computed on.

    `dataset_fingerprint` changes with the data, `transform_hash` with everything that shapes the transformed stream.
    `embodiment`: the robot's type, None when it is not known (older files, datasets that do not state it).
    """

    features: Mapping[str, FeatureStatistics]
    dataset_fingerprint: str
    transform_hash: str
    quantiles: str
    about: Mapping[str, Any] = field(default_factory=dict)
    embodiment: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "format_version": FORMAT_VERSION,
            "dataset_fingerprint": self.dataset_fingerprint,
            "transform_hash": self.transform_hash,
            "embodiment": self.embodiment,
            "quantiles": self.quantiles,
            "about": dict(self.about),
            "features": {name: feature.to_dict() for name, feature in self.features.items()},
        }

    @staticmethod
    def from_dict(content: Mapping[str, Any], where: str = "statistics") -> Statistics:
        """Inverse of `to_dict`; raises ValueError naming `where` for missing or foreign content."""
        missing = [key for key in ("features", "dataset_fingerprint", "transform_hash", "quantiles") if key not in content]
        missing += [name for name in ("state", "actions") if not missing and name not in content["features"]]
        if missing:
            raise ValueError(f"{where}: {', '.join(missing)} missing; make the file with tools/compute_norm_stats.py")
        features = {name: FeatureStatistics.from_dict(value, f"{where}: {name}") for name, value in content["features"].items()}
        return Statistics(
            features,
            content["dataset_fingerprint"],
            content["transform_hash"],
            content["quantiles"],
            dict(content.get("about", {})),
            content.get("embodiment"),
        )

    def save(self, path: Path) -> None:
        """Write statistics.json (floats round-trip exactly)."""
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @staticmethod
    def load(
        path: Path, fingerprint: str | None = None, transform_hash: str | None = None, embodiment: str | None = None
    ) -> Statistics:
        """Inverse of `save`, and of `save_statistics_of_datasets`: there the statistics of the dataset with `fingerprint`.

        Of several with that fingerprint, those with `transform_hash` and `embodiment`. Raises ValueError naming the file.
        """
        try:
            content = json.loads(path.read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as problem:
            raise ValueError(f"{path}: no readable JSON ({problem}); make it with tools/compute_norm_stats.py") from problem
        if "datasets" not in content:
            return Statistics.from_dict(content, str(path))
        parts = {name: Statistics.from_dict(part, f"{path}: {name}") for name, part in content["datasets"].items()}
        fitting = [part for part in parts.values() if part.dataset_fingerprint == fingerprint]
        if not fitting:
            raise ValueError(
                f"{path}: statistics of the datasets {', '.join(parts)}, none of them has fingerprint {fingerprint}; "
                "make it with tools/compute_norm_stats.py from the same --data-path"
            )
        return max(fitting, key=lambda part: (part.transform_hash == transform_hash, part.embodiment == embodiment))

    def normalizer(self, feature: str, mode: Normalization, variant: Any) -> Normalizer:
        """Normalizer of "state" or "actions"."""
        return Normalizer(mode, variant, self.features[feature].values)


def save_statistics_of_datasets(path: Path, parts: Mapping[str, Statistics]) -> None:
    """One file for the datasets of a mixture; each is found again by its fingerprint, not by its name."""
    content = {"format_version": FORMAT_VERSION, "datasets": {name: part.to_dict() for name, part in parts.items()}}
    path.write_text(json.dumps(content, indent=1) + "\n")


def range_table(
    normalized_ND: Mapping[str, np.ndarray], names: Mapping[str, Sequence[str]], limit: float
) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Per dimension: share of rows outside [-1.5, 1.5] and the largest magnitude; an error names the dimensions above `limit`.

    normalized_ND: "state" and "actions" -> rows [N, D] of real samples. Also an error: any value that is not finite.
    """
    table: list[dict[str, Any]] = []
    findings: list[Finding] = []
    for feature, values_ND in normalized_ND.items():
        magnitude_ND = np.abs(values_ND)
        # Written so that NaN counts as outside.
        outside_D = (~(magnitude_ND <= OUTSIDE)).mean(axis=0)
        largest_D = magnitude_ND.max(axis=0)
        for dim, (outside, largest) in enumerate(zip(outside_D, largest_D, strict=True)):
            table.append({"feature": feature, "dim": dim, "name": names[feature][dim], "outside": outside, "max": largest})
        rare = [dim for dim in range(len(outside_D)) if FAR_OUTSIDE < largest_D[dim] < np.inf and outside_D[dim] <= limit]
        if rare:
            shown = ", ".join(f"{names[feature][d]} (max {largest_D[d]:.4g})" for d in rare[:12])
            what = f"{len(rare)} dimension(s) hold rare but huge normalized values: {shown}"
            fix = "they dominate the loss when drawn: look for outliers, or for a dimension that hardly moves"
            findings.append(warning(f"normalization of {feature}", what, fix))
        bad = [dim for dim in range(len(outside_D)) if outside_D[dim] > limit or not np.isfinite(largest_D[dim])]
        if bad:
            shown = ", ".join(f"{names[feature][d]} ({outside_D[d]:.0%} outside, max {largest_D[d]:.4g})" for d in bad[:12])
            findings.append(
                error(
                    f"normalization of {feature}",
                    f"{len(bad)} dimension(s) of {len(values_ND)} real rows leave [-{OUTSIDE}, {OUTSIDE}]: {shown}",
                    "the statistics belong to other data or another action representation, or the dimension hardly moves: "
                    "recompute with tools/compute_norm_stats.py, or raise --max-out-of-range-fraction",
                )
            )
    return table, findings
