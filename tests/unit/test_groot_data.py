"""GR00T's samples from a dataset to batches: prefetching, resume, augmentation, mixtures, serving, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from groot_fixtures import CAMERAS, LENGTHS, MODALITY_CONFIG, MODALITY_JSON, data_flags, write_dataset, write_modality_config
from groot_fixtures import write_tokenizer as write_tokenizer_file

from megatron_vla.config.check import check
from megatron_vla.config.run import parse_args
from megatron_vla.data.build import build_data
from megatron_vla.data.groot.pictures import pictures_of
from megatron_vla.data.groot.preprocess import GrootPreprocessor
from megatron_vla.data.load_preprocessor import load_preprocessor
from megatron_vla.data.supply import DataSupply
from megatron_vla.findings import CheckError
from megatron_vla.models.groot_n1_7.samples import RAW_STATE_STREAM, state_is_dropped
from megatron_vla.models.registry import model_family

FAMILY = model_family("groot_n1_7")
Make = Callable[..., DataSupply]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("groot")
    write_dataset(root / "robot")
    write_tokenizer_file(root)
    write_modality_config(root)
    return root


@pytest.fixture
def make(folder: Path) -> Iterator[Make]:
    """make(*flags) -> DataSupply of the dataset with its modality configuration; closed afterwards."""
    opened = []

    def build(*flags: str, modality: str | None = "modality_config.json", dataset: str = "robot") -> DataSupply:
        chosen = ["--modality-config", str(folder / modality)] if modality else []
        config = parse_args(data_flags(folder / dataset, folder / "tokenizer.json", *chosen, *flags))
        opened.append(build_data(config, FAMILY))
        return opened[-1]

    yield build
    for supply in opened:
        supply.close()


def batches(supply: DataSupply, number: int, consumed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Tensors of the first micro-batches."""
    return [batch.tensors() for batch in supply.iterator(consumed, 0, 1, number, False)]


def assert_equal(first: list[dict[str, torch.Tensor]], second: list[dict[str, torch.Tensor]]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name], other[name]), name


def preprocessor(supply: DataSupply) -> GrootPreprocessor:
    found = supply.preprocessor
    assert isinstance(found, GrootPreprocessor)
    return found


def test_samples_hold_what_the_dataset_has(make: Make) -> None:
    """States and actions come back physical (poses too), the prompt is the task's, pictures are the frame's own."""
    supply = make("--action-loss", "valid")
    processor, dataset = preprocessor(supply), supply.source.dataset  # type: ignore[attr-defined]
    for index in (0, 8, 30):
        raw = dataset[index]
        arrays = processor(raw, 0)
        assert arrays["actions_BTA"].shape == (10, 12) and arrays["embodiment_B"] == 1
        physical = processor.unnormalize_actions(arrays["actions_BTA"], raw.state_D)
        inside = raw.action_is_in_episode_T
        # Relative actions are normalized by their own extremes, so none of them is clipped; the gripper is exact.
        np.testing.assert_allclose(physical[inside], raw.actions_TD[inside], atol=2e-6)
        np.testing.assert_array_equal(arrays["action_is_valid_BTA"][:4, :12], np.repeat(inside[:, None], 12, axis=1))
        assert not arrays["action_is_valid_BTA"][4:].any() and not arrays["action_is_valid_BTA"][:, 12:].any()
        assert not arrays["actions_BTA"][:4][~inside].any() and not arrays["actions_BTA"][4:].any()
        words = processor.tokenizer.decode(arrays["tokens_BS"][arrays["token_is_valid_BS"]])
        colour = ("red", "green")[raw.episode_index % 2]
        assert words.endswith(f"<|vision_end|>pick up the {colour} block<|im_end|>\n")
        assert (arrays["tokens_BS"] == 5).sum() == arrays["image_grid_I3"].prod(axis=1).sum() // 4
    assert len(dataset) == sum(LENGTHS)


def test_prefetching_and_decoding_once_change_nothing(make: Make) -> None:
    flags = ("--augmentation", "groot", "--data-access", "decode_once", "--shard-bytes", "60000", "--decode-lanes", "2")
    plain = batches(make(*flags, "--prefetch-shards", "0"), 9)
    assert_equal(plain, batches(make(*flags, "--prefetch-shards", "8", "--num-workers", "2"), 9))
    random = batches(make("--augmentation", "groot"), 6)
    assert_equal(random, batches(make("--augmentation", "groot", "--num-workers", "2"), 6))
    # The same samples, whichever way they are read: draws, crops and colours belong to (seed, epoch, sample).
    by_sample = {int(b["sample_index_B"][i]): b["actions_BTA"][i] for b in random for i in range(4)}
    for batch in plain:
        for i, index in enumerate(batch["sample_index_B"].tolist()):
            if index in by_sample:
                assert torch.equal(batch["actions_BTA"][i], by_sample[index])


