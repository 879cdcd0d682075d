"""DataSupply on a real (tiny) dataset: same samples whatever the ranks and workers, errors before the start."""

from __future__ import annotations

import dataclasses
import multiprocessing
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from preprocess_fixtures import CAMERAS, LENGTHS, data_flags, write_dataset, write_tokenizer

from megatron_vla.config.run import parse_args
from megatron_vla.data.batch import Batch
from megatron_vla.data.build import DataSupply, build_data
from megatron_vla.data.draws import flow_draws
from megatron_vla.data.loader import SampleError, prompt_slots
from megatron_vla.findings import CheckError
from megatron_vla.models.registry import model_family
from tools.compute_norm_stats import main as compute_norm_stats

FAMILY = model_family("pi05")
NUM_SAMPLES = sum(LENGTHS)
DELTA = ("--model-action-representation", "delta", "--delta-action-dims")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("supply")
    write_dataset(folder / "data")
    write_tokenizer(folder)
    return folder


def supply_of(folder: Path, *flags: str) -> DataSupply:
    return build_data(parse_args(data_flags(folder / "data", folder / "tokenizer.model", *flags)), FAMILY)


def problems_of(folder: Path, *flags: str) -> str:
    with pytest.raises(CheckError) as caught:
        supply_of(folder, *flags)
    return str(caught.value)


def by_sample(batches: Iterator[Batch]) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
    found: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    for batch in batches:
        for i in range(batch.size):
            key = int(batch.epoch_B[i]), int(batch.sample_index_B[i])
            assert key not in found
            found[key] = {name: tensor[i].clone() for name, tensor in batch.tensors().items()}
    return found


def assert_equal(first: dict[Any, Any], second: dict[Any, Any]) -> None:
    assert first.keys() == second.keys()
    for key, tensors in first.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, second[key][name]), (key, name)


@pytest.fixture(autouse=True)
def leaves_no_worker() -> Iterator[None]:
    """Every worker that a test starts is gone when it ends (processes of other test modules may still be there)."""
    others = set(multiprocessing.active_children())
    yield
    assert not set(multiprocessing.active_children()) - others


def test_S02_ranks_workers_and_micro_batches_give_the_same_samples(folder: Path) -> None:
    flags = ("--prompt-padding", "max", "--global-batch-size", "8")
    reference = by_sample(supply_of(folder, *flags, "--micro-batch-size", "8").iterator(0, 0, 1, 10, False))
    assert len(reference) == 80
    assert {key for key in reference if key[0] == 0} == {(0, index) for index in range(NUM_SAMPLES)}
    for ranks, micro, workers in ((2, 4, 0), (2, 1, 4)):
        supply = supply_of(folder, *flags, "--micro-batch-size", str(micro), "--num-workers", str(workers))
        parts = [by_sample(supply.iterator(0, rank, ranks, 10, False)) for rank in range(ranks)]
        union = {key: value for part in parts for key, value in part.items()}
        assert sum(map(len, parts)) == len(union)
        assert_equal(union, reference)
        supply.close()


def test_D12_every_dataset_version_gives_identical_batches_and_statistics(folder: Path, tmp_path: Path) -> None:
    reference = supply_of(folder)
    assert reference.preprocessor is not None
    for version in ("v2.0", "v2.1"):
        write_dataset(tmp_path / version / "data", version=version)  # type: ignore[arg-type]
        write_tokenizer(tmp_path / version)
        supply = supply_of(tmp_path / version)
        assert supply.preprocessor is not None
        assert supply.order_hash == reference.order_hash
        assert supply.preprocessor.to_dict() == reference.preprocessor.to_dict()
        for first, second in zip(supply.iterator(0, 0, 1, 3, False), reference.iterator(0, 0, 1, 3, False), strict=True):
            for name, tensor in first.tensors().items():
                assert torch.equal(tensor, second.tensors()[name]), (version, name)


def test_resume_position_and_draws(folder: Path) -> None:
    supply = supply_of(folder, "--prompt-padding", "max")
    batches = list(supply.iterator(0, 0, 1, 4, False))
    again = next(supply.iterator(12, 0, 1, 1, False))
    for name, tensor in again.tensors().items():
        assert torch.equal(tensor, batches[3].tensors()[name])
    noise, time = flow_draws(1234, 0, int(again.sample_index_B[2]), 4, 12)
    assert np.array_equal(again.noise_BTA[2].numpy(), noise)
    assert again.time_B[2].item() == time
    first = supply.first_batch()
    assert torch.equal(first.images_BVCHW, batches[0].images_BVCHW)
    assert torch.equal(first.noise_BTA, batches[0].noise_BTA)


