"""What several draws of noise for one pass mean, whatever the model family: the mean of as many passes with one draw each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pytest
from pi05_fixtures import assert_gradients_close
from torch import Tensor

DRAWS = 3
BatchT = TypeVar("BatchT", bound=Any)


def single(batch: BatchT, draw: int) -> BatchT:
    """One of the draws."""
    noise_BTA = batch.noise_BTA.unflatten(1, (DRAWS, -1))[:, draw]
    return dataclasses.replace(batch, noise_BTA=noise_BTA, time_B=batch.time_B[:, draw])


def assert_mean_of_single_draws(
    together: Any,
    alone: Any,
    batch: Any,
    mean_loss: Callable[[Any, Any], Tensor],
    gradients: Callable[[Any, Any], Mapping[str, Tensor]],
) -> None:
    """`together` takes all draws of `batch` at once, `alone`, with the same weights, one; the last two are the family's own."""
    losses = [float(mean_loss(alone, single(batch, draw)).detach()) for draw in range(DRAWS)]
    assert len(set(losses)) == DRAWS
    assert float(mean_loss(together, batch).detach()) == pytest.approx(sum(losses) / DRAWS, rel=1e-12)
    sums: dict[str, Tensor] = {}
    for draw in range(DRAWS):
        for name, gradient in gradients(alone, single(batch, draw)).items():
            sums[name] = sums.get(name, 0.0) + gradient / DRAWS
    assert_gradients_close(gradients(together, batch), sums, rtol=1e-9, atol=1e-13)
