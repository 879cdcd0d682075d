"""Image range and padding colour."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_vla.data.image import check_image_range, empty_image, model_image, pixels_to_model_range


@pytest.mark.parametrize("resize", ["pil_bilinear", "torch_bilinear"])
@pytest.mark.parametrize("shape", [(30, 50), (50, 30), (28, 28)])
def test_N09_black_is_minus_one_everywhere_with_padding(resize: str, shape: tuple[int, int]) -> None:
    black = np.zeros((*shape, 3), dtype=np.uint8)
    image = pixels_to_model_range(torch.from_numpy(model_image(black, 28, resize, "top")))  # type: ignore[arg-type]
    assert image.shape == (3, 28, 28)
    assert torch.all(image == -1.0)
    empty = pixels_to_model_range(torch.from_numpy(empty_image(28, resize)))  # type: ignore[arg-type]
    assert torch.all(empty == -1.0)


def test_N09_white_is_one_inside_and_bars_stay_black() -> None:
    white = np.full((14, 28, 3), 255, dtype=np.uint8)
    for resize in ("pil_bilinear", "torch_bilinear"):
        image = pixels_to_model_range(torch.from_numpy(model_image(white, 28, resize, "top")))  # type: ignore[arg-type]
        assert torch.all(image[:, 7:21] == 1.0)
        assert torch.all(image[:, :7] == -1.0)
        assert torch.all(image[:, 21:] == -1.0)


def test_N09_wrong_ranges_are_refused() -> None:
    check_image_range(torch.zeros(1, 1, 3, 2, 2, dtype=torch.uint8))
    check_image_range(torch.full((1, 1, 3, 2, 2), -1.0))
    for values, text in (
        (torch.linspace(-3, 1, 12), "normalized twice"),
        (torch.linspace(0, 255, 12), "normalized twice or not at all"),
        (torch.linspace(0, 1.99, 12).to(torch.uint8), "hold only 0 and 1"),
        (torch.full((12,), torch.nan), "expected"),
        (torch.arange(12), "dtype"),
    ):
        with pytest.raises(ValueError, match=text):
            check_image_range(values.reshape(1, 1, 3, 2, 2))


def test_N09_only_raw_frames_are_taken() -> None:
    with pytest.raises(ValueError, match=r"top: expected a uint8 \[H, W, 3\] image, found float32"):
        model_image(np.zeros((8, 8, 3), dtype=np.float32), 28, "pil_bilinear", "top")
    with pytest.raises(ValueError, match=r"found uint8 \[3, 8, 8\]"):
        model_image(np.zeros((3, 8, 8), dtype=np.uint8), 28, "torch_bilinear", "top")


def test_all_256_values_round_trip() -> None:
    levels = torch.arange(256, dtype=torch.uint8)
    back = ((pixels_to_model_range(levels) + 1.0) / 2.0 * 255.0).round().to(torch.uint8)
    assert torch.equal(back, levels)
    assert pixels_to_model_range(levels)[[0, 255]].tolist() == [-1.0, 1.0]
