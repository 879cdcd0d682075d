"""Image augmentation of Pi0.5's training, in both released forms, applied from explicit parameters.

Parameters are drawn elsewhere (data/draws.py) as pure functions of (seed, epoch, sample), so the same code serves a worker that
augments one sample and the GPU that augments a whole batch in one pass. Source: openpi's preprocessing in PyTorch
(openpi_torch) and in JAX with augmax 0.4.1 (openpi_jax). The two differ in distribution: hue and the probability of 0.5 exist
in the JAX form only.

Shape legend: B samples, V views, G views that are cropped and rotated, N images, P parameters per view, C 3 channels, S side
of the square image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from megatron_vla.config.data import AugmentationKind
from megatron_vla.data.draws import JAX_FIELDS, TORCH_FIELDS, augmentation_draws, crop_side
from megatron_vla.data.image import pixels_to_model_range

MIN_ROTATION_DEGREES = 0.1  # below it openpi's PyTorch form does not resample at all
WRIST = "wrist"  # views with this word in their name keep their geometry: the gripper has to stay where it is


@dataclass(frozen=True)
class Augmentation:
    """What is done to every view; `views` names all image slots, and slots without camera stay black."""

    kind: AugmentationKind
    seed: int
    image_size: int
    views: tuple[str, ...]

    @property
    def geometry_views(self) -> list[int]:
        """Places of the views that are cropped and rotated."""
        return [place for place, name in enumerate(self.views) if WRIST not in name]

    def parameters(self, arrays: dict[str, Any], epoch: int) -> np.ndarray:
        """float32 [V, P] of one sample: a pure function of (seed, epoch, sample)."""
        moves_V = [WRIST not in name for name in self.views]
        is_present_V = arrays["camera_is_present_BV"].tolist()
        index = int(arrays["sample_index_B"])
        return augmentation_draws(self.kind, self.seed, epoch, index, moves_V, is_present_V, self.image_size)

    def apply(self, images_BVCSS: Tensor, parameters_BVP: Tensor) -> Tensor:
        """uint8, or float in [-1, 1] -> float32 [B, V, C, S, S] in [-1, 1], on the device of the images; one pass."""
        return augment(self.kind, images_BVCSS, parameters_BVP, self.geometry_views)

    def apply_to_images(self, images_NCSS: Tensor, parameters_NP: Tensor, view_N: Tensor) -> Tensor:
        """As `apply`, for images of any views; view_N: each one's view, on the host. [N, C, S, S]."""
        moves_N = torch.tensor([WRIST not in name for name in self.views])[view_N].to(images_NCSS.device, non_blocking=True)
        return augment_images(self.kind, images_NCSS, parameters_NP, moves_N)

    def apply_to_sample(self, arrays: dict[str, Any], epoch: int) -> dict[str, Any]:
        """The arrays of one sample with augmented images, for workers."""
        parameters_VP = torch.from_numpy(self.parameters(arrays, epoch))
        images = self.apply(torch.from_numpy(arrays["images_BVCHW"])[None], parameters_VP[None])
        return {**arrays, "images_BVCHW": images[0].numpy()}


def augment(kind: AugmentationKind, images_BVCSS: Tensor, parameters_BVP: Tensor, geometry_views: list[int]) -> Tensor:
    """See `Augmentation.apply`. Parameters have the columns of draws.TORCH_FIELDS or draws.JAX_FIELDS."""
    fields = TORCH_FIELDS if kind == "openpi_torch" else JAX_FIELDS
    move, colour = (_move_torch, _colour_torch) if kind == "openpi_torch" else (_move_jax, _colour_jax)
    unit_BVCSS = pixels_to_model_range(images_BVCSS) / 2.0 + 0.5
    shape = unit_BVCSS.shape
    if geometry_views:
        # Views are taken and put back one by one: indexing with a list would copy the list to the device, which waits for it.
        views = list(unit_BVCSS.unbind(dim=1))
        moved_NCSS = torch.stack([views[place] for place in geometry_views], dim=1).flatten(0, 1)
        parameters_NP = torch.stack([parameters_BVP[:, place] for place in geometry_views], dim=1).flatten(0, 1)
        moved_BGCSS = move(moved_NCSS, _columns(fields, parameters_NP)).unflatten(0, (shape[0], len(geometry_views)))
        for place, moved_BCSS in zip(geometry_views, moved_BGCSS.unbind(dim=1), strict=True):
            views[place] = moved_BCSS
        unit_BVCSS = torch.stack(views, dim=1)
    coloured_NCSS = colour(unit_BVCSS.flatten(0, 1), _columns(fields, parameters_BVP.flatten(0, 1)))
    return (coloured_NCSS * 2.0 - 1.0).view(shape)


