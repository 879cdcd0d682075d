"""Preprocessor: from one raw sample to the model's tensors and back. The one object for training and serving.

Order (openpi's): delta actions -> normalization -> prompt from the unpadded normalized state -> zero padding of dimensions.

Shape legend: n samples, V views, C channels, H height, W width, L prompt slots, T action horizon, A padded action dimensions,
D padded state dimensions; action_dim and state_dim are the robot's own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megatron_vla.data.cameras import CameraMap
from megatron_vla.data.image import ImageResize, empty_image, write_view
from megatron_vla.data.normalization import Normalization, NormalizationVariant
from megatron_vla.data.packing import SampleSize
from megatron_vla.data.prompt import SentencePieceTokenizer, pad_prompts, prompts_ids
from megatron_vla.data.recorded_pictures import PICTURES_KEY, RecordedPictures
from megatron_vla.data.statistics import Statistics
from megatron_vla.data.transforms import absolute_to_delta, action_loss_mask, delta_to_absolute, pad_last_dim

if TYPE_CHECKING:
    from megatron_vla.data.dataset import RawBlock, RawSample

SETTINGS_FILE = "preprocessing.json"
STATISTICS_FILE = "statistics.json"
TOKENIZER_FILE = "tokenizer.model"
MIXTURE_FILE = "mixture.json"  # names the folders of a mixture's datasets, each with the three files above
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class PreprocessSettings:
    """Everything that decides what the model sees, JSON-ready.

    `views` and `camera_keys` pair up by position ("": no camera); `delta_action_dims` is empty when the model predicts the
    dataset's own actions; `max_state_dim` is the width of the padded state; `action_fps`: steps of a chunk per second.
    """

    views: tuple[str, ...]
    camera_keys: tuple[str, ...]
    num_images: int
    image_size: int
    image_resize: ImageResize
    action_dim: int
    state_dim: int
    max_action_dim: int
    max_state_dim: int
    action_horizon: int
    action_names: tuple[str, ...]
    state_names: tuple[str, ...]
    delta_action_dims: tuple[int, ...]
    normalization: Normalization
    normalization_variant: NormalizationVariant
    prompt_state: bool
    prompt_overflow: Literal["error", "truncate"]
    max_prompt_length: int
    action_loss: str
    action_fps: float | None = None

    @property
    def camera_map(self) -> CameraMap:
        """Views and cameras by name."""
        return CameraMap(self.views, self.camera_keys, self.num_images)

    @property
    def num_steps(self) -> int:
        """Steps of a chunk that are the robot's: all."""
        return self.action_horizon

    @property
    def frame_steps(self) -> tuple[int, ...]:
        """Steps relative to now of the frames that each camera gives."""
        return (0,)

    @property
    def state_steps(self) -> tuple[int, ...]:
        """Steps relative to now of the states."""
        return (0,)

    @property
    def about_robot(self) -> dict[str, Any]:
        """Names that a client should know, beside cameras and dimensions."""
        return {}