def test_resume_continues_at_the_exact_sample(make: Make) -> None:
    whole = batches(make("--augmentation", "groot"), 8)
    assert_equal(whole[5:], batches(make("--augmentation", "groot"), 3, consumed=20))


def test_the_device_augments_as_the_workers_do(make: Make) -> None:
    on_cpu = batches(make("--augmentation", "groot"), 3)
    assert_equal(on_cpu, batches(make("--augmentation", "groot", "--augmentation-device", "gpu"), 3))
    without = batches(make(), 3)
    assert not torch.equal(without[0]["pixels_PC"], on_cpu[0]["pixels_PC"])
    assert torch.equal(without[0]["actions_BTA"], on_cpu[0]["actions_BTA"])
    later = batches(make("--augmentation", "groot"), 1, consumed=sum(LENGTHS))
    assert later[0]["epoch_B"].max() == 1


def test_crops_differ_by_epoch_and_agree_between_views(make: Make) -> None:
    supply = make("--augmentation", "groot")
    augmentation = supply.augmentation
    assert augmentation is not None
    drawn = np.stack([augmentation.parameters({"sample_index_B": i}, e) for i in range(40) for e in range(25)])
    low, high = drawn.min(axis=0)[:6], drawn.max(axis=0)[:6]
    np.testing.assert_allclose(low, [0, 0, 0.7, 0.6, 0.5, -0.08], atol=0.01)
    np.testing.assert_allclose(high, [1, 1, 1.3, 1.4, 1.5, 0.08], atol=0.01)
    assert len({tuple(order) for order in drawn[:, 6:].tolist()}) == 24
    # Equal pictures in both views stay equal: one crop and one set of factors per sample.
    picture = np.random.default_rng(0).integers(0, 256, (2, 40, 50, 3), dtype=np.uint8)
    picture[1] = picture[0]
    arrays = {"pictures": picture.reshape(-1), "picture_size_I2": np.array([[40, 50]] * 2), "sample_index_B": 7}
    first, second = np.split(augmentation.apply_to_sample(arrays, 0)["pixels_PC"], 2)
    np.testing.assert_array_equal(first, second)


def test_serving_sees_what_training_sees(make: Make, tmp_path: Path) -> None:
    supply = make()
    trained, dataset = preprocessor(supply), supply.source.dataset  # type: ignore[attr-defined]
    trained.save(tmp_path)
    served = load_preprocessor(tmp_path)
    assert isinstance(served, GrootPreprocessor) and served.to_dict() == trained.to_dict()
    raw = dataset[17]
    arrays = trained(raw, 0)
    seen = served.preprocess_observation(raw.images, raw.state_D, raw.instruction)
    for name, value in seen.items():
        np.testing.assert_array_equal(value, arrays[name], err_msg=name)
    np.testing.assert_array_equal(
        served.unnormalize_actions(arrays["actions_BTA"], raw.state_D),
        trained.unnormalize_actions(arrays["actions_BTA"], raw.state_D),
    )
    augmented = preprocessor(make("--augmentation", "groot"))
    augmented.save(tmp_path)
    # Evaluation crops the centre, whatever training did.
    again = load_preprocessor(tmp_path).preprocess_observation(raw.images, raw.state_D, raw.instruction)
    np.testing.assert_array_equal(again["pixels_PC"], seen["pixels_PC"])


def test_both_state_dropouts(make: Make) -> None:
    supply = make("--state-dropout-prob", "0.5", "--max-prompt-length", "40")
    seen = batches(supply, 10)
    raw = torch.cat([b["state_BHD"].flatten(1).abs().amax(dim=1) == 0 for b in seen])
    feature = torch.cat([b["state_is_dropped_B"] for b in seen])
    index = torch.cat([b["sample_index_B"] for b in seen]).tolist()
    family, seed = supply.config.family, supply.config.training.seed
    assert raw.tolist() == [state_is_dropped(family, RAW_STATE_STREAM, seed, 0, i) for i in index]
    assert 8 < int(raw.sum()) < 32 and 8 < int(feature.sum()) < 32 and not torch.equal(raw, feature)
    single = batches(make("--state-dropout-prob", "0.5", "--single-state-dropout"), 10)
    assert all(bool((b["state_BHD"].flatten(1).abs().amax(dim=1) > 0).all()) for b in single)


