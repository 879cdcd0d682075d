"""From camera frames to Qwen3-VL patch rows: letter box, resize, crop, resize, colour jitter, multiples of 32, patches.

Everything stays uint8 and exact: the model changes the range. Two released pipelines: `area` is Isaac-GR00T's (aspect ratio
kept, OpenCV INTER_AREA, augmentation), `bicubic` LeRobot's (squashed to a square). Evaluation crops the centre; training crops
one window for all views and frames of a sample. Source: spec of GR00T N1.7, sections 5.4 and 5.5.

Shape legend: N images, H height, W width, C 3 channels, P patches, D values of a patch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from megatron_vla.data.groot.resize import resize_area, shortest_edge_size

ImageFilter = Literal["area", "bicubic"]
MAX_ASPECT_RATIO = 200


@dataclass(frozen=True)
class PictureSettings:
    """edge: side of the square, or shorter side, after each resize; crop_fraction: share of each side that a crop keeps.

    patch_size, merge_size: of the vision tower; min_pixels, max_pixels: limits of its image processor.
    """

    image_filter: ImageFilter
    edge: int
    crop_fraction: float
    letter_box: bool
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int

    @property
    def factor(self) -> int:
        """Sides that the vision tower takes are multiples of this."""
        return self.patch_size * self.merge_size

    def resized(self, frame_HWC: np.ndarray, name: str) -> Tensor:
        """uint8 [H, W, C] camera frame -> uint8 [1, H', W', C]: what crops are taken from. Raises ValueError."""
        if frame_HWC.dtype != np.uint8 or frame_HWC.ndim != 3 or frame_HWC.shape[-1] != 3:
            raise ValueError(
                f"{name}: expected a uint8 [H, W, 3] image, found {frame_HWC.dtype} {list(frame_HWC.shape)}; "
                "pass the raw camera frame, neither normalized nor channels-first"
            )
        frame_HWC = np.ascontiguousarray(frame_HWC)
        # torch warns of arrays that cannot be written to, as those out of a client's message are.
        picture = torch.from_numpy(frame_HWC if frame_HWC.flags.writeable else frame_HWC.copy())[None]
        picture = _letter_boxed(picture) if self.letter_box else picture
        return self.resize(picture)

    def resize(self, pictures_NHWC: Tensor) -> Tensor:
        """Frames or crops of one size -> uint8 [N, H', W', C] with the side (or shorter side) `edge`."""
        if self.image_filter == "bicubic":
            return resize_bicubic(pictures_NHWC, self.edge, self.edge)
        height, width = shortest_edge_size(pictures_NHWC.shape[1], pictures_NHWC.shape[2], self.edge)
        return resize_area(pictures_NHWC, height, width)

    def window(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of a crop of a resized picture."""
        # Cut against rounded: each released pipeline's own.
        whole = round if self.image_filter == "bicubic" else int
        return whole(height * self.crop_fraction), whole(width * self.crop_fraction)

    def centre(self, height: int, width: int) -> tuple[int, int]:
        """(top, left) of the centre crop."""
        rows, columns = self.window(height, width)
        if self.image_filter == "bicubic":
            return round((height - rows) / 2), round((width - columns) / 2)
        return (height - rows) // 2, (width - columns) // 2

    def cropped(self, pictures_NHWC: Tensor, top: int, left: int) -> Tensor:
        """One window of equally large resized pictures, resized again: uint8 [N, H', W', C]."""
        rows, columns = self.window(pictures_NHWC.shape[1], pictures_NHWC.shape[2])
        return self.resize(pictures_NHWC[:, top : top + rows, left : left + columns])

    def final_size(self, height: int, width: int) -> tuple[int, int]:
        """Size of the crop of a resized picture after its second resize."""
        if self.image_filter == "bicubic":
            return self.edge, self.edge
        return shortest_edge_size(*self.window(height, width), self.edge)

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """(1, rows, columns) of patches of a resized picture once it is cropped: nothing has to be cropped to know it."""
        size = tower_size(*self.final_size(height, width), self.factor, self.min_pixels, self.max_pixels)
        return 1, size[0] // self.patch_size, size[1] // self.patch_size

    def patches(self, pictures_NHWC: Tensor) -> Tensor:
        """Finished crops of one size -> uint8 [N * P, D], D = channel, row, column; patches in merge-block order."""
        size = tower_size(pictures_NHWC.shape[1], pictures_NHWC.shape[2], self.factor, self.min_pixels, self.max_pixels)
        return patch_rows(resize_bicubic(pictures_NHWC, *size), self.patch_size, self.merge_size)


def _letter_boxed(picture_NHWC: Tensor) -> Tensor:
    """Black bars on the short side; an odd remainder goes to the bottom and right."""
    height, width = picture_NHWC.shape[1:3]
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    padding = (0, 0, left, side - width - left, top, side - height - top)
    return functional.pad(picture_NHWC, padding)


def resize_bicubic(pictures_NHWC: Tensor, height: int, width: int) -> Tensor:
    """Antialiased bicubic, uint8 [N, H, W, C] -> uint8 [N, height, width, C]."""
    if tuple(pictures_NHWC.shape[1:3]) == (height, width):
        return pictures_NHWC
    pictures_NCHW = pictures_NHWC.permute(0, 3, 1, 2)
    # On the CPU torch has a uint8 kernel, the one that the released image processor runs; on GPUs it resizes floats only, which
    # gives the same levels up to rounding.
    values = pictures_NCHW if pictures_NCHW.device.type == "cpu" else pictures_NCHW.to(torch.float32)
    resized = functional.interpolate(values, size=(height, width), mode="bicubic", antialias=True, align_corners=False)
    if resized.dtype != torch.uint8:
        resized = resized.round_().clamp_(0, 255).to(torch.uint8)
    return resized.permute(0, 2, 3, 1)


def tower_size(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The nearest size with sides in multiples of `factor` and a pixel count within the limits (Qwen's rule).

    Raises ValueError for pictures longer than 200 times their other side.
    """
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise ValueError(f"image of {height} x {width} pixels: the sides differ by more than a factor of {MAX_ASPECT_RATIO}")
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        return tuple(max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))  # type: ignore[return-value]
    if new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        return tuple(math.ceil(side * grow / factor) * factor for side in (height, width))  # type: ignore[return-value]
    return new_height, new_width


def patch_rows(pictures_NHWC: Tensor, patch: int, merge: int) -> Tensor:
    """[N, H, W, C] -> [N * P, C * patch * patch], picture after picture; blocks of merge x merge patches stay together."""
    number, height, width, channels = pictures_NHWC.shape
    blocks = pictures_NHWC.reshape(
        number, height // (merge * patch), merge, patch, width // (merge * patch), merge, patch, channels
    )
    # number, block row, block column, row in block, column in block, channel, y, x
    ordered = blocks.permute(0, 1, 4, 2, 5, 7, 3, 6)
    return ordered.reshape(-1, channels * patch * patch)


def pictures_of(patches_PD: Tensor, grid: tuple[int, int, int], patch: int, merge: int) -> Tensor:
    """Inverse of `patch_rows` for the patches of one grid: [time slices, H, W, C], for people to look at."""
    frames, rows, columns = grid
    ordered = patches_PD.reshape(frames, rows // merge, columns // merge, merge, merge, 3, patch, patch)
    return ordered.permute(0, 1, 3, 6, 2, 4, 7, 5).reshape(frames, rows * patch, columns * patch, 3)
