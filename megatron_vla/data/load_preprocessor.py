"""The preprocessor of a checkpoint folder, whatever family it belongs to: what serving and evaluation load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_vla.data.groot.preprocess import KIND as GROOT
from megatron_vla.data.groot.preprocess import GrootPreprocessor
from megatron_vla.data.preprocess import MIXTURE_FILE, Preprocessor, read_preprocessing
from megatron_vla.data.recorded_pictures import RecordedPictures

KINDS: dict[str, Any] = {GROOT: GrootPreprocessor}


class ServedSettings(Protocol):
    """What every family's settings tell those who let its policies act.

    action_horizon, max_action_dim: of the model; num_steps, action_dim: of the robot, whose chunks come out. camera_keys: ""
    where a view has no camera. frame_steps, state_steps: steps relative to now of the frames of each camera, and of the states.
    """

    @property
    def camera_keys(self) -> tuple[str, ...]: ...
    @property
    def frame_steps(self) -> tuple[int, ...]: ...
    @property
    def state_steps(self) -> tuple[int, ...]: ...
    @property
    def image_size(self) -> int: ...
    @property
    def state_dim(self) -> int: ...
    @property
    def action_dim(self) -> int: ...
    @property
    def max_action_dim(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def action_horizon(self) -> int: ...
    @property
    def state_names(self) -> tuple[str, ...]: ...
    @property
    def action_names(self) -> tuple[str, ...]: ...
    @property
    def action_fps(self) -> float | None: ...
    @property
    def about_robot(self) -> dict[str, Any]: ...


class ServedPreprocessor(Protocol):
    """What every family's preprocessor does for those who let its policies act."""

    @property
    def settings(self) -> ServedSettings: ...
    @property
    def pictures(self) -> RecordedPictures | None: ...

    def preprocess_observation(self, images: Mapping[str, np.ndarray], state_D: np.ndarray, instruction: str) -> dict[str, Any]:
        """Arrays of the model's inputs, by the code that training uses. Raises ValueError for what the observation lacks."""
        ...

    def unnormalize_actions(self, actions_TA: np.ndarray, state_D: np.ndarray) -> np.ndarray:
        """Model actions -> physical actions float32 [num_steps, action_dim]; `state_D`: the observation's physical state."""
        ...


def load_preprocessor(folder: Path) -> Any:
    """Raises ValueError naming the file that is missing, broken or of an unknown kind."""
    content, tokenizer_bytes, where = read_preprocessing(folder)
    kind = content.get("kind")
    if kind is None:
        return Preprocessor.from_dict(content, tokenizer_bytes, where)
    if kind not in KINDS:
        raise ValueError(f"{where}: preprocessing of kind {kind!r}; known are {', '.join(KINDS)}")
    return KINDS[kind].from_dict(content, tokenizer_bytes, where)


def mixture_names(folder: Path) -> tuple[str, ...]:
    """Datasets of the mixture that this stored preprocessing belongs to; () for one dataset's."""
    path = folder / MIXTURE_FILE
    return tuple(json.loads(path.read_text())["datasets"]) if path.is_file() else ()