def augment_images(kind: AugmentationKind, images_NCSS: Tensor, parameters_NP: Tensor, moves_N: Tensor) -> Tensor:
    """As `augment`, image by image; moves_N: which are cropped and rotated."""
    fields = TORCH_FIELDS if kind == "openpi_torch" else JAX_FIELDS
    move, colour = (_move_torch, _colour_torch) if kind == "openpi_torch" else (_move_jax, _colour_jax)
    by_name = _columns(fields, parameters_NP)
    unit_NCSS = pixels_to_model_range(images_NCSS) / 2.0 + 0.5
    unit_NCSS = torch.where(moves_N[:, None, None, None], move(unit_NCSS, by_name), unit_NCSS)
    return colour(unit_NCSS, by_name) * 2.0 - 1.0


def _columns(fields: tuple[str, ...], parameters_NP: Tensor) -> dict[str, Tensor]:
    """Field -> [N, 1, 1, 1], ready to meet images."""
    return {name: parameters_NP[:, place, None, None, None] for place, name in enumerate(fields)}


# openpi, PyTorch: crop, resize and rotation are two resamplings in a row.


def _move_torch(unit_NCSS: Tensor, by_name: dict[str, Tensor]) -> Tensor:
    size = unit_NCSS.shape[-1]
    rows_NCSS = _resized_rows(unit_NCSS, by_name["top"][:, 0, 0, 0], crop_side(size))
    # The same along the other axis: bilinear resizing is separable.
    resized_NCSS = _resized_rows(rows_NCSS.mT, by_name["left"][:, 0, 0, 0], crop_side(size)).mT
    angle_N11 = torch.deg2rad(by_name["angle_degrees"][:, 0])
    line_S = torch.linspace(-1.0, 1.0, size, device=unit_NCSS.device)
    x_NSS, y_NSS = line_S[None, None, :], line_S[None, :, None]
    cosine, sine = torch.cos(angle_N11), torch.sin(angle_N11)
    grid_NSS2 = torch.stack([x_NSS * cosine - y_NSS * sine, x_NSS * sine + y_NSS * cosine], dim=-1)
    rotated_NCSS = functional.grid_sample(resized_NCSS, grid_NSS2, mode="bilinear", padding_mode="zeros", align_corners=False)
    is_rotated = by_name["angle_degrees"].abs() > MIN_ROTATION_DEGREES
    return torch.where(is_rotated, rotated_NCSS, resized_NCSS)


def _resized_rows(unit_NCSS: Tensor, top_N: Tensor, crop: int) -> Tensor:
    """Rows top ... top + crop - 1 stretched over the whole height, linear, half-pixel centres; the edge repeats."""
    size = unit_NCSS.shape[-1]
    source_S = ((torch.arange(size, device=unit_NCSS.device) + 0.5) * (crop / size) - 0.5).clamp(min=0.0)
    low_S = source_S.floor().clamp(max=crop - 1)
    weight_S1 = (source_S - low_S)[:, None]
    first_NS = top_N.long()[:, None] + low_S.long()
    second_NS = top_N.long()[:, None] + (low_S.long() + 1).clamp(max=crop - 1)
    first, second = (unit_NCSS.gather(2, rows_NS[:, None, :, None].expand_as(unit_NCSS)) for rows_NS in (first_NS, second_NS))
    return first * (1.0 - weight_S1) + second * weight_S1


def _colour_torch(unit_NCSS: Tensor, by_name: dict[str, Tensor]) -> Tensor:
    bright = unit_NCSS * by_name["brightness"]
    mean = bright.mean(dim=(1, 2, 3), keepdim=True)
    contrasted = (bright - mean) * by_name["contrast"] + mean
    grey = contrasted.mean(dim=1, keepdim=True)
    return (grey + (contrasted - grey) * by_name["saturation"]).clamp(0.0, 1.0)


