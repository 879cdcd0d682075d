"""One pack as tensors of fixed shape: prefixes end to end without padding between them, actions as a dense batch.

A sample's prefix tokens are its images' patches in slot order, then its valid prompt tokens, as in a padded batch. Slots of
samples and images that stay empty, and tokens behind the last prefix, hold harmless zeros that nothing reads.

Shape legend: S sample slots, I image slots, C channels, Y X pixel rows and columns, P packed prefix tokens (the budget), R rows
of image features (I * patches), T action horizon, A padded action dimensions, D padded state dimensions, J tokens of the joint
attention (P + S * T), Q attention sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_vla.data.batch import TensorFields
from megatron_vla.data.packing import PackLimits

# Fields of a sample that keep one row per sample; an empty slot holds zeros.
SAMPLE_FIELDS = (
    "actions_BTA",
    "action_is_valid_BTA",
    "action_dim_is_valid_BA",
    "noise_BTA",
    "time_B",
    "state_BD",
    "sample_index_B",
    "epoch_B",
)


@dataclass
class PackedBatch(TensorFields):
    """One micro-batch that is a pack; B in field names counts sample slots.

    images_ICYX: of cameras that are there, as in Batch; image_is_present_I bool; image_view_I int64: the model's view of each.
    tokens_P: int64 prompt token ids, 0 where no prompt token is; is_patch_P: bool, image patches.
    patch_row_P: int64, row of the image features [R] at each patch (else 0); place_of_row_R: its inverse, -1 for unread rows.
    position_P: int64, from 0 in each sample. num_prefix_B, num_prompt_B: int64 tokens of each sample, 0 in an empty slot.
    prefix_offsets_Q: int32, first token of each sequence of the prefix's own attention and the end; tokens behind the last
    prefix are sequences of their own. joint_row_J: int64, row of [prefix tokens, then action tokens slot by slot] at each place
    of what the actions' attention reads, a sample's prefix and actions end to end; place_of_joint_row_J: its inverse, -1 for
    rows that no action reads. query_offsets_Q, key_offsets_Q: int32, of that attention.
    longest_sequence: bound of one sequence of the prefix's attention.
    The other fields are those of Batch; empty slots have no valid action.
    """

    images_ICYX: Tensor
    image_is_present_I: Tensor
    image_view_I: Tensor
    tokens_P: Tensor
    is_patch_P: Tensor
    patch_row_P: Tensor
    place_of_row_R: Tensor
    position_P: Tensor
    num_prefix_B: Tensor
    num_prompt_B: Tensor
    prefix_offsets_Q: Tensor
    joint_row_J: Tensor
    place_of_joint_row_J: Tensor
    query_offsets_Q: Tensor
    key_offsets_Q: Tensor
    actions_BTA: Tensor
    action_is_valid_BTA: Tensor
    action_dim_is_valid_BA: Tensor
    noise_BTA: Tensor
    time_B: Tensor
    state_BD: Tensor
    sample_index_B: Tensor
    epoch_B: Tensor
    longest_sequence: int

    @property
    def size(self) -> int:
        """Sample slots."""
        return int(self.sample_index_B.shape[0])

    def samples_of_rows(self, field: str) -> Tensor:
        """See `Batch`."""
        if field != "images_ICYX":
            return self.sample_index_B
        # Images lie sample by sample.
        images_B = (self.num_prefix_B - self.num_prompt_B) // (self.place_of_row_R.shape[0] // self.images_ICYX.shape[0])
        index_I = torch.full_like(self.image_view_I, -1)
        found = self.sample_index_B.repeat_interleave(images_B)
        index_I[: len(found)] = found
        return index_I


def pack_samples(samples: Sequence[dict[str, Any]], limits: PackLimits, extra_fields: Sequence[str] = ()) -> dict[str, Tensor]:
    """Fields of a PackedBatch from samples (arrays named as the fields of Batch, one sample each) that fit into a pack.

    `extra_fields`: further ones with a row per view, of which present views' rows are kept, [I, ...].
    """
    present = [np.flatnonzero(sample["camera_is_present_BV"]) for sample in samples]
    prompts = [sample["tokens_BL"][sample["token_is_valid_BL"]] for sample in samples]
    images_B = np.array([len(views) for views in present], dtype=np.int64)
    prompt_B = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    empty = limits.samples - len(samples)
    num_prompt_B = np.pad(prompt_B, (0, empty))
    num_prefix_B = np.pad(images_B * limits.image_tokens, (0, empty)) + num_prompt_B
    horizon = samples[0]["actions_BTA"].shape[0]
    arrays: dict[str, np.ndarray] = {
        "num_prefix_B": num_prefix_B,
        "num_prompt_B": num_prompt_B,
        "image_is_present_I": np.arange(limits.images) < images_B.sum(),
        "image_view_I": _rows(present, limits.images),
        "images_ICYX": _rows([s["images_BVCHW"][views] for s, views in zip(samples, present, strict=True)], limits.images),
        **_prefix(images_B, prompts, limits),
        **_attention(num_prefix_B, horizon, limits),
    }
    for name in extra_fields:
        arrays[name] = _rows([s[name][views] for s, views in zip(samples, present, strict=True)], limits.images)
    for name in SAMPLE_FIELDS:
        arrays[name] = _rows([np.asarray(sample[name])[None] for sample in samples], limits.samples)
    if arrays["images_ICYX"].dtype != np.uint8:
        arrays["images_ICYX"][images_B.sum() :] = -1.0  # black, as an absent view
    arrays["sample_index_B"][len(samples) :] = -1
    arrays["time_B"][len(samples) :] = 1.0
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _rows(parts: Sequence[np.ndarray], count: int) -> np.ndarray:
    """Parts end to end, then zeros, [count, ...]."""
    rows = np.zeros((count, *parts[0].shape[1:]), dtype=parts[0].dtype)
    np.concatenate(parts, out=rows[: sum(len(part) for part in parts)])
    return rows


def _prefix(images_B: np.ndarray, prompts: Sequence[np.ndarray], limits: PackLimits) -> dict[str, np.ndarray]:
    """Contents of the packed prefix."""
    tokens_P, patch_row_P, position_P = (np.zeros(limits.tokens, dtype=np.int64) for _ in range(3))
    is_patch_P = np.zeros(limits.tokens, dtype=bool)
    start = row = 0
    for patches, prompt in zip((images_B * limits.image_tokens).tolist(), prompts, strict=True):
        middle, stop = start + patches, start + patches + len(prompt)
        is_patch_P[start:middle] = True
        patch_row_P[start:middle] = np.arange(row, row + patches)
        tokens_P[middle:stop] = prompt
        position_P[start:stop] = np.arange(stop - start)
        start, row = stop, row + patches
    place_of_row_R = np.full(limits.images * limits.image_tokens, -1, dtype=np.int64)
    place_of_row_R[patch_row_P[is_patch_P]] = np.flatnonzero(is_patch_P)
    return {
        "tokens_P": tokens_P,
        "is_patch_P": is_patch_P,
        "patch_row_P": patch_row_P,
        "place_of_row_R": place_of_row_R,
        "position_P": position_P,
    }


def _attention(num_prefix_B: np.ndarray, horizon: int, limits: PackLimits) -> dict[str, np.ndarray]:
    """Sequences of both attentions. All rows belong to one: kernels leave others as they were in memory."""
    budget, slots, longest = limits.tokens, limits.samples, limits.longest_prefix
    used = int(num_prefix_B.sum())
    # What is left over is cut into pieces no longer than a sample: the kernel's work is laid out for the longest sequence.
    ends_Q = np.concatenate([np.cumsum(num_prefix_B), used + longest * np.arange(1, -(-budget // longest) + 1)])
    prefix_offsets_Q = np.minimum(np.concatenate([[0], ends_Q]), budget).astype(np.int32)
    first_B = np.cumsum(num_prefix_B) - num_prefix_B
    pieces = []
    for slot, (first, count) in enumerate(zip(first_B.tolist(), num_prefix_B.tolist(), strict=True)):
        actions = budget + slot * horizon
        pieces += [np.arange(first, first + count), np.arange(actions, actions + horizon)]
    joint_row_J = np.concatenate([*pieces, np.arange(used, budget)]).astype(np.int64)
    read = used + slots * horizon
    place_of_joint_row_J = np.full(len(joint_row_J), -1, dtype=np.int64)
    place_of_joint_row_J[joint_row_J[:read]] = np.arange(read)
    tail_Q = prefix_offsets_Q[slots + 1 :] + slots * horizon  # keys of the pieces left over; no query reads them
    key_ends_B = np.cumsum(num_prefix_B + horizon)
    query_ends_B = horizon * np.arange(1, slots + 1)
    return {
        "prefix_offsets_Q": prefix_offsets_Q,
        "joint_row_J": joint_row_J,
        "place_of_joint_row_J": place_of_joint_row_J,
        "key_offsets_Q": np.concatenate([[0], key_ends_B, tail_Q]).astype(np.int32),
        "query_offsets_Q": np.concatenate([[0], query_ends_B, np.full(len(tail_Q), slots * horizon)]).astype(np.int32),
    }
