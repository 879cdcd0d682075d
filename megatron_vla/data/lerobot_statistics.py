"""Statistics in LeRobot's files, computed exactly over frames.

LeRobot up to 0.4 averages the episodes' quantiles, which are not quantiles of the data set (a two-valued gripper gets q01 =
q99); here every quantile is taken over all frames. Image statistics come from per-channel histograms of sampled frames, in
[0, 1], shape [3, 1, 1].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

QUANTILES: dict[str, float] = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
FRAME_STRIDE = 10  # every tenth frame enters the image histograms
SIDE_LIMIT = 160  # larger frames are subsampled to about this side


def column_statistics(values_ND: np.ndarray) -> dict[str, np.ndarray]:
    """min, max (in the column's own type), mean, std, exact quantiles (float64) per dimension over N frames, and count [1]."""
    values = values_ND.reshape(len(values_ND), -1) if values_ND.ndim != 2 else values_ND
    if values.dtype == np.bool_:
        values = values.astype(np.int64)
    wide = values.astype(np.float64)
    result: dict[str, np.ndarray] = {
        "min": values.min(axis=0),
        "max": values.max(axis=0),
        "mean": wide.mean(axis=0),
        "std": wide.std(axis=0),
        "count": np.array([len(values)], dtype=np.int64),
    }
    quantiles = np.quantile(wide, list(QUANTILES.values()), axis=0)
    result.update(dict(zip(QUANTILES, quantiles, strict=True)))
    return result


def statistics_of_files(paths: Sequence[Path], features: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, np.ndarray]]:
    """`column_statistics` of every numeric feature over all rows of data files, read one column at a time."""
    result: dict[str, dict[str, np.ndarray]] = {}
    for name, feature in features.items():
        if feature["dtype"] in ("string", "video", "image"):
            continue
        parts = [_flat_values(pq.read_table(path, columns=[name])[name].combine_chunks()) for path in paths]
        size = int(np.prod(feature["shape"], dtype=np.int64)) if feature["shape"] else 1
        result[name] = column_statistics(np.concatenate(parts).reshape(-1, size))
    return result


def _flat_values(array: pa.Array) -> np.ndarray:
    while pa.types.is_fixed_size_list(array.type):
        array = array.flatten()
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values


class ImageHistogram:
    """Counts of the 256 levels of each channel over sampled frames; histograms add, so episodes merge exactly."""

    def __init__(self) -> None:
        self.counts_C256 = np.zeros((3, 256), dtype=np.int64)
        self.num_frames = 0

    def add(self, frame_HWC: np.ndarray) -> None:
        """Count one uint8 [H, W, 3] frame."""
        stride = max(1, max(frame_HWC.shape[:2]) // SIDE_LIMIT)
        small = frame_HWC[::stride, ::stride]
        for channel in range(3):
            self.counts_C256[channel] += np.bincount(small[..., channel].ravel(), minlength=256)
        self.num_frames += 1

    def sampled(self, frames: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """`frames`, one by one; every tenth is counted on its way."""
        for number, frame_HWC in enumerate(frames):
            if number % FRAME_STRIDE == 0:
                self.add(frame_HWC)
            yield frame_HWC

    def merge(self, other: ImageHistogram) -> None:
        """Add another histogram's frames."""
        self.counts_C256 += other.counts_C256
        self.num_frames += other.num_frames

    def statistics(self) -> dict[str, np.ndarray]:
        """Same keys as `column_statistics`, each [3, 1, 1] in [0, 1]; count [1] is the number of sampled frames."""
        levels = np.arange(256) / 255.0
        total = self.counts_C256.sum(axis=1, keepdims=True)
        share = self.counts_C256 / np.maximum(total, 1)
        mean = share @ levels
        variance = np.maximum(share @ levels**2 - mean**2, 0.0)
        cumulative = np.cumsum(self.counts_C256, axis=1)
        present = self.counts_C256 > 0
        result = {
            "min": levels[present.argmax(axis=1)],
            "max": levels[255 - present[:, ::-1].argmax(axis=1)],
            "mean": mean,
            "std": np.sqrt(variance),
        }
        for name, quantile in QUANTILES.items():
            # smallest level whose cumulative count reaches the quantile: exact for discrete levels
            result[name] = levels[(cumulative >= np.maximum(quantile * total, 1)).argmax(axis=1)]
        shaped = {name: value.reshape(3, 1, 1) for name, value in result.items()}
        shaped["count"] = np.array([self.num_frames], dtype=np.int64)
        return shaped


def jsonable(statistics: dict[str, dict[str, np.ndarray]], keys: tuple[str, ...] | None = None) -> dict[str, dict[str, Any]]:
    """Nested lists for JSON, restricted to `keys` if given."""
    return {
        feature: {name: value.tolist() for name, value in values.items() if keys is None or name in keys}
        for feature, values in statistics.items()
    }
