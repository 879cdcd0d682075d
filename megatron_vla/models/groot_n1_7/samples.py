"""GR00T N1.7's samples: their random draws, mock samples, and how they become micro-batches.

Shape legend: as batch.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_vla.config.run import RunConfig
from megatron_vla.data.draws import MOCK_STREAM, fields_of_draws, noise_and_shares, sample_generator
from megatron_vla.data.loader import PromptPadding, prompt_slots
from megatron_vla.data.mock import FIRST_TOKEN, MOCK_ROBOT_DIM, NUM_PHASES, WithoutFiles, mock_actions
from megatron_vla.models.groot_n1_7.assemble import Assembler
from megatron_vla.models.groot_n1_7.batch import GrootN17Batch
from megatron_vla.models.groot_n1_7.config import IMAGE_CHANNELS, GrootN17Config

STATE_FEATURE_STREAM = 0x66656174
RAW_STATE_STREAM = 0x73746174
# A flow time of exactly 1 is never drawn.
TIME_SCALE = 0.999


def state_is_dropped(config: GrootN17Config, stream: int, seed: int, epoch: int, sample_index: int) -> bool:
    """Whether one of the two state dropouts (RAW_STATE_STREAM, STATE_FEATURE_STREAM) hides this sample's state."""
    if stream == RAW_STATE_STREAM and config.single_state_dropout:
        return False
    return bool(sample_generator(seed, stream, epoch, sample_index).random() < config.state_dropout_prob)


def draws(config: GrootN17Config, seed: int, epoch: int, sample_index: int) -> dict[str, Any]:
    """Noise [draws * T, A], flow times [draws] (0 = noise, 1 = data) and feature dropout of one training sample.

    The time of a single draw is a scalar: t = 0.999 (1 - u), u ~ Beta(1.5, 1).
    """
    sizes = config.action_horizon, config.max_action_dim, config.flow_draws
    noise, shares = noise_and_shares(seed, epoch, sample_index, *sizes)
    return {
        **fields_of_draws(noise, ((1.0 - shares) * TIME_SCALE).astype(np.float32)),
        "state_is_dropped_B": np.bool_(state_is_dropped(config, STATE_FEATURE_STREAM, seed, epoch, sample_index)),
    }


# In place of draws when actions are sampled: pure noise, and the state is always seen.
REQUEST_FIELDS = {"time_B": np.float32(0.0), "state_is_dropped_B": np.bool_(False)}


def own_width(config: RunConfig, arrays: Mapping[str, Any]) -> int:
    """Token slots that a sample has in a batch of its own; 0 where padding is masked everywhere and its width means nothing.

    Unmasked padding is read by the vision-language layers (the released behaviour), so that what a sample is padded to must
    depend on nothing but the sample.
    """
    data, family = config.data, config.family
    if family.mask_vl_self_attention or family.vl_num_layers == 0:
        return 0
    longest = int(np.asarray(arrays["token_is_valid_BS"]).sum())
    return prompt_slots(longest, data.prompt_padding, data.prompt_bucket_size, family.max_prompt_length)


@dataclass(frozen=True)
class PaddedAssembler:
    """An Assembler that pads prompts as --prompt-padding says."""

    assembler: Assembler
    padding: PromptPadding
    bucket_size: int
    max_length: int

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> GrootN17Batch:
        """One micro-batch."""
        longest = max(int(np.asarray(sample["token_is_valid_BS"]).sum()) for sample in samples)
        return self.assembler(samples, prompt_slots(longest, self.padding, self.bucket_size, self.max_length))


def build_assembler(config: RunConfig) -> PaddedAssembler:
    """The assembler of one run."""
    data, family = config.data, config.family
    return PaddedAssembler(Assembler(family), data.prompt_padding, data.prompt_bucket_size, family.max_prompt_length)


