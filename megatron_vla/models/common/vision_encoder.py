"""SigLIP vision tower (arXiv:2303.15343): patches, learned positions, pre-norm layers, final norm, no pooling head.

The layers also serve towers with rotary positions and images of different sizes (VisionPlan).

Between the matrices the residual stream [I, S, H] may be this rank's rows [R, H] (see parallel/sequence_parallel.py).

Shape legend: I images, C channels, Y X pixel rows and columns, S patches of an image, P patches of all images, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_vla.models.common.attention import attend
from megatron_vla.models.common.attention_mask import AttentionBackend
from megatron_vla.models.common.feed_forward import FeedForward
from megatron_vla.models.common.merged_linear import merged_linear
from megatron_vla.models.common.multi_head_attention import MultiHeadAttention
from megatron_vla.models.common.normalization import LayerNorm
from megatron_vla.models.common.rotary import RotaryTable, rotate
from megatron_vla.parallel.sequence_parallel import gather_samples, split_rows
from megatron_vla.parallel.tensor_parallel import NOT_PARALLEL, TensorParallel, on_token_rows


@dataclass(frozen=True, kw_only=True)
class VisionLayerSizes:
    """Sizes of one layer."""

    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    norm_epsilon: float


@dataclass(frozen=True, kw_only=True)
class VisionSizes(VisionLayerSizes):
    """Sizes of one SigLIP tower; `image_size` and `patch_size` in pixels."""

    image_size: int
    patch_size: int
    num_layers: int

    @property
    def num_patches(self) -> int:
        """Tokens per image."""
        return (self.image_size // self.patch_size) ** 2


class VisionEmbeddings(nn.Module):
    """Patch convolution plus a learned position table. Its parameters stay fp32 in bf16 models (openpi, JAX).

    The kernel of the convolution equals its stride, so it is computed as one matrix product on rows of pixels: for 64 images of
    256 patches on an H200 the library's convolution takes 1.8 ms forward and backward, most of it in changes of layout.
    """

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        self.patch_size = sizes.patch_size
        # Never called: it holds the parameters, under their names and in their shapes.
        self.patch_embedding = nn.Conv2d(3, sizes.hidden_size, kernel_size=sizes.patch_size, stride=sizes.patch_size)
        self.position_embedding = nn.Embedding(sizes.num_patches, sizes.hidden_size)

    def forward(self, images_ICYX: Tensor) -> Tensor:
        """Images in [-1, 1] -> [I, S, H] in the convolution's dtype, patches in row-major order."""
        convolution, side = self.patch_embedding, self.patch_size
        # [I, C, rows, side, columns, side] -> [I, rows x columns, C x side x side]: the order of the weight's elements.
        grid = images_ICYX.to(convolution.weight.dtype).unflatten(3, (-1, side)).unflatten(2, (-1, side))
        pixels_ISK = grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return F.linear(pixels_ISK, convolution.weight.flatten(1), convolution.bias) + self.position_embedding.weight


@dataclass(frozen=True)
class PaddedImages:
    """Images of different sizes that lie end to end: their rows as a padded batch [I, S] (-1: padding), and back [P]."""

    row_IS: Tensor
    slot_P: Tensor
    mask_I11S: Tensor

    def split(self, rows_1PH: Tensor) -> Tensor:
        """[1, P, H] -> [I, S, H]; padding repeats row 0, and the mask hides it."""
        return rows_1PH[0][self.row_IS.clamp(min=0)]

    def join(self, images_ISH: Tensor) -> Tensor:
        """[I, S, H] -> [1, P, H]."""
        return images_ISH.flatten(0, 1)[self.slot_P][None]


@dataclass(frozen=True)
class VisionPlan:
    """What all layers of one forward pass share.

    num_tokens: axis 1 of the tokens between the layers, one image's patches [I, S, H], or all patches [1, P, H] with `padded`.
    rotary: of every image's patches; None: no rotary positions.
    """

    num_tokens: int
    rotary: RotaryTable | None = None
    padded: PaddedImages | None = None


class VisionAttention(MultiHeadAttention):
    """Self-attention inside each image."""

    def __init__(self, sizes: VisionLayerSizes, backend: AttentionBackend, tensor_parallel: TensorParallel) -> None:
        super().__init__(
            sizes.hidden_size,
            num_heads=sizes.num_attention_heads,
            head_width=sizes.hidden_size // sizes.num_attention_heads,
            backend=backend,
            tensor_parallel=tensor_parallel,
        )

    def forward(self, hidden_ISH: Tensor, plan: VisionPlan) -> Tensor:
        """[I, S, H] -> [I, S, H] (or [1, P, H], see VisionPlan)."""
        hidden_ISH = gather_samples(hidden_ISH, plan.num_tokens, self.tensor_parallel)
        projected = merged_linear(hidden_ISH, (self.q_proj, self.k_proj, self.v_proj), self.merged)
        if plan.padded is not None:
            projected = tuple(plan.padded.split(rows) for rows in projected)
        query, key, value = (self.split_heads(tokens) for tokens in projected)
        if plan.rotary is not None:
            query, key = rotate(query, plan.rotary), rotate(key, plan.rotary)
        mask = None if plan.padded is None else plan.padded.mask_I11S
        # FlashAttention-2 is a choice for attention without a mask.
        backend = self.backend if mask is None or self.backend == "eager" else "sdpa"
        attended_ISH = attend(query, key, value, mask, backend)
        return self.out_proj(attended_ISH if plan.padded is None else plan.padded.join(attended_ISH))


class VisionLayer(nn.Module):
    """One pre-norm encoder layer."""

    def __init__(self, sizes: VisionLayerSizes, backend: AttentionBackend, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.layer_norm1 = on_token_rows(LayerNorm(sizes.hidden_size, eps=sizes.norm_epsilon), tensor_parallel)
        self.self_attn = VisionAttention(sizes, backend, tensor_parallel)
        self.layer_norm2 = on_token_rows(LayerNorm(sizes.hidden_size, eps=sizes.norm_epsilon), tensor_parallel)
        self.mlp = FeedForward(sizes.hidden_size, sizes.ffn_hidden_size, tensor_parallel)

    def forward(self, hidden_ISH: Tensor, plan: VisionPlan) -> Tensor:
        """[I, S, H] -> [I, S, H]."""
        hidden_ISH, normalized_ISH = self.layer_norm1(hidden_ISH, with_input=True)
        hidden_ISH, normalized_ISH = self.layer_norm2(hidden_ISH, self.self_attn(normalized_ISH, plan))
        return hidden_ISH + self.mlp(normalized_ISH)


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
        self.num_patches = sizes.num_patches

    @property
    def stream_dtype(self) -> torch.dtype:
        """Dtype of the layers' matrices and residual stream."""
        return next(cast(VisionLayer, self.layers[0]).mlp.parameters()).dtype

    def forward(self, images_ICYX: Tensor) -> Tensor:
        """Images in [-1, 1] -> features [I, S, H] (a residual stream) in the dtype of the layers' matrices."""
        hidden_ISH = self.embeddings(images_ICYX)
        hidden_ISH = split_rows(hidden_ISH.to(self.stream_dtype), self.tensor_parallel)
        plan = VisionPlan(self.num_patches)
        for layer in self.layers:
            hidden_ISH = layer(hidden_ISH, plan)
        return self.post_layernorm(hidden_ISH)
