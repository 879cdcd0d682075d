"""Area resize of uint8 images with OpenCV's arithmetic, in torch: the released GR00T pipelines resize with INTER_AREA.

Shrinking averages areas in float32; growing (either side) is a two-tap blend in fixed point. The order of all roundings is
repeated here, so every level equals OpenCV's, and one implementation serves data workers and a whole batch on the GPU. Source:
OpenCV's documented INTER_AREA rule, checked against OpenCV 5.0 and the released pipeline's pictures.

Shape legend: N images, H height, W width, C 3 channels, K taps.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

FIXED_POINT = 2048  # 11 bits per axis
SMALLEST_SHARE = 1e-3  # an edge pixel with a smaller share of a cell is left out, as in the original


Taps = tuple[Tensor, Tensor]


@cache
def _on_device(kind: str, size_in: int, size_out: int, device: torch.device) -> Taps:
    """Taps on a device, copied there once: a copy per batch would wait for the device."""
    index, weight = (_area_taps if kind == "area" else _blend_taps)(size_in, size_out)
    return torch.from_numpy(index).to(device), torch.from_numpy(weight).to(device)


def _area_taps(size_in: int, size_out: int) -> tuple[np.ndarray, np.ndarray]:
    """(source index int64 [size_out, K], weight float32 [size_out, K]) of shrinking one axis; unused taps weigh 0."""
    scale = 1.0 / (size_out / size_in)
    taps: list[list[tuple[int, float]]] = []
    for place in range(size_out):
        low, high = place * scale, place * scale + scale
        cell = min(scale, size_in - low)
        last = min(math.floor(high), size_in - 1)
        first = min(math.ceil(low), last)
        row = [(index, 1.0 / cell) for index in range(first, last)]
        if first - low > SMALLEST_SHARE:
            row.insert(0, (first - 1, (first - low) / cell))
        if high - last > SMALLEST_SHARE:
            row.append((last, min(high - last, 1.0, cell) / cell))
        taps.append(row)
    width = max(map(len, taps))
    index, weight = np.zeros((size_out, width), dtype=np.int64), np.zeros((size_out, width), dtype=np.float32)
    for place, row in enumerate(taps):
        index[place, : len(row)] = [i for i, _ in row]
        weight[place, : len(row)] = [w for _, w in row]
    return index, weight


def _blend_taps(size_in: int, size_out: int) -> tuple[np.ndarray, np.ndarray]:
    """(source index int64 [size_out, 2], weight int32 [size_out, 2], of FIXED_POINT) of growing one axis."""
    inverse = size_out / size_in
    scale = 1.0 / inverse  # not size_in / size_out: the last bit decides which pixel comes first
    first = np.floor(np.arange(size_out) * scale).astype(np.int64)
    share = (np.arange(1, size_out + 1) - (first + 1) * inverse).astype(np.float32)
    share = np.where(share <= 0, np.float32(0), share - np.floor(share))
    share[first >= size_in - 1] = 0
    first = np.minimum(first, size_in - 1)
    # The original rounds both weights from float32, so they need not add up to the whole.
    weight = np.rint(np.stack([np.float32(1) - share, share], axis=1) * FIXED_POINT).astype(np.int32)
    return np.stack([first, np.minimum(first + 1, size_in - 1)], axis=1), weight


def resize_area(images_NHWC: Tensor, height: int, width: int) -> Tensor:
    """uint8 [N, H, W, C] -> uint8 [N, height, width, C], on the device of the images."""
    size = tuple(images_NHWC.shape[1:3])
    if size == (height, width):
        return images_NHWC
    shrinks = size[0] >= height and size[1] >= width
    return (_shrink if shrinks else _grow)(images_NHWC, height, width)


def _shrink(images_NHWC: Tensor, height: int, width: int) -> Tensor:
    size_in = images_NHWC.shape[1:3]
    factors = (size_in[0] // height, size_in[1] // width)
    if (factors[0] * height, factors[1] * width) == tuple(size_in):
        return _shrink_by_integers(images_NHWC, factors)
    # Columns first, as the original: in float32 the other order, with the same sum, rounds to another level here and there.
    # Each pass on rows in memory: picking pixels of three numbers takes twice the time.
    columns_NWHC = images_NHWC.transpose(1, 2).contiguous().to(torch.float32)
    shrunk_NHWC = _weighted(columns_NWHC, width).transpose(1, 2).contiguous()
    return _weighted(shrunk_NHWC, height).round_().clamp_(0, 255).to(torch.uint8)


def _weighted(values: Tensor, size_out: int) -> Tensor:
    """Axis 1 of float32 [N, A, B, C] -> size_out."""
    size_in = values.shape[1]
    if size_in == size_out:
        return values
    index, weight = _on_device("area", size_in, size_out, values.device)
    weight = weight[..., None, None]
    total = values.index_select(1, index[:, 0]) * weight[:, 0]
    for tap in range(1, index.shape[1]):
        # Not addcmul: where it is one fused operation it does not round the product.
        total += values.index_select(1, index[:, tap]).mul_(weight[:, tap])
    return total


def _shrink_by_integers(images_NHWC: Tensor, factors: tuple[int, int]) -> Tensor:
    """Whole cells: exact sums, one rounding."""
    batch, height_in, width_in, channels = images_NHWC.shape
    shape = (batch, height_in // factors[0], factors[0], width_in // factors[1], factors[1], channels)
    total = images_NHWC.view(shape).sum(dim=(2, 4), dtype=torch.int32)
    # The original has a path of its own for halving, which rounds halves up.
    if factors == (2, 2):
        return ((total + 2) >> 2).to(torch.uint8)
    area = np.float32(1.0) / np.float32(factors[0] * factors[1])
    return (total.to(torch.float32) * float(area)).round_().to(torch.uint8)


def _grow(images_NHWC: Tensor, height: int, width: int) -> Tensor:
    """At least one side grows: a blend of two taps per axis."""
    device = images_NHWC.device
    columns, column_weight = _on_device("blend", images_NHWC.shape[2], width, device)
    rows, row_weight = _on_device("blend", images_NHWC.shape[1], height, device)
    blended = images_NHWC.index_select(2, columns[:, 0]).to(torch.int32).mul_(column_weight[:, 0, None])
    blended.addcmul_(images_NHWC.index_select(2, columns[:, 1]).to(torch.int32), column_weight[:, 1, None])
    # Shifts in the middle of the sum are the original's: they drop bits, and a tenth of all pixels would be one off without.
    blended >>= 4
    first = blended.index_select(1, rows[:, 0]).mul_(row_weight[:, 0, None, None])
    second = blended.index_select(1, rows[:, 1]).mul_(row_weight[:, 1, None, None])
    first >>= 16
    second >>= 16
    return first.add_(second).add_(2).__irshift__(2).clamp_(0, 255).to(torch.uint8)


def cut_windows(images_NHWC: Tensor, top_N: Tensor, left_N: Tensor, height: int, width: int) -> Tensor:
    """A window of one size at each image's own place: uint8 [N, height, width, C]. Offsets int64 [N] on the same device."""
    number = torch.arange(len(images_NHWC), device=images_NHWC.device)[:, None, None]
    rows = top_N[:, None, None] + torch.arange(height, device=images_NHWC.device)[None, :, None]
    columns = left_N[:, None, None] + torch.arange(width, device=images_NHWC.device)[None, None, :]
    return images_NHWC[number, rows, columns]


def shortest_edge_size(height: int, width: int, edge: int) -> tuple[int, int]:
    """Size with the shorter side at `edge` and the same aspect ratio."""
    scale = edge / min(height, width)
    return round(height * scale), round(width * scale)
