"""One micro-batch of GR00T N1.7: samples, random draws, and every position that the model would otherwise search for.

All index tensors are made on the host (metadata.py), so nothing is read back from the device, and all shapes follow from the
images' grids, the padded length and the two capacities of the embodiment groups.

Shape legend: B samples, S padded tokens, P patches of all images, C values of a patch, I images, Q patches of the largest
image, M image tokens of all samples, K image tokens of one sample, L other token slots of one sample, H state history, D
state dimensions, T action horizon, A action dimensions, G embodiment groups, N samples of one group.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_vla.data.batch import TensorFields


@dataclass
class GrootN17Batch(TensorFields):
    """Fields in the order in which the model reads them.

    tokens_BS int64, left-padded with the padding token; token_is_valid_BS bool.
    pixels_PC: patch rows in merge-block order. float in [-1, 1]: C = channels x frames x rows x columns, as the released
        processor writes them. uint8: C = channels x rows x columns, one frame; the model scales and repeats it.
    image_token_M int64: places of the image tokens in the flattened [B * S], in the order of the merged patches.
    token_position_3BS int64: rotary positions (temporal, row, column); 0 on padding.
    patch_table_4P int64, patch_weight_4P float32: rows of the position table around each patch, and their shares.
    patch_place_P2 int64: row and column of each patch in its image (vision rotary positions).
    image_offset_I int32 [images + 1]: first patch of each image (cumulative lengths; a video counts its time slices).
    image_row_IQ int64: patches of each image, -1 beyond its end; patch_slot_P int64: each patch's place in the flattened
        [I * Q]. When I * Q = P all images are equally large and neither is read.
    image_key_BK, text_key_BL int64: places in S of a sample's image tokens and of its other slots; image_key_is_valid_BK,
        text_key_is_valid_BL bool: False beyond the sample's own number, and on padding.
    state_BHD float32, normalised, zero-padded; state_is_dropped_B bool: hide the state features (training draws).
    embodiment_B int64: slot of the per-embodiment weights.
    group_embodiment_G int64: slots that occur; group_sample_GN int64: samples of each group, -1 beyond its end;
        sample_place_B int64: each sample's place in the flattened [G * N].
    actions_BTA float32, normalised, zero in padded dimensions; action_is_valid_BTA bool: elements of the loss;
        action_dim_is_valid_BA bool: the robot's own dimensions.
    noise_BTA float32 standard normal, in padded dimensions too; time_B float32 in [0, 1): 0 = noise, 1 = data. With several
        draws (--flow-draws): [B, draws * T, A], draw after draw, and [B, draws].
    sample_index_B, epoch_B int64.
    """

    tokens_BS: Tensor
    token_is_valid_BS: Tensor
    pixels_PC: Tensor
    image_token_M: Tensor
    token_position_3BS: Tensor
    patch_table_4P: Tensor
    patch_weight_4P: Tensor
    patch_place_P2: Tensor
    image_offset_I: Tensor
    image_row_IQ: Tensor
    patch_slot_P: Tensor
    image_key_BK: Tensor
    image_key_is_valid_BK: Tensor
    text_key_BL: Tensor
    text_key_is_valid_BL: Tensor
    state_BHD: Tensor
    state_is_dropped_B: Tensor
    embodiment_B: Tensor
    group_embodiment_G: Tensor
    group_sample_GN: Tensor
    sample_place_B: Tensor
    actions_BTA: Tensor
    action_is_valid_BTA: Tensor
    action_dim_is_valid_BA: Tensor
    noise_BTA: Tensor
    time_B: Tensor
    sample_index_B: Tensor
    epoch_B: Tensor

    @property
    def size(self) -> int:
        """Samples in this micro-batch."""
        return int(self.tokens_BS.shape[0])
