"""Noise and flow time are functions of (seed, epoch, sample)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from megatron_vla.data.draws import NOISE_STREAM, TIME_STREAM, flow_draws, sample_generator


def test_same_key_same_draw_whatever_else_happens() -> None:
    noise, time = flow_draws(1, 2, 3, 10, 8)
    torch.manual_seed(99)
    np.random.seed(99)
    flow_draws(1, 2, 4, 10, 8)
    again, again_time = flow_draws(1, 2, 3, 10, 8)
    assert np.array_equal(noise, again)
    assert time == again_time
    assert noise.dtype == np.float32
    assert time.dtype == np.float32


@pytest.mark.parametrize("key", [(1, 2, 3), (-1, 0, 0), (2**63, 5, 2**40)])
def test_a_generator_that_is_used_again_starts_like_a_new_one(key: tuple[int, int, int]) -> None:
    seed, epoch, index = key
    fresh = sample_generator(seed, NOISE_STREAM, epoch, index).standard_normal((5, 3), dtype=np.float32)
    uniform = sample_generator(seed, TIME_STREAM, epoch, index).random()
    flow_draws(9, 9, 9, 7, 3)  # leaves half a block and half a word behind
    noise, time = flow_draws(seed, epoch, index, 5, 3)
    assert np.array_equal(noise, fresh) and time == np.float32(0.999 * uniform ** (2.0 / 3.0) + 0.001)
    with ThreadPoolExecutor(4) as threads:
        for other, other_time in threads.map(lambda _: flow_draws(seed, epoch, index, 5, 3), range(64)):
            assert np.array_equal(other, fresh) and other_time == time


def test_more_draws_begin_alike() -> None:
    noise, time = flow_draws(1, 2, 3, 5, 4, num_draws=3)
    first, first_time = flow_draws(1, 2, 3, 5, 4)
    assert noise.shape == (15, 4) and time.shape == (3,)
    assert np.array_equal(noise[:5], first) and time[0] == first_time[0]
    assert len(np.unique(noise)) == noise.size and len(np.unique(time)) == 3


def test_every_part_of_the_key_matters() -> None:
    keys = [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1), (1, 0, 2**40)]
    draws = [flow_draws(*key, 4, 4) for key in keys]
    assert len({draw[0].tobytes() for draw in draws}) == len(keys)
    assert len({float(draw[1][0]) for draw in draws}) == len(keys)


def test_moments_of_noise_and_flow_time() -> None:
    draws = [flow_draws(5, 0, index, 4, 8) for index in range(20_000)]
    noise = np.stack([draw[0] for draw in draws])
    time = np.array([draw[1][0] for draw in draws], dtype=np.float64)
    # 200,000 reference draws: mean 0.6007, std 0.2617; exact: 0.999 * 0.6 + 0.001 and 0.999 * sqrt(12 / 175).
    assert abs(time.mean() - 0.6004) < 4 * 0.2617 / np.sqrt(len(time))
    assert abs(time.std() - 0.999 * np.sqrt(12 / 175)) < 4e-3
    assert time.min() >= 0.001
    assert time.max() <= 1.0
    share_below_half = (time < 0.5).mean()
    assert abs(share_below_half - ((0.5 - 0.001) / 0.999) ** 1.5) < 0.015
    assert abs(noise.mean()) < 4 / np.sqrt(noise.size)
    assert abs(noise.std() - 1) < 4 / np.sqrt(2 * noise.size)
    # Neighbouring samples, steps and dimensions are independent.
    flat = noise.reshape(len(noise), -1)
    assert abs(np.mean(flat[1:] * flat[:-1])) < 4 / np.sqrt(flat.size)
    assert np.abs(np.corrcoef(flat.T) - np.eye(32)).max() < 5 / np.sqrt(len(flat))
    assert abs(np.corrcoef(flat[:, 0], time)[0, 1]) < 5 / np.sqrt(len(flat))


def test_pinned_values() -> None:
    """A change here would change resumed runs."""
    noise, time = flow_draws(1234, 0, 0, 2, 2)
    np.testing.assert_allclose(noise, PINNED_NOISE, rtol=1e-6)
    np.testing.assert_allclose(time, PINNED_TIME, rtol=1e-6)


PINNED_NOISE = [[-1.3545927, 0.32626647], [0.60079026, 0.50876093]]
PINNED_TIME = 0.3274709
