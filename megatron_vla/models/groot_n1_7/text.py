"""Qwen3-VL's text layers: token embedding with image tokens in place, causal layers, deepstack additions.

Shape legend: B samples, S tokens, H hidden, M image tokens of all samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_vla.models.common.attention import attend
from megatron_vla.models.common.attention_mask import AttentionBackend, causal_mask
from megatron_vla.models.common.decoder_layer import AttentionProjections, GatedMlp
from megatron_vla.models.common.normalization import RMSNorm
from megatron_vla.models.common.precision import dtype_of
from megatron_vla.models.common.rotary import RotaryTable, sectioned_rotary_table
from megatron_vla.models.groot_n1_7.batch import GrootN17Batch
from megatron_vla.models.groot_n1_7.config import GrootN17Config
from megatron_vla.parallel.linear import token_embedding
from megatron_vla.parallel.sequence_parallel import split_rows
from megatron_vla.parallel.tensor_parallel import TensorParallel, on_token_rows


@dataclass(frozen=True)
class TextPlan:
    """What all text layers of one forward pass share."""

    rotary: RotaryTable
    mask_B1SS: Tensor
    is_padding_BS1: Tensor


class TextLayer(nn.Module):
    """One pre-norm decoder layer. Attention of padding rows is zero, as unpadded kernels leave it."""

    def __init__(self, config: GrootN17Config, backend: AttentionBackend, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.backend = backend
        self.input_norm = on_token_rows(RMSNorm(config.hidden_size, config.norm_epsilon, offset=0.0), tensor_parallel)
        self.attention = AttentionProjections(
            config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_query_groups,
            head_width=config.kv_channels,
            tensor_parallel=tensor_parallel,
            head_norm_epsilon=config.norm_epsilon,
        )
        self.post_attention_norm = on_token_rows(RMSNorm(config.hidden_size, config.norm_epsilon, offset=0.0), tensor_parallel)
        self.mlp = GatedMlp(config.hidden_size, config.ffn_hidden_size, tensor_parallel, "silu")

    def forward(self, hidden_BSH: Tensor, plan: TextPlan) -> Tensor:
        """Residual stream -> residual stream, in the dtype of this layer's matrices."""
        # A trained layer above frozen ones may have another dtype.
        hidden_BSH = hidden_BSH.to(dtype_of(self.mlp.down_proj))
        hidden_BSH, normalized_BSH = self.input_norm(hidden_BSH, with_input=True)
        tokens_BSH = self.attention.tokens(normalized_BSH, plan.rotary)
        query, key_value = self.attention.query_key_value(tokens_BSH, plan.rotary)
        attended_BSH = attend(query, *key_value, plan.mask_B1SS.to(query.dtype), self.backend)
        attended_BSH = self.attention.o_proj(attended_BSH.masked_fill(plan.is_padding_BS1, 0.0))
        hidden_BSH, normalized_BSH = self.post_attention_norm(hidden_BSH, attended_BSH)
        return hidden_BSH + self.mlp(normalized_BSH)


def build_text_layers(config: GrootN17Config, backend: AttentionBackend, tensor_parallel: TensorParallel) -> nn.ModuleList:
    """The kept layers."""
    return nn.ModuleList(TextLayer(config, backend, tensor_parallel) for _ in range(config.num_layers))


def build_token_embedding(config: GrootN17Config, tensor_parallel: TensorParallel) -> nn.Module:
    """The token table."""
    return token_embedding(config.vocab_size, config.hidden_size, tensor_parallel=tensor_parallel)


def plan_text(batch: GrootN17Batch, config: GrootN17Config, dtype: torch.dtype) -> TextPlan:
    """Rotary tables and masks; `dtype` is the activations'."""
    rotary = sectioned_rotary_table(
        batch.token_position_3BS, config.mrope_sections, config.kv_channels, config.rope_theta, dtype
    )
    is_valid_BS = batch.token_is_valid_BS
    return TextPlan(rotary, causal_mask(is_valid_BS, dtype), ~is_valid_BS.unsqueeze(-1))


def embed_tokens(table: nn.Module, image_MH: Tensor, batch: GrootN17Batch, tensor_parallel: TensorParallel) -> Tensor:
    """Token embeddings with image tokens overwritten by image features: the first text layer's input, a residual stream."""
    embedded_BSH = table(batch.tokens_BS)
    rows = embedded_BSH.flatten(0, 1).index_copy(0, batch.image_token_M, image_MH.to(embedded_BSH.dtype))
    return split_rows(rows.view_as(embedded_BSH), tensor_parallel)


def add_image_features(stream: Tensor, image_MH: Tensor, batch: GrootN17Batch, tensor_parallel: TensorParallel) -> Tensor:
    """Add features to the rows of image tokens."""
    num_samples, num_tokens = batch.tokens_BS.shape
    if not tensor_parallel.sequence_parallel:
        rows = stream.flatten(0, 1).index_add(0, batch.image_token_M, image_MH.to(stream.dtype))
        return rows.view_as(stream)
    # This rank's rows are a slice of all: spread the features first.
    spread = stream.new_zeros(num_samples * num_tokens, stream.shape[-1])
    spread = spread.index_copy(0, batch.image_token_M, image_MH.to(stream.dtype))
    return stream + split_rows(spread.view(num_samples, num_tokens, -1), tensor_parallel)
