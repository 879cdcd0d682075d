"""Random draws of flow matching and image augmentation as pure functions of (seed, epoch, sample index).

Counter-based: the Philox key is (seed, stream), the upper counter words are (epoch, sample index), so a draw is the same on
any rank, in any worker, at any place in the batch and after any restart, and no two samples ever share a block of the
stream.

Shape legend: K draws, T action horizon, A padded action dimensions, V views, P augmentation parameters per view.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_vla.config.data import AugmentationKind
from megatron_vla.data.sampler import UINT64

NOISE_STREAM = 0x6E6F697365
TIME_STREAM = 0x74696D65
MOCK_STREAM = 0x6D6F636B
MOCK_SIZE_STREAM = 0x73697A65
AUGMENT_STREAM = 0x6175676D

# Columns of augmentation parameters. Torch form: pixels, degrees, factors. JAX form: pixels from the centre, radians, amounts.
TORCH_FIELDS = ("top", "left", "angle_degrees", "brightness", "contrast", "saturation")
JAX_FIELDS = ("centre_y", "centre_x", "angle_radians", "is_coloured", "brightness", "contrast", "hue")
CROP_SHARE = 0.95
MAX_ROTATION_DEGREES = 5.0


def sample_generator(seed: int, stream: int, epoch: int, sample_index: int) -> np.random.Generator:
    """Generator that belongs to one (seed, stream, epoch, sample)."""
    return np.random.Generator(np.random.Philox(**_place(seed, stream, epoch, sample_index)))


def _place(seed: int, stream: int, epoch: int, sample_index: int) -> dict[str, Any]:
    """Philox's key and counter."""
    # As uint64: numpy takes lists of large numbers for floats.
    words = {"key": [seed & UINT64, stream], "counter": [0, 0, epoch, sample_index]}
    return {name: np.array(values, dtype=np.uint64) for name, values in words.items()}


class _Restarted(threading.local):
    """A generator per thread that is set to where a new one would start: making one reads entropy nobody needs."""

    def __init__(self) -> None:
        self._bits: Any = np.random.Philox(0)
        self._generator = np.random.Generator(self._bits)
        # Setting the state copies these two, so they are written over each time.
        self._words = _place(0, 0, 0, 0)
        self._state = {**self._bits.state, "state": self._words}

    def generator(self, seed: int, stream: int, epoch: int, sample_index: int) -> np.random.Generator:
        """As `sample_generator`, good until the next call in this thread."""
        key, counter = self._words["key"], self._words["counter"]
        key[0], key[1], counter[2], counter[3] = seed & UINT64, stream, epoch, sample_index
        self._bits.state = self._state
        return self._generator


_restarted = _Restarted()


def noise_and_shares(
    seed: int, epoch: int, sample_index: int, horizon: int, dim: int, num_draws: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """(noise float32 [K * T, A] ~ N(0, 1), shares float64 [K] ~ Beta(1.5, 1) by its inverse CDF u^(2/3)), draw after draw.

    The first draws do not depend on how many there are. Families make their flow times of the shares: see `flow_draws`.
    """
    # Drawn in padded dimensions too: released weights were trained with noise there.
    generator = _restarted.generator
    noise_TA = generator(seed, NOISE_STREAM, epoch, sample_index).standard_normal((num_draws * horizon, dim), dtype=np.float32)
    # A stream of its own, so that another horizon does not change the times.
    uniform_K = generator(seed, TIME_STREAM, epoch, sample_index).random(num_draws)
    return noise_TA, uniform_K ** (2.0 / 3.0)


def flow_draws(
    seed: int, epoch: int, sample_index: int, horizon: int, dim: int, num_draws: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """(noise float32 [K * T, A] ~ N(0, 1), flow times float32 [K] in (0, 1], 1 = noise), draw after draw.

    Time: tau ~ Beta(1.5, 1), then t = 0.999 tau + 0.001 (Pi0, arXiv:2410.24164; openpi).
    """
    noise_TA, share_K = noise_and_shares(seed, epoch, sample_index, horizon, dim, num_draws)
    return noise_TA, (0.999 * share_K + 0.001).astype(np.float32)


def fields_of_draws(noise_TA: np.ndarray, time_K: np.ndarray) -> dict[str, Any]:
    """A sample's draws as the fields of a batch: the time of a single one is a scalar."""
    return {"noise_BTA": noise_TA, "time_B": time_K[0] if len(time_K) == 1 else time_K}


def flow_draw_fields(family: Any, seed: int, epoch: int, sample_index: int) -> dict[str, Any]:
    """`flow_draws` for a family's number of draws, horizon and action width, as the fields of Batch."""
    sizes = family.action_horizon, family.max_action_dim, family.flow_draws
    return fields_of_draws(*flow_draws(seed, epoch, sample_index, *sizes))


# In place of draws when actions are sampled: every sample starts from pure noise.
FLOW_REQUEST_FIELDS = {"time_B": np.float32(1.0)}


def crop_side(size: int) -> int:
    """Side of the crop of a `size` x `size` image, in pixels."""
    return int(size * CROP_SHARE)


def augmentation_draws(
    kind: AugmentationKind,
    seed: int,
    epoch: int,
    sample_index: int,
    moves_V: Sequence[bool],
    is_present_V: Sequence[bool],
    image_size: int,
) -> np.ndarray:
    """float32 [V, P]: parameters of every view of one sample; `moves_V` says which views are cropped and rotated.

    The released forms differ in what shares a draw. openpi_torch: every view its own (the original draws once per batch; here
    every sample draws). openpi_jax: one draw for all views that move and one for the others, as its key splitting does. Views
    without camera get the identity: their black is a mark.
    """
    generator = sample_generator(seed, AUGMENT_STREAM, epoch, sample_index)
    slack = image_size - crop_side(image_size)
    if kind == "openpi_torch":
        drawn = [_torch_draw(generator, slack) for _ in moves_V]
        identity = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    else:
        moving, still = _jax_draw(generator, slack), _jax_draw(generator, slack)
        drawn = [moving if moves else still for moves in moves_V]
        identity = [0.0] * len(JAX_FIELDS)
    present = zip(drawn, is_present_V, strict=True)
    return np.array([values if is_present else identity for values, is_present in present], dtype=np.float32)


def _torch_draw(generator: np.random.Generator, slack: int) -> list[float]:
    top, left = generator.integers(0, slack + 1, 2)
    low, high = [-MAX_ROTATION_DEGREES, 0.7, 0.6, 0.5], [MAX_ROTATION_DEGREES, 1.3, 1.4, 1.5]
    return [float(top), float(left), *generator.uniform(low, high).tolist()]


def _jax_draw(generator: np.random.Generator, slack: int) -> list[float]:
    reach, turn = slack / 2, np.deg2rad(MAX_ROTATION_DEGREES)
    # Hue and the probability of one half are the library's defaults, which the released recipe leaves in place.
    bounds = np.array([reach, reach, turn, 1.0, 0.3, 0.4, 0.1])
    values = generator.uniform(-bounds, bounds)
    values[3] = values[3] >= 0.0
    return values.tolist()
