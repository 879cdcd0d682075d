"""--data-access decode_once with several video datasets: the mixture's samples, each episode decoded in one pass."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_fixture_dataset import CAMERAS, make_dataset
from preprocess_fixtures import write_tokenizer

from megatron_vla.config.run import parse_args
from megatron_vla.data.batch import Batch
from megatron_vla.data.build import build_data
from megatron_vla.data.frame_source import FrameSource
from megatron_vla.data.mixture_shards import MixtureShardOrder
from megatron_vla.data.supply import DataSupply
from megatron_vla.models.registry import model_family

FAMILY = model_family("pi05")
LENGTHS = {"one": (23, 18, 31), "two": (40, 17)}
TOTAL = sum(sum(lengths) for lengths in LENGTHS.values())
FRAME_BYTES = 48 * 64 * 3
SHARDS = ("--data-access", "decode_once", "--shard-bytes", str(40 * FRAME_BYTES), "--decode-lanes", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture_shards")
    for name, lengths in LENGTHS.items():
        make_dataset(folder / name, lengths=lengths)
    write_tokenizer(folder)
    return folder


def supply_of(folder: Path, *flags: str) -> DataSupply:
    words = ["--model-variant", "tiny", "--image-size", "28", "--data-path", *(f"{n}={folder / n}" for n in LENGTHS)]
    words += ["--camera-map", f"base={CAMERAS[0]}", f"two:left_wrist={CAMERAS[1]}", "--action-horizon", "4"]
    words += ["--tokenizer-model", str(folder / "tokenizer.model"), "--max-prompt-length", "120", "--num-workers", "0"]
    words += ["--micro-batch-size", "4", "--prompt-padding", "max"]
    return build_data(parse_args([*words, *SHARDS, *flags]), FAMILY)


def batches_of(supply: DataSupply, count: int, consumed: int = 0, rank: int = 0, ranks: int = 1) -> list[Batch]:
    batches = list(supply.iterator(consumed, rank, ranks, count, False))
    supply.close()
    assert all(isinstance(batch, Batch) for batch in batches)
    return batches  # type: ignore[return-value]


def keys_of(batches: list[Batch]) -> list[tuple[int, int]]:
    return [key for batch in batches for key in zip(batch.epoch_B.tolist(), batch.sample_index_B.tolist(), strict=True)]


def assert_equal(first: list[Batch], second: list[Batch]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        for name, tensor in one.tensors().items():
            assert torch.equal(tensor, other.tensors()[name]), name


def test_S06_shards_give_the_samples_that_random_access_gives(folder: Path) -> None:
    supply = supply_of(folder, "--prefetch-shards", "0")
    assert isinstance(supply.order, MixtureShardOrder) and supply.order.num_lanes == 4
    inline = batches_of(supply, 5 * TOTAL // 16)
    for batch in inline[:20]:
        for place, (epoch, row) in enumerate(keys_of([batch])):
            arrays = supply._samples[epoch, row][0]  # nothing is left out here, so numbers are rows
            for name in ("images_BVCHW", "camera_is_present_BV", "actions_BTA", "noise_BTA", "tokens_BL"):
                assert np.array_equal(arrays[name], batch.tensors()[name][place].numpy()), name
    assert sorted(keys_of(inline)[:TOTAL]) == [(0, index) for index in range(TOTAL)]
    assert_equal(inline, batches_of(supply_of(folder, "--num-workers", "2", "--prefetch-shards", "3"), 5 * TOTAL // 16))
    assert_equal([supply.first_batch()], inline[:1])
    # A resume starts inside pieces of both datasets.
    assert_equal(inline[7:20], batches_of(supply_of(folder), 13, consumed=28))


def test_each_frame_of_an_epoch_is_asked_for_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supply = supply_of(folder, "--prefetch-shards", "0")
    asked: Counter[tuple[str, str, int, int]] = Counter()
    frames = FrameSource.frames

    def counted(self: FrameSource, camera: str, episode: int, frame_indices: Any, *more: Any) -> np.ndarray:
        assert list(frame_indices) == sorted(frame_indices)
        asked.update((Path(self.table.root).name, camera, episode, int(frame)) for frame in frame_indices)
        return frames(self, camera, episode, frame_indices, *more)

    monkeypatch.setattr(FrameSource, "frames", counted)
    batches_of(supply, TOTAL // 4)
    probe = ("one", CAMERAS[0], 0, 0)  # the sample that shows the layout
    asked[probe] -= 1
    assert max(asked.values()) == 1
    assert sum(asked.values()) >= sum(LENGTHS["one"]) + 2 * sum(LENGTHS["two"]) - 3 * 4


@pytest.mark.parametrize("ranks", [4])
def test_S01_ranks_share_the_global_batch_and_the_samples_stay(folder: Path, ranks: int) -> None:
    flags = ("--global-batch-size", "8", "--micro-batch-size", "2")
    whole = keys_of(batches_of(supply_of(folder, *flags), 12))
    parts = [keys_of(batches_of(supply_of(folder, *flags), 12, rank=rank, ranks=ranks)) for rank in range(ranks)]
    share = 8 // ranks
    for step in range(12):
        together = [key for part in parts for key in part[step * share : (step + 1) * share]]
        assert sorted(together) == sorted(whole[step * 8 : (step + 1) * 8])


def test_weights_and_storage_order_work_as_without_shards(folder: Path) -> None:
    weighted = keys_of(batches_of(supply_of(folder, "--data-weights", "3", "1"), TOTAL // 4))
    from_one = sum(row < sum(LENGTHS["one"]) for _, row in weighted)
    assert from_one == pytest.approx(0.75 * len(weighted), abs=4)
    in_order = keys_of(batches_of(supply_of(folder, "--no-shuffle"), TOTAL // 4))
    assert in_order == [(0, index) for index in range(len(in_order))]


def test_orders_with_and_without_shards_have_other_hashes(folder: Path) -> None:
    hashes = {supply_of(folder, *flags).order_hash for flags in ((), ("--data-access", "random"), ("--seed", "7"))}
    assert len(hashes) == 3


PACKED = ("--packing", "--pack-token-budget", "330", "--pack-pool-size", "5", "--micro-batch-size", "4")


def test_packs_out_of_shards_are_the_packs_of_random_access(folder: Path) -> None:
    flags = (*PACKED, "--global-batch-size", "8", "--augmentation", "openpi_torch", "--augmentation-device", "gpu")
    supply = supply_of(folder, *flags)
    packs = list(supply.iterator(0, 0, 1, 9, False))
    for step in (0, 4, 8):
        # A single step is read by random access; the state before it is known.
        for pack, other in zip(packs[2 * step :], supply.iterator(0, 0, 1, 1, False, step), strict=False):
            assert all(torch.equal(tensor, pack.tensors()[name]) for name, tensor in other.tensors().items())
    ahead = supply_of(folder, *flags, "--num-workers", "2", "--prefetch-shards", "3")
    for pack, other in zip(packs, ahead.iterator(0, 0, 1, 9, False), strict=True):
        assert all(torch.equal(tensor, pack.tensors()[name]) for name, tensor in other.tensors().items())
    ahead.close()


def test_S01_ranks_share_the_packs_out_of_shards(folder: Path) -> None:
    flags = (*PACKED, "--global-batch-size", "8")
    whole = list(supply_of(folder, *flags).iterator(0, 0, 1, 4, False))
    parts = [list(supply_of(folder, *flags).iterator(0, rank, 2, 4, False)) for rank in range(2)]
    for number, pack in enumerate(whole):
        other = parts[number % 2][number // 2]
        assert all(torch.equal(tensor, other.tensors()[name]) for name, tensor in pack.tensors().items())