class Preprocessor:
    """Raw sample -> arrays named as the fields of Batch, without the batch dimension; and model actions -> physical actions.

    pictures: what the training data says of its pictures; None: not known.
    """

    def __init__(
        self,
        settings: PreprocessSettings,
        statistics: Statistics,
        tokenizer: SentencePieceTokenizer,
        pictures: RecordedPictures | None = None,
    ) -> None:
        self.settings = settings
        self.pictures = pictures
        self.statistics = statistics
        self.tokenizer = tokenizer
        mode, variant = settings.normalization, settings.normalization_variant
        self.state_normalizer = statistics.normalizer("state", mode, variant)
        self.num_truncated_prompts = 0  # in this process, since construction
        self.action_normalizer = statistics.normalizer("actions", mode, variant)

    def __call__(self, sample: RawSample, epoch: int) -> dict[str, Any]:
        """Training sample: every field of Batch except noise and time. Raises ValueError for what the data does wrong."""
        images = {camera: frame_HWC[None] for camera, frame_HWC in sample.images.items()}
        # The very function that serving calls: the two cannot drift apart.
        arrays = self._observations(images, sample.state_D[None], [sample.instruction], self.room(1))
        is_in_episode_nT = np.asarray(sample.action_is_in_episode_T)[None]
        arrays |= self._actions(sample.actions_TD[None], sample.state_D[None], is_in_episode_nT)
        arrays |= {"sample_index_B": np.array([sample.index]), "epoch_B": np.array([epoch])}
        return {name: array[0] for name, array in arrays.items()}

    def block(self, raw: RawBlock, epoch: int, images_nVCSS: np.ndarray) -> dict[str, np.ndarray]:
        """As one by one, with a dimension n of samples in front, and their pictures in `images_nVCSS` (see `room`)."""
        arrays = self._observations(raw.images, raw.state_nD, raw.instructions, images_nVCSS)
        arrays |= self._actions(raw.actions_nTD, raw.state_nD, raw.action_is_in_episode_nT)
        index_n = raw.index_n.astype(np.int64)
        return arrays | {"sample_index_B": index_n, "epoch_B": np.full_like(index_n, epoch)}

    def room(self, num_samples: int, memory: np.ndarray | None = None) -> np.ndarray:
        """Memory for the pictures of n samples, [n, V, 3, S, S]: `memory` where it fits, else new."""
        settings = self.settings
        empty_CSS = empty_image(settings.image_size, settings.image_resize)
        shape = (num_samples, settings.num_images, *empty_CSS.shape)
        if memory is not None and (memory.shape, memory.dtype) == (shape, empty_CSS.dtype):
            return memory
        return np.empty(shape, dtype=empty_CSS.dtype)

    def camera_room(self, images_nVCSS: np.ndarray) -> dict[str, np.ndarray]:
        """Camera -> where in `images_nVCSS` its pictures belong, for cameras that need not be changed but for their size."""
        if images_nVCSS.dtype != np.uint8:
            return {}
        return {key: images_nVCSS[:, view] for view, key in enumerate(self.settings.camera_keys) if key}

    def preprocess_observation(self, images: Mapping[str, np.ndarray], state_D: np.ndarray, instruction: str) -> dict[str, Any]:
        """What inference needs, by the very code that training uses.

        images: camera key -> uint8 [H, W, 3] (further cameras are ignored); state_D: physical, float32 [state_dim]. Raises
        ValueError for a missing camera, a wrong state width, a non-finite state, or a prompt that does not fit (--prompt-
        overflow error).
        """
        frames = {camera: frame_HWC[None] for camera, frame_HWC in images.items()}
        arrays = self._observations(frames, state_D[None], [instruction], self.room(1))
        return {name: array[0] for name, array in arrays.items()}

    def _observations(
        self,
        images: Mapping[str, np.ndarray],
        state_nD: np.ndarray,
        instructions: Sequence[str],
        images_nVCSS: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """`preprocess_observation` of n samples, with pictures in `images_nVCSS`."""
        settings = self.settings
        if state_nD.shape[1:] != (settings.state_dim,):
            raise ValueError(f"state has shape {list(state_nD.shape[1:])}; this model was trained with [{settings.state_dim}]")
        self._check_finite("state", state_nD)
        # float32 first, as datasets store it; openpi's statistics then lift it to float64 for the bins.
        normalized_nD = self.state_normalizer.normalize(np.asarray(state_nD, dtype=np.float32))
        # Before padding: only the robot's own dimensions are in the prompt.
        tokens_nL, token_is_valid_nL = self._tokenize(instructions, normalized_nD)
        cameras = settings.camera_map
        frames = zip(cameras.select(images), settings.camera_keys, strict=True)
        # Empty slots last, so that real cameras keep their places when slots are added.
        padded = [*frames, *((None, "") for _ in range(settings.num_images - len(settings.camera_keys)))]
        for view, (frames_nHWC, key) in enumerate(padded):
            write_view(images_nVCSS[:, view], frames_nHWC, settings.image_size, settings.image_resize, key)
        return {
            "images_BVCHW": images_nVCSS,
            "camera_is_present_BV": np.tile(np.array(cameras.is_present), (len(state_nD), 1)),
            "tokens_BL": tokens_nL,
            "token_is_valid_BL": token_is_valid_nL,
            "state_BD": pad_last_dim(normalized_nD, settings.max_state_dim).astype(np.float32),
        }

    def _actions(self, actions_nTD: np.ndarray, state_nD: np.ndarray, is_in_episode_nT: np.ndarray) -> dict[str, np.ndarray]:
        settings = self.settings
        self._check_finite("action", actions_nTD)
        is_loss_nTA, is_real_A = action_loss_mask(
            settings.action_loss, is_in_episode_nT, settings.action_dim, settings.max_action_dim
        )
        actions_nTA = pad_last_dim(self.normalize_actions(actions_nTD, state_nD), settings.max_action_dim)
        return {
            "actions_BTA": actions_nTA.astype(np.float32),
            "action_is_valid_BTA": is_loss_nTA,
            "action_dim_is_valid_BA": np.tile(is_real_A, (len(state_nD), 1)),
        }

    def prompt_token_ids(self, instruction: str, normalized_state_D: np.ndarray) -> list[int]:
        """Ids of the whole prompt, neither cut nor padded."""
        return self._prompts_ids([instruction], normalized_state_D[None])[0]

    def _prompts_ids(self, instructions: Sequence[str], normalized_state_nD: np.ndarray) -> list[list[int]]:
        return prompts_ids(self.tokenizer, instructions, normalized_state_nD if self.settings.prompt_state else None)

    def size_of(self, instruction: str, state_D: np.ndarray) -> SampleSize:
        """Images and prompt tokens of the sample that these make; reads no picture."""
        normalized_D = self.state_normalizer.normalize(np.asarray(state_D, dtype=np.float32))
        prompt = min(len(self.prompt_token_ids(instruction, normalized_D)), self.settings.max_prompt_length)
        return SampleSize(sum(self.settings.camera_map.is_present), prompt)

    def _tokenize(self, instructions: Sequence[str], normalized_state_nD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(int64 [n, L], bool [n, L]) of prompts. One that does not fit is cut, or raises ValueError (--prompt-overflow)."""
        settings = self.settings
        prompts = self._prompts_ids(instructions, normalized_state_nD)
        for ids, instruction in zip(prompts, instructions, strict=True):
            if len(ids) > settings.max_prompt_length and settings.prompt_overflow == "error":
                raise ValueError(
                    f"prompt of {len(ids)} tokens for the task {instruction[:60]!r}; {settings.max_prompt_length} fit: "
                    f"use --max-prompt-length {len(ids)} or more, or --prompt-overflow truncate"
                )
            self.num_truncated_prompts += len(ids) > settings.max_prompt_length
        return pad_prompts(prompts, settings.max_prompt_length)

    def normalize_actions(self, actions_TD: np.ndarray, state_D: np.ndarray) -> np.ndarray:
        """Physical actions as the dataset writes them -> normalized model actions, [..., T, action_dim]."""
        dims = self.settings.delta_action_dims
        relative_TD = absolute_to_delta(actions_TD, state_D, dims) if dims else actions_TD
        return self.action_normalizer.normalize(relative_TD)

    def unnormalize_actions(self, actions_TA: np.ndarray, state_D: np.ndarray) -> np.ndarray:
        """Model actions [..., T, A] -> physical actions as the dataset writes them, float32 [..., T, action_dim].

        `state_D` is the physical state of the observation that the actions were predicted from.
        """
        settings = self.settings
        # The padding is cut off first: it has no statistics.
        physical_TD = self.action_normalizer.unnormalize(actions_TA[..., : settings.action_dim])
        if settings.delta_action_dims:
            physical_TD = delta_to_absolute(physical_TD, state_D, settings.delta_action_dims)
        return physical_TD.astype(np.float32)

    def _check_finite(self, what: str, values_D: np.ndarray) -> None:
        if not np.isfinite(values_D).all():
            dims = sorted({int(dim) for dim in np.nonzero(~np.isfinite(values_D))[-1]})
            names = self.settings.action_names if what == "action" else self.settings.state_names
            named = ", ".join(f"{dim} ({names[dim]})" for dim in dims)
            raise ValueError(f"{what} has NaN or Inf in dimension {named}; repair the data or use --drop-nonfinite")

    def to_dict(self) -> dict[str, Any]:
        """Settings and statistics, JSON-ready; the tokenizer's bytes travel beside it."""
        return {
            "format_version": FORMAT_VERSION,
            "settings": dataclasses.asdict(self.settings),
            PICTURES_KEY: None if self.pictures is None else self.pictures.to_dict(),
            "statistics": self.statistics.to_dict(),
        }

    @staticmethod
    def from_dict(content: Mapping[str, Any], tokenizer_bytes: bytes, where: str = "preprocessing") -> Preprocessor:
        """Inverse of `to_dict`; an unknown or missing setting is a ValueError."""
        if "kind" in content:
            raise ValueError(f"{where}: preprocessing of another model family ({content['kind']})")
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in content["settings"].items()}
        known = {f.name for f in dataclasses.fields(PreprocessSettings)}
        # A default for a missing setting could differ from what the checkpoint was trained with.
        if given.keys() != known:
            missing, extra = sorted(known - given.keys()), sorted(given.keys() - known)
            raise ValueError(
                f"{where}: missing settings {missing}, unknown settings {extra}; made by another version of this project"
            )
        statistics = Statistics.from_dict(content["statistics"], where)
        pictures = RecordedPictures.from_dict(content.get(PICTURES_KEY))
        return Preprocessor(PreprocessSettings(**given), statistics, SentencePieceTokenizer(tokenizer_bytes), pictures)

    def save(self, folder: Path) -> None:
        """Write preprocessing.json, statistics.json and tokenizer.model into an existing folder."""
        write_preprocessing(folder, self.to_dict(), self.statistics, self.tokenizer.model_bytes)

    @staticmethod
    def load(folder: Path) -> Preprocessor:
        """Inverse of `save`. Raises ValueError naming the file that is missing or broken."""
        return Preprocessor.from_dict(*read_preprocessing(folder))


def write_preprocessing(folder: Path, content: dict[str, Any], statistics: Statistics, tokenizer_bytes: bytes) -> None:
    """Write a preprocessor's `to_dict`, its statistics and its tokenizer into an existing folder."""
    statistics.save(folder / STATISTICS_FILE)
    # One copy of the statistics only: the file of its own that --statistics-path reads too.
    settings = {name: value for name, value in content.items() if name != "statistics"}
    (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=1) + "\n")
    (folder / TOKENIZER_FILE).write_bytes(tokenizer_bytes)


def read_preprocessing(folder: Path) -> tuple[dict[str, Any], bytes, str]:
    """(content, tokenizer bytes, file name for messages) of what `save` wrote, whatever the kind of preprocessor."""
    if (folder / MIXTURE_FILE).is_file():
        names = json.loads((folder / MIXTURE_FILE).read_text())["datasets"]
        raise ValueError(f"{folder}: of a mixture of {', '.join(names)}; choose one: {folder / names[0]}")
    absent = [name for name in (SETTINGS_FILE, STATISTICS_FILE, TOKENIZER_FILE) if not (folder / name).is_file()]
    if absent:
        raise ValueError(f"{folder}: {', '.join(absent)} missing; a checkpoint carries all of its preprocessing")
    try:
        content = json.loads((folder / SETTINGS_FILE).read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as problem:
        raise ValueError(f"{folder / SETTINGS_FILE}: no readable JSON ({problem})") from problem
    content["statistics"] = Statistics.load(folder / STATISTICS_FILE).to_dict()
    return content, (folder / TOKENIZER_FILE).read_bytes(), str(folder / SETTINGS_FILE)