# openpi, JAX: augmax composes crop, resize and rotation into one resampling, and changes colours in HSV.


def _move_jax(unit_NCSS: Tensor, by_name: dict[str, Tensor]) -> Tensor:
    size = unit_NCSS.shape[-1]
    centre = (size - 1) / 2.0
    line_S = (torch.arange(size, device=unit_NCSS.device, dtype=torch.float32) - centre) * (crop_side(size) / size)
    x_NSS, y_NSS = line_S[None, None, :], line_S[None, :, None]
    angle_N11 = by_name["angle_radians"][:, 0]
    cosine, sine = torch.cos(angle_N11), torch.sin(angle_N11)
    source_y = y_NSS * cosine + x_NSS * sine + by_name["centre_y"][:, 0]
    source_x = x_NSS * cosine - y_NSS * sine + by_name["centre_x"][:, 0]
    # Pixel offsets from the centre -> [-1, 1] between the centres of the outermost pixels.
    grid_NSS2 = torch.stack([source_x, source_y], dim=-1) / centre
    return functional.grid_sample(unit_NCSS, grid_NSS2, mode="bilinear", padding_mode="zeros", align_corners=True)


def _colour_jax(unit_NCSS: Tensor, by_name: dict[str, Tensor]) -> Tensor:
    hue, saturation, value = _to_hsv(unit_NCSS)
    brightness, contrast = by_name["brightness"][:, 0], by_name["contrast"][:, 0]
    value = torch.where(brightness < 0, value * (1.0 + brightness), value * (1.0 - brightness) + brightness)
    value = _contrast(value, contrast)
    # Saturation is drawn by the original and its result is thrown away there, so it has no column here.
    changed_NCSS = _to_rgb((hue + by_name["hue"][:, 0]) % 1.0, saturation, value)
    return torch.where(by_name["is_coloured"] > 0, changed_NCSS, unit_NCSS)


def _contrast(value_NSS: Tensor, contrast_N11: Tensor) -> Tensor:
    """Piecewise linear: slope m in the middle, 1 / m at both ends."""
    slope = torch.tan((contrast_N11 + 1.0) * (torch.pi / 4.0))
    # slope 1 is the identity; its knee would be 0 / 0.
    is_identity = (slope - 1.0).abs() < 1e-6
    safe = torch.where(is_identity, 1.5, slope)
    knee = (safe - safe * safe) / (2.0 * (1.0 - safe * safe))
    middle = safe * (value_NSS - 0.5) + 0.5
    ends = torch.where(value_NSS > 1.0 - knee, value_NSS / safe + 1.0 - 1.0 / safe, middle)
    return torch.where(is_identity, value_NSS, torch.where(value_NSS < knee, value_NSS / safe, ends))


def _to_hsv(unit_NCSS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hue, saturation and value, each [N, S, S] in [0, 1]."""
    red, green, blue = unit_NCSS.unbind(dim=1)
    value, low = unit_NCSS.amax(dim=1), unit_NCSS.amin(dim=1)
    spread = value - low
    safe = torch.where(spread > 0, spread, 1.0)
    hue = torch.where(value == red, (green - blue) / safe, torch.where(value == green, (blue - red) / safe + 2.0, 0.0))
    hue = torch.where((value != red) & (value != green), (red - green) / safe + 4.0, hue)
    return (hue / 6.0) % 1.0, spread / torch.where(value > 0, value, 1.0), value


def _to_rgb(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Inverse of `_to_hsv`: [N, 3, S, S]."""
    # Distance of the hue from each primary's sector, the branch-free form of the six cases. The shifts 5, 3, 1 are made on the
    # device: a copy of a host tensor would wait for it.
    shifts = torch.arange(5, 0, -2, device=hue.device, dtype=hue.dtype)[None, :, None, None]
    sector = (hue[:, None] * 6.0 + shifts) % 6.0
    weight = torch.minimum(sector, 4.0 - sector).clamp(0.0, 1.0)
    return value[:, None] - (value * saturation)[:, None] * weight
