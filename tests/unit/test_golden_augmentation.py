"""Augmentation: replay of explicit parameters against the community implementations, draws, and one pass against many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_vla.config.data import AugmentationKind
from megatron_vla.data.augmentation import Augmentation, augment
from megatron_vla.data.draws import JAX_FIELDS, TORCH_FIELDS, augmentation_draws

GOLDEN = Path(__file__).parents[1] / "golden/pi05_augmentation"
TORCH_CASES: list[dict[str, Any]] = json.loads((GOLDEN / "augment_torch.json").read_text())["cases"]
JAX_CASES: list[dict[str, Any]] = json.loads((GOLDEN / "augment_jax.json").read_text())["cases"]
TORCH_CAMERAS = ("base_0_rgb", "left_wrist_0_rgb")
KINDS: tuple[AugmentationKind, ...] = ("openpi_torch", "openpi_jax")
LSB = 2 / 255


@pytest.mark.parametrize("case", TORCH_CASES, ids=lambda case: case["case"])
def test_torch_form_replays_openpi(case: dict[str, Any]) -> None:
    tensors = load_file(GOLDEN / "augment_torch.safetensors")
    images_BVCSS = torch.stack([tensors[f"in.{name}"].permute(0, 3, 1, 2) for name in TORCH_CAMERAS], dim=1)
    keys = ("start_h", "start_w", "angle_degrees", "brightness_factor", "contrast_factor", "saturation_factor")
    parameters_P = torch.tensor([case[key] for key in keys])
    result = augment("openpi_torch", images_BVCSS, parameters_P.expand(2, 2, len(TORCH_FIELDS)), [0])
    for view, name in enumerate(TORCH_CAMERAS):
        wanted = tensors[f"out{case['case']}.{name}"].permute(0, 3, 1, 2)
        torch.testing.assert_close(result[:, view], wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize("case", JAX_CASES, ids=lambda case: case["key"])
def test_jax_form_replays_openpi(case: dict[str, Any]) -> None:
    tensors = load_file(GOLDEN / "augment_jax.safetensors")
    image_BVCSS = tensors["in"].permute(2, 0, 1)[None, None] * 2 - 1
    offset, amounts = case["crop_centre_offset_yx"], case["colour_amounts"]
    moves = offset is not None
    values = [*(offset or (0, 0)), case["rotation_radians"] or 0.0, float(case["colour_applied"])]
    values += [amounts[key] for key in ("brightness", "contrast", "hue")]
    result = augment("openpi_jax", image_BVCSS, torch.tensor(values)[None, None], [0] if moves else [])
    wanted = tensors[case["key"]].permute(2, 0, 1)
    # fp32 in [0, 1]; hue amplifies rounding where the colour is nearly grey.
    torch.testing.assert_close(result[0, 0] / 2 + 0.5, wanted, rtol=0, atol=3e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_draws_depend_on_seed_epoch_and_sample_only_and_stay_in_range(kind: AugmentationKind) -> None:
    def draw(seed: int = 1, epoch: int = 0, sample: int = 5) -> np.ndarray:
        return augmentation_draws(kind, seed, epoch, sample, [True, False, True], [True, True, False], 224)

    assert np.array_equal(draw(), draw())
    for other in (draw(seed=2), draw(epoch=1), draw(sample=6)):
        assert not np.array_equal(draw(), other)
    many_NVP = np.stack([draw(sample=i) for i in range(4000)])
    fields = TORCH_FIELDS if kind == "openpi_torch" else JAX_FIELDS
    ranges = {"top": (0, 12), "left": (0, 12), "angle_degrees": (-5, 5), "angle_radians": (-0.0873, 0.0873)}
    ranges |= {"centre_y": (-6, 6), "centre_x": (-6, 6), "is_coloured": (0, 1), "hue": (-0.1, 0.1), "saturation": (0.5, 1.5)}
    is_torch = kind == "openpi_torch"
    ranges |= {"brightness": (0.7, 1.3) if is_torch else (-0.3, 0.3), "contrast": (0.6, 1.4) if is_torch else (-0.4, 0.4)}
    for place, name in enumerate(fields):
        low, high = ranges[name]
        values = many_NVP[:, 0, place]
        assert low - 1e-4 <= values.min() <= low + 0.02 * (high - low), name
        assert high - 0.02 * (high - low) <= values.max() <= high + 1e-4, name
        # A uniform variable's mean, within five standard errors (a fair coin's is the widest).
        assert abs(values.mean() - (low + high) / 2) < 5 * 0.5 * (high - low) / np.sqrt(4000), name


@pytest.mark.parametrize("kind", KINDS)
def test_one_pass_over_a_batch_equals_samples_one_by_one(kind: AugmentationKind) -> None:
    plan = Augmentation(kind, seed=4, image_size=56, views=("base", "left_wrist", "empty_0"))
    images_BVCSS = torch.randint(0, 256, (9, 3, 3, 56, 56), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images_BVCSS[:, 2] = 0  # no camera
    samples = [
        {
            "images_BVCHW": images_VCSS.numpy(),
            "camera_is_present_BV": np.array([True, True, False]),
            "sample_index_B": np.int64(i),
        }
        for i, images_VCSS in enumerate(images_BVCSS)
    ]
    parameters_BVP = torch.from_numpy(np.stack([plan.parameters(arrays, 0) for arrays in samples]))
    batch = plan.apply(images_BVCSS, parameters_BVP)
    assert batch.dtype == torch.float32 and float(batch.abs().max()) <= 1.0 + 1e-6
    assert bool((batch[:, 2] == -1).all())
    for i in range(9):
        one = plan.apply_to_sample(samples[i], 0)["images_BVCHW"]
        np.testing.assert_allclose(one, batch[i].numpy(), rtol=0, atol=LSB / 100)
    changed = (batch[:, :2] - (images_BVCSS[:, :2] / 255 * 2 - 1)).abs().amax(dim=(2, 3, 4))
    assert bool((changed[:, 0] > LSB).all())  # the base view always moves
    assert bool((changed[:, 1] > LSB).any())
