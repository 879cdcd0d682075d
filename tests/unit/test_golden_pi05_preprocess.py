"""Preprocessing against numbers of the community implementations of Pi0.5 (tests/golden/pi05_preprocess)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from megatron_vla.data.image import (
    padded_geometry,
    pixels_to_model_range,
    resize_float_with_pad,
    resize_with_pad_pil,
    resize_with_pad_torch,
)
from megatron_vla.data.normalization import Normalizer, normalize_range, unnormalize_range
from megatron_vla.data.prompt import discretize_state, pad_prompts, prompt_ids, state_prompt
from megatron_vla.data.statistics import StatisticsAccumulator
from megatron_vla.data.transforms import absolute_to_delta, delta_to_absolute, pad_last_dim

GOLDEN = Path(__file__).parents[1] / "golden/pi05_preprocess"
IMAGES = load_file(GOLDEN / "images.safetensors")
IMAGES_OPENPI = load_file(GOLDEN / "images_openpi.safetensors")
CASES: list[dict[str, Any]] = json.loads((GOLDEN / "images.json").read_text())


class StandInTokenizer:
    """The tokenizer that the padding fixture was made with: 3 + code point mod 250 per character."""

    bos_id = 2

    def encode(self, text: str) -> list[int]:
        return [3 + ord(character) % 250 for character in text]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["key"])
def test_images(case: dict[str, Any]) -> None:
    raw_HWC, size = IMAGES[f"{case['key']}.raw"], case["target"]
    height, width, top, left = padded_geometry(*raw_HWC.shape[:2], size)
    assert [height, width] == case["resized"]
    step = 3 if size == 224 else 1

    pil_SSC = resize_with_pad_pil(raw_HWC, size)
    np.testing.assert_array_equal(pil_SSC[::step, ::step], IMAGES_OPENPI[f"{case['key']}.openpi_pil_uint8"])

    torch_CSS = resize_with_pad_torch(raw_HWC, size)
    np.testing.assert_array_equal(torch_CSS[:, ::step, ::step], IMAGES[f"{case['key']}.lerobot"])
    outside = np.ones((size, size), dtype=bool)
    outside[top : top + height, left : left + width] = False
    assert np.all(torch_CSS[:, outside] == -1.0)
    model_range = pixels_to_model_range(torch.from_numpy(pil_SSC.copy())).numpy()
    assert np.all(model_range[outside] == -1.0)

    key = f"{case['key']}.openpi_torch_float"
    if key in IMAGES_OPENPI:
        float_BCHW = pixels_to_model_range(torch.from_numpy(raw_HWC)).permute(2, 0, 1)[None]
        ours = resize_float_with_pad(float_BCHW, size, -1.0, 1.0)[0].permute(1, 2, 0).numpy()
        np.testing.assert_allclose(ours, IMAGES_OPENPI[key], atol=5e-7)


def test_prompts() -> None:
    cases = prompts_cases()
    stored = load_file(GOLDEN / "prompts_state.safetensors")
    for case, state_D, bins_D in zip(cases, stored["state"], stored["bins"], strict=True):
        np.testing.assert_array_equal(discretize_state(state_D), bins_D)
        assert state_prompt(case["task"], state_D) == case["prompt"]


def test_prompt_padding() -> None:
    cases = json.loads((GOLDEN / "prompt_padding.json").read_text())["cases"]
    states = load_file(GOLDEN / "prompts_state.safetensors")["state"]
    prompts = {state_prompt(c["task"], s): (c["task"], s) for c, s in zip(prompts_cases(), states, strict=True)}
    assert len(cases) == 6
    for case in cases:
        ids = prompt_ids(StandInTokenizer(), *prompts[case["prompt"]])
        tokens_nL, is_valid_nL = pad_prompts([ids, ids[:1]], case["max_len"])
        assert tokens_nL[0].tolist() == case["tokens"]
        assert is_valid_nL[0].tolist() == case["mask"]
        assert (tokens_nL[1, 0], is_valid_nL[1].sum(), tokens_nL[1, 1:].any()) == (ids[0], 1, False)


def prompts_cases() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((GOLDEN / "prompts.json").read_text())["cases"]
    return cases


@pytest.mark.parametrize(
    ("mode", "low", "high"), [("QUANTILES", "q01", "q99"), ("QUANTILE10", "q10", "q90"), ("MIN_MAX", "min", "max")]
)
def test_normalize_range(mode: str, low: str, high: str) -> None:
    golden = load_file(GOLDEN / "normalize.safetensors")
    bounds = golden[f"stats.{low}"], golden[f"stats.{high}"]
    normalized = normalize_range(golden["x"], *bounds, "lerobot")
    np.testing.assert_array_equal(normalized, golden[f"lerobot.{mode}.normalized"])
    np.testing.assert_array_equal(unnormalize_range(normalized, *bounds, "lerobot"), golden[f"lerobot.{mode}.roundtrip"])
    back = unnormalize_range(golden[f"lerobot.{mode}.unnormalize_in"], *bounds, "lerobot")
    np.testing.assert_array_equal(back, golden[f"lerobot.{mode}.unnormalize_out"])


@pytest.mark.parametrize(("mode", "name"), [("quantile", "QUANTILES"), ("mean_std", "MEAN_STD")])
def test_normalizer_lerobot(mode: Any, name: str) -> None:
    golden = load_file(GOLDEN / "normalize.safetensors")
    # Statistics are kept in float64; LeRobot's arithmetic is float32, so the values must come back through that.
    statistics = {k.removeprefix("stats."): v.astype(np.float64) for k, v in golden.items() if k.startswith("stats.")}
    normalizer = Normalizer(mode, "lerobot", statistics)
    normalized = normalizer.normalize(golden["x"])
    assert normalized.dtype == np.float32
    np.testing.assert_array_equal(normalized, golden[f"lerobot.{name}.normalized"])
    np.testing.assert_array_equal(normalizer.unnormalize(normalized), golden[f"lerobot.{name}.roundtrip"])
    unnormalized = normalizer.unnormalize(golden[f"lerobot.{name}.unnormalize_in"])
    np.testing.assert_array_equal(unnormalized, golden[f"lerobot.{name}.unnormalize_out"])


@pytest.mark.parametrize(("mode", "name"), [("quantile", "quantile"), ("mean_std", "zscore")])
def test_normalizer_openpi(mode: Any, name: str) -> None:
    golden = load_file(GOLDEN / "normalize_openpi.safetensors")
    stored = load_file(GOLDEN / "normalize.safetensors")
    statistics = {k.removeprefix("stats."): v for k, v in stored.items() if k.startswith("stats.")}
    normalizer = Normalizer(mode, "openpi", statistics)
    normalized = normalizer.normalize(golden["x"])
    np.testing.assert_array_equal(normalized, golden[f"{name}.normalized"])
    np.testing.assert_array_equal(normalizer.unnormalize(normalized), golden[f"{name}.roundtrip"])
    wider = normalizer.unnormalize(golden[f"{name}.unnormalize_wider_in"])
    np.testing.assert_allclose(wider, golden[f"{name}.unnormalize_wider_out"], rtol=1e-15)
    narrow = normalizer.normalize(golden["x"][:, :4])
    np.testing.assert_array_equal(narrow, golden[f"{name}.normalize_narrow_out"])


def test_relative_actions() -> None:
    golden = load_file(GOLDEN / "relative_actions.safetensors")
    for case in json.loads((GOLDEN / "relative_actions.json").read_text())["cases"]:
        dims = np.flatnonzero(golden[f"{case}.mask"]).tolist()
        relative = absolute_to_delta(golden["action"], golden["state"], dims)
        np.testing.assert_array_equal(relative, golden[f"{case}.relative"])
        np.testing.assert_array_equal(delta_to_absolute(relative, golden["state"], dims), golden[f"{case}.absolute_again"])


def test_delta_openpi() -> None:
    golden = load_file(GOLDEN / "delta_openpi.safetensors")
    dims = np.flatnonzero(golden["mask"]).tolist()
    delta = absolute_to_delta(golden["actions"], golden["state"], dims)
    np.testing.assert_array_equal(delta, golden["delta"])
    np.testing.assert_array_equal(delta_to_absolute(delta, golden["state"], dims), golden["absolute"])
    np.testing.assert_array_equal(pad_last_dim(golden["actions"], 12), golden["padded_actions"])
    np.testing.assert_array_equal(pad_last_dim(golden["state"], 12), golden["padded_state"])


def test_chain() -> None:
    golden = load_file(GOLDEN / "chain.safetensors")
    about = json.loads((GOLDEN / "chain.json").read_text())
    dims = [i for i, name in enumerate(about["action_names"]) if "gripper" not in name.lower()]
    actions = Normalizer("quantile", "lerobot", {"q01": golden["action_q01"], "q99": golden["action_q99"]})
    states = Normalizer("quantile", "lerobot", {"q01": golden["state_q01"], "q99": golden["state_q99"]})
    relative = actions.normalize(absolute_to_delta(golden["action"], golden["state"], dims))
    np.testing.assert_array_equal(relative, golden["normalized_relative_action"])
    normalized_state = states.normalize(golden["state"])
    np.testing.assert_array_equal(normalized_state, golden["normalized_state"])
    decoded = delta_to_absolute(actions.unnormalize(relative), golden["state"], dims)
    np.testing.assert_array_equal(decoded, golden["decoded_action"])
    assert [state_prompt(t, s) for t, s in zip(about["tasks"], normalized_state, strict=True)] == about["prompts"]


def _fed(data_ND: np.ndarray, method: Any) -> StatisticsAccumulator:
    accumulator = StatisticsAccumulator(method)
    for start in range(0, len(data_ND), 256):
        accumulator.update(data_ND[start : start + 256])
    return accumulator


def test_statistics_exact() -> None:
    golden = load_file(GOLDEN / "statistics.safetensors")
    result = _fed(golden["data"], "exact").result()
    assert result.count == golden["lerobot.count"][0]
    for name in ("q01", "q10", "q50", "q90", "q99"):
        np.testing.assert_allclose(result.values[name], golden[f"exact.{name}"], rtol=1e-14)
    for name in ("mean", "std", "min", "max"):
        np.testing.assert_allclose(result.values[name], golden[f"lerobot.{name}"], rtol=2e-6)


def test_statistics_openpi() -> None:
    golden = load_file(GOLDEN / "statistics_openpi.safetensors")
    data_ND = load_file(GOLDEN / "statistics.safetensors")["data"]
    result = _fed(data_ND, "histogram").result()
    for name in ("q01", "q99"):
        np.testing.assert_allclose(result.values[name], golden[name], rtol=1e-14)
    for name in ("mean", "std"):
        np.testing.assert_allclose(result.values[name], golden[name], rtol=2e-6)
