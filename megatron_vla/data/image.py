"""Images: resize with padding, and the one place that says what range pixels have.

Both pipelines keep the aspect ratio, floor the resized sides, centre the picture and put an odd remainder at the bottom and
right. The padding is black *before* the range change, so it is exactly -1 for the model. Source: Pi0.5 as in openpi and
LeRobot.

Shape legend: H height, W width, S side of the square model image, C 3 channels, B samples, V views.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

ImageResize = Literal["pil_bilinear", "torch_bilinear"]


def padded_geometry(height: int, width: int, size: int) -> tuple[int, int, int, int]:
    """(new height, new width, top, left) of an image fitted into a `size` x `size` square; sides are floored."""
    # Floor, not round: one pixel more or less moves every patch of the picture.
    ratio = max(width / size, height / size)
    new_height, new_width = max(1, int(height / ratio)), max(1, int(width / ratio))
    return new_height, new_width, (size - new_height) // 2, (size - new_width) // 2


def _check_image(image_HWC: np.ndarray, name: str) -> None:
    if image_HWC.dtype != np.uint8 or image_HWC.ndim != 3 or image_HWC.shape[-1] != 3:
        raise ValueError(
            f"{name}: expected a uint8 [H, W, 3] image, found {image_HWC.dtype} {list(image_HWC.shape)}; "
            "pass the raw camera frame, neither normalized nor channels-first"
        )


def resize_with_pad_pil(image_HWC: np.ndarray, size: int, name: str = "image") -> np.ndarray:
    """uint8 [H, W, 3] -> uint8 [S, S, 3] with Pillow's antialiased bilinear filter.

    Raises ValueError on another dtype or shape.
    """
    _check_image(image_HWC, name)
    height, width, _ = image_HWC.shape
    # Untouched when it fits: a resampling filter is not the identity in every library version.
    if (height, width) == (size, size):
        return image_HWC
    new_height, new_width, top, left = padded_geometry(height, width, size)
    # Antialiased: differs from the float path by up to 0.8 of the range when shrinking, so the choice is stored in checkpoints.
    resized = Image.fromarray(image_HWC).resize((new_width, new_height), resample=Image.Resampling.BILINEAR)
    padded_SSC = np.zeros((size, size, 3), dtype=np.uint8)
    padded_SSC[top : top + new_height, left : left + new_width] = np.asarray(resized)
    return padded_SSC


def resize_float_with_pad(image_BCHW: Tensor, size: int, low: float, high: float) -> Tensor:
    """Bilinear without antialias, clamped to [low, high], padded with `low` (black): [B, C, H, W] -> [B, C, S, S]."""
    height, width = image_BCHW.shape[-2:]
    if (height, width) == (size, size):
        return image_BCHW
    new_height, new_width, top, left = padded_geometry(height, width, size)
    # No antialias here: checkpoints trained through this path saw its aliasing.
    resized = functional.interpolate(image_BCHW, size=(new_height, new_width), mode="bilinear", align_corners=False)
    padding = (left, size - new_width - left, top, size - new_height - top)
    return functional.pad(resized.clamp(low, high), padding, value=low)


def resize_with_pad_torch(image_HWC: np.ndarray, size: int, name: str = "image") -> np.ndarray:
    """uint8 [H, W, 3] -> float32 [3, S, S] in [-1, 1]: LeRobot's order, resize in [0, 1] first and change the range last."""
    _check_image(image_HWC, name)
    image_BCHW = torch.from_numpy(np.ascontiguousarray(image_HWC)).permute(2, 0, 1)[None].to(torch.float32) / 255.0
    resized_BCSS = resize_float_with_pad(image_BCHW, size, 0.0, 1.0)
    return (resized_BCSS * 2.0 - 1.0)[0].numpy()


def model_image(image_HWC: np.ndarray, size: int, resize: ImageResize, name: str) -> np.ndarray:
    """[3, S, S].

    Uint8 for pil_bilinear (a quarter of the bytes to copy; `pixels_to_model_range` follows), else float32 in [-1, 1].
    """
    if resize == "pil_bilinear":
        return resize_with_pad_pil(image_HWC, size, name).transpose(2, 0, 1)
    return resize_with_pad_torch(image_HWC, size, name)


def empty_image(size: int, resize: ImageResize) -> np.ndarray:
    """[3, S, S] of a view without camera: -1 everywhere once in model range."""
    if resize == "pil_bilinear":
        return np.zeros((3, size, size), dtype=np.uint8)
    return np.full((3, size, size), -1.0, dtype=np.float32)


def write_view(out_nCSS: np.ndarray, frames_nHWC: np.ndarray | None, size: int, resize: ImageResize, name: str) -> None:
    """Pictures of one view of n samples, as `model_image` gives them, into [n, 3, S, S]; None: a view without camera."""
    if frames_nHWC is None:
        out_nCSS[...] = empty_image(size, resize)
        return
    # Pictures that need no change were decoded to their place.
    if _start_of(frames_nHWC) == _start_of(out_nCSS):
        return
    for out_CSS, frame_HWC in zip(out_nCSS, frames_nHWC, strict=True):
        # Channels are put first here and nowhere before: one copy.
        out_CSS[...] = model_image(frame_HWC, size, resize, name)


def _start_of(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def pixels_to_model_range(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 [0, 255] -> [-1, 1] in `dtype`; float images are already in range and are only cast. Same shape."""
    # This order of operations maps all 256 levels exactly as the reference pipelines do.
    if images.dtype == torch.uint8:
        return images.to(dtype) / 255.0 * 2.0 - 1.0
    return images.to(dtype)


def check_image_range(images_BVCHW: Tensor) -> None:
    """Raise ValueError unless images are uint8 pixels or floats in [-1, 1].

    Called once, on the first batch: catches images that were normalized twice or not at all, and [0, 1] floats cast to uint8.
    """
    # A host read is fine: this runs once, on the CPU, before the first step.
    low, high = float(images_BVCHW.min()), float(images_BVCHW.max())
    if images_BVCHW.dtype == torch.uint8:
        if high == 1.0:
            raise ValueError(
                "images: uint8 pixels hold only 0 and 1; they were floats in [0, 1] before: store frames as 0 ... 255"
            )
        return
    if not images_BVCHW.is_floating_point():
        raise ValueError(f"images: dtype {images_BVCHW.dtype}; expected uint8, or float in [-1, 1]")
    if not (low >= -1.0 - 1e-4 and high <= 1.0 + 1e-4):
        raise ValueError(
            f"images: values from {low:.3f} to {high:.3f}; expected [-1, 1]. They were normalized twice or not at all: "
            "give uint8 frames to the preprocessor and change the range nowhere else"
        )
