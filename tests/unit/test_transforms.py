"""Transforms and the preprocessor: inverses, masks, save and load."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from preprocess_fixtures import CAMERAS, MemoryDataset, preprocessor

from megatron_vla.data.dataset import RawBlock
from megatron_vla.data.preprocess import Preprocessor
from megatron_vla.data.transforms import absolute_to_delta, action_loss_mask, delta_to_absolute, pad_last_dim

DATA = MemoryDataset()


def test_delta_uses_the_current_state_at_repeated_steps() -> None:
    sample = DATA[7]  # two real steps, then the last action repeated
    assert sample.action_is_in_episode_T.tolist() == [True, True, False, False]
    delta = absolute_to_delta(sample.actions_TD, sample.state_D, (0, 2))
    for step in range(4):
        assert delta[step, 0] == sample.actions_TD[step, 0] - sample.state_D[0]
        assert delta[step, 1] == sample.actions_TD[step, 1]
    np.testing.assert_allclose(delta_to_absolute(delta, sample.state_D, (0, 2)), sample.actions_TD, rtol=1e-6)


def test_delta_dimension_out_of_reach_is_named() -> None:
    with pytest.raises(ValueError, match=r"--delta-action-dims 4: actions have 3 dimensions"):
        absolute_to_delta(DATA[0].actions_TD, DATA[0].state_D, (0, 4))
    with pytest.raises(ValueError, match="do not fit into 2"):
        pad_last_dim(np.zeros(3), 2)


def test_loss_mask_of_each_recipe() -> None:
    inside_T = np.array([True, True, False])
    valid, real_A = action_loss_mask("valid", inside_T, 2, 3)
    assert real_A.tolist() == [True, True, False]
    assert valid.tolist() == [[True, True, False], [True, True, False], [False, False, False]]
    assert action_loss_mask("real_dims", inside_T, 2, 3)[0].tolist() == [[True, True, False]] * 3
    assert action_loss_mask("all", inside_T, 2, 3)[0].all()
    with pytest.raises(ValueError, match="--action-loss nothing"):
        action_loss_mask("nothing", inside_T, 2, 3)


@pytest.mark.parametrize("variant", ["openpi", "lerobot"])
@pytest.mark.parametrize("normalization", ["quantile", "mean_std", "identity"])
@pytest.mark.parametrize("delta", [(), (0, 1)])
def test_actions_come_back_physical(variant: str, normalization: str, delta: tuple[int, ...]) -> None:
    processor = preprocessor(DATA, normalization=normalization, normalization_variant=variant, delta_action_dims=delta)
    for index in (0, 8, len(DATA) - 1):
        sample = DATA[index]
        arrays = processor(sample, 0)
        back = processor.unnormalize_actions(arrays["actions_BTA"], sample.state_D)
        np.testing.assert_allclose(back, sample.actions_TD, rtol=2e-5, atol=2e-5)
        assert np.all(arrays["actions_BTA"][:, 3:] == 0.0)
        assert np.all(arrays["state_BD"][5:] == 0.0)


def test_fields_of_a_sample() -> None:
    processor = preprocessor(DATA)
    sample = DATA[7]
    arrays = processor(sample, 3)
    assert arrays["camera_is_present_BV"].tolist() == [True, True, False]
    assert arrays["images_BVCHW"].shape == (3, 3, 28, 28)
    assert arrays["images_BVCHW"].dtype == np.uint8
    assert np.all(arrays["images_BVCHW"][2] == 0)
    assert arrays["action_is_valid_BTA"].sum() == 2 * 3
    assert arrays["action_dim_is_valid_BA"].sum() == 3
    assert (arrays["sample_index_B"], arrays["epoch_B"]) == (7, 3)
    low, high = (processor.statistics.features["state"].values[q][0] for q in ("q01", "q99"))
    expected = (float(sample.state_D[0]) - low) / (high - low + 1e-6) * 2 - 1
    assert arrays["state_BD"][0] == np.float32(expected)
    prompt = processor.tokenizer.decode(arrays["tokens_BL"][arrays["token_is_valid_BL"]])
    assert prompt.startswith("Task: pick up the red block, State: ")


def test_padding_may_not_reach_the_prompt() -> None:
    processor = preprocessor(DATA)
    prompt = processor.tokenizer.decode(processor(DATA[0], 0)["tokens_BL"])
    assert len(prompt.split("State: ")[1].split(";")[0].split()) == 5


def test_serving_path_equals_training_path() -> None:
    processor = preprocessor(DATA)
    sample = DATA[11]
    trained = processor(sample, 0)
    served = processor.preprocess_observation(sample.images, sample.state_D, sample.instruction)
    for name, value in served.items():
        np.testing.assert_array_equal(value, trained[name])


def test_K09_saved_preprocessing_is_complete_and_bit_equal(tmp_path: Path) -> None:
    processor = preprocessor(DATA, image_resize="torch_bilinear")
    processor.save(tmp_path)
    again = Preprocessor.load(tmp_path)
    assert again.settings == processor.settings
    for index in range(len(DATA)):
        first, second = processor(DATA[index], 1), again(DATA[index], 1)
        assert first.keys() == second.keys()
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])
            assert np.asarray(first[name]).dtype == np.asarray(second[name]).dtype
        actions = np.random.default_rng(index).normal(size=(4, 8)).astype(np.float32)
        state_D = DATA[index].state_D
        np.testing.assert_array_equal(
            processor.unnormalize_actions(actions, state_D), again.unnormalize_actions(actions, state_D)
        )
    (tmp_path / "statistics.json").unlink()
    with pytest.raises(ValueError, match=r"statistics\.json missing"):
        Preprocessor.load(tmp_path)


def test_from_dict_refuses_unknown_settings() -> None:
    processor = preprocessor(DATA)
    content = processor.to_dict()
    again = Preprocessor.from_dict(content, processor.tokenizer.model_bytes)
    assert again.settings == processor.settings
    content["settings"]["crop"] = 3
    with pytest.raises(ValueError, match=r"unknown settings \['crop'\]"):
        Preprocessor.from_dict(content, processor.tokenizer.model_bytes)


def test_observation_errors_name_the_cause() -> None:
    processor = preprocessor(DATA)
    sample = DATA[0]
    with pytest.raises(ValueError, match=r"state has shape \[4\].*\[5\]"):
        processor.preprocess_observation(sample.images, sample.state_D[:4], "go")
    with pytest.raises(ValueError, match=rf"camera\(s\) {CAMERAS[1]} are missing; given: {CAMERAS[0]}"):
        processor.preprocess_observation({CAMERAS[0]: sample.images[CAMERAS[0]]}, sample.state_D, "go")


def test_N04_nan_in_a_sample_names_the_dimension() -> None:
    processor = preprocessor(DATA)
    state_D = DATA[0].state_D.copy()
    state_D[3] = np.nan
    with pytest.raises(ValueError, match=r"state has NaN or Inf in dimension 3 \(a\)"):
        processor.preprocess_observation(DATA[0].images, state_D, "go")


def block_of(indices: list[int]) -> RawBlock:
    samples = [DATA[index] for index in indices]
    return RawBlock(
        np.array(indices),
        {camera: np.stack([sample.images[camera] for sample in samples]) for camera in CAMERAS},
        np.stack([sample.state_D for sample in samples]),
        np.stack([sample.actions_TD for sample in samples]),
        np.stack([sample.action_is_in_episode_T for sample in samples]),
        tuple(sample.instruction + str(sample.index) for sample in samples),
    )


@pytest.mark.parametrize("resize", ["pil_bilinear", "torch_bilinear"])
@pytest.mark.parametrize("variant", ["openpi", "lerobot"])
@pytest.mark.parametrize("loss", ["valid", "real_dims", "all"])
def test_a_block_is_its_samples_one_by_one(resize: str, variant: str, loss: str) -> None:
    processor = preprocessor(
        DATA, image_resize=resize, normalization_variant=variant, action_loss=loss, delta_action_dims=(0, 2)
    )
    indices = list(range(3, 15))  # over the end of two episodes
    raw = block_of(indices)
    block = processor.block(raw, 5, processor.room(len(indices)))
    for place, index in enumerate(indices):
        alone = processor(dataclasses.replace(DATA[index], instruction=raw.instructions[place]), 5)
        assert alone.keys() == block.keys()
        for name, value in alone.items():
            np.testing.assert_array_equal(block[name][place], value)
            assert block[name].dtype == np.asarray(value).dtype
        again = processor.block(raw.one(place), 5, processor.room(1))
        assert all(np.array_equal(again[name][0], value) for name, value in alone.items())


def test_memory_for_pictures_is_used_only_where_it_fits() -> None:
    processor = preprocessor(DATA)
    given = np.zeros((2, 3, 3, 28, 28), dtype=np.uint8)
    assert processor.room(2, given) is given
    assert processor.room(3, given) is not given and processor.room(2, given.astype(np.float32)).dtype == np.uint8
    rooms = processor.camera_room(given)
    assert list(rooms) == list(CAMERAS) and all(np.shares_memory(room, given) for room in rooms.values())
    floats = preprocessor(DATA, image_resize="torch_bilinear")
    assert floats.room(2, given).dtype == np.float32 and floats.camera_room(floats.room(2)) == {}
