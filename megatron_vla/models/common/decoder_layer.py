"""Pieces of Gemma-style decoder layers: grouped-query projections with rotary positions, gated MLP.

Shape legend: B samples, S tokens, H hidden, N query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from megatron_vla.models.common.rotary import RotaryTable, rotate
from megatron_vla.parallel.linear import TensorParallel, column_parallel_linear, row_parallel_linear


class KeyValue(NamedTuple):
    """Rotated keys and values of some tokens, [B, G, S, D] each: what other tokens need to read them."""

    key_BGSD: Tensor
    value_BGSD: Tensor


class AttentionProjections(nn.Module):
    """q, k, v and o projections of one stream, without biases. Who reads whom is decided by the layer that owns them."""

    def __init__(
        self,
        hidden_size: int,
        *,
        num_attention_heads: int,
        num_query_groups: int,
        head_width: int,
        tensor_parallel: TensorParallel,
    ) -> None:
        super().__init__()
        self.head_width = head_width
        query_size, group_size = num_attention_heads * head_width, num_query_groups * head_width
        self.q_proj = column_parallel_linear(hidden_size, query_size, bias=False, tensor_parallel=tensor_parallel)
        self.k_proj = column_parallel_linear(hidden_size, group_size, bias=False, tensor_parallel=tensor_parallel)
        self.v_proj = column_parallel_linear(hidden_size, group_size, bias=False, tensor_parallel=tensor_parallel)
        self.o_proj = row_parallel_linear(query_size, hidden_size, bias=False, tensor_parallel=tensor_parallel)

    def query(self, hidden_BSH: Tensor, rotary: RotaryTable) -> Tensor:
        """Rotated queries [B, N, S, D]."""
        return rotate(self._split_heads(self.q_proj(hidden_BSH)), rotary)

    def key_value(self, hidden_BSH: Tensor, rotary: RotaryTable) -> KeyValue:
        """Rotated keys, and values."""
        key_BGSD = rotate(self._split_heads(self.k_proj(hidden_BSH)), rotary)
        return KeyValue(key_BGSD, self._split_heads(self.v_proj(hidden_BSH)))

    def _split_heads(self, projected_BSH: Tensor) -> Tensor:
        return projected_BSH.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class GatedMlp(nn.Module):
    """down(gelu_tanh(gate(x)) * up(x)), without biases."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.gate_proj = column_parallel_linear(hidden_size, ffn_hidden_size, bias=False, tensor_parallel=tensor_parallel)
        self.up_proj = column_parallel_linear(hidden_size, ffn_hidden_size, bias=False, tensor_parallel=tensor_parallel)
        self.down_proj = row_parallel_linear(ffn_hidden_size, hidden_size, bias=False, tensor_parallel=tensor_parallel)

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        return self.down_proj(F.gelu(self.gate_proj(hidden_BSH), approximate="tanh") * self.up_proj(hidden_BSH))
