"""Batch: named tensors with positive masks. Padding may hold garbage and the loss does not move.

Shape legend: B samples, V views (model image slots), C channels, H height, W width, L prompt slots, T action horizon,
A padded action dimensions, D padded state dimensions.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor


@dataclass
class TensorFields:
    """A dataclass of tensors (and of plain numbers, which stay as they are)."""

    def tensors(self) -> dict[str, Tensor]:
        """Field name -> tensor."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device, non_blocking: bool = True) -> Self:
        """Copy to `device`; dtypes stay (the model casts)."""
        return dataclasses.replace(self, **{k: v.to(device, non_blocking=non_blocking) for k, v in self.tensors().items()})

    def pin_memory(self) -> Self:
        """Called by torch's DataLoader when pinning is on."""
        return dataclasses.replace(self, **{k: v.pin_memory() for k, v in self.tensors().items()})


@dataclass
class Batch(TensorFields):
    """One micro-batch.

    images_BVCHW: uint8 in [0, 255] or float in [-1, 1]; an absent view is black (-1).
    camera_is_present_BV: bool.
    tokens_BL: int64, right-padded with 0; token_is_valid_BL: bool.
    actions_BTA: float32, normalised, zero in padded dimensions; action_is_valid_BTA: bool, the elements of the loss.
    action_dim_is_valid_BA: bool, the robot's own dimensions (False = padding up to --max-action-dim).
    noise_BTA: float32 standard normal, in padded dimensions too; time_B: float32 flow time in (0, 1], 1 = noise. With
    --flow-draws K they are [B, K * T, A], draw after draw, and [B, K].
    state_BD: float32, normalised, zero-padded.
    sample_index_B: int64 dataset index; epoch_B: int64.
    """

    images_BVCHW: Tensor
    camera_is_present_BV: Tensor
    tokens_BL: Tensor
    token_is_valid_BL: Tensor
    actions_BTA: Tensor
    action_is_valid_BTA: Tensor
    action_dim_is_valid_BA: Tensor
    noise_BTA: Tensor
    time_B: Tensor
    state_BD: Tensor
    sample_index_B: Tensor
    epoch_B: Tensor

    @property
    def size(self) -> int:
        """Samples in this micro-batch."""
        return int(self.tokens_BL.shape[0])

    def samples_of_rows(self, field: str) -> Tensor:
        """Dataset index of the sample that each row of a tensor belongs to."""
        return self.sample_index_B


def collate_tensors(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Stack equal-shaped numpy arrays of samples into tensors, name by name."""
    return {name: torch.stack([torch.as_tensor(s[name]) for s in samples]) for name in samples[0]}
