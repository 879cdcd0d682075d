"""Colour jitter of uint8 images as GR00T's released pipeline does it: integer steps, explicit factors, any order of the four.

Brightness and contrast are tables over the 256 levels, saturation a blend with the grey picture, hue a shift of OpenCV's 8-bit
HSV (hue in 0 ... 179). All in torch on uint8, and every level equals the original's: so a data worker and a whole batch on the
GPU give the same picture. Source: the augmentation library's published formulas, checked against pictures of the released
pipeline and, over all colours, against OpenCV 5.0.

OpenCV's builds for processors with fused multiply-add (all x86 ones since 2013) round a * b + c once. That is repeated here by
computing it in fp64, where the product of two fp32 numbers is exact.

Shape legend: N images, H height, W width, C 3 channels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

OPERATIONS = ("brightness", "contrast", "saturation", "hue")  # their numbers in a drawn order
HUE_LEVELS = 180
VECTOR_COLUMNS = 32  # pixels in one step of OpenCV's vector code for HSV -> RGB
SHIFT = 12  # fixed point of the division tables
# OpenCV's 8-bit grey: 0.299, 0.587, 0.114 in 15 bits.
GREY_SHIFT = 15
GREY_WEIGHTS = (9798, 19235, 3735)


def adjust(operation: int, images_NHWC: Tensor, factor_N111: Tensor) -> Tensor:
    """One operation with one float64 factor per image [N, 1, 1, 1]: uint8 -> uint8 [N, H, W, C]."""
    functions: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (_brightness, _contrast, _saturation, _hue)
    return functions[operation](images_NHWC, factor_N111)


def jitter(images_NHWC: Tensor, factors_N4: Tensor, order_N4: Tensor) -> Tensor:
    """All four operations, each image in its own order; nothing is read back from the device.

    factors_N4: float64, columns as OPERATIONS; order_N4: int64, operation at each place.
    """
    for place in range(len(OPERATIONS)):
        chosen_N111 = order_N4[:, place, None, None, None]
        # Every operation on every image and then a choice: a batch on the GPU has all orders at once.
        changed = images_NHWC
        for operation in range(len(OPERATIONS)):
            candidate = adjust(operation, images_NHWC, factors_N4[:, operation, None, None, None])
            changed = torch.where(chosen_N111 == operation, candidate, changed)
        images_NHWC = changed
    return images_NHWC


def jitter_alike(images_NHWC: Tensor, factors: list[float], order: list[int]) -> Tensor:
    """The same for images that share factors and order (the views of one sample), without work that is thrown away."""
    for operation in order:
        factor_1111 = images_NHWC.new_full((1, 1, 1, 1), factors[operation], dtype=torch.float64)
        images_NHWC = adjust(operation, images_NHWC, factor_1111)
    return images_NHWC


def _to_levels(values: Tensor) -> Tensor:
    # Cut, not rounded: the original casts its clipped float tables.
    return values.clamp_(0, 255).to(torch.uint8)


def _brightness(images_NHWC: Tensor, factor_N111: Tensor) -> Tensor:
    return _to_levels(images_NHWC.to(torch.float32) * factor_N111.to(torch.float32))


def _grey(images_NHWC: Tensor) -> Tensor:
    """int32 [N, H, W] in 0 ... 255."""
    red, green, blue = images_NHWC.to(torch.int32).unbind(dim=-1)
    weights = GREY_WEIGHTS
    total = red * weights[0] + green * weights[1] + blue * weights[2] + (1 << (GREY_SHIFT - 1))
    return total >> GREY_SHIFT


def _contrast(images_NHWC: Tensor, factor_N111: Tensor) -> Tensor:
    grey_NHW = _grey(images_NHWC)
    # Not mean(): GPUs multiply by the reciprocal of the count there.
    mean_N111 = (grey_NHW.sum(dim=(1, 2)).to(torch.float64) / grey_NHW[0].numel())[:, None, None, None]
    offset_N111 = (mean_N111 * (1.0 - factor_N111)).to(torch.float32)
    changed = _to_levels(images_NHWC.to(torch.float32) * factor_N111.to(torch.float32) + offset_N111)
    return torch.where(factor_N111 == 1.0, images_NHWC, changed)


def _saturation(images_NHWC: Tensor, factor_N111: Tensor) -> Tensor:
    grey_NHW1 = _grey(images_NHWC)[..., None].to(torch.float32) * (1.0 - factor_N111).to(torch.float32)
    # The product with the colour is the fused one.
    changed = images_NHWC.to(torch.float64).mul_(factor_N111.to(torch.float32).to(torch.float64))
    changed = changed.add_(grey_NHW1.to(torch.float64))
    # This one operation rounds, half to even.
    return changed.to(torch.float32).round_().clamp_(0, 255).to(torch.uint8)


def _hue(images_NHWC: Tensor, factor_N111: Tensor) -> Tensor:
    hue, saturation, value = _to_hsv(images_NHWC)
    # The shift is a table over levels in the original, cut to integers after the wrap-around.
    shifted = torch.remainder(hue.to(torch.float64) + HUE_LEVELS * factor_N111[..., 0], HUE_LEVELS).to(torch.int32)
    # No shift is no change, though colours do not survive the way there and back.
    return torch.where(factor_N111 == 0.0, images_NHWC, _to_rgb(shifted, saturation, value))


def _to_hsv(images_NHWC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hue 0 ... 179, saturation and value 0 ... 255, int32 [N, H, W], by OpenCV's integer division tables."""
    red, green, blue = images_NHWC.to(torch.int32).unbind(dim=-1)
    value = torch.maximum(torch.maximum(red, green), blue)
    spread = value - torch.minimum(torch.minimum(red, green), blue)
    level = torch.arange(256, device=images_NHWC.device, dtype=torch.float64).clamp(min=1.0)
    saturation_table = ((255 << SHIFT) / level).round().to(torch.int32)
    hue_table = ((HUE_LEVELS << SHIFT) / (6.0 * level)).round().to(torch.int32)
    half = 1 << (SHIFT - 1)
    saturation = (spread * saturation_table[value] + half) >> SHIFT
    numerator = torch.where(
        value == red, green - blue, torch.where(value == green, blue - red + 2 * spread, red - green + 4 * spread)
    )
    hue = (numerator * hue_table[spread] + half) >> SHIFT
    return torch.where(hue < 0, hue + HUE_LEVELS, hue), saturation, value


