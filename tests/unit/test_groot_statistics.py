"""Statistics of GR00T's keys against brute force; released files read and written; merging; tokenizers."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from groot_fixtures import (
    LENGTHS,
    MODALITY_CONFIG,
    data_flags,
    golden_json,
    tokenizer,
    tokenizer_bytes,
    write_dataset,
    write_modality_config,
    write_tokenizer,
)

from megatron_vla.config.run import parse_args
from megatron_vla.data.build import build_data
from megatron_vla.data.groot.modality import RELEASED_EMBODIMENTS
from megatron_vla.data.groot.preprocess import GrootPreprocessor
from megatron_vla.data.groot.processor_files import (
    carry_processor_files,
    option_differences,
    read_processor_files,
    to_processor_files,
    write_processor_files,
)
from megatron_vla.data.groot.rotations import relative_pose
from megatron_vla.data.groot.statistics import key_statistics, merge_key_statistics
from megatron_vla.data.groot.tokenizer import BytePairTokenizer, read_tokenizer
from megatron_vla.data.statistics import FeatureStatistics, Statistics
from megatron_vla.findings import CheckError
from megatron_vla.models.registry import model_family

FAMILY = model_family("groot_n1_7")
NUMBERS = ("min", "max", "mean", "std", "q01", "q99")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("groot")
    write_dataset(root / "robot")
    write_tokenizer(root)
    write_modality_config(root)
    return root


def preprocessor(folder: Path, *flags: str) -> tuple[GrootPreprocessor, Any]:
    """(preprocessor, dataset) of a run on the fixture dataset."""
    modality = ("--modality-config", str(folder / "modality_config.json"))
    config = parse_args(data_flags(folder / "robot", folder / "tokenizer.json", *modality, *flags))
    supply = build_data(config, FAMILY)
    assert isinstance(supply.preprocessor, GrootPreprocessor)
    return supply.preprocessor, supply.source.dataset  # type: ignore[attr-defined]


def brute_force(rows: np.ndarray) -> dict[str, np.ndarray]:
    wide = rows.astype(np.float64)
    quantiles = {name: np.quantile(wide, q, axis=0) for name, q in (("q01", 0.01), ("q99", 0.99))}
    return {
        "min": wide.min(axis=0),
        "max": wide.max(axis=0),
        "mean": wide.mean(axis=0),
        "std": wide.std(axis=0),
        **quantiles,
    }


@pytest.mark.parametrize("policy", ["clamp", "complete"])
def test_statistics_against_brute_force(folder: Path, policy: str) -> None:
    """States and absolute actions over all frames; relative actions step by step, only steps inside their episode."""
    processor, dataset = preprocessor(folder, "--action-horizon-policy", policy)
    found = key_statistics(processor.statistics, processor.settings.stream)
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    for name, place in (("pose", slice(0, 9)), ("gripper", slice(9, 10)), ("arm", slice(10, 12))):
        for statistic, value in brute_force(dataset.state_ND[:, place]).items():
            np.testing.assert_allclose(found.state[name][statistic], value, rtol=1e-12, err_msg=f"{name} {statistic}")
        for statistic, value in brute_force(dataset.actions_ND[:, place]).items():
            np.testing.assert_allclose(found.action[name][statistic], value, rtol=1e-12, err_msg=f"{name} {statistic}")
    assert set(found.relative_action) == {"pose", "arm"}
    for step in range(4):
        pose_rows, arm_rows = [], []
        for start, end in pairwise(starts):
            last = end - 3 if policy == "complete" else end
            for row in range(start, last):
                if row + step < end:
                    state, action = dataset.state_ND[row], dataset.actions_ND[row + step]
                    pose_rows.append(relative_pose(action[:9], state[:9], "XYZ_ROT6D"))
                    arm_rows.append(action[10:].astype(np.float64) - state[10:])
        for name, rows in (("pose", pose_rows), ("arm", arm_rows)):
            for statistic, value in brute_force(np.array(rows).astype(np.float32)).items():
                np.testing.assert_allclose(found.relative_action[name][statistic][step], value, rtol=1e-9, atol=1e-12)


def test_the_tool_writes_what_training_computes(folder: Path, tmp_path: Path) -> None:
    from compute_norm_stats import main

    path = tmp_path / "statistics.json"
    flags = ["--model-name", "groot_n1_7", "--model-variant", "tiny", "--data-path", str(folder / "robot")]
    flags += ["--modality-config", str(folder / "modality_config.json"), "--embodiment-id", "1", "--output", str(path)]
    assert main(flags) == 0
    computed, _ = preprocessor(folder)
    assert Statistics.load(path).to_dict() == computed.statistics.to_dict()
    loaded, _ = preprocessor(folder, "--statistics-path", str(path))
    assert loaded.to_dict() == computed.to_dict()
    # Another horizon makes other bounds per step: refused, not stretched.
    shorter = write_modality_config(tmp_path, action={**MODALITY_CONFIG["action"], "delta_indices": [0, 1]})
    with pytest.raises(CheckError, match="computed on other transforms"):
        preprocessor(folder, "--statistics-path", str(path), "--modality-config", str(shorter))


def test_released_statistics_need_a_word(folder: Path, tmp_path: Path) -> None:
    processor, _ = preprocessor(folder)
    files = to_processor_files({"robot": processor})
    write_processor_files(tmp_path, files)
    path = str(tmp_path / "statistics.json")
    with pytest.raises(CheckError, match="--allow-foreign-statistics"):
        preprocessor(folder, "--statistics-path", path)
    loaded, dataset = preprocessor(folder, "--statistics-path", path, "--allow-foreign-statistics")
    raw = dataset[11]
    for name, value in processor(raw, 0).items():
        np.testing.assert_array_equal(loaded(raw, 0)[name], value, err_msg=name)
    with pytest.raises(CheckError, match="no statistics of the embodiment tag libero_sim"):
        preprocessor(folder, "--statistics-path", path, "--allow-foreign-statistics", "--embodiment-tag", "libero_sim")
    # A resume reads the stored file without the word: it is the project's own form by then.
    loaded.save(tmp_path / "stored") if (tmp_path / "stored").mkdir() is None else None
    assert GrootPreprocessor.load(tmp_path / "stored").to_dict() == loaded.to_dict()


def test_merging_datasets_of_one_tag() -> None:
    generator = np.random.default_rng(0)
    rows = [generator.normal(loc=i, size=(50 * (i + 1), 3)) for i in range(3)]
    parts = []
    for values in rows:
        feature = FeatureStatistics(len(values), brute_force(values))
        parts.append(Statistics({"state": feature, "actions": feature}, "f", "t", "exact"))
    merged = merge_key_statistics(parts, [len(values) for values in rows]).features["state"].values
    everything = np.concatenate(rows)
    np.testing.assert_allclose(merged["mean"], everything.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(merged["std"], everything.std(axis=0), rtol=1e-12)
    np.testing.assert_array_equal(merged["q01"], np.min([p.features["state"].values["q01"] for p in parts], axis=0))
    np.testing.assert_array_equal(merged["max"], everything.max(axis=0))
    weighted = merge_key_statistics(parts, [1.0, 0.0, 3.0]).features["state"].values
    np.testing.assert_allclose(weighted["mean"], rows[0].mean(axis=0) / 4 + rows[2].mean(axis=0) * 3 / 4, rtol=1e-12)


def released_folder(root: Path) -> dict[str, Any]:
    """A released checkpoint's JSON files, with options and tags that this project does not know."""
    values = golden_json("state_action")
    one = {"delta_indices": [0], "modality_keys": ["a"], "sin_cos_embedding_keys": None, "mean_std_embedding_keys": None}
    one |= {"action_configs": None}
    modality = {name: {**one, **values["modality_config"].get(name, {})} for name in ("video", "state", "action", "language")}
    contents = {
        "processor_config.json": {
            "processor_class": "Gr00tN1d7Processor",
            "processor_kwargs": {
                "modality_configs": {"new_embodiment": modality, "libero_sim": {**modality, "note": "kept"}},
                "shortest_image_edge": 64,
                "crop_fraction": 0.95,
                "use_percentiles": True,
                "something_new": {"a": [1, None]},
            },
        },
        "statistics.json": {"new_embodiment": values["statistics"], "libero_sim": {**values["statistics"], "extra": {}}},
        "embodiment_id.json": {"new_embodiment": 3, "libero_sim": 2},
    }
    for name, content in contents.items():
        (root / name).write_text(json.dumps(content))
    return contents


