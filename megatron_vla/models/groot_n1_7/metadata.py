"""Everything that a micro-batch's layout determines, computed on the host: positions, image blocks, token places, groups.

Pure functions of grids, token layout and embodiment ids. Training sees the same few layouts again and again, so the parts that
depend on a grid or on one row's layout are kept in bounded caches that count their hits.

Shape legend: as batch.py, and S one row's padded tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from megatron_vla.models.groot_n1_7.config import GrootN17Config

Grid = tuple[int, int, int]  # time slices, rows and columns of patches
Value = TypeVar("Value")

PADDING_POSITION = 0


class BoundedCache(Generic[Value]):
    """Least recently used values are dropped. hits and misses count since the start of the process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.hits = 0
        self.misses = 0
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of `key`, made if it is not kept."""
        if key in self._values:
            self.hits += 1
            self._values.move_to_end(key)
            return self._values[key]
        self.misses += 1
        value = self._values[key] = make()
        if len(self._values) > self.size:
            self._values.popitem(last=False)
        return value

    @property
    def hit_rate(self) -> float:
        """Share of requests that were answered from the cache; 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)


@dataclass(frozen=True)
class VisionMetadata:
    """Positions and image blocks of all patches; fields as in GrootN17Batch."""

    patch_table_4P: np.ndarray
    patch_weight_4P: np.ndarray
    patch_place_P2: np.ndarray
    image_offset_I: np.ndarray
    image_row_IQ: np.ndarray
    patch_slot_P: np.ndarray


@dataclass(frozen=True)
class RowMetadata:
    """One sample's tokens: rotary positions [3, S], places of image tokens and of the other slots."""

    position_3S: np.ndarray
    image_place_K: np.ndarray
    text_place_L: np.ndarray


