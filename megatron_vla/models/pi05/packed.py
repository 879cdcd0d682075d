"""Pi0.5 on packs: the prefix stream of several samples end to end, the action stream a dense batch.

The same layers as in a padded batch run on a prefix [1, P, H] that holds all samples, and their attentions are two calls over
sequences of different lengths: prefix -> prefix, and actions -> prefix and actions of their sample, whose keys are put end to
end first. Vision tower and prefix work on no padding inside or between samples; every shape is fixed.

Shape legend: as data/packed_batch.py (S is B in field names); N heads, G key/value heads, H prefix hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_vla.data.packed_batch import PackedBatch
from megatron_vla.models.common.attention_mask import AttentionBackend
from megatron_vla.models.common.decoder_layer import KeyValue
from megatron_vla.models.common.rotary import RotaryTable, rotary_table
from megatron_vla.models.common.row_selection import take_rows
from megatron_vla.models.common.varlen import varlen_attention
from megatron_vla.models.pi05.config import Pi05Config

if TYPE_CHECKING:
    from megatron_vla.models.pi05.model import Pi05Model


@dataclass(frozen=True)
class PackedAttentionPlan:
    """Does what layers.AttentionPlan does, for a pack. `prefix_rotary` [1, 1, P, D/2], `suffix_rotary` [S, 1, T, D/2]."""

    prefix_rotary: RotaryTable
    suffix_rotary: RotaryTable
    prefix_offsets_Q: Tensor
    query_offsets_Q: Tensor
    key_offsets_Q: Tensor
    joint_row_J: Tensor
    place_of_joint_row_J: Tensor
    longest_sequence: int
    suffix_owners: None = None

    def attend_prefix(self, query_1NPD: Tensor, prefix: KeyValue, backend: AttentionBackend) -> Tensor:
        """Prefix tokens read their own sample's: [1, P, N * D]. `backend`: not used, there is one kernel."""
        query, key, value = (heads[0].transpose(0, 1) for heads in (query_1NPD, *prefix))
        longest, offsets_Q = self.longest_sequence, self.prefix_offsets_Q
        attended_PND = varlen_attention(query, key, value, offsets_Q, offsets_Q, longest, longest)
        return attended_PND.flatten(1).unsqueeze(0)

    def attend_suffix(self, query_SNTD: Tensor, prefix: KeyValue, own: KeyValue, backend: AttentionBackend) -> Tensor:
        """Actions read prefix and actions of their sample: [S, T, N * D]."""
        horizon = query_SNTD.shape[2]
        query = query_SNTD.transpose(1, 2).flatten(0, 1)
        key, value = (self._joint(*parts) for parts in zip(prefix, own, strict=True))
        longest = self.longest_sequence + horizon
        attended = varlen_attention(query, key, value, self.query_offsets_Q, self.key_offsets_Q, horizon, longest)
        return attended.flatten(1).unflatten(0, (-1, horizon))

    def _joint(self, prefix_1GPD: Tensor, own_SGTD: Tensor) -> Tensor:
        """Each sample's prefix and actions end to end: [J, G, D]."""
        rows_JGD = torch.cat((prefix_1GPD[0].transpose(0, 1), own_SGTD.transpose(1, 2).flatten(0, 1)))
        return take_rows(rows_JGD, self.joint_row_J, self.place_of_joint_row_J)


def plan_packed_attention(batch: PackedBatch, config: Pi05Config, dtype: torch.dtype) -> PackedAttentionPlan:
    """Positions restart in every sample; an action's goes on from its own sample's prefix."""
    action_T = torch.arange(batch.actions_BTA.shape[1], device=batch.num_prefix_B.device)
    position_ST = batch.num_prefix_B[:, None] + action_T
    return PackedAttentionPlan(
        prefix_rotary=rotary_table(batch.position_P[None], config.kv_channels, config.rope_theta, dtype),
        suffix_rotary=rotary_table(position_ST, config.kv_channels, config.rope_theta, dtype),
        prefix_offsets_Q=batch.prefix_offsets_Q,
        query_offsets_Q=batch.query_offsets_Q,
        key_offsets_Q=batch.key_offsets_Q,
        joint_row_J=batch.joint_row_J,
        place_of_joint_row_J=batch.place_of_joint_row_J,
        longest_sequence=batch.longest_sequence,
    )


def embed_packed_prefix(model: Pi05Model, batch: PackedBatch) -> Tensor:
    """[1, P, H]: the patches of images that are there and the valid prompt tokens, at their places."""
    patches_RH = model.embed_images(batch.images_ICYX, batch.image_is_present_I).flatten(0, 1)
    images_PH = take_rows(patches_RH, batch.patch_row_P, batch.place_of_row_R)
    return torch.where(batch.is_patch_P[:, None], images_PH, model.embed_tokens(batch.tokens_P))[None]