def test_frames_of_the_past(make: Make, folder: Path) -> None:
    """Video steps [-5, 0]: four pictures, frame by frame; before the start the first frame stands in."""
    changed = {**MODALITY_CONFIG["video"], "delta_indices": [-5, 0]}
    (folder / "past.json").write_text(json.dumps({**MODALITY_CONFIG, "video": changed}))
    supply = make("--max-prompt-length", "100", "--no-shuffle", modality="past.json")
    dataset = supply.source.dataset  # type: ignore[attr-defined]
    raw = dataset[LENGTHS[0] + 7]  # episode 1, frame 7
    assert raw.images[CAMERAS[0]].shape == (2, 40, 48, 3)
    assert [int(f[0, 0, 0]) for f in raw.images[CAMERAS[0]]] == [10 * 2 + 1, 10 * 7 + 1]
    assert [int(f[0, 0, 0]) for f in dataset[LENGTHS[0] + 2].images[CAMERAS[1]]] == [1, 10 * 2 + 1]
    once = make(
        "--max-prompt-length",
        "100",
        "--no-shuffle",
        "--data-access",
        "decode_once",
        "--decode-lanes",
        "1",
        modality="past.json",
    )
    assert_equal(batches(supply, 4), batches(once, 4))
    batch = batches(supply, 1)[0]
    assert batch["image_offset_I"].shape == (4 * 4 + 1,)
    # Sample 0 is the first frame: both steps show the same picture.
    views = [pictures_of(rows, (1, 4, 4), 16, 2) for rows in batch["pixels_PC"][: 4 * 16].split(16)]
    assert torch.equal(views[0], views[2]) and torch.equal(views[1], views[3]) and not torch.equal(views[0], views[1])


def test_states_of_the_past(make: Make, folder: Path, tmp_path: Path) -> None:
    """State steps [-3, -1, 0]; before the start the first row stands in; relative actions start from the last."""
    changed = {**MODALITY_CONFIG["state"], "delta_indices": [-3, -1, 0]}
    (folder / "states.json").write_text(json.dumps({**MODALITY_CONFIG, "state": changed}))
    plain, supply = make("--no-shuffle"), make("--no-shuffle", "--state-history-length", "3", modality="states.json")
    dataset, alone = supply.source.dataset, plain.source.dataset  # type: ignore[attr-defined]
    first = LENGTHS[0]
    for index, rows in ((first + 5, (2, 4, 5)), (first + 2, (0, 1, 2)), (first, (0, 0, 0))):
        raw = dataset[index]
        np.testing.assert_array_equal(raw.state_D, [alone[first + row].state_D for row in rows])
        found, present = preprocessor(supply)(raw, 0), preprocessor(plain)(alone[index], 0)
        np.testing.assert_array_equal(found["state_BHD"][2], present["state_BHD"][0])
        earlier = preprocessor(plain)(alone[first + rows[0]], 0)
        np.testing.assert_array_equal(found["state_BHD"][0], earlier["state_BHD"][0])
        np.testing.assert_array_equal(found["actions_BTA"], present["actions_BTA"])
        physical = preprocessor(supply).unnormalize_actions(found["actions_BTA"], raw.state_D)
        np.testing.assert_array_equal(
            physical, preprocessor(plain).unnormalize_actions(present["actions_BTA"], alone[index].state_D)
        )
    once = make(
        *("--no-shuffle", "--state-history-length", "3", "--data-access", "decode_once", "--decode-lanes", "1"),
        modality="states.json",
    )
    assert_equal(batches(supply, 4), batches(once, 4))
    assert batches(supply, 1)[0]["state_BHD"].shape == (4, 3, 12)
    preprocessor(supply).save(tmp_path)
    again = load_preprocessor(tmp_path).preprocess_observation(raw.images, raw.state_D, raw.instruction)
    np.testing.assert_array_equal(again["state_BHD"], found["state_BHD"])
    with pytest.raises(ValueError, match=r"trained with \[3, 12\]"):
        preprocessor(supply).preprocess_observation(raw.images, raw.state_D[0], "go")