def merge_order(height: int, width: int, merge: int) -> np.ndarray:
    """Raster numbers of an image's patches in the order of the rows: blocks of merge x merge, each row by row."""
    raster = np.arange(height * width).reshape(height // merge, merge, width // merge, merge)
    return raster.transpose(0, 2, 1, 3).reshape(-1)


def grid_positions(
    grid: Grid, table_side: int, merge: int, share_dtype: type = np.float32
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(table rows int64 [4, P], their shares [4, P], (row, column) int64 [P, 2]) of one image's patches.

    Bilinear with aligned corners: the first and last patch sit on the table's first and last row. Shares are computed in
    `share_dtype`: in fp32, the released model's, they have its bits. Raises ValueError for a grid that cannot be merged.
    """
    frames, height, width = grid
    if height % merge or width % merge or min(grid) < 1:
        raise ValueError(f"image grid {grid}: rows and columns of patches must be positive multiples of {merge}")
    rows: np.ndarray = np.linspace(0, table_side - 1, height, dtype=share_dtype)
    columns: np.ndarray = np.linspace(0, table_side - 1, width, dtype=share_dtype)
    row_low, column_low = rows.astype(np.int64), columns.astype(np.int64)
    row_high = np.minimum(row_low + 1, table_side - 1)
    column_high = np.minimum(column_low + 1, table_side - 1)
    row_share, column_share = (rows - row_low.astype(share_dtype))[:, None], (columns - column_low.astype(share_dtype))[None, :]
    corners = ((row_low, column_low), (row_low, column_high), (row_high, column_low), (row_high, column_high))
    shares = (
        (1 - row_share) * (1 - column_share),
        (1 - row_share) * column_share,
        row_share * (1 - column_share),
        row_share * column_share,
    )
    order = merge_order(height, width, merge)
    table_4P = np.stack([(r[:, None] * table_side + c[None, :]).reshape(-1)[order] for r, c in corners])
    weight_4P = np.stack([share.reshape(-1)[order] for share in shares])
    place_P2 = np.stack([order // width, order % width], axis=1)
    return np.tile(table_4P, (1, frames)), np.tile(weight_4P, (1, frames)), np.tile(place_P2, (frames, 1))


def image_blocks(grids: Sequence[Grid]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(offsets int32 [I + 1], rows int64 [I, Q] with -1 beyond an image's end, slots int64 [P]); time slices are images."""
    sizes = np.array([height * width for frames, height, width in grids for _ in range(frames)], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    place = np.arange(sizes.max(initial=1))
    rows_IQ = np.where(place[None, :] < sizes[:, None], offsets[:-1, None] + place[None, :], -1)
    slot_P = np.flatnonzero(rows_IQ.reshape(-1) >= 0)
    return offsets.astype(np.int32), rows_IQ, slot_P


def row_metadata(is_image_S: np.ndarray, is_valid_S: np.ndarray, grids: Sequence[Grid], merge: int) -> RowMetadata:
    """Rotary positions and token places of one row.

    A text token advances by one; an image's tokens share the temporal position and spread over rows and columns, and what
    follows starts after the larger side. Raises ValueError when image tokens and grids do not agree.
    """
    num_tokens = [frames * height * width // merge**2 for frames, height, width in grids]
    image_place_K = np.flatnonzero(is_image_S & is_valid_S)
    if len(image_place_K) != sum(num_tokens):
        raise ValueError(
            f"a prompt holds {len(image_place_K)} image tokens, its image grids {list(grids)} need {sum(num_tokens)}: "
            "the prompt was cut, or images and prompt belong to different samples"
        )
    position_3S = np.full((3, len(is_image_S)), PADDING_POSITION, dtype=np.int64)
    current, done = 0, 0
    valid = np.flatnonzero(is_valid_S)
    remaining = list(zip(grids, num_tokens, strict=True))
    while done < len(valid):
        if not is_image_S[valid[done]]:
            position_3S[:, valid[done]] = current
            current, done = current + 1, done + 1
            continue
        (frames, height, width), count = remaining.pop(0)
        places = valid[done : done + count]
        if not is_image_S[places].all():
            raise ValueError(f"an image of {count} tokens is interrupted by other tokens in its prompt")
        axes = np.indices((frames, height // merge, width // merge)).reshape(3, -1)
        position_3S[:, places] = current + axes
        current, done = current + max(frames, height // merge, width // merge), done + count
    text_place_L = np.flatnonzero(~(is_image_S & is_valid_S))
    return RowMetadata(position_3S, image_place_K, text_place_L)


def embodiment_groups(embodiment_B: np.ndarray, num_groups: int | None = None, capacity: int | None = None) -> list[np.ndarray]:
    """[slots [G], samples [G, N] with -1 beyond a group's end, places [B] in the flattened groups], all int64.

    num_groups, capacity: G and N when they must not depend on the batch (static shapes); unset, the smallest that fit. Groups
    beyond the embodiments that occur are empty. Raises ValueError when the batch does not fit.
    """
    slots, group_B = np.unique(embodiment_B, return_inverse=True)
    counts = np.bincount(group_B, minlength=len(slots))
    num_groups = len(slots) if num_groups is None else num_groups
    capacity = int(counts.max()) if capacity is None else capacity
    if len(slots) > num_groups or counts.max() > capacity:
        raise ValueError(
            f"a micro-batch of {len(slots)} embodiments, up to {counts.max()} samples each, does not fit into {num_groups} "
            f"groups of {capacity}"
        )
    group_embodiment_G = np.zeros(num_groups, dtype=np.int64)
    group_embodiment_G[: len(slots)] = slots
    group_sample_GN = np.full((num_groups, capacity), -1, dtype=np.int64)
    sample_place_B = np.empty(len(embodiment_B), dtype=np.int64)
    for group in range(len(slots)):
        samples = np.flatnonzero(group_B == group)
        group_sample_GN[group, : len(samples)] = samples
        sample_place_B[samples] = group * capacity + np.arange(len(samples))
    return [group_embodiment_G, group_sample_GN, sample_place_B]


class MetadataMaker:
    """The functions above behind caches: one per process that collates micro-batches.

    share_dtype: of the position table's shares; float64 for fp64 models only.
    """

    def __init__(self, config: GrootN17Config, cache_size: int = 256, share_dtype: type = np.float32) -> None:
        self.config = config
        self.share_dtype = share_dtype
        self.grids: BoundedCache[VisionMetadata] = BoundedCache(cache_size)
        self.rows: BoundedCache[RowMetadata] = BoundedCache(cache_size)

    def vision(self, grids: Sequence[Grid]) -> VisionMetadata:
        """Positions and blocks of a micro-batch's images, keyed by all their grids."""
        return self.grids.get(tuple(grids), lambda: self._vision(grids))

    def _vision(self, grids: Sequence[Grid]) -> VisionMetadata:
        side, merge = self.config.position_table_side, self.config.vision_spatial_merge_size
        parts = {grid: grid_positions(grid, side, merge, self.share_dtype) for grid in set(grids)}
        tables, weights, places = zip(*(parts[grid] for grid in grids), strict=True)
        weight_4P: np.ndarray = np.concatenate(weights, axis=1)
        return VisionMetadata(np.concatenate(tables, axis=1), weight_4P, np.concatenate(places), *image_blocks(grids))

    def row(self, tokens_S: np.ndarray, is_valid_S: np.ndarray, grids: Sequence[Grid]) -> RowMetadata:
        """Positions and places of one row, keyed by its layout (not by its words)."""
        is_image_S = tokens_S == self.config.image_token
        key = (is_image_S.tobytes(), is_valid_S.tobytes(), tuple(grids))
        merge = self.config.vision_spatial_merge_size
        return self.rows.get(key, lambda: row_metadata(is_image_S, is_valid_S, grids, merge))

    @property
    def hit_rate(self) -> float:
        """Share of rows and grid signatures that were known."""
        hits, misses = self.grids.hits + self.rows.hits, self.grids.misses + self.rows.misses
        return hits / max(1, hits + misses)
