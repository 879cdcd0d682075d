"""GrootPreprocessor: from one raw sample to the arrays of a GrootN17Batch and back. The one object for training and serving.

Order (spec of GR00T N1.7, section 5): relative actions -> normalization -> zero padding; pictures -> patch rows; chat prompt.

Shape legend: S prompt slots, P patches, C values of a patch, I images, H state history, D state dimensions, T action horizon,
A padded action dimensions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from megatron_vla.data.action_steps import ActionSteps
from megatron_vla.data.cameras import CameraMap
from megatron_vla.data.groot.chat import PADDING, chat_ids, formalized, pad_left
from megatron_vla.data.groot.modality import ModalityConfig
from megatron_vla.data.groot.pictures import PictureSettings
from megatron_vla.data.groot.state_action import StateActionOptions, StateActionTransform
from megatron_vla.data.groot.statistics import KeyStream, key_statistics
from megatron_vla.data.groot.tokenizer import BytePairTokenizer
from megatron_vla.data.preprocess import read_preprocessing, write_preprocessing
from megatron_vla.data.recorded_pictures import PICTURES_KEY, RecordedPictures
from megatron_vla.data.sample_shape import KeyPlace, SampleShape, dimension_labels
from megatron_vla.data.statistics import Statistics
from megatron_vla.data.transforms import pad_last_dim

if TYPE_CHECKING:
    from megatron_vla.data.dataset import RawSample

KIND = "groot_n1_7"  # in preprocessing.json, so that a folder says which preprocessor it holds
FORMAT_VERSION = 1
# A sample whose crops are still to be taken: resized pictures end to end, and their sizes. See augmentation.py.
PICTURES, PICTURE_SIZES = "pictures", "picture_size_I2"


@dataclass(frozen=True, kw_only=True)
class GrootPreprocessSettings:
    """Everything that decides what the model sees, JSON-ready. `views` and `camera_keys` pair up by position."""

    embodiment_tag: str
    embodiment_id: int
    modality: ModalityConfig
    state: tuple[KeyPlace, ...]
    action: tuple[KeyPlace, ...]
    steps: ActionSteps
    views: tuple[str, ...]
    camera_keys: tuple[str, ...]
    pictures: PictureSettings
    state_action: StateActionOptions
    max_state_dim: int
    max_action_dim: int
    action_horizon: int
    max_prompt_length: int
    prompt_overflow: Literal["error", "truncate"]
    formalize_language: bool
    exclude_state: bool
    action_loss: str
    action_fps: float
    color_jitter: tuple[float, ...]
    state_dropout_prob: float

    @property
    def camera_map(self) -> CameraMap:
        """Views and cameras by name; there are no empty slots."""
        return CameraMap(self.views, self.camera_keys, len(self.views))

    @property
    def stream(self) -> KeyStream:
        """What the statistics were made of."""
        return KeyStream(self.modality, self.state, self.action, self.steps, self.state_action.use_relative_action)

    @property
    def state_dim(self) -> int:
        """Numbers of the physical state."""
        return sum(place.width for place in self.state)

    @property
    def action_dim(self) -> int:
        """Numbers of a physical action."""
        return sum(place.width for place in self.action)

    @property
    def state_names(self) -> tuple[str, ...]:
        """One per state dimension."""
        return dimension_labels(self.state)

    @property
    def action_names(self) -> tuple[str, ...]:
        """One per action dimension."""
        return dimension_labels(self.action)

    @property
    def num_steps(self) -> int:
        """Steps of a chunk that are the robot's; padding up to --action-horizon follows."""
        return self.steps.horizon

    @property
    def frame_steps(self) -> tuple[int, ...]:
        """Steps relative to now of the frames that each camera gives."""
        return self.modality.video.delta_indices

    @property
    def state_steps(self) -> tuple[int, ...]:
        """Steps relative to now of the states."""
        return self.modality.state.delta_indices

    @property
    def image_size(self) -> int:
        """Side (or shorter side) of the pictures that the model sees."""
        return self.pictures.edge

    @property
    def about_robot(self) -> dict[str, Any]:
        """Names that a client should know, beside cameras and dimensions."""
        return {
            "embodiment_tag": self.embodiment_tag,
            "embodiment_id": self.embodiment_id,
            "state_keys": list(self.modality.state.keys),
            "action_keys": list(self.modality.action.keys),
        }

    @property
    def shape(self) -> SampleShape:
        """The make-up of samples that a dataset must give."""
        video, state = self.modality.video.delta_indices, self.modality.state.delta_indices
        return SampleShape(self.state, self.action, video, self.steps, state_deltas=state)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        plain = dataclasses.asdict(self)
        return {**plain, "modality": self.modality.to_dict()}

    @staticmethod
    def from_dict(content: Mapping[str, Any], where: str) -> GrootPreprocessSettings:
        """Inverse of `to_dict`; an unknown or missing setting is a ValueError."""
        known = {f.name for f in dataclasses.fields(GrootPreprocessSettings)}
        if content.keys() != known:
            missing, extra = sorted(known - content.keys()), sorted(content.keys() - known)
            raise ValueError(
                f"{where}: missing settings {missing}, unknown settings {extra}; made by another version of this project"
            )
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}
        given.update(
            modality=ModalityConfig.from_dict(content["modality"], f"{where}: modality"),
            state=tuple(KeyPlace(**place) for place in content["state"]),
            action=tuple(KeyPlace(**place) for place in content["action"]),
            steps=ActionSteps(**content["steps"]),
            pictures=PictureSettings(**content["pictures"]),
            state_action=StateActionOptions(**content["state_action"]),
        )
        return GrootPreprocessSettings(**given)