def test_mixture_of_robots(make: Make, folder: Path) -> None:
    """Two robots with other cameras, keys, sizes and slots in one batch; grids differ, so nothing is padded to the other."""
    write_dataset(folder / "other", modality=None, size=(64, 96), version="v3.0")
    config = parse_args(
        [
            *data_flags(folder / "robot", folder / "tokenizer.json"),
            *("--data-path", f"first={folder / 'robot'}", f"second={folder / 'other'}", "--max-prompt-length", "120"),
            *("--camera-map", f"second:scene={CAMERAS[1]}", "--micro-batch-size", "8"),
            *("--data-override", f"first:modality-config={folder / 'modality_config.json'}", "second:embodiment-id=3"),
        ]
    )
    supply = build_data(config, FAMILY)
    seen = batches(supply, 6)
    per_sample = {
        (int(e), int(k.sum())) for b in seen for e, k in zip(b["embodiment_B"], b["image_key_is_valid_BK"], strict=True)
    }
    assert per_sample == {(1, 8), (3, 6)}  # two 64 x 64 pictures (76 x 64 before), one of 64 x 96
    for batch in seen:
        assert batch["image_offset_I"][-1] == len(batch["pixels_PC"])
        assert len(batch["sample_index_B"].unique()) == 8
        second = batch["embodiment_B"] == 3
        assert bool((batch["sample_index_B"][second] >= sum(LENGTHS)).all())
    supply.close()


def test_merged_statistics_of_one_tag(make: Make, folder: Path) -> None:
    config = parse_args(
        [
            *data_flags(folder / "robot", folder / "tokenizer.json", "--modality-config", str(folder / "modality_config.json")),
            *("--data-path", f"first={folder / 'robot'}", f"second={folder / 'robot'}", "--data-weights", "1", "3"),
            *("--mixture-statistics", "merged"),
        ]
    )
    supply, alone = build_data(config, FAMILY), preprocessor(make())
    for part in supply.preprocessor.parts.values():  # type: ignore[union-attr]
        for name, feature in part.statistics.features.items():
            # The same dataset twice: everything but the counts stays as it is, to rounding.
            for statistic, value in alone.statistics.features[name].values.items():
                if statistic in feature.values:
                    np.testing.assert_allclose(feature.values[statistic], value, rtol=1e-9, atol=1e-9)
    supply.close()


def test_elements_of_the_loss_and_hidden_states(make: Make) -> None:
    """The released mask and the two wider ones; the last sample of an episode has one step of its own."""
    index = LENGTHS[0] - 1
    expected = {"valid": 12, "real_dims": 4 * 12, "all": 10 * 12}
    for action_loss, number in expected.items():
        supply = make("--action-loss", action_loss, "--exclude-state")
        arrays = preprocessor(supply)(supply.source.dataset[index], 0)  # type: ignore[attr-defined]
        assert arrays["action_is_valid_BTA"].sum() == number
        assert (arrays["actions_BTA"][1:4].any()) == (action_loss != "valid")
        assert not arrays["state_BHD"].any()


def refused(folder: Path, *flags: str, dataset: str = "robot") -> str:
    with pytest.raises(CheckError) as problems:
        build_data(parse_args(data_flags(folder / dataset, folder / "tokenizer.json", *flags)), FAMILY)
    return str(problems.value)


