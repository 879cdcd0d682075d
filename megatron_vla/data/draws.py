"""Random draws of flow matching as pure functions of (seed, epoch, sample index).

Counter-based: the Philox key is (seed, stream), the upper counter words are (epoch, sample index), so a draw is the same on
any rank, in any worker, at any place in the batch and after any restart, and no two samples ever share a block of the
stream.

Shape legend: T action horizon, A padded action dimensions.
"""

from __future__ import annotations

import numpy as np

from megatron_vla.data.sampler import UINT64

NOISE_STREAM = 0x6E6F697365
TIME_STREAM = 0x74696D65
MOCK_STREAM = 0x6D6F636B


def sample_generator(seed: int, stream: int, epoch: int, sample_index: int) -> np.random.Generator:
    """Generator that belongs to one (seed, stream, epoch, sample)."""
    return np.random.Generator(np.random.Philox(key=[seed & UINT64, stream], counter=[0, 0, epoch, sample_index]))


def flow_draws(seed: int, epoch: int, sample_index: int, horizon: int, dim: int) -> tuple[np.ndarray, np.float32]:
    """(noise float32 [T, A] ~ N(0, 1), flow time float32 in (0, 1], 1 = noise).

    Time: tau ~ Beta(1.5, 1) by its inverse CDF u^(2/3), then t = 0.999 tau + 0.001 (Pi0, arXiv:2410.24164; openpi).
    """
    # Drawn in padded dimensions too: released weights were trained with noise there.
    noise_TA = sample_generator(seed, NOISE_STREAM, epoch, sample_index).standard_normal((horizon, dim), dtype=np.float32)
    # A stream of its own, so that another horizon does not change the times.
    uniform = sample_generator(seed, TIME_STREAM, epoch, sample_index).random()
    return noise_TA, np.float32(0.999 * uniform ** (2.0 / 3.0) + 0.001)
