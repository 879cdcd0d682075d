"""Pieces of language-model layers: grouped-query projections with rotary positions, gated MLP.

Under tensor parallelism N and G count this rank's heads. A residual stream [B, S, H] may be this rank's rows [R, H] (see
parallel/sequence_parallel.py).

Shape legend: B samples, S tokens, H hidden, F MLP width, N query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from megatron_vla.kernels.gated_gelu.op import gated_gelu
from megatron_vla.models.common.feed_forward import ACTIVATIONS, ActivationName
from megatron_vla.models.common.merged_linear import FusesGatedMlp, MergesProjections, joined_linear, merged_linear
from megatron_vla.models.common.normalization import RMSNorm
from megatron_vla.models.common.rotary import RotaryTable, rotate
from megatron_vla.parallel.linear import column_parallel_linear, replicated_linear, row_parallel_linear
from megatron_vla.parallel.parameter_shard import mark_partial
from megatron_vla.parallel.sequence_parallel import gather_rows, gather_samples
from megatron_vla.parallel.tensor_parallel import TensorParallel


class KeyValue(NamedTuple):
    """Rotated keys and values of some tokens, [B, G, S, D] each: what other tokens need to read them."""

    key_BGSD: Tensor
    value_BGSD: Tensor


class AttentionProjections(MergesProjections):
    """q, k, v and o projections of one stream, without biases. Who reads whom is decided by the layer that owns them.

    head_norm_epsilon: normalise each query and key head before it is rotated (Qwen3); None: do not (Gemma).

    Key/value heads are split over the tensor-parallel ranks when there are enough of them. Otherwise every rank computes all of
    them and reads the one that its query heads belong to; the gradients of k and v are then partial sums.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_attention_heads: int,
        num_query_groups: int,
        head_width: int,
        tensor_parallel: TensorParallel,
        head_norm_epsilon: float | None = None,
    ) -> None:
        super().__init__()
        self.head_width = head_width
        self.q_norm = self.k_norm = None
        if head_norm_epsilon is not None:
            self.q_norm = RMSNorm(head_width, head_norm_epsilon, offset=0.0)
            self.k_norm = RMSNorm(head_width, head_norm_epsilon, offset=0.0)
            if tensor_parallel.size > 1:
                # Each rank only sees its own heads.
                mark_partial(self.q_norm)
                mark_partial(self.k_norm)
        self.tensor_parallel = tensor_parallel
        query_size, group_size = num_attention_heads * head_width, num_query_groups * head_width
        self.q_proj = column_parallel_linear(hidden_size, query_size, bias=False, tensor_parallel=tensor_parallel)
        self.own_group: int | None = None
        if num_query_groups % tensor_parallel.size == 0:
            self.k_proj = column_parallel_linear(hidden_size, group_size, bias=False, tensor_parallel=tensor_parallel)
            self.v_proj = column_parallel_linear(hidden_size, group_size, bias=False, tensor_parallel=tensor_parallel)
        else:
            if tensor_parallel.size % num_query_groups:
                raise ValueError(
                    f"--tensor-model-parallel-size {tensor_parallel.size} and --num-query-groups {num_query_groups}: "
                    "one must be a multiple of the other, so that a rank's query heads share one key/value head"
                )
            self.k_proj = replicated_linear(hidden_size, group_size, bias=False)
            self.v_proj = replicated_linear(hidden_size, group_size, bias=False)
            mark_partial(self.k_proj)
            mark_partial(self.v_proj)
            self.own_group = tensor_parallel.rank * num_query_groups // tensor_parallel.size
        self.o_proj = row_parallel_linear(query_size, hidden_size, bias=False, tensor_parallel=tensor_parallel)

    def tokens(self, stream_BSH: Tensor, rotary: RotaryTable) -> Tensor:
        """Normalised residual stream -> the tokens [B, S, H] that the projections read, gathered once for all of them."""
        return gather_samples(stream_BSH, rotary.num_tokens, self.tensor_parallel)

    def projection_groups(self) -> tuple[tuple[nn.Module, ...], ...]:
        """q, k and v read the same tokens."""
        return ((self.q_proj, self.k_proj, self.v_proj),)

    def query_key_value(self, hidden_BSH: Tensor, rotary: RotaryTable) -> tuple[Tensor, KeyValue]:
        """(rotated queries [B, N, S, D], rotated keys and values)."""
        query_BSH, key_BSH, value_BSH = merged_linear(hidden_BSH, (self.q_proj, self.k_proj, self.v_proj), self.merged)
        query_BNSD = self._split_heads(query_BSH)
        query_BNSD = rotate(query_BNSD if self.q_norm is None else self.q_norm(query_BNSD), rotary)
        return query_BNSD, self._key_value(key_BSH, value_BSH, rotary)

    def key_value(self, hidden_BSH: Tensor, rotary: RotaryTable) -> KeyValue:
        """Rotated keys, and values, where nobody asks for queries."""
        key_BSH, value_BSH = merged_linear(hidden_BSH, (self.k_proj, self.v_proj), self.merged)
        return self._key_value(key_BSH, value_BSH, rotary)

    def _key_value(self, key_BSH: Tensor, value_BSH: Tensor, rotary: RotaryTable) -> KeyValue:
        key_BGSD, value_BGSD = self._split_heads(key_BSH), self._split_heads(value_BSH)
        if self.own_group is not None:
            key_BGSD, value_BGSD = key_BGSD.narrow(1, self.own_group, 1), value_BGSD.narrow(1, self.own_group, 1)
        return KeyValue(rotate(key_BGSD if self.k_norm is None else self.k_norm(key_BGSD), rotary), value_BGSD)

    def _split_heads(self, projected_BSH: Tensor) -> Tensor:
        return projected_BSH.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class GatedMlp(MergesProjections):
    """down(activation(gate(x)) * up(x)), without biases."""

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, tensor_parallel: TensorParallel, activation: ActivationName = "gelu_tanh"
    ) -> None:
        super().__init__()
        self.tensor_parallel = tensor_parallel
        self.activation: ActivationName = activation
        self.gate_proj = column_parallel_linear(hidden_size, ffn_hidden_size, bias=False, tensor_parallel=tensor_parallel)
        self.up_proj = column_parallel_linear(hidden_size, ffn_hidden_size, bias=False, tensor_parallel=tensor_parallel)
        self.down_proj = row_parallel_linear(ffn_hidden_size, hidden_size, bias=False, tensor_parallel=tensor_parallel)

    def projection_groups(self) -> tuple[tuple[nn.Module, ...], ...]:
        """gate and up read the same rows."""
        return ((self.gate_proj, self.up_proj),)

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        hidden_BSH = gather_rows(hidden_BSH, self.tensor_parallel)
        if self.merged and self.activation == "gelu_tanh":
            layers = self.gate_proj, self.up_proj, self.down_proj
            if isinstance(self.gate_proj, FusesGatedMlp) and self.gate_proj.fuses_gated_mlp(layers):
                return self.gate_proj.gated_mlp(hidden_BSH, layers)
            return self.down_proj(gated_gelu(joined_linear(hidden_BSH, (self.gate_proj, self.up_proj))))
        gate, up = merged_linear(hidden_BSH, (self.gate_proj, self.up_proj), self.merged)
        return self.down_proj(ACTIVATIONS[self.activation](gate) * up)