def test_wrong_configurations_are_named(folder: Path, tmp_path: Path) -> None:
    def config(**changes: Any) -> tuple[str, str]:
        return "--modality-config", str(write_modality_config(tmp_path, **changes))

    assert "slot 9, the model 4" in refused(folder, "--embodiment-id", "9")
    flags = data_flags(folder / "robot", folder / "tokenizer.json", "--embodiment-tag", "my_robot")
    place = flags.index("--embodiment-id")
    with pytest.raises(CheckError, match="'my_robot' is unknown; known are simpler_env_google"):
        build_data(parse_args(flags[:place] + flags[place + 2 :]), FAMILY)
    state = {"delta_indices": [-1, 0], "modality_keys": ["pose", "arm"]}
    assert "2 state step(s), the model reads 1" in refused(folder, *config(state=state))
    for steps in ([0, -1], [-2, -1], [0, 1]):
        state = {"delta_indices": steps, "modality_keys": ["pose", "arm"]}
        assert "must end with 0, the present" in refused(folder, *config(state=state), "--state-history-length", "2")
    state = {"delta_indices": [0], "modality_keys": ["pose", "wheel"]}
    assert "relative to the state 'arm'" in refused(folder, *config(state=state))
    action = {**MODALITY_CONFIG["action"], "delta_indices": [0, 1, 3]}
    assert "evenly spaced" in refused(folder, *config(action=action))
    action = {**MODALITY_CONFIG["action"], "delta_indices": list(range(12))}
    assert "--action-horizon 12" in refused(folder, *config(action=action))
    action = {**MODALITY_CONFIG["action"], "action_configs": [{"rep": "SIDEWAYS", "type": "EEF", "format": "DEFAULT"}] * 3}
    assert "SIDEWAYS" in refused(folder, *config(action=action))
    video = {"delta_indices": [0], "modality_keys": ["front", "roof"]}
    assert "video keys roof" in refused(folder, *config(video=video))
    language = {"delta_indices": [0], "modality_keys": ["annotation.mood"]}
    assert "annotation.human.task" in refused(folder, *config(language=language))
    # A gripper is no pose: widths must fit the format.
    wrong = {**MODALITY_JSON, "action": {**MODALITY_JSON["action"], "pose": {"start": 0, "end": 8}}}
    (folder / "robot/meta/modality.json").write_text(json.dumps(wrong))
    assert "both need 9" in refused(folder, *config())
    wrong = {**MODALITY_JSON, "action": {**MODALITY_JSON["action"], "pose": {"start": 0, "end": 99}}}
    (folder / "robot/meta/modality.json").write_text(json.dumps(wrong))
    assert "no slice of the 10 numbers" in refused(folder, *config())
    (folder / "robot/meta/modality.json").write_text(json.dumps(MODALITY_JSON))
    assert "--max-prompt-length" in refused(folder, *config(), "--max-prompt-length", "20")
    assert "the model's --image-token is 6" in refused(folder, *config(), "--image-token", "6")


def test_flags_of_the_other_family_are_refused(folder: Path) -> None:
    flags = data_flags(
        folder / "robot", folder / "tokenizer.json", "--normalization", "mean_std", "--augmentation", "openpi_jax"
    )
    found = "\n".join(map(str, check(parse_args(flags), FAMILY, 1)))
    assert "--normalization" in found and "openpi_jax is not made for groot_n1_7" in found
    mock = parse_args(["--model-name", "groot_n1_7", "--model-variant", "tiny", "--mock-data", "--augmentation", "groot"])
    with pytest.raises(CheckError, match="mock samples have no pictures"):
        build_data(mock, FAMILY)
    pi05 = parse_args(["--model-variant", "tiny", "--mock-data", "--embodiment-tag", "x", "--augmentation", "groot"])
    found = "\n".join(map(str, check(pi05, model_family("pi05"), 1)))
    assert "--embodiment-tag" in found and "groot is not made for pi05" in found


def test_datasets_without_modality_json(make: Make, folder: Path) -> None:
    """Whole columns; --delta-action-dims splits them into relative and other keys."""
    write_dataset(folder / "plain", modality=None)
    camera = ("--camera-map", f"front={CAMERAS[0]}")
    supply = make(*camera, modality=None, dataset="plain")
    settings = preprocessor(supply).settings
    assert settings.modality.state.keys == ("state",) and settings.num_steps == 10 and settings.action_dim == 10
    delta = make(
        *camera, "--model-action-representation", "delta", "--delta-action-dims", "0", "1", "2", modality=None, dataset="plain"
    )
    processor, dataset = preprocessor(delta), delta.source.dataset  # type: ignore[attr-defined]
    assert processor.settings.modality.action.keys == ("action_0", "action_3")
    raw = dataset[4]
    arrays = processor(raw, 0)
    relative = raw.actions_TD[:, :3] - raw.state_D[:3]
    bounds = processor.transform._action["action_0"]
    expected = 2 * (relative - bounds.first) / (bounds.second - bounds.first) - 1
    inside = raw.action_is_in_episode_T
    np.testing.assert_allclose(arrays["actions_BTA"][:10, :3][inside], expected[inside], atol=1e-5)
    assert "--camera-map" in refused(folder, dataset="plain")


def test_long_instructions_lose_words_only(make: Make) -> None:
    supply = make("--max-prompt-length", "20", "--prompt-overflow", "truncate")
    arrays = preprocessor(supply)(supply.source.dataset[0], 0)  # type: ignore[attr-defined]
    assert (arrays["tokens_BS"] == 5).sum() == 8 and arrays["token_is_valid_BS"].all()
    text = preprocessor(supply).tokenizer.decode(arrays["tokens_BS"])
    assert text.startswith("<|im_start|>user\n") and text.endswith("<|im_end|>\n") and "block" not in text
