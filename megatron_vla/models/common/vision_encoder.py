"""SigLIP vision tower (arXiv:2303.15343): patches, learned positions, pre-norm layers, final norm, no pooling head.

Between the matrices the residual stream [I, S, H] may be this rank's rows [R, H] (see parallel/sequence_parallel.py).

Shape legend: I images, C channels, Y X pixel rows and columns, S patches, H hidden, N heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_vla.models.common.attention import attend
from megatron_vla.models.common.attention_mask import AttentionBackend, without_mask
from megatron_vla.models.common.merged_linear import MergesProjections, merged_linear
from megatron_vla.models.common.normalization import LayerNorm
from megatron_vla.parallel.linear import column_parallel_linear, row_parallel_linear
from megatron_vla.parallel.sequence_parallel import gather_rows, gather_samples, split_rows
from megatron_vla.parallel.tensor_parallel import NOT_PARALLEL, TensorParallel, on_token_rows


@dataclass(frozen=True, kw_only=True)
class VisionSizes:
    """Sizes of one tower; `image_size` and `patch_size` in pixels."""

    image_size: int
    patch_size: int
    hidden_size: int
    ffn_hidden_size: int
    num_layers: int
    num_attention_heads: int
    norm_epsilon: float

    @property
    def num_patches(self) -> int:
        """Tokens per image."""
        return (self.image_size // self.patch_size) ** 2


class VisionEmbeddings(nn.Module):
    """Patch convolution plus a learned position table. Its parameters stay fp32 in bf16 models (openpi, JAX)."""

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, sizes.hidden_size, kernel_size=sizes.patch_size, stride=sizes.patch_size)
        self.position_embedding = nn.Embedding(sizes.num_patches, sizes.hidden_size)

    def forward(self, images_ICYX: Tensor) -> Tensor:
        """Images in [-1, 1] -> [I, S, H] in the convolution's dtype, patches in row-major order."""
        patches_IHYX = self.patch_embedding(images_ICYX.to(self.patch_embedding.weight.dtype))
        return patches_IHYX.flatten(2).transpose(1, 2) + self.position_embedding.weight


class VisionAttention(MergesProjections):
    """Full self-attention with biases and no mask."""

    def __init__(self, sizes: VisionSizes, backend: AttentionBackend, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.backend = without_mask(backend)
        self.tensor_parallel = tensor_parallel
        self.num_patches = sizes.num_patches
        self.head_width = sizes.hidden_size // sizes.num_attention_heads
        hidden = sizes.hidden_size
        self.q_proj = column_parallel_linear(hidden, hidden, bias=True, tensor_parallel=tensor_parallel)
        self.k_proj = column_parallel_linear(hidden, hidden, bias=True, tensor_parallel=tensor_parallel)
        self.v_proj = column_parallel_linear(hidden, hidden, bias=True, tensor_parallel=tensor_parallel)
        self.out_proj = row_parallel_linear(hidden, hidden, bias=True, tensor_parallel=tensor_parallel)

    def projection_groups(self) -> tuple[tuple[nn.Module, ...], ...]:
        """q, k and v read the same patches."""
        return ((self.q_proj, self.k_proj, self.v_proj),)

    def forward(self, hidden_ISH: Tensor) -> Tensor:
        """[I, S, H] -> [I, S, H]."""
        hidden_ISH = gather_samples(hidden_ISH, self.num_patches, self.tensor_parallel)
        query, key, value = (
            projected.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for projected in merged_linear(hidden_ISH, (self.q_proj, self.k_proj, self.v_proj), self.merged)
        )
        return self.out_proj(attend(query, key, value, None, self.backend))


class VisionMlp(nn.Module):
    """fc2(gelu_tanh(fc1(x)))."""

    def __init__(self, sizes: VisionSizes, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.tensor_parallel = tensor_parallel
        self.fc1 = column_parallel_linear(sizes.hidden_size, sizes.ffn_hidden_size, bias=True, tensor_parallel=tensor_parallel)
        self.fc2 = row_parallel_linear(sizes.ffn_hidden_size, sizes.hidden_size, bias=True, tensor_parallel=tensor_parallel)

    def forward(self, hidden_ISH: Tensor) -> Tensor:
        """[I, S, H] -> [I, S, H]."""
        return self.fc2(F.gelu(self.fc1(gather_rows(hidden_ISH, self.tensor_parallel)), approximate="tanh"))


class VisionLayer(nn.Module):
    """One pre-norm encoder layer."""

    def __init__(self, sizes: VisionSizes, backend: AttentionBackend, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.layer_norm1 = on_token_rows(LayerNorm(sizes.hidden_size, eps=sizes.norm_epsilon), tensor_parallel)
        self.self_attn = VisionAttention(sizes, backend, tensor_parallel)
        self.layer_norm2 = on_token_rows(LayerNorm(sizes.hidden_size, eps=sizes.norm_epsilon), tensor_parallel)
        self.mlp = VisionMlp(sizes, tensor_parallel)

    def forward(self, hidden_ISH: Tensor) -> Tensor:
        """[I, S, H] -> [I, S, H]."""
        hidden_ISH = hidden_ISH + self.self_attn(self.layer_norm1(hidden_ISH))
        return hidden_ISH + self.mlp(self.layer_norm2(hidden_ISH))


class VisionEncoder(nn.Module):
    """The tower: embeddings, `layers.N`, final norm."""

    def __init__(
        self, sizes: VisionSizes, backend: AttentionBackend = "sdpa", tensor_parallel: TensorParallel = NOT_PARALLEL
    ) -> None:
        super().__init__()
        self.embeddings = VisionEmbeddings(sizes)
        self.layers = nn.ModuleList(VisionLayer(sizes, backend, tensor_parallel) for _ in range(sizes.num_layers))
        self.post_layernorm = on_token_rows(LayerNorm(sizes.hidden_size, eps=sizes.norm_epsilon), tensor_parallel)
        self.tensor_parallel = tensor_parallel

    @property
    def stream_dtype(self) -> torch.dtype:
        """Dtype of the layers' matrices and residual stream."""
        return next(cast(VisionLayer, self.layers[0]).mlp.parameters()).dtype

    def forward(self, images_ICYX: Tensor) -> Tensor:
        """Images in [-1, 1] -> features [I, S, H] (a residual stream) in the dtype of the layers' matrices."""
        hidden_ISH = self.embeddings(images_ICYX)
        hidden_ISH = split_rows(hidden_ISH.to(self.stream_dtype), self.tensor_parallel)
        for layer in self.layers:
            hidden_ISH = layer(hidden_ISH)
        return self.post_layernorm(hidden_ISH)
