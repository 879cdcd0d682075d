"""Layers of GR00T's action head: vision-language self-attention and the blocks of the diffusion transformer (DiT).

Under sequence parallelism the streams between the layers are this rank's rows.

Shape legend: B samples (of the DiT's own tokens: action chunks, see model.py), S vision-language tokens, K tokens that a block
reads, T action steps, Z state and action tokens, H their widths, C condition width.
"""

from __future__ import annotations

from torch import Tensor, nn

from megatron_vla.models.common.attention_mask import AttentionBackend
from megatron_vla.models.common.decoder_layer import KeyValue
from megatron_vla.models.common.dropout import Dropout, twice
from megatron_vla.models.common.feed_forward import FeedForward
from megatron_vla.models.common.multi_head_attention import MultiHeadAttention
from megatron_vla.models.common.normalization import AdaptiveLayerNorm, LayerNorm, PlainLayerNorm
from megatron_vla.models.groot_n1_7.config import GrootN17Config
from megatron_vla.parallel.sequence_parallel import RowOwners, gather_samples
from megatron_vla.parallel.tensor_parallel import TensorParallel, on_token_rows

HEAD_NORM_EPSILON = 1e-5
OUTPUT_NORM_EPSILON = 1e-6


class ActionPositions(nn.Embedding):
    """A learned vector per action step. Added here: sharding gathers a module's own weights, during its forward alone."""

    def forward(self, action_BTH: Tensor) -> Tensor:
        """Action tokens, each with its step's vector added."""
        return action_BTH + self.weight[: action_BTH.shape[1]].to(action_BTH.dtype)


class VisionLanguageLayer(nn.Module):
    """Pre-norm self-attention over all tokens of the backbone, padding included unless `mask` says otherwise."""

    def __init__(self, config: GrootN17Config, backend: AttentionBackend, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.tensor_parallel = tensor_parallel
        width = config.hidden_size
        self.norm1 = on_token_rows(LayerNorm(width, eps=HEAD_NORM_EPSILON), tensor_parallel)
        self.attention = MultiHeadAttention(
            width,
            num_heads=config.vl_num_attention_heads,
            head_width=width // config.vl_num_attention_heads,
            backend=backend,
            tensor_parallel=tensor_parallel,
        )
        # The released code drops twice in a row; one dropout with the joint probability has the same distribution.
        self.dropout = Dropout(twice(config.dropout), is_split=tensor_parallel.sequence_parallel)
        self.norm2 = on_token_rows(LayerNorm(width, eps=HEAD_NORM_EPSILON), tensor_parallel)
        self.mlp = FeedForward(width, config.vl_ffn_hidden_size, tensor_parallel, dropout=config.dropout)

    def forward(self, hidden_BSH: Tensor, num_tokens: int, mask_B11S: Tensor | None) -> Tensor:
        """Residual stream -> residual stream."""
        hidden_BSH, normalized_BSH = self.norm1(hidden_BSH, with_input=True)
        tokens_BSH = gather_samples(normalized_BSH, num_tokens, self.tensor_parallel)
        attended = self.attention.read(tokens_BSH, None, mask_B11S)
        hidden_BSH, normalized_BSH = self.norm2(hidden_BSH, self.dropout(attended))
        return hidden_BSH + self.mlp(normalized_BSH)


class DitBlock(nn.Module):
    """One block: adaptive norm, attention (own tokens, or text or image tokens of the backbone), MLP."""

    def __init__(self, config: GrootN17Config, index: int, backend: AttentionBackend, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.tensor_parallel = tensor_parallel
        width = config.dit_hidden_size
        self.reads_backbone = index % 2 == 0
        self.norm1 = AdaptiveLayerNorm(width, width, HEAD_NORM_EPSILON, shift_first=False)
        self.attention = MultiHeadAttention(
            width,
            num_heads=config.dit_num_attention_heads,
            head_width=config.dit_kv_channels,
            backend=backend,
            tensor_parallel=tensor_parallel,
            memory_size=config.hidden_size if self.reads_backbone else None,
        )
        self.dropout = Dropout(twice(config.dropout), is_split=tensor_parallel.sequence_parallel)
        self.norm2 = PlainLayerNorm(HEAD_NORM_EPSILON)
        self.mlp = FeedForward(width, config.dit_ffn_hidden_size, tensor_parallel, dropout=config.dropout)

    def forward(
        self,
        hidden_BZH: Tensor,
        condition_BC: Tensor,
        num_tokens: int,
        owners: RowOwners | None,
        memory: Tensor | KeyValue | None,
        mask_B11K: Tensor | None,
    ) -> Tensor:
        """Next hidden. memory: what a block that reads the backbone reads, as (gathered) tokens [B, K, H] or as their keys and
        values; None: its own tokens."""
        if isinstance(memory, Tensor):
            assert mask_B11K is not None, "there is one for everything that is read"
            memory = self.attention.key_value(memory, mask_B11K)
        return self.with_memory(hidden_BZH, condition_BC, num_tokens, owners, memory, mask_B11K)

    def with_memory(
        self,
        hidden_BZH: Tensor,
        condition_BC: Tensor,
        num_tokens: int,
        owners: RowOwners | None,
        memory: KeyValue | None,
        mask_B11K: Tensor | None,
    ) -> Tensor:
        """`forward` with keys and values that were computed before (sampling does so once for all steps)."""
        tokens_BZH = gather_samples(self.norm1(hidden_BZH, condition_BC, owners), num_tokens, self.tensor_parallel)
        hidden_BZH = hidden_BZH + self.dropout(self.attention.read(tokens_BZH, memory, mask_B11K))
        return hidden_BZH + self.mlp(self.norm2(hidden_BZH))
