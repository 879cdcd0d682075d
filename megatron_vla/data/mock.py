"""Deterministic synthetic samples with the same fields as real ones: for benchmarks and launcher tests, no files needed.

The actions are a smooth function of a phase that the image's brightness and the first prompt token show, so a model can
learn them.

Shape legend: as data/batch.py, without the batch dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_vla.data.draws import MOCK_SIZE_STREAM, MOCK_STREAM, sample_generator
from megatron_vla.data.packing import SampleSize
from megatron_vla.data.transforms import action_loss_mask, pad_last_dim
from megatron_vla.data.watch import StageTimes, StatusBoard

MOCK_ROBOT_DIM = 7
NUM_PHASES = 16
FIRST_TOKEN = 4  # ids below are pad, eos, bos, unk


@dataclass(frozen=True, kw_only=True)
class MockSource:
    """`source(index, epoch)` gives the arrays of one sample; the same for every epoch, rank and worker.

    A sample has `num_cameras` cameras or one of `camera_counts`, and min_prompt_length ... prompt_length prompt tokens.
    """

    num_samples: int
    num_cameras: int
    camera_counts: tuple[int, ...]
    num_images: int
    image_size: int
    min_prompt_length: int
    prompt_length: int
    max_prompt_length: int
    vocab_size: int
    action_horizon: int
    max_action_dim: int
    action_loss: str
    seed: int

    def take_times(self) -> StageTimes:
        """Nothing is read."""
        return StageTimes(num_samples=1)

    def where(self, index: int) -> str:
        """For messages."""
        return f"mock sample {index}"

    def use_board(self, board: StatusBoard, first_sample: int = 0) -> None:
        """Nothing to note: no file can stall."""

    def size_of(self, index: int) -> SampleSize:
        """See `SampleSource`."""
        # A stream of its own: sizes change no picture and no action.
        generator = sample_generator(self.seed, MOCK_SIZE_STREAM, 0, index)
        cameras = int(generator.choice(self.camera_counts)) if self.camera_counts else self.num_cameras
        return SampleSize(cameras, int(generator.integers(self.min_prompt_length, self.prompt_length + 1)))

    def __call__(self, index: int, epoch: int) -> dict[str, Any]:
        """Arrays named as the fields of Batch, without noise and time."""
        # Epoch 0 always: an epoch of mock data repeats, as real data does.
        generator = sample_generator(self.seed, MOCK_STREAM, 0, index)
        phase = int(generator.integers(NUM_PHASES))
        size, (num_cameras, prompt_length) = self.image_size, self.size_of(index)
        images_VCHW = np.zeros((self.num_images, 3, size, size), dtype=np.uint8)
        # Texture keeps compression and caches honest; its mean still shows the phase.
        texture = generator.integers(0, 64, (self.num_cameras, 3, size, size), dtype=np.uint8)
        images_VCHW[:num_cameras] = texture[:num_cameras] + np.uint8(phase * 12)
        tokens_L = np.zeros(self.max_prompt_length, dtype=np.int64)
        tokens_L[:prompt_length] = generator.integers(FIRST_TOKEN, self.vocab_size, prompt_length)
        tokens_L[0] = FIRST_TOKEN + phase
        action_dim = min(MOCK_ROBOT_DIM, self.max_action_dim)
        angle = 2 * np.pi * phase / NUM_PHASES
        # Different phases per dimension, so that no output can be learned by copying another.
        actions_TD = np.sin(angle + 0.2 * np.arange(self.action_horizon)[:, None] + np.arange(action_dim)[None, :])
        is_loss_TA, is_real_A = action_loss_mask(
            self.action_loss, np.ones(self.action_horizon, dtype=bool), action_dim, self.max_action_dim
        )
        return {
            "images_BVCHW": images_VCHW,
            "camera_is_present_BV": np.arange(self.num_images) < num_cameras,
            "tokens_BL": tokens_L,
            "token_is_valid_BL": np.arange(self.max_prompt_length) < prompt_length,
            "state_BD": pad_last_dim(actions_TD[0], self.max_action_dim).astype(np.float32),
            "actions_BTA": pad_last_dim(actions_TD, self.max_action_dim).astype(np.float32),
            "action_is_valid_BTA": is_loss_TA,
            "action_dim_is_valid_BA": is_real_A,
            "sample_index_B": np.int64(index),
            "epoch_B": np.int64(epoch),
        }
