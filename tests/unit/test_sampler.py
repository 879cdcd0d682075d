"""Sample order: pure, split, complete."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch

from megatron_vla.data.sampler import GlobalOrder, MicroBatchSampler


def ids(world_size: int, micro: int, global_batch: int, iterations: int, consumed: int = 0, n: int = 53) -> list[list[tuple]]:
    """Per rank, the (epoch, index) pairs in order."""
    result = []
    for rank in range(world_size):
        order = GlobalOrder(n, seed=7, shuffle=True)  # every rank builds its own
        sampler = MicroBatchSampler(order, consumed, micro, global_batch, rank, world_size, iterations)
        result.append([pair for batch in sampler for pair in batch])
    return result


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_S01_ranks_are_disjoint_and_cover_everything(world_size: int) -> None:
    per_rank = ids(world_size, 1, 24, 53)  # 24 * 53 samples are 24 whole epochs of 53
    counts = Counter(pair for rank in per_rank for pair in rank)
    assert counts == {(epoch, index): 1 for epoch in range(24) for index in range(53)}


@pytest.mark.parametrize(("world_size", "micro"), [(1, 24), (1, 4), (2, 3), (3, 8), (8, 3), (8, 1)])
def test_S02_global_batches_do_not_depend_on_the_split(world_size: int, micro: int) -> None:
    reference = ids(1, 24, 24, 5)[0]
    per_rank = ids(world_size, micro, 24, 5)
    for step in range(5):
        size = 24 // world_size
        union = [pair for rank in per_rank for pair in rank[step * size : (step + 1) * size]]
        assert sorted(union) == sorted(reference[step * 24 : (step + 1) * 24])
        assert len(set(union)) == 24


def test_micro_batches_follow_the_documented_positions() -> None:
    order = GlobalOrder(1000, seed=0, shuffle=False)
    sampler = MicroBatchSampler(order, 100, 2, 12, 1, 3, 2)
    positions = [[index for _, index in batch] for batch in sampler]
    assert positions == [[102, 103], [108, 109], [114, 115], [120, 121]]
    assert len(sampler) == 4


def test_resume_continues_the_order() -> None:
    whole = ids(2, 2, 8, 10)
    for first, second, everything in zip(ids(2, 2, 8, 4), ids(2, 2, 8, 6, consumed=32), whole, strict=True):
        assert first + second == everything


def test_S03_global_random_state_changes_nothing() -> None:
    reference = ids(2, 2, 8, 10)
    torch.rand(17), np.random.rand(17), random.random()
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    assert ids(2, 2, 8, 10) == reference
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])


def test_S05_no_shuffle_is_storage_order_and_hash_names_the_order() -> None:
    plain = GlobalOrder(10, seed=3, shuffle=False)
    assert [plain.at(p) for p in (0, 9, 10, 25)] == [(0, 0), (0, 9), (1, 0), (2, 5)]
    shuffled = GlobalOrder(10, seed=3, shuffle=True)
    assert shuffled.order_hash() == GlobalOrder(10, seed=3, shuffle=True).order_hash()
    others = [GlobalOrder(10, 4, True), GlobalOrder(11, 3, True), plain]
    assert len({order.order_hash() for order in (shuffled, *others)}) == 4


def test_epochs_are_shuffled_differently_and_known_by_number() -> None:
    order = GlobalOrder(100, seed=1, shuffle=True)
    permutations = [order.permutation(epoch).tolist() for epoch in range(5)]
    assert len({tuple(p) for p in permutations}) == 5
    assert all(sorted(p) == list(range(100)) for p in permutations)
    # Out of order and past the cache.
    assert order.permutation(0).tolist() == permutations[0]
    # The order is part of every checkpoint: a change here breaks resumes.
    assert GlobalOrder(10, 1234, True).permutation(0).tolist() == PINNED


PINNED = [1, 6, 8, 5, 3, 7, 2, 0, 4, 9]


def test_memory_is_four_bytes_per_sample_and_two_epochs() -> None:
    tracemalloc.start()
    order = GlobalOrder(200_000, seed=1, shuffle=True)
    for epoch in range(5):
        order.permutation(epoch)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 2.2 * 4 * 200_000


def test_dataset_smaller_than_the_batch_still_gives_full_batches() -> None:
    (pairs,) = ids(1, 8, 8, 3, n=3)
    assert len(pairs) == 24
    assert Counter(epoch for epoch, _ in pairs) == dict.fromkeys(range(8), 3)


def test_errors() -> None:
    with pytest.raises(ValueError, match="no samples left"):
        GlobalOrder(0, 1, True)
    with pytest.raises(ValueError, match=r"--global-batch-size 10 is not a multiple"):
        MicroBatchSampler(GlobalOrder(5, 1, True), 0, 3, 10, 0, 2, 1)
