"""Qwen3-VL's vision tower: patch rows to image tokens, and deepstack features from three depths.

Positions come with the batch (metadata.py). Between the layers, tokens are [I, Q, H] when all images are equally large, else
[1, P, H]; under sequence parallelism this rank's rows.

Shape legend: P patches of all images, C values of a patch, I images, Q patches of the largest image, H vision hidden, M image
tokens, U patches merged into a token, O text hidden.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_vla.models.common.attention_mask import AttentionBackend
from megatron_vla.models.common.feed_forward import FeedForward
from megatron_vla.models.common.normalization import LayerNorm
from megatron_vla.models.common.rotary import plane_rotary_table
from megatron_vla.models.common.vision_encoder import PaddedImages, VisionLayer, VisionLayerSizes, VisionPlan
from megatron_vla.models.groot_n1_7.batch import GrootN17Batch
from megatron_vla.models.groot_n1_7.config import IMAGE_CHANNELS, VISION_ROPE_THETA, GrootN17Config
from megatron_vla.parallel.sequence_parallel import join_samples, split_rows
from megatron_vla.parallel.tensor_parallel import TensorParallel


class PatchEmbedding(nn.Module):
    """A convolution whose kernel equals its stride: one matrix product. The weight keeps the convolution's shape."""

    def __init__(self, config: GrootN17Config) -> None:
        super().__init__()
        side = config.vision_patch_size
        shape = (config.vision_hidden_size, IMAGE_CHANNELS, config.vision_temporal_patch_size, side, side)
        self.weight = nn.Parameter(torch.zeros(shape))
        self.bias = nn.Parameter(torch.zeros(config.vision_hidden_size))

    def forward(self, pixels_PC: Tensor) -> Tensor:
        """Patch rows -> [P, H]. Rows of one uint8 frame are scaled to [-1, 1] and repeated for every frame of the kernel."""
        weight_HC = self.weight.flatten(1)
        if pixels_PC.dtype == torch.uint8:
            wide = torch.promote_types(weight_HC.dtype, torch.float32)
            # The processor's own steps: to [0, 1], then (x - 0.5) / 0.5.
            unit_PC = (pixels_PC.to(wide) / 255.0 - 0.5) / 0.5
            frames = self.weight.shape[2]
            pixels_PC = unit_PC.unflatten(1, (IMAGE_CHANNELS, 1, -1)).expand(-1, -1, frames, -1).flatten(1)
        return F.linear(pixels_PC.to(weight_HC.dtype), weight_HC, self.bias)


class PatchPositions(nn.Embedding):
    """A square table of positions, interpolated to each image's grid. Read in here: sharding gathers a module's own weights."""

    def forward(self, patch_table_4P: Tensor, patch_weight_4P: Tensor) -> Tensor:  # type: ignore[override]
        """Rows of the table around each patch, and their shares -> [P, H]."""
        position_PH: Tensor | float = 0.0
        # One look-up per corner: four gathered [P, H] at once would be the tower's largest tensor.
        for rows_P, shares_P in zip(patch_table_4P, patch_weight_4P, strict=True):
            shares_P1 = shares_P.to(self.weight.dtype).unsqueeze(-1)
            position_PH = position_PH + F.embedding(rows_P, self.weight) * shares_P1
        return cast(Tensor, position_PH)


class PatchMerger(nn.Module):
    """Neighbouring patches -> one text-width token: norm, then MLP. `norm_merged`: the norm sees the joined patches."""

    def __init__(self, config: GrootN17Config, tensor_parallel: TensorParallel, *, norm_merged: bool) -> None:
        super().__init__()
        self.width = config.vision_hidden_size * config.merge_unit
        self.norm_merged = norm_merged
        self.norm = LayerNorm(self.width if norm_merged else config.vision_hidden_size, eps=config.norm_epsilon)
        self.mlp = FeedForward(self.width, self.width, tensor_parallel, activation="gelu", output_size=config.hidden_size)

    def forward(self, patches_PH: Tensor) -> Tensor:
        """[P, H] -> [M, O]; patches of one token are neighbours (merge-block order)."""
        if self.norm_merged:
            return self.mlp(self.norm(patches_PH.reshape(-1, self.width)))
        return self.mlp(self.norm(patches_PH).reshape(-1, self.width))


