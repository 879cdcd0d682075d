"""Where every sample is, and which samples are decoded together.

One pass over the episode lengths gives each valid sample a locator (episode, frame), 8 bytes, in a file that all ranks of a
host map. Samples of an episode have consecutive numbers, so a shard is a short list of runs: no per-sample table is needed to
build or to shuffle it.

Shape legend: N samples, E episodes, R runs of consecutive samples of one episode, K shards.
"""

from __future__ import annotations

import hashlib
import heapq
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LOCATOR_DTYPE = np.dtype(np.int32)  # two per sample


def has_complete_chunk(frame_of_N: np.ndarray, length_of_N: np.ndarray, reach: int) -> np.ndarray:
    """bool [N]: frames whose chunk, `reach` frames long with its first, lies inside the episode."""
    return frame_of_N + reach <= length_of_N


class LocatorIndex:
    """Sample number -> (row of the episode table, frame), in storage order.

    `rows` (dataset rows of the samples, ascending) is None when every frame is a sample. With a cache folder the table is a
    memory-mapped file named after its content, shared by all ranks and workers of a host.
    """

    def __init__(self, length_E: np.ndarray, rows: np.ndarray | None, cache_folder: Path | None) -> None:
        first_row_E = np.concatenate([[0], np.cumsum(length_E, dtype=np.int64)])
        if rows is None:
            count_E = np.asarray(length_E, dtype=np.int64)
        else:
            count_E = np.diff(np.searchsorted(rows, first_row_E))
        self.first_sample_E = np.concatenate([[0], np.cumsum(count_E, dtype=np.int64)])
        self.first_row_E = first_row_E
        self.path: Path | None = None
        if cache_folder is None:
            self.locators_N2 = _locators(rows, first_row_E, count_E)
            return
        digest = hashlib.blake2b(np.ascontiguousarray(length_E, dtype="<i8").tobytes(), digest_size=12)
        digest.update(b"all" if rows is None else np.ascontiguousarray(rows, dtype="<i8").data)
        self.path = cache_folder / f"locators-{digest.hexdigest()}.npy"
        if not self._matches():
            cache_folder.mkdir(parents=True, exist_ok=True)
            # Every rank may come here at once: each writes its own file and the last rename wins, all with the same bytes.
            temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
            with open(temporary, "wb") as file:
                np.save(file, _locators(rows, first_row_E, count_E))
            os.replace(temporary, self.path)
        self.locators_N2 = np.load(self.path, mmap_mode="r")

    def _matches(self) -> bool:
        """A whole file of the right size is there; a cut one (full disk) is made again."""
        assert self.path is not None
        if not self.path.is_file():
            return False
        try:
            return bool(np.load(self.path, mmap_mode="r").shape == (self.num_samples, 2))
        except (ValueError, EOFError):
            return False

    @property
    def num_samples(self) -> int:
        """N."""
        return int(self.first_sample_E[-1])

    def dataset_row(self, sample: int) -> int:
        """Row of the dataset (all its frames in storage order) of a sample number."""
        episode, frame = self.locators_N2[sample]
        return int(self.first_row_E[episode]) + int(frame)

    def dataset_rows(self, sample_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(row of the episode table, row of the dataset) of sample numbers, int64 [M] each."""
        episode_M, frame_M = self.locators_N2[sample_M].T.astype(np.int64)
        return episode_M, self.first_row_E[episode_M] + frame_M


def _locators(rows: np.ndarray | None, first_row_E: np.ndarray, count_E: np.ndarray) -> np.ndarray:
    """int32 [N, 2], made in one pass."""
    episode_N = np.repeat(np.arange(len(count_E), dtype=LOCATOR_DTYPE), count_E)
    row_N = np.arange(first_row_E[-1]) if rows is None else rows
    return np.stack([episode_N, (row_N - first_row_E[episode_N]).astype(LOCATOR_DTYPE)], axis=1)


@dataclass(frozen=True)
class ShardTable:
    """Runs of consecutive samples, grouped into shards; the runs of a shard are neighbours.

    first_sample_R, count_R: int64. first_run_K: int64 [K + 1]. count_K: samples per shard, int64.
    """

    first_sample_R: np.ndarray
    count_R: np.ndarray
    first_run_K: np.ndarray
    count_K: np.ndarray

    @property
    def num_samples(self) -> int:
        """N."""
        return int(self.count_R.sum())

    @property
    def num_shards(self) -> int:
        """K."""
        return len(self.count_K)

    def samples(self, shard: int, start: int, stop: int) -> np.ndarray:
        """Sample numbers at places start ... stop - 1 of a shard, int64, run by run."""
        runs = range(int(self.first_run_K[shard]), int(self.first_run_K[shard + 1]))
        parts, passed = [], 0
        for run in runs:
            first, count = int(self.first_sample_R[run]), int(self.count_R[run])
            low, high = max(0, start - passed), min(count, stop - passed)
            if low < high:
                parts.append(np.arange(first + low, first + high, dtype=np.int64))
            passed += count
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def build_shards(first_sample_E: np.ndarray, bytes_per_sample: int, shard_bytes: int, in_storage_order: bool) -> ShardTable:
    """Group episodes into shards of about equal decoded bytes, at most `shard_bytes` each unless `in_storage_order`.

    An episode that is larger than a shard is cut into runs of about equal length. `in_storage_order` keeps neighbours together
    (for --no-shuffle); else each episode goes to the lightest shard, so that neighbours (often one task) are spread.
    """
    samples_per_shard = max(1, shard_bytes // max(1, bytes_per_sample))
    count_E = np.diff(first_sample_E)
    pieces_E = -(-count_E // samples_per_shard)
    episode_R = np.repeat(np.arange(len(count_E)), pieces_E)
    piece_R = np.arange(len(episode_R)) - np.repeat(np.cumsum(pieces_E) - pieces_E, pieces_E)
    # Cut points in integers, so that a cut never loses or doubles a sample.
    low_R = count_E[episode_R] * piece_R // pieces_E[episode_R]
    high_R = count_E[episode_R] * (piece_R + 1) // pieces_E[episode_R]
    first_R, count_R = first_sample_E[:-1][episode_R] + low_R, high_R - low_R
    num_shards = max(1, -(-int(count_R.sum()) // samples_per_shard))
    group = _contiguous if in_storage_order else _balanced
    shard_R = group(count_R, num_shards)
    # Whole episodes rarely fill shards to the brim; memory is taken for the largest, so more and smaller ones cost less.
    while not in_storage_order and np.bincount(shard_R, count_R).max(initial=0) > samples_per_shard:
        num_shards += max(1, num_shards // 10)
        shard_R = group(count_R, num_shards)
    place = np.argsort(shard_R, kind="stable")
    shards, runs_K = np.unique(shard_R[place], return_counts=True)
    first_run_K = np.concatenate([[0], np.cumsum(runs_K)])
    count_K = np.add.reduceat(count_R[place], first_run_K[:-1]) if len(shards) else np.empty(0, dtype=np.int64)
    return ShardTable(first_R[place], count_R[place], first_run_K, count_K)


def _contiguous(count_R: np.ndarray, num_shards: int) -> np.ndarray:
    """Shard of each run when shards are stretches of the storage order."""
    middle_R = np.cumsum(count_R) - count_R / 2
    return np.minimum((middle_R * num_shards / max(1, count_R.sum())).astype(np.int64), num_shards - 1)


def _balanced(count_R: np.ndarray, num_shards: int) -> np.ndarray:
    """Longest first, each to the shard with the fewest samples so far: within 4/3 of the best possible largest shard."""
    shard_R = np.empty(len(count_R), dtype=np.int64)
    heap = [(0, shard) for shard in range(num_shards)]
    for run in np.argsort(-count_R, kind="stable"):
        load, shard = heap[0]
        shard_R[run] = shard
        heapq.heapreplace(heap, (load + int(count_R[run]), shard))
    return shard_R