class GrootPreprocessor:
    """Raw sample -> arrays as models/groot_n1_7/assemble.py takes them, without draws; and model actions -> physical actions.

    keep_pictures: training samples carry resized pictures in place of patch rows, for augmentation. pictures: what the training
    data says of its pictures; None: not known.
    """

    def __init__(
        self,
        settings: GrootPreprocessSettings,
        statistics: Statistics,
        tokenizer: BytePairTokenizer,
        pictures: RecordedPictures | None = None,
    ) -> None:
        self.settings = settings
        self.pictures = pictures
        self.statistics = statistics
        self.tokenizer = tokenizer
        self.keep_pictures = False
        self.num_truncated_prompts = 0  # in this process, since construction
        self.transform = StateActionTransform(
            settings.modality,
            [place.width for place in settings.state],
            [place.width for place in settings.action],
            key_statistics(statistics, settings.stream),
            settings.state_action,
        )

    def __call__(self, sample: RawSample, epoch: int) -> dict[str, Any]:
        """Training sample: every array but the draws. Raises ValueError for what the data does wrong."""
        settings = self.settings
        # The very function that serving calls: the two cannot drift apart.
        arrays = self.preprocess_observation(sample.images, sample.state_D, sample.instruction, self.keep_pictures)
        self._check_finite("action", sample.actions_TD)
        # A chunk as long as the model's padded horizon (serving fills one with zeros) is cut to the robot's own steps.
        is_inside_T = np.asarray(sample.action_is_in_episode_T)[: settings.num_steps]
        actions_TD = self.transform.normalize_actions(sample.actions_TD[: settings.num_steps], self._present(sample.state_D))
        # Repeated steps beyond the episode's end carry no target, as in the released collation.
        actions_TD = (
            np.where(is_inside_T[:, None], actions_TD, np.float32(0)) if settings.action_loss == "valid" else actions_TD
        )
        actions_TA = np.zeros((settings.action_horizon, settings.max_action_dim), dtype=np.float32)
        actions_TA[: settings.num_steps, : settings.action_dim] = actions_TD
        is_real_A = np.arange(settings.max_action_dim) < settings.action_dim
        arrays.update(
            actions_BTA=actions_TA,
            action_is_valid_BTA=self._loss_mask(is_inside_T, is_real_A),
            action_dim_is_valid_BA=is_real_A,
            sample_index_B=np.int64(sample.index),
            epoch_B=np.int64(epoch),
        )
        return arrays

    def _present(self, state: np.ndarray) -> np.ndarray:
        """What relative actions start from: the last of several steps [..., H, D]."""
        return state if len(self.settings.modality.state.delta_indices) == 1 else state[..., -1, :]

    def _loss_mask(self, is_inside_T: np.ndarray, is_real_A: np.ndarray) -> np.ndarray:
        """bool [T, A]; see --action-loss."""
        settings = self.settings
        mask_TA = np.zeros((settings.action_horizon, settings.max_action_dim), dtype=bool)
        if settings.action_loss == "all":
            mask_TA[:] = True
        elif settings.action_loss == "real_dims":
            mask_TA[: settings.num_steps] = is_real_A
        else:
            mask_TA[: settings.num_steps] = is_inside_T[:, None] & is_real_A
        return mask_TA

    def preprocess_observation(
        self, images: Mapping[str, np.ndarray], state_D: np.ndarray, instruction: str, keep_pictures: bool = False
    ) -> dict[str, Any]:
        """What inference needs, by the very code that training uses.

        images: camera key -> uint8 [H, W, 3], or [frames, H, W, 3] in the order of the configuration's video steps; state_D:
        physical, float32 [state_dim], or [steps, state_dim] in the order of several state steps. Raises ValueError for a
        missing camera, another number of frames, a wrong state, or a prompt that does not fit.
        """
        settings = self.settings
        num_steps = len(settings.modality.state.delta_indices)
        expected = (settings.state_dim,) if num_steps == 1 else (num_steps, settings.state_dim)
        if state_D.shape != expected:
            raise ValueError(f"state has shape {list(state_D.shape)}; this model was trained with {list(expected)}")
        self._check_finite("state", state_D)
        pictures = self._pictures(images)
        sizes = [(int(picture.shape[1]), int(picture.shape[2])) for picture in pictures]
        grids = [settings.pictures.grid(*size) for size in sizes]
        merge = settings.pictures.merge_size
        tokens_S, is_valid_S = self.tokenize(instruction, [h * w * t // merge**2 for t, h, w in grids])
        normalized_D = self.transform.normalize_state(np.asarray(state_D, dtype=np.float32))
        if settings.exclude_state:
            normalized_D = np.zeros_like(normalized_D)
        arrays: dict[str, Any] = {
            "tokens_BS": tokens_S,
            "token_is_valid_BS": is_valid_S,
            "image_grid_I3": np.array(grids, dtype=np.int64),
            "state_BHD": pad_last_dim(normalized_D, settings.max_state_dim).reshape(num_steps, settings.max_state_dim),
            "embodiment_B": np.int64(settings.embodiment_id),
        }
        if keep_pictures:
            arrays[PICTURES] = np.concatenate([picture.reshape(-1).numpy() for picture in pictures])
            arrays[PICTURE_SIZES] = np.array(sizes, dtype=np.int64)
        else:
            crops = [settings.pictures.cropped(p, *settings.pictures.centre(*s)) for p, s in zip(pictures, sizes, strict=True)]
            arrays["pixels_PC"] = torch.cat([settings.pictures.patches(crop) for crop in crops]).numpy()
        return arrays

    def _pictures(self, images: Mapping[str, np.ndarray]) -> list[Tensor]:
        """Resized pictures [1, H, W, 3] in the prompt's order: frame by frame, view by view."""
        num_frames = len(self.settings.modality.video.delta_indices)
        stacks = []
        for key, frames in zip(self.settings.camera_keys, self.settings.camera_map.select(images), strict=True):
            stack = frames[None] if frames.ndim == 3 else frames
            if len(stack) != num_frames:
                raise ValueError(
                    f"camera {key}: {len(stack)} frame(s); this model takes {num_frames}, at the steps "
                    f"{list(self.settings.modality.video.delta_indices)} relative to now"
                )
            stacks.append([self.settings.pictures.resized(frame, key) for frame in stack])
        return [stack[frame] for frame in range(num_frames) for stack in stacks]

    def tokenize(self, instruction: str, tokens_per_image: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """(int64 [S], bool [S]) of the prompt, left-padded. Too long: words are cut, or ValueError (--prompt-overflow)."""
        settings = self.settings
        text = formalized(instruction) if settings.formalize_language else instruction
        ids = chat_ids(self.tokenizer, text, tokens_per_image)
        excess = len(ids) - settings.max_prompt_length
        if excess > 0:
            num_words = len(self.tokenizer.encode(text))
            if settings.prompt_overflow == "error" or num_words < excess:
                raise ValueError(
                    f"prompt of {len(ids)} tokens for the task {instruction[:60]!r}, {sum(tokens_per_image)} of them of images;"
                    f" {settings.max_prompt_length} fit: use --max-prompt-length {len(ids)} or more, or "
                    "--prompt-overflow truncate"
                )
            # Only words may go: an image must keep all of its tokens.
            num_after = 1 + len(self.tokenizer.encode("\n"))
            del ids[len(ids) - num_after - excess : len(ids) - num_after]
            self.num_truncated_prompts += 1
        return pad_left(ids, settings.max_prompt_length, self.tokenizer.token_id(PADDING))

    def unnormalize_actions(self, actions_TA: np.ndarray, state_D: np.ndarray) -> np.ndarray:
        """Model actions [..., T, A] -> physical actions as the dataset writes them, float32 [..., num_steps, action_dim].

        `state_D` is the physical state of the observation that the actions were predicted from.
        """
        settings = self.settings
        physical_TA = actions_TA[..., : settings.num_steps, : settings.action_dim]
        return self.transform.unnormalize_actions(physical_TA, self._present(state_D))

    def _check_finite(self, what: str, values_D: np.ndarray) -> None:
        if not np.isfinite(values_D).all():
            dims = sorted({int(dim) for dim in np.nonzero(~np.isfinite(values_D))[-1]})
            names = self.settings.action_names if what == "action" else self.settings.state_names
            named = ", ".join(f"{dim} ({names[dim]})" for dim in dims)
            raise ValueError(f"{what} has NaN or Inf in dimension {named}; repair the data or use --drop-nonfinite")

    def to_dict(self) -> dict[str, Any]:
        """Settings and statistics, JSON-ready; the tokenizer's bytes travel beside it."""
        return {
            "kind": KIND,
            "format_version": FORMAT_VERSION,
            "settings": self.settings.to_dict(),
            PICTURES_KEY: None if self.pictures is None else self.pictures.to_dict(),
            "statistics": self.statistics.to_dict(),
        }

    @staticmethod
    def from_dict(content: Mapping[str, Any], tokenizer_bytes: bytes, where: str = "preprocessing") -> GrootPreprocessor:
        """Inverse of `to_dict`."""
        if content.get("kind") != KIND:
            raise ValueError(f"{where}: preprocessing of another model family")
        settings = GrootPreprocessSettings.from_dict(content["settings"], where)
        statistics = Statistics.from_dict(content["statistics"], where)
        pictures = RecordedPictures.from_dict(content.get(PICTURES_KEY))
        return GrootPreprocessor(settings, statistics, BytePairTokenizer(tokenizer_bytes), pictures)

    def save(self, folder: Path) -> None:
        """Write preprocessing.json, statistics.json and the tokenizer into an existing folder."""
        write_preprocessing(folder, self.to_dict(), self.statistics, self.tokenizer.model_bytes)

    @staticmethod
    def load(folder: Path) -> GrootPreprocessor:
        """Inverse of `save`. Raises ValueError naming the file that is missing or broken."""
        return GrootPreprocessor.from_dict(*read_preprocessing(folder))
