"""Attention with biases and one key head per query head: vision towers, vision-language layers, diffusion transformers.

Shape legend: B samples, Q query tokens, K key tokens, H hidden, N heads, D head width.
"""

from __future__ import annotations

from torch import Tensor, nn

from megatron_vla.models.common.attention import attend
from megatron_vla.models.common.attention_mask import AttentionBackend, without_mask
from megatron_vla.models.common.decoder_layer import KeyValue
from megatron_vla.models.common.merged_linear import MergesProjections, merged_linear
from megatron_vla.parallel.linear import column_parallel_linear, row_parallel_linear
from megatron_vla.parallel.tensor_parallel import TensorParallel


class MultiHeadAttention(MergesProjections):
    """q, k, v and out projections. `memory_size`: width of what keys and values are made of, when they are not the queries'.

    Inputs are tokens that column-parallel matrices read (gathered); the output is a residual stream.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        head_width: int,
        backend: AttentionBackend,
        tensor_parallel: TensorParallel,
        memory_size: int | None = None,
    ) -> None:
        super().__init__()
        self.backend = without_mask(backend)
        self.tensor_parallel = tensor_parallel
        self.head_width = head_width
        self.reads_others = memory_size is not None
        inner = num_heads * head_width
        memory_size = hidden_size if memory_size is None else memory_size
        self.q_proj = column_parallel_linear(hidden_size, inner, bias=True, tensor_parallel=tensor_parallel)
        self.k_proj = column_parallel_linear(memory_size, inner, bias=True, tensor_parallel=tensor_parallel)
        self.v_proj = column_parallel_linear(memory_size, inner, bias=True, tensor_parallel=tensor_parallel)
        self.out_proj = row_parallel_linear(inner, hidden_size, bias=True, tensor_parallel=tensor_parallel)

    def split_heads(self, projected_BSH: Tensor) -> Tensor:
        """[B, S, N * D] -> [B, N, S, D]."""
        return projected_BSH.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def projection_groups(self) -> tuple[tuple[nn.Module, ...], ...]:
        """q, k and v read the same tokens; of a module that reads other tokens, k and v."""
        return ((self.k_proj, self.v_proj),) if self.reads_others else ((self.q_proj, self.k_proj, self.v_proj),)

    def key_value(self, memory_BKH: Tensor, mask_B11K: Tensor) -> KeyValue:
        """Keys and values [B, N, K, D] of the tokens that are read."""
        key_BKH, value_BKH = merged_linear(memory_BKH, (self.k_proj, self.v_proj), self.merged)
        return self.of_memory(key_BKH, value_BKH, mask_B11K)

    def of_memory(self, key_BKH: Tensor, value_BKH: Tensor, mask_B11K: Tensor) -> KeyValue:
        """Projected keys and values of tokens that are read, by heads [B, N, K, D]; the keys less their mean.

        What all keys have in common adds the same to all scores of a query, and softmax drops it. But fused kernels subtract
        from a score's gradient a mean that they compute from the rounded output: that error, times what the keys have in
        common, lands in the gradient of the queries. In bf16 it was up to 2.6 times the gradient itself where the tokens read
        resemble each other (small GR00T on an H200), and is 4 % without the mean. The mean is a constant: the gradients of
        all keys add up to zero. mask: additive, so its softmax is 1 / n on the n tokens that are read.
        """
        weight_BK1 = mask_B11K[:, 0, 0].softmax(-1).to(key_BKH.dtype).unsqueeze(-1)
        key_BKH = key_BKH - (weight_BK1 * key_BKH.detach()).sum(1, keepdim=True)
        return KeyValue(self.split_heads(key_BKH), self.split_heads(value_BKH))

    def query_key_value(self, tokens_BSH: Tensor) -> tuple[Tensor, KeyValue]:
        """(queries, keys and values) [B, N, S, D] of tokens that read each other."""
        parts = merged_linear(tokens_BSH, (self.q_proj, self.k_proj, self.v_proj), self.merged)
        query_BNSD, key_BNSD, value_BNSD = (self.split_heads(part) for part in parts)
        return query_BNSD, KeyValue(key_BNSD, value_BNSD)

    def read(self, tokens_BQH: Tensor, memory: KeyValue | None = None, mask_B11K: Tensor | None = None) -> Tensor:
        """What the tokens read from `memory`, or from each other: [B, Q, H].

        `tokens_BQH` may have several sequences for each sample of the memory, in a row (B is then their number): they read it
        blind to each other, as more queries of one sample.
        """
        if memory is None:
            query_BNQD, memory = self.query_key_value(tokens_BQH)
        else:
            query_BQH = self.q_proj(tokens_BQH)
            query_BNQD = self.split_heads(query_BQH.reshape(memory.key_BGSD.shape[0], -1, query_BQH.shape[-1]))
        attended_BQH = attend(query_BNQD, *memory, mask_B11K, self.backend)
        return self.out_proj(attended_BQH.reshape(*tokens_BQH.shape[:2], -1))