class VisionTower(nn.Module):
    """patch_embedding, position_embedding, layers.N, merger, deepstack_mergers.N."""

    def __init__(self, config: GrootN17Config, backend: AttentionBackend, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.config = config
        self.tensor_parallel = tensor_parallel
        # Merging needs neighbouring rows, which a rank's share may cut apart: all ranks hold all rows there.
        whole_rows = dataclasses.replace(tensor_parallel, sequence_parallel=False)
        sizes = VisionLayerSizes(
            hidden_size=config.vision_hidden_size,
            ffn_hidden_size=config.vision_ffn_hidden_size,
            num_attention_heads=config.vision_num_attention_heads,
            norm_epsilon=config.norm_epsilon,
        )
        self.patch_embedding = PatchEmbedding(config)
        self.position_embedding = PatchPositions(config.vision_num_position_embeddings, config.vision_hidden_size)
        self.layers = nn.ModuleList(VisionLayer(sizes, backend, tensor_parallel) for _ in range(config.vision_num_layers))
        self.merger = PatchMerger(config, whole_rows, norm_merged=False)
        self.deepstack_mergers = nn.ModuleList(
            PatchMerger(config, whole_rows, norm_merged=True) for _ in config.vision_deepstack_layers
        )

    def forward(self, batch: GrootN17Batch) -> tuple[Tensor, list[Tensor]]:
        """(image tokens [M, O] in the order of the images, one such tensor per deepstack layer)."""
        hidden, plan = self.embed(batch), self.plan(batch, self.stream_dtype)
        features: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, plan)
            if index in self.config.vision_deepstack_layers:
                features.append(self.merged(f"deepstack_mergers.{len(features)}", hidden, plan))
        return self.merged("merger", hidden, plan), features

    def embed(self, batch: GrootN17Batch) -> Tensor:
        """Patches with their positions: the first layer's input, a residual stream."""
        patches_PH = self.patch_embedding(batch.pixels_PC)
        position_PH = self.position_embedding(batch.patch_table_4P, batch.patch_weight_4P)
        hidden_PH = (patches_PH + position_PH).to(self.stream_dtype)
        return split_rows(self._by_image(hidden_PH, batch), self.tensor_parallel)

    @property
    def stream_dtype(self) -> torch.dtype:
        """Dtype of the layers' matrices and residual stream."""
        return self.patch_embedding.weight.dtype

    def plan(self, batch: GrootN17Batch, dtype: torch.dtype) -> VisionPlan:
        """Rotary tables and, for images of different sizes, their padded layout; `dtype` is the activations'."""
        head_width = self.config.vision_hidden_size // self.config.vision_num_attention_heads
        num_patches, row_IQ = batch.pixels_PC.shape[0], batch.image_row_IQ
        padded = None
        place_IQ2 = batch.patch_place_P2.view(row_IQ.shape[0], -1, 2) if row_IQ.numel() == num_patches else None
        if place_IQ2 is None:
            place_IQ2 = batch.patch_place_P2[row_IQ.clamp(min=0)]
            mask = torch.zeros(row_IQ.shape, dtype=dtype, device=row_IQ.device)
            padded = PaddedImages(row_IQ, batch.patch_slot_P, mask.masked_fill(row_IQ < 0, float("-inf"))[:, None, None])
        rotary = plane_rotary_table(place_IQ2, head_width, VISION_ROPE_THETA, dtype)
        return VisionPlan(row_IQ.shape[1] if padded is None else num_patches, rotary, padded)

    def _by_image(self, hidden_PH: Tensor, batch: GrootN17Batch) -> Tensor:
        """[P, H] -> [I, Q, H] when that is only a view."""
        row_IQ = batch.image_row_IQ
        return hidden_PH.view(*row_IQ.shape, -1) if row_IQ.numel() == hidden_PH.shape[0] else hidden_PH[None]

    def merged(self, merger: str, hidden: Tensor, plan: VisionPlan) -> Tensor:
        """Layer output -> tokens [M, O] by the merger of that name."""
        patches_PH = join_samples(hidden, plan.num_tokens, self.tensor_parallel).flatten(0, 1)
        tokens_MO: Tensor = self.get_submodule(merger)(patches_PH)
        return tokens_MO
