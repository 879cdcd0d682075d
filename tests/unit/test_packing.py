"""Which samples share a pack: best fit, capacity, waiting, and the same packs after every restart."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_fixtures import tiny_config

from megatron_vla.config.check import check
from megatron_vla.config.run import RunConfig
from megatron_vla.data.batch import Batch
from megatron_vla.data.build import build_data
from megatron_vla.data.pack_sampler import Packing, PackSampler, PackWindow, gathered_state
from megatron_vla.data.packed_batch import PackedBatch
from megatron_vla.data.packing import Pack, PackLimits, PackStream, SampleSize, StreamState
from megatron_vla.data.sampler import GlobalOrder
from megatron_vla.data.supply import DataSupply
from megatron_vla.findings import CheckError
from megatron_vla.models.registry import model_family

FAMILY = model_family("pi05")
# Pi0.5's sizes: 256 tokens per image, up to 4 cameras, prompts of up to 200 tokens.
LIMITS = PackLimits(
    tokens=8192, images=32, samples=24, image_tokens=256, most_images=4, most_prompt_tokens=200, pool_size=32, max_wait=16
)


@functools.cache
def mixed(place: int) -> SampleSize:
    """1 to 4 cameras, prompts of 20 to 80 tokens."""
    generator = np.random.default_rng(place)
    return SampleSize(int(generator.integers(1, 5)), int(generator.integers(20, 81)))


def packs_of(limits: PackLimits, count: int, size_of: Any = mixed) -> list[Pack]:
    return list(itertools.islice(PackStream(limits, size_of), count))


@pytest.mark.parametrize(
    "changes",
    [{}, {"images": 20}, {"samples": 6}, {"pool_size": 1, "max_wait": 1}, {"tokens": 1300, "max_wait": 32}, {"max_wait": 5}],
    ids=str,
)
def test_every_sample_once_in_time_and_within_capacity(changes: dict[str, int]) -> None:
    limits = dataclasses.replace(LIMITS, **changes)
    packs = packs_of(limits, 200)
    for pack in packs:
        sizes = [mixed(place) for place in pack.places]
        assert pack.num_tokens == sum(map(limits.tokens_of, sizes)) <= limits.tokens
        assert pack.num_images == sum(size.images for size in sizes) <= limits.images
        assert 1 <= len(sizes) <= limits.samples
        assert min(pack.waits) >= 0 and max(pack.waits) <= limits.max_wait
    seen = [place for pack in packs for place in pack.places]
    assert len(seen) == len(set(seen))
    # Nothing is left behind: all but what waits in the pool.
    assert set(range(max(seen) + 1)) - set(seen) <= {w.place for w in _state_after(limits, 200).pool}


def _state_after(limits: PackLimits, count: int) -> StreamState:
    stream = PackStream(limits, mixed)
    for _ in range(count):
        stream.next_pack()
    return stream.state


def test_best_fit_fills_a_mixture_where_padding_wastes_half() -> None:
    packs = packs_of(LIMITS, 300)
    useful = PackWindow.of(packs, LIMITS).metrics()["pack_useful_token_share"]
    samples = [mixed(place) for pack in packs for place in pack.places]
    padded = np.mean([LIMITS.tokens_of(size) for size in samples]) / LIMITS.longest_prefix
    assert useful >= 0.97 and padded < 0.58
    # First come, first served (no pool to choose from) wastes more.
    first_come = packs_of(dataclasses.replace(LIMITS, pool_size=1, max_wait=1), 300)
    assert PackWindow.of(first_come, LIMITS).metrics()["pack_useful_token_share"] < useful - 0.02


def test_the_largest_that_fits_is_taken_and_the_older_of_equals() -> None:
    sizes = [SampleSize(0, tokens) for tokens in (40, 70, 30, 70, 25, 60)] + [SampleSize(0, 90)] * 50
    limits = PackLimits(
        tokens=100, images=1, samples=9, image_tokens=1, most_images=1, most_prompt_tokens=99, pool_size=4, max_wait=9
    )
    first = PackStream(limits, lambda place: sizes[place]).next_pack()
    # Of 40 70 30 70: the older 70, then (25 came in) 30; nothing fits into the 0 that are left.
    assert first.places == (1, 2)


def test_a_sample_that_never_fits_best_does_not_wait_for_ever() -> None:
    """One odd sample among samples that fill packs exactly."""
    limits = PackLimits(
        tokens=100, images=1, samples=9, image_tokens=1, most_images=1, most_prompt_tokens=99, pool_size=4, max_wait=6
    )
    packs = packs_of(limits, 12, lambda place: SampleSize(0, 3 if place == 0 else 50))
    when = next(number for number, pack in enumerate(packs) if 0 in pack.places)
    assert when == limits.urgent_wait and packs[when].waits[0] == when <= limits.max_wait


def test_state_goes_through_json_and_continues_exactly() -> None:
    whole = packs_of(LIMITS, 30)
    for cut in (1, 7, 29):
        stream = PackStream(LIMITS, mixed, StreamState.from_list(_state_after(LIMITS, cut).to_list()))
        assert [stream.next_pack() for _ in range(30 - cut)] == whole[cut:]


def sampled(packing: Packing, ranks: int, first: int, count: int) -> list[list[list[tuple[int, int]]]]:
    """Of each step its packs in global order."""
    by_rank = [iter(PackSampler(packing, first, 0, rank, ranks, count)) for rank in range(ranks)]
    per_step = packing.num_streams // ranks
    return [[next(by_rank[rank]) for _ in range(per_step) for rank in range(ranks)] for _ in range(count)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_S01_global_batches_do_not_depend_on_ranks_and_resume_at_any_world_size(ranks: int) -> None:
    def fresh() -> Packing:
        return Packing(GlobalOrder(500, 3, True), LIMITS, 4, mixed)

    whole = sampled(fresh(), 1, 0, 12)
    first = fresh()
    assert sampled(first, ranks, 0, 5) == whole[:5]
    states = [_states_of_rank(fresh(), rank, ranks, 5) for rank in range(ranks)]
    for others in (1, 2, 4):
        resumed = fresh()
        resumed.restore(gathered_state(5, states))
        assert sampled(resumed, others, 5, 7) == whole[5:]
    # Every sample of an epoch once, apart from what the pools still hold.
    seen = [key for step in whole for pack in step for key in pack]
    assert len(seen) == len(set(seen))
    with pytest.raises(ValueError, match="4 packs per step, this run 2"):
        Packing(GlobalOrder(500, 3, True), LIMITS, 2, mixed).restore(gathered_state(5, states))


def _states_of_rank(packing: Packing, rank: int, ranks: int, iteration: int) -> dict[int, StreamState]:
    list(PackSampler(packing, 0, 0, rank, ranks, iteration))
    return packing.states_after(iteration)


PACKED = (
    *("--packing", "--pack-token-budget", "100", "--pack-pool-size", "8", "--micro-batch-size", "6"),
    *("--global-batch-size", "12", "--mock-camera-counts", "1", "2", "3", "--mock-min-prompt-length", "4"),
)


def packed_config(*extra: str) -> RunConfig:
    return tiny_config(*PACKED, *extra)


def supply_of(config: RunConfig) -> DataSupply:
    return build_data(config, FAMILY)


def batches(config: RunConfig, steps: int = 4) -> list[Any]:
    supply = supply_of(config)
    try:
        return list(supply.iterator(0, 0, 1, steps, False))
    finally:
        supply.close()


def test_packs_carry_the_samples_of_the_padded_run() -> None:
    """Same samples, noise, time and actions as without packing; every sample of the order comes."""
    packs = batches(packed_config(), 20)
    padded = {}
    for batch in batches(tiny_config(*PACKED[7:], "--micro-batch-size", "6", "--prompt-padding", "max"), 30):
        assert isinstance(batch, Batch)
        for row in range(batch.size):
            key = int(batch.epoch_B[row]), int(batch.sample_index_B[row])
            padded[key] = {name: tensor[row] for name, tensor in batch.tensors().items()}
    seen = []
    for pack in packs:
        assert isinstance(pack, PackedBatch)
        image = 0
        for slot in range(int((pack.sample_index_B >= 0).sum())):
            key = int(pack.epoch_B[slot]), int(pack.sample_index_B[slot])
            seen.append(key)
            for name in ("actions_BTA", "noise_BTA", "time_B", "action_is_valid_BTA", "state_BD"):
                assert torch.equal(pack.tensors()[name][slot], padded[key][name]), (key, name)
            present = padded[key]["camera_is_present_BV"]
            count = int(present.sum())
            assert torch.equal(pack.images_ICYX[image : image + count], padded[key]["images_BVCHW"][present])
            assert int(pack.num_prompt_B[slot]) == int(padded[key]["token_is_valid_BL"].sum())
            image += count
        assert bool(pack.image_is_present_I[:image].all()) and not bool(pack.image_is_present_I[image:].any())
    assert len(seen) == len(set(seen)) and {key for key in seen if key[0] == 0} == {(0, i) for i in range(40)}


def test_workers_and_device_augmentation_give_the_same_packs() -> None:
    flags = ("--augmentation", "openpi_torch")
    reference = batches(packed_config(*flags))
    for other in (("--num-workers", "2"), ("--augmentation-device", "gpu")):
        for one, two in zip(reference, batches(packed_config(*flags, *other)), strict=True):
            for name, tensor in one.tensors().items():
                if name == "images_ICYX":
                    assert torch.allclose(two.images_ICYX[two.image_is_present_I], tensor[one.image_is_present_I], atol=1e-6)
                else:
                    assert torch.equal(tensor, two.tensors()[name]), name


def test_impossible_sizes_are_refused(tmp_path: Path) -> None:
    for flags, words in (
        (("--pack-token-budget", "60"), "3 images of 4 tokens and 64 prompt tokens = 76"),
        (("--pack-max-images", "2"), "2 is less than the 3 images"),
        (("--pack-max-wait", "2"), "fills 8 packs"),
    ):
        with pytest.raises(CheckError, match=words):
            supply_of(packed_config(*flags))


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        (("--tensor-model-parallel-size", "2"), "--packing, --tensor-model-parallel-size"),
        (("--pipeline-model-parallel-size", "2", "--prompt-padding", "max"), "--packing, --pipeline-model-parallel-size"),
        (("--attention-backend", "eager"), "--attention-backend"),
        (("--no-packing",), "--pack-token-budget"),
        (("--report-memory",), "--report-memory"),
        (("--pack-pool-size", "0"), "--pack-pool-size"),
        (("--mock-min-prompt-length", "9"), "--mock-min-prompt-length"),
    ],
)
def test_what_packing_cannot_be_combined_with(flags: tuple[str, ...], where: str) -> None:
    world_size = 2 if "parallel" in flags[0] else 1
    findings = check(packed_config(*flags), FAMILY, world_size)
    assert where in {finding.where for finding in findings if finding.severity == "error"}


def test_start_says_how_full_packs_are_and_which_flag_limits_them(capsys: pytest.CaptureFixture[str]) -> None:
    supply_of(packed_config())
    assert "2 packs per step of 100 prefix tokens, 25 image slots and 6 sample slots" in capsys.readouterr().out
    supply_of(packed_config("--micro-batch-size", "1", "--pack-max-images", "3"))
    assert "raise --micro-batch-size (now 1)" in capsys.readouterr().out
