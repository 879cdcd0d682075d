"""Rotary position embedding (half-split layout), one table per forward pass.

Shape legend: B samples, S tokens, N heads, D head width.
"""

from __future__ import annotations

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


def rotary_table(position_BS: Tensor, head_width: int, theta: float, dtype: torch.dtype) -> RotaryTable:
    """Angles position * theta^(-2i / head_width), i < head_width / 2, in at least fp32.

    `dtype` is the activations' dtype: bf16 and fp32 models get an fp32 table, fp64 models an fp64 one.
    """
    wide = at_least_fp32(dtype)
    exponent_D = torch.arange(0, head_width, 2, device=position_BS.device, dtype=wide) / head_width
    inverse_frequency_D = 1.0 / theta**exponent_D
    angle_B1SD = (position_BS.to(wide).unsqueeze(-1) * inverse_frequency_D).unsqueeze(1)
    return RotaryTable(angle_B1SD.cos(), angle_B1SD.sin())


def rotate(heads_BNSD: Tensor, table: RotaryTable) -> Tensor:
    """Rotate each (first half, second half) pair by its token's angle: products in the table's dtype, one rounding (as JAX)."""
    # Computed and stored token by token, as projections give heads and as attention's output is read: nothing is transposed.
    first, second = heads_BNSD.transpose(1, 2).to(table.cos_B1SD.dtype).chunk(2, dim=-1)
    cos, sin = table.cos_B1SD.transpose(1, 2), table.sin_B1SD.transpose(1, 2)
    rotated_BSND = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated_BSND.to(heads_BNSD.dtype).transpose(1, 2)
