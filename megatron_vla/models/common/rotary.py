"""Rotary position embedding (half-split layout), one table per forward pass.

Shape legend: B samples, S tokens, N heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_vla.models.common.normalization import at_least_fp32


class RotaryTable(NamedTuple):
    """Cosine and sine of every token's angles [B, 1, S, D/2]; the second half of a head uses the same angles as the first."""

    cos_B1SD: Tensor
    sin_B1SD: Tensor

    @property
    def num_tokens(self) -> int:
        """S."""
        return self.cos_B1SD.shape[2]

    def tokens(self, start: int, stop: int) -> RotaryTable:
        """The table of tokens start..stop-1 (views, no copy)."""
        return RotaryTable(self.cos_B1SD[:, :, start:stop], self.sin_B1SD[:, :, start:stop])


def inverse_frequencies(head_width: int, theta: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """theta^(-2i / head_width), i < head_width / 2, in `dtype`."""
    exponent_D = torch.arange(0, head_width, 2, device=device, dtype=dtype) / head_width
    return 1.0 / theta**exponent_D


def rotary_table(position_BS: Tensor, head_width: int, theta: float, dtype: torch.dtype) -> RotaryTable:
    """Angles position * theta^(-2i / head_width), i < head_width / 2, in at least fp32.

    `dtype` is the activations' dtype: bf16 and fp32 models get an fp32 table, fp64 models an fp64 one.
    """
    wide = at_least_fp32(dtype)
    frequency_D = inverse_frequencies(head_width, theta, position_BS.device, wide)
    return table_of_angles(position_BS.to(wide).unsqueeze(-1) * frequency_D)


def table_of_angles(angle_BSD: Tensor) -> RotaryTable:
    """Table of given angles [B, S, D/2], in their dtype."""
    angle_B1SD = angle_BSD.unsqueeze(1)
    return RotaryTable(angle_B1SD.cos(), angle_B1SD.sin())


def sectioned_rotary_table(
    position_3BS: Tensor, sections: Sequence[int], head_width: int, theta: float, dtype: torch.dtype
) -> RotaryTable:
    """Table of tokens with three positions each (interleaved M-RoPE of Qwen3-VL).

    Frequency k turns with the second position for k = 1, 4, 7, ... (`sections[1]` of them), with the third for k = 2, 5, 8, ...
    (`sections[2]`), and with the first otherwise. Only device arithmetic: nothing is copied from the host.
    """
    wide = at_least_fp32(dtype)
    frequency_D = inverse_frequencies(head_width, theta, position_3BS.device, wide)
    place_D = torch.arange(head_width // 2, device=position_3BS.device)
    first, second, third = position_3BS.to(wide).unsqueeze(-1).unbind(0)
    uses_second_D = (place_D % 3 == 1) & (place_D < 3 * sections[1])
    uses_third_D = (place_D % 3 == 2) & (place_D < 3 * sections[2])
    return table_of_angles(torch.where(uses_third_D, third, torch.where(uses_second_D, second, first)) * frequency_D)


def plane_rotary_table(place_BS2: Tensor, head_width: int, theta: float, dtype: torch.dtype) -> RotaryTable:
    """Table of tokens in a plane: the first half of the frequencies turns with the row, the second half with the column."""
    wide = at_least_fp32(dtype)
    frequency_D = inverse_frequencies(head_width // 2, theta, place_BS2.device, wide)
    return table_of_angles((place_BS2.to(wide).unsqueeze(-1) * frequency_D).flatten(-2))


def rotate(heads_BNSD: Tensor, table: RotaryTable) -> Tensor:
    """Rotate each (first half, second half) pair by its token's angle: products in the table's dtype, one rounding (as JAX)."""
    # Computed and stored token by token, as projections give heads and as attention's output is read: nothing is transposed.
    first, second = heads_BNSD.transpose(1, 2).to(table.cos_B1SD.dtype).chunk(2, dim=-1)
    cos, sin = table.cos_B1SD.transpose(1, 2), table.sin_B1SD.transpose(1, 2)
    rotated_BSND = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated_BSND.to(heads_BNSD.dtype).transpose(1, 2)