def test_released_files_survive_reading_and_writing(tmp_path: Path, folder: Path) -> None:
    contents = released_folder(tmp_path)
    files = read_processor_files(tmp_path)
    assert files.embodiments["new_embodiment"] == 3 and files.modalities["libero_sim"].num_action_steps == 5
    again = tmp_path / "again"
    again.mkdir()
    write_processor_files(again, files)
    for name, content in contents.items():
        assert json.loads((again / name).read_text()) == content
    # A model trained here replaces its own tag and leaves the others as they were.
    processor, _ = preprocessor(folder)
    mine = to_processor_files({"robot": processor}, files)
    write_processor_files(again, mine)
    back = read_processor_files(again)
    assert back.modalities["new_embodiment"] == processor.settings.modality
    assert back.raw_modalities["libero_sim"] == files.raw_modalities["libero_sim"]
    assert back.embodiments == {"new_embodiment": 1, "libero_sim": 2}
    assert back.options["something_new"] == {"a": [1, None]}
    stored = key_statistics(processor.statistics, processor.settings.stream)
    assert back.statistics["new_embodiment"].to_dict() == stored.to_dict()
    (tmp_path / "embodiment_id.json").unlink()
    with pytest.raises(ValueError, match=r"embodiment_id.json missing"):
        read_processor_files(tmp_path)