@cache
def _shares(device: torch.device) -> Tensor:
    """float32 [180 * 256, 3]: red, green and blue as shares of the value, by hue and saturation; made once per device."""
    sector = torch.arange(HUE_LEVELS, dtype=torch.float32)[:, None] * torch.tensor(6.0 / HUE_LEVELS)
    whole = sector.floor()
    part, saturation = sector - whole, torch.arange(256, dtype=torch.float32) * torch.tensor(1.0 / 255.0)

    def fused(weight: Tensor) -> Tensor:
        return (1.0 - saturation.to(torch.float64) * weight.to(torch.float64)).to(torch.float32)

    one = torch.ones(HUE_LEVELS, 256)
    choices = torch.stack([one, (1.0 - saturation).expand_as(one), fused(part), fused(1.0 - part)], dim=-1)
    # Which of the four red, green and blue take in each sixth of the circle.
    takes = torch.tensor([[0, 3, 1], [2, 0, 1], [1, 0, 3], [1, 2, 0], [3, 1, 0], [0, 1, 2]])
    chosen = takes[whole.to(torch.int64).expand(-1, 256)]
    return choices.gather(-1, chosen).view(-1, 3).to(device)


def _to_rgb(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """uint8 [N, H, W, C] of int32 hue, saturation and value [N, H, W]."""
    level = value.to(torch.float32) * (1.0 / 255.0)
    rgb = functional.embedding(hue * 256 + saturation, _shares(hue.device)) * level[..., None]
    levels = rgb * 255.0
    # OpenCV cuts in its vector code and rounds in the columns that are left over: at 256 columns everything is cut.
    in_vectors = levels.shape[2] // VECTOR_COLUMNS * VECTOR_COLUMNS
    levels[:, :, in_vectors:] = levels[:, :, in_vectors:].round()
    return _to_levels(levels)
