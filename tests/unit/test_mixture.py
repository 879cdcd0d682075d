"""Mixtures: order and quotas, every sample as its own dataset alone gives it, statistics, flags, checkpoints.

The datasets differ in everything: a LeRobot arm with 7 dimensions, 10 fps and one camera, and an RLDS pair of arms with 14
dimensions, 50 fps and three cameras.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from preprocess_fixtures import write_tokenizer
from rlds_fixtures import png, tensor_feature, write_records

from megatron_vla.config.data import DataConfig
from megatron_vla.config.datasets import dataset_parts
from megatron_vla.config.run import parse_args
from megatron_vla.data.build import build_data
from megatron_vla.data.lerobot_writer import LeRobotWriter
from megatron_vla.data.mixture import MixtureOrder, dataset_order, quotas
from megatron_vla.data.mixture_data import MixturePreprocessor, statistics_groups
from megatron_vla.data.preprocess import Preprocessor
from megatron_vla.data.report import first_batch_report
from megatron_vla.data.sampler import MicroBatchSampler
from megatron_vla.data.statistics import save_statistics_of_datasets
from megatron_vla.data.statistics_pass import transformed_blocks
from megatron_vla.findings import CheckError
from megatron_vla.models.pi05.family import FAMILY

ARM_LENGTHS, PAIR_LENGTHS = (8, 11), (30, 24, 20)
ARM_SAMPLES, PAIR_SAMPLES = sum(ARM_LENGTHS), sum(PAIR_LENGTHS)
PAIR_VIEWS = {"base": "high", "left_wrist": "left", "right_wrist": "right"}


def walk(seed: int, length: int, dims: int) -> np.ndarray:
    return np.cumsum(np.random.default_rng(seed).normal(size=(length, dims)), axis=0).astype(np.float32)


def picture(dataset: int, camera: int, episode: int, frame: int) -> np.ndarray:
    return np.full((12, 12, 3), dataset * 100 + camera * 40 + episode * 10 + frame % 10, dtype=np.uint8)


def write_arm(root: Path, dims: int = 7, seed: int = 0) -> Path:
    features: dict[str, Any] = {
        "observation.state": {"dtype": "float32", "shape": [dims]},
        "action": {"dtype": "float32", "shape": [dims]},
        "front": {"dtype": "image", "shape": [12, 12, 3]},
    }
    writer = LeRobotWriter(root, fps=10, features=features, robot_type="arm")
    for episode, length in enumerate(ARM_LENGTHS):
        state = walk(seed + episode, length, dims)
        frames = np.stack([picture(0, 0, episode, k) for k in range(length)])
        writer.add_episode({"observation.state": state, "action": state + 0.1}, {"front": frames}, "reach the cup")
    return writer.finalize()


def write_pair(root: Path) -> tuple[Path, str]:
    episodes = []
    for episode, length in enumerate(PAIR_LENGTHS):
        state = walk(100 + episode, length, 14) * 10
        values: dict[str, Any] = {"steps/action": state + 1, "steps/observation/state": state}
        values["steps/language_instruction"] = [b"fold the towel"] * length
        for camera, name in enumerate(PAIR_VIEWS.values()):
            values[f"steps/observation/{name}"] = [png(picture(1, camera, episode, k)) for k in range(length)]
        episodes.append(values)
    leaves: dict[str, Any] = {"action": tensor_feature("float32", 14), "observation/state": tensor_feature("float32", 14)}
    leaves["language_instruction"] = {"text": {}}
    for name in PAIR_VIEWS.values():
        leaves[f"observation/{name}"] = {"image": {"dtype": "uint8", "shape": {"dimensions": ["12", "12", "3"]}}}
    return write_records(root, episodes, leaves), json.dumps({"fps": 50, "robot_type": "pair"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mixture")
    write_arm(root / "arm")
    write_arm(root / "arm2", seed=50)
    mapping = write_pair(root)[1]
    (root / "mapping.json").write_text(mapping)
    write_tokenizer(root)
    return root


COMMON = ["--model-variant", "tiny", "--action-horizon", "4", "--max-prompt-length", "200", "--num-workers", "0"]
COMMON += ["--action-fps", "10", "--max-action-dim", "16"]
PAIR_MAP = [f"pair:{view}=observation.images.{name}" for view, name in PAIR_VIEWS.items()]


def mixture_flags(folder: Path, *more: str) -> list[str]:
    paths = ["--data-path", str(folder / "arm"), f"pair={folder / 'toy'}", "--tokenizer-model", str(folder / "tokenizer.model")]
    override = ["--data-override", f"pair:rlds-mapping={folder / 'mapping.json'}"]
    return [*COMMON, *paths, *override, "--camera-map", "arm:base=front", *PAIR_MAP, *more]


def alone(folder: Path, name: str) -> list[str]:
    flags = [*COMMON, "--tokenizer-model", str(folder / "tokenizer.model")]
    if name == "arm":
        return [*flags, "--data-path", str(folder / "arm"), "--camera-map", "base=front"]
    mapping = ["--rlds-mapping", str(folder / "mapping.json")]
    return [*flags, "--data-path", str(folder / "toy"), *mapping, "--camera-map", *(p[5:] for p in PAIR_MAP)]


def test_S06_every_sample_is_what_its_own_dataset_gives(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    supply = build_data(parse_args(mixture_flags(folder, "--data-weights", "1", "2")), FAMILY)
    total = ARM_SAMPLES + PAIR_SAMPLES
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    arm_quota = round(total / 3)
    assert ["arm", str(ARM_SAMPLES), str(arm_quota), "33.3%"] in [line[:4] for line in printed]
    assert ["pair", str(PAIR_SAMPLES), str(total - arm_quota), "66.7%"] in [line[:4] for line in printed]
    single = {name: build_data(parse_args(alone(folder, name)), FAMILY) for name in ("arm", "pair")}
    for index in range(total):
        name, own = ("arm", index) if index < ARM_SAMPLES else ("pair", index - ARM_SAMPLES)
        ours, theirs = supply.source(index, 0), single[name].source(own, 0)
        assert ours["images_BVCHW"].shape[0] == 3
        assert ours["camera_is_present_BV"].tolist() == ([True, False, False] if name == "arm" else [True] * 3)
        np.testing.assert_array_equal(ours["images_BVCHW"][: len(theirs["images_BVCHW"])], theirs["images_BVCHW"])
        for field in ("actions_BTA", "action_is_valid_BTA", "action_dim_is_valid_BA", "state_BD", "tokens_BL"):
            np.testing.assert_array_equal(ours[field], theirs[field])
        assert int(ours["action_dim_is_valid_BA"].sum()) == (7 if name == "arm" else 14)  # nothing cut to what is shared
        assert ours["sample_index_B"] == index
    longest = [int(single[name].longest_prompt or 0) for name in single]
    assert supply.longest_prompt == max(longest) and 0 < min(longest) < max(longest)
    # 50 fps at 10 steps per second: every fifth frame, no other.
    pair = single["pair"].source.dataset  # type: ignore[attr-defined]
    np.testing.assert_array_equal(pair[3].actions_TD, pair.actions_ND[[3, 8, 13, 18]])
    supply.close()


def test_S06_one_batch_mixes_the_datasets_and_is_reported(folder: Path, tmp_path: Path) -> None:
    supply = build_data(parse_args(mixture_flags(folder, "--micro-batch-size", "8")), FAMILY)
    batch = supply.first_batch()
    assert set((batch.sample_index_B.numpy() >= ARM_SAMPLES).tolist()) == {True, False}
    assert batch.images_BVCHW.shape[:2] == (8, 3)
    first_batch_report(batch, supply.preprocessor, tmp_path, order_hash=supply.order_hash)
    report = json.loads((tmp_path / "first_batch.json").read_text())
    assert report["views"][0]["camera"] == "front, observation.images.high"
    names = {row["name"] for row in report["ranges"]}
    assert {"arm:dim_6", "pair:dim_13"} <= names and "arm:dim_7" not in names


def test_S02_workers_give_the_same_batches(folder: Path) -> None:
    flags = mixture_flags(folder, "--micro-batch-size", "4")
    direct, workers = build_data(parse_args(flags), FAMILY), build_data(parse_args([*flags, "--num-workers", "2"]), FAMILY)
    pairs = zip(direct.iterator(40, 0, 1, 4, False), workers.iterator(40, 0, 1, 4, False), strict=True)
    for one, other in pairs:
        for name, tensor in one.tensors().items():
            assert torch.equal(tensor, other.tensors()[name]), name
    workers.close()


@pytest.mark.parametrize("weights", [None, (1.0, 1.0, 2.0), (0.02, 0.9, 0.1)])
def test_S06_quotas_and_coverage_are_exact(weights: tuple[float, ...] | None) -> None:
    sizes = (40, 25, 10)
    quota_M = quotas(sizes, weights)
    total = sum(sizes)
    assert quota_M.sum() == total
    if weights is not None:
        assert np.abs(quota_M - np.array(weights) / sum(weights) * total).max() < 1
    order = MixtureOrder(tuple(dataset_order(n, 5, True, d) for d, n in enumerate(sizes)), quota_M, 5, True)
    first_M = order.first_sample_M
    seen: Counter[int] = Counter()
    keys = set()
    for epoch in range(4):
        drawn = [order.at(p) for p in range(epoch * total, (epoch + 1) * total)]
        dataset = np.searchsorted(first_M, [index for _, index in drawn], side="right") - 1
        assert np.bincount(dataset, minlength=3).tolist() == quota_M.tolist()
        seen.update(index for _, index in drawn)
        keys.update(drawn)
    assert len(keys) == 4 * total  # (epoch, sample) never repeats: no two visits share noise
    for number, size in enumerate(sizes):
        counts = [seen[first_M[number] + i] for i in range(size)]
        assert max(counts) - min(counts) <= 1  # no sample twice before all once
        assert sum(counts) == 4 * quota_M[number]
    if weights is None:
        assert set(seen.values()) == {4}


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_S01_mixture_resumes_by_consumed_samples_at_any_world_size(world: int) -> None:
    def order() -> MixtureOrder:
        return MixtureOrder(
            tuple(dataset_order(n, 9, True, d) for d, n in enumerate((31, 50))), quotas((31, 50), (1, 3)), 9, True
        )

    plain = [order().at(p) for p in range(24 * 9)]
    consumed, batches = 24 * 4, [[] for _ in range(5)]  # type: ignore[var-annotated]
    for rank in range(world):
        sampler = MicroBatchSampler(order(), consumed, 1, 24, rank, world, 5)
        for number, micro_batch in enumerate(sampler):
            batches[number // sampler.num_microbatches] += micro_batch
    assert [sorted(b) for b in batches] == [sorted(plain[consumed + 24 * i : consumed + 24 * (i + 1)]) for i in range(5)]
    assert order().order_hash() == order().order_hash()
    other = dataclasses.replace(order(), quota_M=quotas((31, 50), None))
    assert other.order_hash() != order().order_hash()


def test_S05_without_shuffling_datasets_follow_each_other() -> None:
    order = MixtureOrder(tuple(dataset_order(n, 1, False, d) for d, n in enumerate((3, 2))), quotas((3, 2), None), 1, False)
    assert [order.at(p) for p in range(7)] == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1)]


def test_equal_datasets_have_different_orders() -> None:
    one, other = (dataset_order(50, 3, True, number).permutation(0) for number in (0, 1))
    assert (one != other).sum() > 40


def compute(folder: Path, output: Path) -> None:
    import compute_norm_stats

    assert compute_norm_stats.main([*mixture_flags(folder), "--output", str(output)]) == 0


def as_json(parts: dict[str, Preprocessor]) -> str:
    return json.dumps({name: part.to_dict() for name, part in parts.items()})


def test_N06_statistics_file_of_a_mixture_is_found_by_fingerprint(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "statistics.json"
    compute(folder, path)
    computed = build_data(parse_args(mixture_flags(folder)), FAMILY).preprocessor
    loaded = build_data(parse_args(mixture_flags(folder, "--statistics-path", str(path))), FAMILY).preprocessor
    assert isinstance(computed, MixturePreprocessor) and isinstance(loaded, MixturePreprocessor)
    assert as_json(loaded.parts) == as_json(computed.parts)
    # The order in the file does not matter, a dataset that is not in it does.
    content = json.loads(path.read_text())
    content["datasets"] = {"x": content["datasets"]["arm"]}
    path.write_text(json.dumps(content))
    with pytest.raises(CheckError, match=r"dataset pair: --statistics-path.*none of them has fingerprint") as caught:
        build_data(parse_args(mixture_flags(folder, "--statistics-path", str(path))), FAMILY)
    assert "--data-path" in str(caught.value) and "compute_norm_stats" in str(caught.value)


def test_N02_changed_stream_of_one_dataset_is_named(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "statistics.json"
    compute(folder, path)
    changed = ["--data-override", f"pair:rlds-mapping={folder / 'mapping.json'}", "arm:model-action-representation=delta"]
    changed += ["arm:delta-action-dims=0,1,2"]
    with pytest.raises(CheckError, match=r"dataset arm: --statistics-path: .* other transforms \(delta_action_dims") as caught:
        build_data(parse_args(mixture_flags(folder, "--statistics-path", str(path), *changed)), FAMILY)
    assert len(caught.value.findings) == 1


def merged_flags(folder: Path, *more: str) -> list[str]:
    paths = ["--data-path", str(folder / "arm"), str(folder / "arm2"), "--tokenizer-model", str(folder / "tokenizer.model")]
    return [*COMMON, *paths, "--camera-map", "base=front", "--mixture-statistics", "merged", *more]


@pytest.mark.parametrize("quantiles", ["exact", "histogram"])
def test_merged_statistics_are_those_of_all_samples(folder: Path, quantiles: str) -> None:
    supply = build_data(parse_args(merged_flags(folder, "--statistics-quantiles", quantiles)), FAMILY)
    parts = supply.preprocessor.parts  # type: ignore[union-attr]
    one, other = parts["arm"].statistics, parts["arm2"].statistics
    assert one.features is other.features and one.dataset_fingerprint != other.dataset_fingerprint
    blocks = []
    for source in supply.source.sources:  # type: ignore[attr-defined]
        blocks += list(transformed_blocks(source.dataset, _stream(source), np.arange(len(source.dataset))))
    actions = np.concatenate([block[1].reshape(-1, 7) for block in blocks]).astype(np.float64)
    values = one.features["actions"].values
    np.testing.assert_allclose(values["mean"], actions.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(values["std"], actions.std(axis=0), rtol=1e-12)
    tolerance = 1e-12 if quantiles == "exact" else np.ptp(actions) / 2000
    np.testing.assert_allclose(values["q01"], np.quantile(actions, 0.01, axis=0), rtol=0.05, atol=max(tolerance, 0.15))
    if quantiles == "exact":
        np.testing.assert_allclose(values["q99"], np.quantile(actions, 0.99, axis=0), rtol=1e-12)


def _stream(source: Any) -> Any:
    from megatron_vla.data.statistics_pass import StreamTransform

    return StreamTransform(source.dataset.action_horizon, (), "observation.state", "action")


def test_N06_statistics_of_a_mixture_are_kept_by_embodiment(folder: Path, tmp_path: Path) -> None:
    """Two datasets of one robot share statistics, the third robot has its own; a file of another robot is refused."""
    flags = mixture_flags(folder, "--mixture-statistics", "per_embodiment")
    flags.insert(flags.index(str(folder / "arm")) + 1, str(folder / "arm2"))
    flags.insert(flags.index("arm:base=front") + 1, "arm2:base=front")
    parts = build_data(parse_args(flags), FAMILY).preprocessor
    assert isinstance(parts, MixturePreprocessor)
    arm, arm2, pair = (parts.parts[name].statistics for name in ("arm", "arm2", "pair"))
    assert arm.features is arm2.features and arm.features is not pair.features
    assert (arm.embodiment, arm2.embodiment, pair.embodiment) == ("arm", "arm", "pair")
    merged = build_data(parse_args(merged_flags(folder)), FAMILY).preprocessor
    assert isinstance(merged, MixturePreprocessor)
    np.testing.assert_array_equal(
        arm.features["actions"].values["q99"], merged.parts["arm"].statistics.features["actions"].values["q99"]
    )
    path = tmp_path / "statistics.json"
    save_statistics_of_datasets(path, {"arm": dataclasses.replace(arm, embodiment="other_arm"), "arm2": arm2})
    with pytest.raises(CheckError, match=r"dataset arm: --statistics-path: .* on another robot \(other_arm, here arm\)"):
        build_data(parse_args(merged_flags(folder, "--statistics-path", str(path))), FAMILY)


def test_N06_a_dataset_without_a_robot_type_cannot_share_by_embodiment() -> None:
    assert statistics_groups("per_embodiment", {"a": "x", "b": "y", "c": "x"}) == [["a", "c"], ["b"]]
    with pytest.raises(CheckError, match=r"metadata of b states no robot type"):
        statistics_groups("per_embodiment", {"a": "x", "b": None})


def test_merged_statistics_need_equal_dimensions(folder: Path) -> None:
    with pytest.raises(CheckError, match=r"--mixture-statistics: .*arm state 7 action 7, pair state 14 action 14"):
        build_data(parse_args(mixture_flags(folder, "--mixture-statistics", "merged")), FAMILY)


@pytest.mark.parametrize("kind", ["per_dataset", "merged"])
def test_checkpoint_folder_serves_each_dataset_and_resumes(folder: Path, tmp_path: Path, kind: str) -> None:
    flags = mixture_flags(folder) if kind == "per_dataset" else merged_flags(folder)
    supply = build_data(parse_args(flags), FAMILY)
    preprocessor = supply.preprocessor
    assert isinstance(preprocessor, MixturePreprocessor)
    preprocessor.save(tmp_path)
    for name, part in preprocessor.parts.items():
        assert as_json({name: Preprocessor.load(tmp_path / name)}) == as_json({name: part})
    with pytest.raises(ValueError, match=r"of a mixture of .*; choose one"):
        Preprocessor.load(tmp_path)
    # What a resume does: statistics and tokenizer of the checkpoint.
    stored = ["--statistics-path", str(tmp_path / "statistics.json"), "--tokenizer-model", str(tmp_path / "tokenizer.model")]
    again = build_data(parse_args([*flags, *stored]), FAMILY)
    assert as_json(again.preprocessor.parts) == as_json(preprocessor.parts)  # type: ignore[union-attr]
    assert again.order_hash == supply.order_hash


def test_settings_of_a_mixture_carry_the_rate_of_the_chunk(folder: Path) -> None:
    parts = build_data(parse_args(mixture_flags(folder)), FAMILY).preprocessor.parts  # type: ignore[union-attr]
    assert {name: part.settings.action_fps for name, part in parts.items()} == {"arm": 10.0, "pair": 10.0}


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ({"data_path": ("a/x", "b/x")}, "two datasets are called x"),
        ({"data_path": ("a", "b"), "data_weights": (1.0,)}, "1 weights for 2 datasets"),
        ({"data_path": ("a", "b"), "data_weights": (1.0, 0.0)}, "a weight is above 0"),
        ({"data_path": ("a", "b"), "camera_map": ("c:base=x",)}, "no dataset 'c'"),
        ({"data_path": ("a", "b"), "data_override": ("a:lr=3",)}, "'lr' is no flag of one dataset"),
        ({"data_path": ("a", "b"), "data_override": ("a.action-key=x",)}, "is not NAME:FLAG=VALUE"),
        ({"data_path": ("a", "b"), "data_override": ("a:normalization=zscore",)}, "one of quantile, mean_std, identity"),
        ({"data_path": ("a", "b"), "data_override": ("a:drop-nonfinite=yes",)}, "true or false"),
    ],
)
def test_S06_wrong_flags_are_named(flags: dict[str, Any], what: str) -> None:
    parts, findings = dataset_parts(DataConfig(**flags))
    assert not parts
    assert len(findings) == 1 and what in str(findings[0])


def test_flags_are_taken_apart_per_dataset() -> None:
    data = DataConfig(
        data_path=("x=/d/one", "/d/two/1.0.0"),
        camera_map=("base=cam", "two:base=other", "two:wrist=hand"),
        data_override=("x:delta-action-dims=0,1", "two:drop-idle-frames=true", "two:action-key=act"),
        data_weights=(1.0, 3.0),
    )
    parts, findings = dataset_parts(data)
    assert not findings
    one, two = parts
    assert (one.name, one.data.data_path, one.weight) == ("x", ("/d/one",), 1.0)
    assert (two.name, two.data.data_path, two.weight) == ("two", ("/d/two/1.0.0",), 3.0)
    assert one.data.camera_map == ("base=cam",) and two.data.camera_map == ("base=other", "wrist=hand")
    assert one.data.delta_action_dims == (0, 1) and two.data.delta_action_dims == ()
    assert two.data.drop_idle_frames and not one.data.drop_idle_frames
    assert (one.data.action_key, two.data.action_key) == ("action", "act")


def test_S06_errors_of_all_datasets_come_together(folder: Path) -> None:
    flags = mixture_flags(folder, "--max-action-dim", "6", "--camera-map", "arm:base=back", *PAIR_MAP)
    with pytest.raises(CheckError) as caught:
        build_data(parse_args(flags), FAMILY)
    text = str(caught.value)
    assert "dataset arm: --camera-map: asks for camera back" in text
    assert "dataset arm: --max-action-dim" in text and "dataset pair: --max-action-dim" in text


def test_too_small_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dataset number 2 would get no sample"):
        quotas((10, 10), (1000.0, 1.0))
