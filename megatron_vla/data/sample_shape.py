"""What a sample of a dataset consists of when it is not simply one state column, one action column and one frame per camera.

Shape legend: R rows, D dimensions, F frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_vla.data.action_steps import ActionSteps


@dataclass(frozen=True)
class KeyPlace:
    """Numbers `start` ... `end` - 1 of a dataset column, under a name of their own."""

    key: str
    column: str
    start: int
    end: int

    @property
    def width(self) -> int:
        """Numbers."""
        return self.end - self.start


@dataclass(frozen=True)
class SampleShape:
    """state, action: pieces of columns, concatenated in this order. frame_deltas, state_deltas: frames of every camera,
    and rows of the state, relative to the sample's own, clamped to the episode's start; (0,) is one. task_column: column of
    task indices."""

    state: tuple[KeyPlace, ...]
    action: tuple[KeyPlace, ...]
    frame_deltas: tuple[int, ...]
    steps: ActionSteps
    task_column: str = "task_index"
    state_deltas: tuple[int, ...] = (0,)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of numbers that are read, each once."""
        return tuple(dict.fromkeys(place.column for place in (*self.state, *self.action)))


def joined(values: Mapping[str, np.ndarray], places: Sequence[KeyPlace], num_rows: int) -> np.ndarray:
    """float32 [R, D] of the pieces, side by side."""
    parts = [values[place.column].reshape(num_rows, -1)[:, place.start : place.end] for place in places]
    return np.concatenate(parts, axis=1).astype(np.float32, copy=False)


def dimension_labels(places: Sequence[KeyPlace]) -> tuple[str, ...]:
    """key, or key_0, key_1, ... where a key has several numbers."""
    return tuple(
        place.key if place.width == 1 else f"{place.key}_{number}" for place in places for number in range(place.width)
    )
