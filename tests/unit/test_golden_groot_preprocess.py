"""GR00T preprocessing against numbers of the community implementations (tests/golden/groot_preprocess)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from groot_fixtures import golden, golden_json

from megatron_vla.data.groot.chat import PADDING, chat_ids, formalized, pad_left
from megatron_vla.data.groot.colour import OPERATIONS, jitter, jitter_alike
from megatron_vla.data.groot.modality import ModalityConfig
from megatron_vla.data.groot.pictures import PictureSettings, patch_rows, pictures_of, tower_size
from megatron_vla.data.groot.rotations import absolute_pose
from megatron_vla.data.groot.state_action import KeyStatistics, StateActionOptions, StateActionTransform
from megatron_vla.data.statistics import StatisticsAccumulator

IMAGES = {**golden("images_a"), **golden("images_b")}
IMAGE_CASES: list[dict[str, Any]] = golden_json("images")["cases"]
STATE_ACTION: dict[str, Any] = golden_json("state_action")


def settings(case: dict[str, Any], image_filter: str) -> PictureSettings:
    """Of one case of images.json."""
    args = case["args"]
    edge = args["shortest_image_edge"] or args["image_target_size"][0]
    fraction = args["crop_fraction"] or args["image_crop_size"][0] / args["image_target_size"][0]
    return PictureSettings(image_filter, edge, fraction, args["letter_box_transform"], 16, 2, 1024, 1 << 24)  # type: ignore[arg-type]


def differs(picture: torch.Tensor, expected: np.ndarray) -> int:
    """Largest difference in levels."""
    assert picture.shape == expected.shape
    return int(np.abs(picture.numpy().astype(int) - expected.astype(int)).max())


@pytest.mark.parametrize("case", IMAGE_CASES, ids=lambda case: f"{case['key']}.{case['variant']}")
def test_evaluation_pictures_and_a_chosen_crop(case: dict[str, Any]) -> None:
    name = f"{case['key']}.{case['variant']}"
    for image_filter in ("area", "bicubic"):
        chosen = settings(case, image_filter)
        picture = chosen.resized(IMAGES[f"{case['key']}.raw"], "x")
        height, width = picture.shape[1:3]
        crop = chosen.cropped(picture, *chosen.centre(height, width))
        assert tuple(crop.shape[1:3]) == chosen.final_size(height, width)
        assert differs(crop[0], IMAGES[f"{name}.{image_filter}_center"]) == 0
    area = settings(case, "area")
    picture = area.resized(IMAGES[f"{case['key']}.raw"], "x")
    slack = np.array(picture.shape[1:3]) - area.window(*picture.shape[1:3])
    top, left = (round(s * share) for s, share in zip(slack.tolist(), case["crop_position"], strict=True))
    assert differs(area.cropped(picture, top, left)[0], IMAGES[f"{name}.area_at"]) == 0


def test_released_sizes() -> None:
    for image_filter in ("area", "bicubic"):
        released = PictureSettings(image_filter, 256, 230 / 256, False, 16, 2, 65536, 1 << 24)  # type: ignore[arg-type]
        picture = released.resized(IMAGES["released.raw"], "x")
        crop = released.cropped(picture, *released.centre(*picture.shape[1:3]))
        assert differs(crop[0, ::2, ::2], IMAGES[f"released.{image_filter}_center"]) == 0


@pytest.mark.parametrize(
    "case", [c for c in IMAGE_CASES if "train_replay" in c], ids=lambda case: f"{case['key']}.{case['variant']}"
)
def test_training_replay_of_crop_and_colours(case: dict[str, Any]) -> None:
    """The released augmentation, replayed on two views: equal in every level."""
    chosen, replay = settings(case, "area"), [step["params"] for step in case["train_replay"]]
    left, top, right, bottom = replay[1]["crop_coords"]
    factors, order = [replay[3][name] for name in OPERATIONS], replay[3]["order"]
    for raw, made in (("raw", "albumentations_train"), ("second_view_raw", "second_view_train")):
        picture = chosen.resized(IMAGES[f"{case['key']}.{raw}"], "x")
        assert chosen.window(*picture.shape[1:3]) == (bottom - top, right - left)
        crop = chosen.cropped(picture, top, left)
        coloured = jitter_alike(crop, factors, order)
        expected = IMAGES[f"{case['key']}.{case['variant']}.{made}"]
        np.testing.assert_array_equal(coloured[0].numpy(), expected)
        # The batched form (what a GPU runs) is the same picture, bit by bit.
        factors_24 = torch.tensor([factors, factors], dtype=torch.float64)
        batched = jitter(crop.repeat(2, 1, 1, 1), factors_24, torch.tensor([order, order]))
        assert torch.equal(batched, coloured.repeat(2, 1, 1, 1))


def test_qwen_sizes_and_patch_rows() -> None:
    content, arrays = golden_json("qwen_image"), golden("qwen_image")
    for row in content["smart_resize_factor32_min65536_max16777216"]:
        assert list(tower_size(*row["raw"], 32, 65536, 16777216)) == row["resized"]
    for case in content["cases"]:
        chosen = PictureSettings("area", 1, 1.0, False, 16, 2, case["min_pixels"], case["max_pixels"])
        rows = chosen.patches(torch.from_numpy(arrays[f"{case['key']}.raw"])[None])
        np.testing.assert_allclose(rows.numpy() / 127.5 - 1, arrays[f"{case['key']}.pixel_values"], atol=1e-6)
        back = pictures_of(rows, tuple(case["grid"][0]), 16, 2)
        assert torch.equal(patch_rows(back, 16, 2), rows)
    two = PictureSettings("area", 1, 1.0, False, 16, 2, 1024, 1 << 24)
    rows = torch.cat([two.patches(torch.from_numpy(arrays[f"two.raw{i}"])[None]) for i in range(2)])
    np.testing.assert_allclose(rows.numpy() / 127.5 - 1, arrays["two.pixel_values"], atol=1e-6)
    large = PictureSettings("area", 1, 1.0, False, 16, 2, 65536, 1 << 24)
    rows = large.patches(torch.from_numpy(arrays["released.raw"])[None])[[0, 5, 17]]
    stored = arrays["released.pixel_values_rows_0_5_17"].reshape(3, 3, 2, 256)
    for frame in range(2):
        np.testing.assert_allclose(rows.numpy().reshape(3, 3, 256) / 127.5 - 1, stored[:, :, frame], atol=1e-6)


class StandInTokenizer:
    """The tokenizer that the prompt fixture was made with."""

    numbers: dict[str, Any] = golden_json("prompt")["stand_in_tokenizer"]

    def encode(self, text: str) -> list[int]:
        other = {"\n": self.numbers["newline"], "\t": self.numbers["tab"]}
        return [other[c] if c in other else ord(c) - 31 for c in text]

    def token_id(self, token: str) -> int:
        return int(self.numbers[token])


def test_prompts_and_pixels_of_whole_samples() -> None:
    content, arrays = golden_json("prompt"), golden("prompt")
    chosen = PictureSettings("area", 64, content["crop"] / content["target"], False, 16, 2, content["min_pixels"], 1 << 24)
    tokenizer, rows, grids = StandInTokenizer(), [], []
    for sample, text in enumerate(content["language"]):
        own = []
        for frame in arrays["video"][sample].reshape(-1, *arrays["video"].shape[3:]):
            picture = chosen.resized(frame, "x")
            size = (picture.shape[1], picture.shape[2])
            own.append(chosen.grid(*size))
            rows.append(chosen.patches(chosen.cropped(picture, *chosen.centre(*size))))
        ids = chat_ids(tokenizer, text, [h * w // 4 for _, h, w in own])
        tokens_S, is_valid_S = pad_left(ids, arrays["input_ids"].shape[1], tokenizer.token_id(PADDING))
        np.testing.assert_array_equal(tokens_S, arrays["input_ids"][sample])
        np.testing.assert_array_equal(is_valid_S, arrays["attention_mask"][sample].astype(bool))
        grids += own
    np.testing.assert_array_equal(grids, arrays["image_grid_thw"])
    pixels = torch.cat(rows).numpy().reshape(-1, 3, 1, 256) / 127.5 - 1
    full = np.repeat(pixels, 2, axis=2).reshape(len(pixels), -1)
    np.testing.assert_allclose(full[::4], arrays["pixel_values"], atol=1e-6)
    np.testing.assert_allclose(full.sum(axis=1), arrays["pixel_values_rowsum"], atol=1e-3)


def test_language() -> None:
    for row in golden_json("language"):
        assert formalized(row["raw"]) == row["isaac"]


def transform(use_percentiles: bool, with_embeddings: bool) -> StateActionTransform:
    """Of state_action.json."""
    modality = STATE_ACTION["modality_config"]
    state, action = {**modality["state"], "delta_indices": [0]}, dict(modality["action"])
    if with_embeddings:
        state |= {
            "sin_cos_embedding_keys": STATE_ACTION["sin_cos_keys"],
            "mean_std_embedding_keys": STATE_ACTION["mean_std_keys"],
        }
        action |= {"mean_std_embedding_keys": STATE_ACTION["mean_std_keys"]}
    one = {"delta_indices": [0], "modality_keys": ["x"]}
    config = ModalityConfig.from_dict({"video": one, "language": one, "state": state, "action": action}, "golden")
    widths = list(STATE_ACTION["keys_in_order"].values())
    statistics = KeyStatistics.from_dict(STATE_ACTION["statistics"], "golden")
    assert statistics.to_dict() == STATE_ACTION["statistics"]
    return StateActionTransform(config, widths, widths, statistics, StateActionOptions(use_percentiles, with_embeddings))


@pytest.mark.parametrize("name", ["percentile", "minmax"])
def test_states_and_actions(name: str) -> None:
    arrays = golden("state_action")
    state_BD, action_BTD, is_pad_BT = arrays["state"], arrays["action"], arrays["action_is_pad"]
    plain = transform(name == "percentile", False)
    states, actions = plain.normalize_state(state_BD), plain.normalize_actions(action_BTD, state_BD)
    np.testing.assert_allclose(states, arrays[f"isaac.{name}.state"][:, 0], atol=1e-6)
    np.testing.assert_allclose(actions, arrays[f"isaac.{name}.action"], atol=1e-6)
    np.testing.assert_allclose(states, arrays[f"lerobot.{name}.state"][:, 0, :10], atol=1e-6)
    packed = np.where(is_pad_BT[..., None], 0, actions)
    np.testing.assert_allclose(packed, arrays[f"lerobot.{name}.action"][:, :5, :10], atol=1e-6)
    back = plain.unnormalize_actions(actions, state_BD)
    np.testing.assert_allclose(back, arrays[f"isaac.{name}.decode_of_encoded"], atol=1e-6)
    decoded = plain.unnormalize_actions(arrays[f"lerobot.{name}.decode_in"][:, :5, :10], state_BD)
    np.testing.assert_allclose(decoded, arrays[f"lerobot.{name}.decode_out"][:, :5, :10], atol=1e-6)
    with_embeddings = transform(name == "percentile", True)
    key = f"isaac.{name}_meanstd_sincos"
    assert with_embeddings.state_width == arrays[f"{key}.state"].shape[-1]
    np.testing.assert_allclose(with_embeddings.normalize_state(state_BD), arrays[f"{key}.state"][:, 0], atol=2e-6)
    actions = with_embeddings.normalize_actions(action_BTD, state_BD)
    np.testing.assert_allclose(actions, arrays[f"{key}.action"], atol=1e-6)
    back = with_embeddings.unnormalize_actions(actions, state_BD)
    np.testing.assert_allclose(back, arrays[f"{key}.decode_of_encoded"], atol=1e-6)


def test_relative_poses() -> None:
    arrays = golden("state_action")
    absolute = absolute_pose(arrays["eef.relative"], arrays["eef.reference_state"][:, None], "XYZ_ROT6D")
    np.testing.assert_allclose(absolute, arrays["eef.absolute"], atol=1e-6)


def test_relative_statistics() -> None:
    arrays = golden("relative_stats")
    for step in range(arrays["chunks"].shape[1]):
        accumulator = StatisticsAccumulator("exact")
        accumulator.update(arrays["chunks"][:, step])
        result = accumulator.result()
        assert result.count == arrays["count"][step]
        for name in ("min", "max", "mean", "std", "q01", "q99"):
            np.testing.assert_allclose(result.values[name], arrays[name][step], atol=1e-6)
