"""Locators, shards and the order of --data-access decode_once: every sample once per epoch, evenly spread, for any split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_vla.data.locator import LocatorIndex, ShardTable, build_shards, has_complete_chunk
from megatron_vla.data.shard_order import LaneSampler, ShardOrder

LENGTHS = np.random.default_rng(0).integers(3, 40, 30)
TOTAL = int(LENGTHS.sum())


def table(shard_samples: int = 60, in_storage_order: bool = False) -> ShardTable:
    return build_shards(LocatorIndex(LENGTHS, None, None).first_sample_E, 100, 100 * shard_samples, in_storage_order)


def order(lanes: int = 4, seed: int = 3, shard_samples: int = 60) -> ShardOrder:
    return ShardOrder(table(shard_samples), seed, True, lanes)


def test_locators_are_one_per_sample_and_mapped(tmp_path: Path) -> None:
    rows = np.flatnonzero(np.random.default_rng(1).random(TOTAL) < 0.8)
    index = LocatorIndex(LENGTHS, rows, tmp_path / "cache")
    assert index.path is not None and isinstance(index.locators_N2, np.memmap)
    assert index.path.stat().st_size / len(rows) < 16
    assert [index.dataset_row(n) for n in range(index.num_samples)] == rows.tolist()
    assert len({tuple(pair) for pair in index.locators_N2.tolist()}) == len(rows)
    again = LocatorIndex(LENGTHS, rows, tmp_path / "cache")
    assert np.array_equal(again.locators_N2, index.locators_N2) and len(list((tmp_path / "cache").iterdir())) == 1
    assert LocatorIndex(LENGTHS, rows[1:], tmp_path / "cache").path != index.path
    whole = np.array(index.locators_N2)
    index.path.write_bytes(index.path.read_bytes()[:-9])  # a full disk cut it
    assert np.array_equal(LocatorIndex(LENGTHS, rows, tmp_path / "cache").locators_N2, whole)
    in_memory = LocatorIndex(LENGTHS, None, None)
    assert in_memory.locators_N2.nbytes == 8 * TOTAL and in_memory.dataset_row(TOTAL - 1) == TOTAL - 1


def test_complete_policy_keeps_exactly_the_frames_with_a_whole_chunk() -> None:
    frames, lengths = np.array([0, 1, 2, 3, 0, 1]), np.array([4, 4, 4, 4, 2, 2])
    assert has_complete_chunk(frames, lengths, 3).tolist() == [True, True, False, False, False, False]


@pytest.mark.parametrize("in_storage_order", [False, True])
def test_shards_hold_every_sample_once_and_are_balanced(in_storage_order: bool) -> None:
    shards = table(60, in_storage_order)
    samples = [shards.samples(k, 0, int(shards.count_K[k])) for k in range(shards.num_shards)]
    assert sorted(np.concatenate(samples).tolist()) == list(range(TOTAL))
    if in_storage_order:
        assert np.concatenate(samples).tolist() == list(range(TOTAL))
    else:
        assert shards.count_K.max() <= min(60, 1.3 * TOTAL / shards.num_shards)
        alike = build_shards(300 * np.arange(51), 100, 34_100, False)
        assert alike.count_K.tolist() == [300] * 50  # 44 shards would fit the sum, and the largest would hold 600
    # An episode that is larger than a shard is cut into runs, none of which is larger.
    tiny = table(7)
    assert tiny.count_R.max() <= 7 and sorted(tiny.count_R.tolist()) != sorted(LENGTHS.tolist())
    assert int(tiny.count_R.sum()) == TOTAL


@pytest.mark.parametrize(("lanes", "shard_samples"), [(1, 60), (4, 60), (5, 7), (16, 1000), (64, 60)])
def test_S02_every_epoch_holds_every_sample_once(lanes: int, shard_samples: int) -> None:
    walked = order(lanes, shard_samples=shard_samples)
    for epoch in (0, 1, 5):
        seen = [walked.at(epoch * TOTAL + place) for place in range(TOTAL)]
        assert {e for e, _ in seen} == {epoch}
        assert sorted(sample for _, sample in seen) == list(range(TOTAL))
    first, second = ([walked.at(e * TOTAL + place)[1] for place in range(TOTAL)] for e in (0, 1))
    assert first != second


def test_places_are_spread_like_those_of_the_plain_order() -> None:
    """Place of a sample over many epochs: mean and spread of a uniform variable, as with the plain shuffle."""
    epochs = 300
    place_EN = np.empty((epochs, TOTAL))
    for seed in range(epochs):
        walked = order(seed=seed)
        positions = np.arange(TOTAL)
        places = walked.places(positions)
        for piece in np.unique(places.piece_P).tolist():
            here = places.piece_P == piece
            place_EN[seed, walked.piece_samples(0, piece)[places.place_P[here]]] = positions[here]
    error = TOTAL / np.sqrt(12 * epochs)
    assert np.abs(place_EN.mean(axis=0) - (TOTAL - 1) / 2).max() < 5 * error
    assert np.allclose(place_EN.std(axis=0), TOTAL / np.sqrt(12), rtol=0.15)
    # All lanes are mixed in every stretch of positions: neighbours come from different shards.
    walked = order(lanes=8, shard_samples=60)
    episode_N = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    distinct = [len({int(episode_N[walked.at(c + i)[1]]) for i in range(16)}) for c in range(0, 320, 16)]
    plain = np.random.default_rng(0).permutation(TOTAL)[:320].reshape(20, 16)
    assert np.mean(distinct) > 0.75 * np.mean([len(set(episode_N[row].tolist())) for row in plain])


@pytest.mark.parametrize("lanes", [4, 6])
def test_S01_ranks_share_a_global_batch_without_overlap(lanes: int) -> None:
    walked = order(lanes)
    for consumed in (0, 24, TOTAL - 30):
        wanted = [sorted(walked.at(consumed + 24 * i + j) for j in range(24)) for i in range(5)]
        for ranks, micro in ((1, 8), (2, 4), (3, 4), (8, 3)):
            parts = [list(LaneSampler(walked, consumed, micro, 24, rank, ranks, 5)) for rank in range(ranks)]
            per_iteration = len(parts[0]) // 5
            for i in range(5):
                mine = [batch for part in parts for batch in part[i * per_iteration : (i + 1) * per_iteration]]
                assert sorted(key for batch in mine for key in batch) == wanted[i]


def test_ranks_of_an_even_split_read_different_pieces() -> None:
    walked = order(lanes=4)
    read = []
    for rank in range(2):
        sampler = LaneSampler(walked, 0, 4, 8, rank, 2, 3 * TOTAL // 8)
        assert sampler.num_open_pieces == 2
        places = [walked.places(positions) for positions in sampler.positions()]
        read.append({(int(e), int(q)) for p in places for e, q in zip(p.epoch_P, p.piece_P, strict=True)})
    assert not read[0] & read[1]
    assert LaneSampler(walked, 0, 4, 12, 0, 3, 1).num_open_pieces == 4  # any lane may come


def test_S05_order_hash_and_storage_order() -> None:
    assert order().order_hash() == order().order_hash()
    assert (
        len(
            {
                order().order_hash(),
                order(lanes=5).order_hash(),
                order(seed=4).order_hash(),
                order(shard_samples=50).order_hash(),
            }
        )
        == 4
    )
    stored = ShardOrder(table(in_storage_order=True), 3, False, 1)
    assert [stored.at(p) for p in range(TOTAL + 3)] == [divmod(p, TOTAL) for p in range(TOTAL + 3)]
    with pytest.raises(ValueError, match="one lane"):
        ShardOrder(table(), 3, False, 2)


def test_S03_order_is_pinned_and_ignores_global_random_state() -> None:
    np.random.seed(0)
    first = [order().at(p)[1] for p in range(6)]
    np.random.seed(1)
    assert [order().at(p)[1] for p in range(6)] == first == PINNED


# A changed order breaks the resume of every checkpoint: change it knowingly.
PINNED = [32, 421, 488, 615, 232, 415]
