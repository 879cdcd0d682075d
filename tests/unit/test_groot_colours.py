"""GR00T's colours and resizes against OpenCV: every level equals numbers it gave and, where it is installed, all colours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron_vla.data.groot.colour import HUE_LEVELS, OPERATIONS, _to_hsv, _to_rgb, jitter, jitter_alike
from megatron_vla.data.groot.resize import resize_area

# (hue, saturation, value) -> (red, green, blue) of OpenCV 5.0 where rounding the product before the subtraction gives another.
FUSED = {
    (1, 90, 85): (85, 56, 55),
    (5, 162, 85): (85, 40, 30),
    (5, 238, 108): (108, 23, 7),
    (12, 135, 255): (255, 174, 119),
    (40, 102, 150): (129, 150, 89),
    (47, 60, 255): (220, 255, 195),
    (50, 153, 220): (132, 220, 88),
    (55, 170, 54): (23, 54, 18),
    (67, 102, 75): (44, 75, 52),
    (107, 30, 165): (145, 154, 165),
    (115, 51, 126): (100, 105, 126),
    (170, 51, 195): (195, 156, 169),
}


def picture(generator: np.random.Generator, height: int, width: int) -> np.ndarray:
    return generator.integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_products_that_opencv_fuses() -> None:
    hsv = torch.tensor(list(FUSED), dtype=torch.int32).repeat_interleave(32, 0).view(1, len(FUSED), 32, 3)
    rgb = _to_rgb(*hsv.unbind(-1))
    assert rgb[0, :, 0].tolist() == [list(levels) for levels in FUSED.values()]
    assert torch.equal(rgb, rgb[:, :, :1].expand_as(rgb))


def test_neutral_factors_change_nothing() -> None:
    """Alone or beside an image that changes; hue by hue, colours would not survive the way through HSV."""
    pictures = torch.from_numpy(np.stack([picture(np.random.default_rng(n), 8, 40) for n in range(2)]))
    neutral = [1.0, 1.0, 1.0, 0.0]
    assert torch.equal(jitter_alike(pictures, neutral, [3, 0, 2, 1]), pictures)
    factors = torch.tensor([neutral, [0.9, 1.1, 1.2, 0.05]], dtype=torch.float64)
    changed = jitter(pictures, factors, torch.tensor([[3, 0, 2, 1], [0, 1, 2, 3]]))
    assert torch.equal(changed[0], pictures[0]) and not torch.equal(changed[1], pictures[1])


@pytest.fixture(scope="module")
def opencv() -> Any:
    cv2 = pytest.importorskip("cv2")
    if "AVX2" not in cv2.getCPUFeaturesLine():
        pytest.skip("OpenCV rounds otherwise without fused multiply-add")
    return cv2


def test_all_hues_of_opencv(opencv: Any) -> None:
    saturation, value = np.meshgrid(np.arange(256), np.arange(256), indexing="ij")
    for hue in range(0, HUE_LEVELS, 7):
        for columns in (256, 16):  # as vectors, and what is left over
            hsv = np.stack([np.full_like(saturation, hue), saturation, value], -1).astype(np.uint8).reshape(-1, columns, 3)
            own = _to_rgb(*torch.from_numpy(hsv.astype(np.int32))[None].unbind(-1))
            np.testing.assert_array_equal(own[0].numpy(), opencv.cvtColor(hsv, opencv.COLOR_HSV2RGB))
        rgb = np.stack([np.full_like(saturation, (hue * 37) % 256), saturation, value], -1).astype(np.uint8)
        own = torch.stack(_to_hsv(torch.from_numpy(rgb)[None]), dim=-1)
        np.testing.assert_array_equal(own[0].numpy(), opencv.cvtColor(rgb, opencv.COLOR_RGB2HSV))


def test_saturation_of_opencv(opencv: Any) -> None:
    generator = np.random.default_rng(0)
    for factor in generator.uniform(0.5, 1.5, 30):
        rgb = picture(generator, 64, 100)
        grey = opencv.cvtColor(opencv.cvtColor(rgb, opencv.COLOR_RGB2GRAY), opencv.COLOR_GRAY2RGB)
        own = jitter_alike(torch.from_numpy(rgb)[None], [factor] * 4, [OPERATIONS.index("saturation")])
        np.testing.assert_array_equal(own[0].numpy(), opencv.addWeighted(rgb, factor, grey, 1 - factor, gamma=0))


def test_area_resize_of_opencv(opencv: Any) -> None:
    generator = np.random.default_rng(0)
    drawn = [tuple(generator.integers(8, 120, 4).tolist()) for _ in range(80)]
    for height, width, new_height, new_width in ((360, 640, 256, 455), (480, 640, 256, 341), (230, 306, 256, 341), *drawn):
        rgb = picture(generator, height, width)
        own = resize_area(torch.from_numpy(rgb)[None], new_height, new_width)[0].numpy()
        expected = opencv.resize(rgb, (new_width, new_height), interpolation=opencv.INTER_AREA)
        np.testing.assert_array_equal(own, expected, err_msg=f"{height} x {width} to {new_height} x {new_width}")