def test_conversion_takes_the_files_along(tmp_path: Path, folder: Path) -> None:
    """The same bytes from folder to folder; out of a training checkpoint over the files of where it started from."""
    released, output, checkpoint = tmp_path / "released", tmp_path / "output", tmp_path / "iter_0000002"
    for place in (released, output, checkpoint / "preprocessor"):
        place.mkdir(parents=True)
    contents = released_folder(released)
    assert "copied" in carry_processor_files(released / "model.safetensors", output)[0]
    for name in contents:
        assert (output / name).read_bytes() == (released / name).read_bytes()
    processor, _ = preprocessor(folder)
    processor.save(checkpoint / "preprocessor")
    (checkpoint / "config.json").write_text(json.dumps({"model": {"pretrained_checkpoint": str(released)}}))
    assert "over those of" in carry_processor_files(checkpoint, output)[0]
    files = read_processor_files(output)
    assert files.modalities["new_embodiment"] == processor.settings.modality
    assert (
        files.raw_modalities["libero_sim"]
        == contents["processor_config.json"]["processor_kwargs"]["modality_configs"]["libero_sim"]
    )
    # The exported statistics serve a next run just as the checkpoint's own do.
    again, dataset = preprocessor(folder, "--statistics-path", str(output / "statistics.json"), "--allow-foreign-statistics")
    np.testing.assert_array_equal(again(dataset[3], 0)["actions_BTA"], processor(dataset[3], 0)["actions_BTA"])


def test_a_checkpoint_names_robot_slot_and_differences(tmp_path: Path, folder: Path) -> None:
    contents = released_folder(tmp_path)
    config = parse_args(data_flags(folder / "robot", folder / "tokenizer.json", "--max-action-dim", "12"))
    found = option_differences(tmp_path / "processor_config.json", config.family)
    assert found == [("--image-crop-fraction", "0.95", str(230 / 256))]
    for name, older in (("Gr00tN1d6Processor", "N1.6"), ("GR00TTransform", "N1.5")):
        contents["processor_config.json"]["processor_class"] = name
        (tmp_path / "processor_config.json").write_text(json.dumps(contents["processor_config.json"]))
        with pytest.raises(ValueError, match=older):
            read_processor_files(tmp_path)


def test_released_slots() -> None:
    assert RELEASED_EMBODIMENTS["libero_sim"] == 2 and RELEASED_EMBODIMENTS["new_embodiment"] == 10
    assert RELEASED_EMBODIMENTS["oxe_droid_relative_eef_relative_joint"] == 24


def test_tokenizer_files_in_both_forms(tmp_path: Path) -> None:
    """tokenizer.json, and the three older files, give the same ids; special tokens are never split."""
    content = json.loads(tokenizer_bytes())
    special = {t["content"] for t in content["added_tokens"]}
    vocabulary = {token: number for token, number in content["model"]["vocab"].items() if token not in special}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    lines = [" ".join(merge) if isinstance(merge, list) else merge for merge in content["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
        read_tokenizer(tmp_path)
    # The library numbers added tokens behind the vocabulary, as in released files.
    shifted = {token: number - len(special) for token, number in vocabulary.items()}
    (tmp_path / "vocab.json").write_text(json.dumps(shifted))
    added = {str(len(shifted) + i): {"content": t, "special": True} for i, t in enumerate(sorted(special))}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    whole, parts = tokenizer(), read_tokenizer(tmp_path)
    for text in ("pick up the red block", "Größe 12\n\n x", "user\n", "it's 3½ cm"):
        assert parts.encode(text) == [i - len(special) for i in whole.encode(text)]
        assert whole.decode(whole.encode(text)) == text
    assert parts.vocab_size == whole.vocab_size
    assert whole.tokenizer.encode("a<|im_end|>b").ids[1] == whole.token_id("<|im_end|>")
    with pytest.raises(ValueError, match=r"no tokenizer.json"):
        BytePairTokenizer(b"not json")


def test_preprocessing_of_another_version_is_refused(folder: Path) -> None:
    processor, _ = preprocessor(folder)
    content = processor.to_dict()
    assert GrootPreprocessor.from_dict(content, processor.tokenizer.model_bytes).to_dict() == content
    del content["settings"]["formalize_language"]
    with pytest.raises(ValueError, match=r"missing settings \['formalize_language'\]"):
        GrootPreprocessor.from_dict(content, processor.tokenizer.model_bytes)
    assert {f.name for f in dataclasses.fields(processor.settings)} == set(processor.to_dict()["settings"])