def test_S03_loading_leaves_global_random_state_alone(folder: Path) -> None:
    before = torch.get_rng_state()
    supply = supply_of(folder, "--num-workers", "1")
    list(supply.iterator(0, 0, 1, 2, False))
    assert torch.equal(before, torch.get_rng_state())


def test_S05_order_hash_is_stable_and_no_shuffle_is_storage_order(folder: Path) -> None:
    assert supply_of(folder).order_hash == supply_of(folder).order_hash
    assert supply_of(folder, "--seed", "5").order_hash != supply_of(folder).order_hash
    (batch,) = supply_of(folder, "--no-shuffle").iterator(0, 0, 1, 1, False)
    assert batch.sample_index_B.tolist() == [0, 1, 2, 3]


def test_contents_of_a_batch(folder: Path) -> None:
    supply = supply_of(
        folder, "--no-shuffle", "--num-images", "3", "--model-action-representation", "delta", "--delta-action-dims", "0", "1"
    )
    (batch,) = supply.iterator(4, 0, 1, 1, False)  # frames 4 ... 7 of the first episode (9 frames)
    dataset, processor = supply.source.dataset, supply.preprocessor  # type: ignore[attr-defined]
    assert processor is not None
    assert batch.images_BVCHW.dtype == torch.uint8
    # 16 x 24 pixels become 37 x 56 with 9 black rows above; green encodes the frame, the second camera adds 100.
    assert batch.images_BVCHW[:, 0, 1, 28, 28].tolist() == [40, 50, 60, 70]
    assert batch.images_BVCHW[:, 1, 1, 28, 28].tolist() == [140, 150, 160, 170]
    assert int(batch.images_BVCHW[:, :, :, :9].max()) == 0
    assert int(batch.images_BVCHW[:, 2].max()) == 0
    assert batch.camera_is_present_BV.tolist() == [[True, True, False]] * 4
    assert batch.action_is_valid_BTA[:, :, 0].sum(dim=1).tolist() == [4, 4, 3, 2]
    assert batch.action_dim_is_valid_BA.sum(dim=1).tolist() == [3] * 4
    for i in range(4):
        physical = processor.unnormalize_actions(batch.actions_BTA[i].numpy(), dataset.state_ND[4 + i])
        np.testing.assert_allclose(physical, dataset[4 + i].actions_TD, rtol=1e-5, atol=1e-5)
    assert supply.expected_padded_fraction == pytest.approx(4 * (1 + 2 + 3) / (4 * NUM_SAMPLES))