def num_image_tokens(family: GrootN17Config) -> int:
    """Tokens of one image of --image-size."""
    return (family.image_size // family.vision_patch_size // family.vision_spatial_merge_size) ** 2


@dataclass(frozen=True, kw_only=True)
class GrootMockSource(WithoutFiles):
    """`source(index, epoch)` gives the arrays of one sample; the same for every epoch, rank and worker.

    Its prompt is laid out as a real one: markers, one run of image tokens per camera, words. As in the other family's mock
    data, the images' brightness and one word show the phase of the actions.
    """

    family: GrootN17Config
    num_cameras: int
    prompt_length: int
    num_embodiments: int
    word_tokens: tuple[int, int]
    seed: int

    def __call__(self, index: int, epoch: int) -> dict[str, Any]:
        """Arrays named as the fields of GrootN17Batch; see assemble.py."""
        family = self.family
        generator = sample_generator(self.seed, MOCK_STREAM, 0, index)
        phase = int(generator.integers(NUM_PHASES))
        side = family.image_size // family.vision_patch_size
        rows_per_image = side * side
        width = IMAGE_CHANNELS * family.vision_patch_size**2
        texture_PC = generator.integers(0, 64, (self.num_cameras * rows_per_image, width), dtype=np.uint8)
        action_dim = min(MOCK_ROBOT_DIM, family.max_action_dim)
        actions_TA = np.zeros((family.action_horizon, family.max_action_dim), dtype=np.float32)
        actions_TA[:, :action_dim] = mock_actions(phase, family.action_horizon, action_dim)
        state_HD = np.zeros((family.state_history_length, family.max_state_dim), dtype=np.float32)
        state_HD[:, : min(action_dim, family.max_state_dim)] = actions_TA[0, : min(action_dim, family.max_state_dim)]
        is_real_A = np.arange(family.max_action_dim) < action_dim
        return {
            **self._prompt(generator, phase),
            "pixels_PC": texture_PC + np.uint8(phase * 12),
            "image_grid_I3": np.tile(np.array([1, side, side], dtype=np.int64), (self.num_cameras, 1)),
            "state_BHD": state_HD,
            "embodiment_B": np.int64(index % self.num_embodiments),
            "actions_BTA": actions_TA,
            "action_is_valid_BTA": np.broadcast_to(is_real_A, actions_TA.shape).copy(),
            "action_dim_is_valid_BA": is_real_A,
            "sample_index_B": np.int64(index),
            "epoch_B": np.int64(epoch),
        }

    def _prompt(self, generator: np.random.Generator, phase: int) -> dict[str, np.ndarray]:
        family = self.family
        low, high = self.word_tokens
        words = generator.integers(low, high, self.prompt_length)
        words[0] = low + phase
        image = [family.image_token] * num_image_tokens(family)
        # Markers around each image, as in the real prompt.
        tokens = [low, *(token for _ in range(self.num_cameras) for token in (low + 1, *image, low + 2)), *words.tolist()]
        tokens_S = np.full(family.max_prompt_length, family.padding_token, dtype=np.int64)
        tokens_S[len(tokens_S) - len(tokens) :] = tokens
        return {"tokens_BS": tokens_S, "token_is_valid_BS": np.arange(len(tokens_S)) >= len(tokens_S) - len(tokens)}


def word_tokens(family: GrootN17Config) -> tuple[int, int]:
    """[first, end) of the tokens that mock words are drawn from: the longest run without a special one. Raises ValueError."""
    special = sorted(token for token in {family.image_token, family.padding_token} if token >= FIRST_TOKEN)
    starts, ends = [FIRST_TOKEN, *(token + 1 for token in special)], [*special, family.vocab_size]
    first, end = max(zip(starts, ends, strict=True), key=lambda run: run[1] - run[0])
    if end - first < NUM_PHASES:
        raise ValueError(
            f"--image-token {family.image_token}, --padding-token {family.padding_token}: they leave no {NUM_PHASES} tokens "
            f"in a row of --vocab-size {family.vocab_size} for --mock-data -> enlarge the vocabulary"
        )
    return first, end


def mock_prompt_tokens(family: GrootN17Config, num_cameras: int, prompt_length: int) -> int:
    """Tokens of a mock sample: one marker, two and its tokens per image, the words."""
    return 1 + num_cameras * (2 + num_image_tokens(family)) + prompt_length


def build_mock_source(config: RunConfig) -> tuple[GrootMockSource, tuple[str, ...]]:
    """(mock samples of one run, names of their views)."""
    data, family = config.data, config.family
    room = family.max_prompt_length - mock_prompt_tokens(family, data.mock_num_cameras, 0)
    source = GrootMockSource(
        num_samples=data.mock_num_samples,
        family=family,
        num_cameras=data.mock_num_cameras,
        prompt_length=min(data.mock_prompt_length, room),
        num_embodiments=min(data.mock_num_embodiments, family.num_embodiments),
        word_tokens=word_tokens(family),
        seed=config.training.seed,
    )
    return source, tuple(f"view_{i}" for i in range(data.mock_num_cameras))