def test_prompt_trimming_keeps_every_valid_token(folder: Path) -> None:
    batches = {
        p: next(supply_of(folder, "--prompt-padding", p).iterator(0, 0, 1, 1, False)) for p in ("max", "longest", "bucket")
    }
    longest = int(batches["max"].token_is_valid_BL.sum(dim=1).max())
    assert longest <= int(supply_of(folder).longest_prompt or 0) <= 100
    assert {p: b.tokens_BL.shape[1] for p, b in batches.items()} == {
        "max": 100,
        "longest": longest,
        "bucket": -(-longest // 32) * 32,
    }
    for batch in batches.values():
        assert torch.equal(batch.tokens_BL[batch.token_is_valid_BL], batches["max"].tokens_BL[batches["max"].token_is_valid_BL])
    assert [prompt_slots(n, "bucket", 32, 100) for n in (0, 1, 32, 33, 97, 100)] == [32, 32, 32, 64, 100, 100]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_sample_ends_the_run_and_is_named(folder: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    supply = supply_of(folder, "--no-shuffle", "--num-workers", str(workers))
    dataset_type = type(supply.source.dataset)  # type: ignore[attr-defined]
    read = dataset_type.block

    def broken(self: Any, row: int, index_n: np.ndarray, room: Any) -> Any:
        if 10 in index_n:
            raise OSError("camera file is cut off")
        return read(self, row, index_n, room)

    monkeypatch.setattr(dataset_type, "block", broken)
    with pytest.raises(SampleError, match=r"sample 10 \(episode 1, frame 1, .*parquet\): OSError: camera file is cut off"):
        list(supply.iterator(0, 0, 1, 5, False))


def test_samples_can_be_pickled_for_spawned_workers(folder: Path) -> None:
    samples = supply_of(folder)._samples
    again = pickle.loads(pickle.dumps(samples))
    first, second = samples[1, 17][0], again[1, 17][0]
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert np.array_equal(value, second[name]), name


def test_idle_samples_are_left_out_and_counted(tmp_path: Path) -> None:
    def stand_still(episode: int, columns: dict[str, np.ndarray]) -> None:
        if episode == 1:
            columns["observation.state"][2:5] = columns["observation.state"][2]  # frames 2 and 3 do not move on

    write_dataset(tmp_path / "data", change=stand_still)
    write_tokenizer(tmp_path)
    assert supply_of(tmp_path).num_samples == NUM_SAMPLES
    supply = supply_of(tmp_path, "--drop-idle-frames", "--no-shuffle")
    assert supply.num_samples == NUM_SAMPLES - 2
    seen = {index for _, index in by_sample(supply.iterator(0, 0, 1, 9, False))}
    assert set(range(36)) - seen == {LENGTHS[0] + 2, LENGTHS[0] + 3}
    assert any("2 of 40 samples left out" in str(finding) for finding in supply.findings)


def test_early_close_stops_the_workers(folder: Path) -> None:
    supply = supply_of(folder, "--num-workers", "2")
    batches = supply.iterator(0, 0, 1, 1000, False)
    next(batches)
    supply.close()
    with pytest.raises(StopIteration):
        next(batches)


def test_metrics_name_the_stages(folder: Path) -> None:
    supply = supply_of(folder, "--max-prompt-length", "20", "--prompt-overflow", "truncate")
    list(supply.iterator(0, 0, 1, 2, False))
    metrics = supply.metrics()
    assert metrics["num_truncated_prompts"] == 8
    assert metrics["data_read_ms"] > 0
    assert metrics["data_transform_ms"] > 0
    assert supply.metrics()["num_truncated_prompts"] == 0
    assert any("--max-prompt-length" in str(finding) for finding in supply.findings)


def test_everything_wrong_is_one_list(folder: Path, tmp_path: Path) -> None:
    text = problems_of(
        folder,
        *("--camera-map", "base=observation.images.front"),
        *("--tokenizer-model", str(tmp_path / "absent.model")),
        *("--max-action-dim", "2"),
    )
    assert "3 problem(s) found before start" in text
    assert f"--camera-map base={CAMERAS[0]} left_wrist={CAMERAS[1]}" in text
    assert "absent.model is not a file" in text
    assert "has 3 dimensions, the model takes at most 2" in text
    assert "NoColumn" in problems_of(folder, "--state-key", "NoColumn")
    assert "3 is fewer" not in text


def test_C05_wide_actions_name_the_flag_and_what_it_costs(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", action_dim=35)
    write_tokenizer(tmp_path)
    text = problems_of(tmp_path, "--max-action-dim", "32")
    assert "action has 35 dimensions, the model takes at most 32" in text
    assert "--max-action-dim 35" in text
    assert "action_in_proj and action_out_proj" in text
    assert supply_of(tmp_path, "--max-action-dim", "35").first_batch().actions_BTA.shape == (4, 4, 35)


def test_C04_empty_instructions_refused_dropped_or_kept(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data")
    import pyarrow.parquet as pq

    tasks = next(root.glob("meta/tasks*"))
    table = pq.read_table(tasks)
    (column,) = (i for i, name in enumerate(table.column_names) if name != "task_index")
    texts = ["" if "green" in text else text for text in table.column(column).to_pylist()]
    pq.write_table(table.set_column(column, table.column_names[column], [texts]), tasks)
    write_tokenizer(tmp_path)
    assert "--empty-instruction" in problems_of(tmp_path)
    kept = supply_of(tmp_path, "--empty-instruction", "keep")
    assert kept.num_samples == NUM_SAMPLES
    dropped = supply_of(tmp_path, "--empty-instruction", "drop")
    assert dropped.num_samples == LENGTHS[0] + LENGTHS[2]
    prompts = {
        dropped.preprocessor.tokenizer.decode(b.tokens_BL[i])  # type: ignore[union-attr]
        for b in dropped.iterator(0, 0, 1, 5, False)
        for i in range(4)
    }
    assert all("red" in prompt for prompt in prompts)


def test_N04_nan_is_located_or_its_windows_left_out(tmp_path: Path) -> None:
    def spoil(episode: int, columns: dict[str, np.ndarray]) -> None:
        if episode == 2:
            columns["observation.state"][5, 1] = np.nan
            columns["action"][9, 2] = np.inf

    write_dataset(tmp_path / "data", change=spoil)
    write_tokenizer(tmp_path)
    text = problems_of(tmp_path)
    assert "episode 2 frame 5" in text
    assert "episode 2 frame 9" in text
    assert "--drop-nonfinite" in text
    supply = supply_of(tmp_path, "--drop-nonfinite", "--no-shuffle")
    first = LENGTHS[0] + LENGTHS[1]
    left_out = {first + 5, *range(first + 6, first + 10)}
    assert supply.num_samples == NUM_SAMPLES - len(left_out)
    seen = {index for _, index in by_sample(supply.iterator(0, 0, 1, supply.num_samples // 4, False))}
    assert not seen & left_out
    assert any("5 of 40 samples left out" in str(finding) for finding in supply.findings)


def test_N02_statistics_of_another_representation_are_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "statistics.json"
    flags = data_flags(folder / "data", folder / "tokenizer.model")
    tool_flags = flags[: flags.index("--micro-batch-size")]
    delta = (*DELTA, "0", "1", "2")
    assert compute_norm_stats([*tool_flags, *delta, "--output", str(path)]) == 0
    used = supply_of(folder, *delta, "--statistics-path", str(path))
    assert used.preprocessor is not None
    assert used.preprocessor.statistics.transform_hash == supply_of(folder, *delta).preprocessor.statistics.transform_hash  # type: ignore[union-attr]

    text = problems_of(folder, "--statistics-path", str(path))
    assert "delta_action_dims [0, 1, 2] -> ()" in text
    assert "python tools/compute_norm_stats.py --model-name pi05 --data-path" in text
    text = problems_of(folder, "--statistics-path", str(path), "--allow-foreign-statistics")
    assert "normalization of actions" in text
    assert re.search(r"\b(x|y|gripper) \(\d+% outside, max [\d.]+\)", text)
    assert "--max-out-of-range-fraction" in text


def test_N06_recompute_command_in_the_error_works(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shlex

    path = tmp_path / "statistics.json"
    supply_of(folder).preprocessor.statistics.save(path)  # type: ignore[union-attr]
    flags = ("--action-horizon", "3", "--statistics-path", str(path))
    text = problems_of(folder, *flags)
    command = text.split("recompute: ")[1].split("  (or")[0]
    words = shlex.split(command)
    assert words[:2] == ["python", "tools/compute_norm_stats.py"]
    assert compute_norm_stats(words[2:]) == 1  # it never replaces a file unasked
    assert "--overwrite" in capsys.readouterr().err
    assert compute_norm_stats([*words[2:], "--overwrite"]) == 0
    assert "gripper" in capsys.readouterr().out
    assert supply_of(folder, *flags).num_samples == NUM_SAMPLES


def test_N06_missing_statistics_are_computed_never_skipped(folder: Path) -> None:
    processor = supply_of(folder).preprocessor
    assert processor is not None
    values = processor.statistics.features["state"].values
    assert values["q99"].shape == (5,)
    assert np.all(values["q99"] > values["q01"])
    text = problems_of(folder, "--statistics-path", str(folder / "absent.json"))
    assert "absent.json" in text


def test_mock_data_has_the_same_fields_and_can_be_learned() -> None:
    flags = ["--model-variant", "tiny", "--mock-data", "--micro-batch-size", "8", "--num-images", "3", "--num-workers", "0"]
    config = parse_args(flags)
    supply = build_data(config, FAMILY)
    assert supply.preprocessor is None
    batches = list(supply.iterator(0, 0, 1, 20, False))
    assert {f.name for f in dataclasses.fields(Batch)} == batches[0].tensors().keys()
    assert batches[0].images_BVCHW.shape == (8, 3, 3, 56, 56)
    assert batches[0].camera_is_present_BV[0].tolist() == [True, True, False]
    assert int(batches[0].tokens_BL.max()) < config.family.vocab_size
    again = next(build_data(config, FAMILY).iterator(8 * 19, 0, 1, 1, False))
    assert torch.equal(again.images_BVCHW, batches[-1].images_BVCHW)
    # The first token tells the actions.
    by_token: dict[int, torch.Tensor] = {}
    for batch in batches:
        for i in range(8):
            known = by_token.setdefault(int(batch.tokens_BL[i, 0]), batch.actions_BTA[i])
            assert torch.equal(known, batch.actions_BTA[i])
    assert len(by_token) == 16
    with pytest.raises(CheckError, match="--num-images 2 or more"):
        build_data(parse_args([*flags, "--num-images", "1"]), FAMILY)
