"""Pi0.5 (openpi, arXiv:2504.16054): SigLIP features and prompt tokens, read by an action expert that predicts flow velocity.

Shape legend: B samples, V views, C channels, Y X pixel rows and columns, L prompt slots, P prefix tokens (V * patches + L),
T action horizon, A padded action dimensions, H prefix hidden, E expert hidden, D action chunks: each sample's draws of noise
in a row (--flow-draws). What is said of B in the action stream holds for D.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_vla.data.batch import Batch
from megatron_vla.data.image import pixels_to_model_range
from megatron_vla.data.packed_batch import PackedBatch
from megatron_vla.models.common.attention_mask import LENGTH_BACKENDS, AttentionBackend, valid_first_order
from megatron_vla.models.common.decoder_layer import KeyValue
from megatron_vla.models.common.flow_matching import (
    flow_time_embedding,
    integrate_velocity,
    mean_over_draws,
    noisy_actions,
    repeated,
    target_velocity,
)
from megatron_vla.models.common.normalization import AdaptiveRMSNorm, RMSNorm
from megatron_vla.models.common.vision_encoder import VisionEncoder, VisionSizes
from megatron_vla.models.pi05.config import Pi05Config
from megatron_vla.models.pi05.flops import model_units
from megatron_vla.models.pi05.layers import AnyAttentionPlan, AttentionPlan, JointLayer, plan_attention
from megatron_vla.models.pi05.packed import embed_packed_prefix, plan_packed_attention
from megatron_vla.parallel.linear import replicated_linear, row_local_linear, token_embedding
from megatron_vla.parallel.sequence_parallel import join_samples, split_rows
from megatron_vla.parallel.tensor_parallel import NOT_PARALLEL, TensorParallel, on_token_rows

PADDING_TOKEN = 0


@dataclass(frozen=True)
class PrefixCache:
    """What sampling keeps of the prefix: every layer's keys and values, and the attention plan."""

    layers: tuple[KeyValue, ...]
    plan: AttentionPlan


class Pi05Model(nn.Module):
    """Loss elements from a Batch (`forward`), or actions from noise (`sample_actions`). It never draws random numbers.

    Parameters that the action loss cannot reach have requires_grad=False (see `mark_dead_parameters`), whether or not
    `skip_dead_compute` leaves their computation out.
    """

    def __init__(
        self,
        config: Pi05Config,
        *,
        attention_backend: AttentionBackend = "sdpa",
        skip_dead_compute: bool = True,
        tensor_parallel: TensorParallel = NOT_PARALLEL,
    ) -> None:
        super().__init__()
        self.config = config
        self.skip_dead_compute = skip_dead_compute
        self.attention_backend = attention_backend
        self.tensor_parallel = tensor_parallel
        width = config.expert_hidden_size
        self.vision_tower = VisionEncoder(vision_sizes(config), attention_backend, tensor_parallel)
        self.vision_projector = row_local_linear(
            config.vision_hidden_size, config.hidden_size, bias=True, tensor_parallel=tensor_parallel
        )
        self.token_embedding = token_embedding(
            config.vocab_size, config.hidden_size, padding_index=PADDING_TOKEN, tensor_parallel=tensor_parallel
        )
        self.layers = nn.ModuleList(
            JointLayer(
                config,
                prefix_keys_only=skip_dead_compute and index == config.num_layers - 1,
                backend=attention_backend,
                tensor_parallel=tensor_parallel,
            )
            for index in range(config.num_layers)
        )
        self.prefix_norm = on_token_rows(RMSNorm(config.hidden_size, config.norm_epsilon), tensor_parallel)
        self.suffix_norm = AdaptiveRMSNorm(width, width, config.norm_epsilon)
        self.action_in_proj = replicated_linear(config.max_action_dim, width, bias=True)
        self.action_out_proj = replicated_linear(width, config.max_action_dim, bias=True)
        self.time_mlp_in = replicated_linear(width, width, bias=True)
        self.time_mlp_out = replicated_linear(width, width, bias=True)
        self.mark_dead_parameters()

    def mark_dead_parameters(self) -> None:
        """Take parameters without a gradient out of training, as torch's optimizers do with `grad is None`.

        The last prefix layer is only read through its keys and values. In the reference its query projection has a gradient of
        exact zeros, not None, so weight decay still acts on it: `decay_only` tells the optimizer.
        """
        last = cast(JointLayer, list(self.layers.children())[-1]).prefix
        for module in (last.attention.o_proj, last.post_attention_norm, last.mlp, self.prefix_norm):
            module.requires_grad_(False)
        for parameter in last.attention.q_proj.parameters():
            parameter.requires_grad_(False)
            parameter.decay_only = True  # type: ignore[attr-defined]

    @property
    def interface_dtype(self) -> torch.dtype:
        """Dtype of actions, flow time and loss: fp32, also in bf16 models (fp64 in fp64 models)."""
        return next(self.action_in_proj.parameters()).dtype

    def forward(self, batch: Batch | PackedBatch) -> Tensor:
        """Squared velocity errors [B, T, A], unmasked; `flow_matching.masked_loss` reduces them."""
        actions_DTA, noise_DTA, time_D = self.flow_inputs(batch)
        x_DTA = noisy_actions(actions_DTA, noise_DTA, time_D.to(self.interface_dtype))
        velocity_DTA = self.velocity(batch, x_DTA, time_D)
        return self.squared_errors(velocity_DTA, actions_DTA, noise_DTA)

    def squared_errors(self, velocity_DTA: Tensor, actions_DTA: Tensor, noise_DTA: Tensor) -> Tensor:
        """Squared velocity errors [B, T, A], the mean of a sample's draws."""
        error_DTA = (velocity_DTA - target_velocity(actions_DTA, noise_DTA)).square()
        return mean_over_draws(error_DTA, self.config.flow_draws)

    def flow_inputs(self, batch: Batch | PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """(actions, noise, both [D, T, A] in the interface dtype, flow time [D]); D = B * K, a sample's K draws in a row."""
        # Padded dimensions are zero by contract; selecting makes garbage there harmless. Steps beyond the episode's end are not
        # padding in this sense: they hold the repeated last action and are attended to, as in the released recipe.
        actions_BTA = torch.where(batch.action_dim_is_valid_BA[:, None], batch.actions_BTA, 0.0)
        actions_DTA = repeated(actions_BTA, self.config.flow_draws)
        noise_DTA = batch.noise_BTA.reshape(actions_DTA.shape)
        return actions_DTA.to(self.interface_dtype), noise_DTA.to(self.interface_dtype), batch.time_B.flatten()

    def flops_per_sample(self, num_views: int, prompt_length: int, action_horizon: int | None = None) -> float:
        """Forward FLOPs of one training sample with these views, prompt slots and horizon, as this model computes it."""
        return model_units(
            self.config,
            num_views=num_views,
            prompt_length=prompt_length,
            action_horizon=action_horizon,
            skip_dead_compute=self.skip_dead_compute,
        ).forward_flops

    def training_flops_per_sample(self, shapes: Mapping[str, Sequence[int]]) -> float:
        """FLOPs of forward and backward, which dead work has none of, of one sample of a batch of these shapes (by name)."""
        num_views, prompt_length = shapes["camera_is_present_BV"][1], shapes["tokens_BL"][1]
        live = model_units(self.config, num_views=num_views, prompt_length=prompt_length)
        return self.flops_per_sample(num_views, prompt_length) + 2.0 * live.forward_flops

    def velocity(self, batch: Batch | PackedBatch, x_DTA: Tensor, time_D: Tensor) -> Tensor:
        """Predicted dx/dt [D, T, A] at flow time `time_D`, both streams in one pass; a sample's draws follow each other."""
        prefix_BPH, plan = self._embed_and_plan(batch, x_DTA.shape[1], x_DTA.shape[0] // batch.actions_BTA.shape[0])
        suffix_DTE, condition_DE = self.embed_suffix(batch, x_DTA, time_D)
        return self.backbone(prefix_BPH, suffix_DTE, condition_DE, plan)

    def plan(self, prefix_is_valid_BP: Tensor, action_horizon: int, dtype: torch.dtype, num_draws: int = 1) -> AttentionPlan:
        """What all layers share; `prefix_is_valid_BP` as `prefix_is_valid` gives it."""
        return plan_attention(
            prefix_is_valid_BP,
            action_horizon,
            self.config,
            dtype,
            self.tensor_parallel,
            self.attention_backend,
            num_draws=num_draws,
        )

    def backbone(self, prefix_BPH: Tensor, suffix_BTE: Tensor, condition_BE: Tensor, plan: AnyAttentionPlan) -> Tensor:
        """All joint layers and the read-out: velocity [B, T, A]. Tensors of fixed shapes in and out, so it can be one graph."""
        for layer in self.layers:
            prefix_BPH, suffix_BTE = layer(prefix_BPH, suffix_BTE, condition_BE, plan)
        if not self.skip_dead_compute:
            self.prefix_norm(prefix_BPH)
        return self.read_out(suffix_BTE, condition_BE, plan)

    def _embed_and_plan(
        self, batch: Batch | PackedBatch, action_horizon: int, num_draws: int
    ) -> tuple[Tensor, AnyAttentionPlan]:
        """Prefix stream and attention plan of a padded batch, or of a pack."""
        if isinstance(batch, PackedBatch):
            prefix_1PH = embed_packed_prefix(self, batch)
            return prefix_1PH, plan_packed_attention(batch, self.config, prefix_1PH.dtype)
        prefix_BPH, is_valid_BP = self.embed_prefix(batch)
        return prefix_BPH, self.plan(is_valid_BP, action_horizon, prefix_BPH.dtype, num_draws)

    def embed_prefix(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(hidden [B, P, H], is_valid [B, P]): the views' patches in slot order, then the prompt.

        Backends that know samples by their lengths get the valid ones of these first: positions follow validity, so the order
        of a sample's tokens is free. Image features are not scaled; token embeddings are multiplied by sqrt(H). Hidden is a
        residual stream: this rank's rows under sequence parallelism.
        """
        is_present_BV = batch.camera_is_present_BV
        num_samples, num_views = is_present_BV.shape
        patches = self.embed_images(batch.images_BVCHW.flatten(0, 1), is_present_BV.flatten())
        images_BPH = patches.reshape(num_samples, num_views * patches.shape[1], patches.shape[2])
        # Token ids of padded slots may be garbage, even beyond the vocabulary.
        tokens_BL = batch.tokens_BL.masked_fill(~batch.token_is_valid_BL, PADDING_TOKEN)
        hidden_BPH = torch.cat((images_BPH, self.embed_tokens(tokens_BL)), dim=1)
        if self.attention_backend in LENGTH_BACKENDS:
            order_BP = valid_first_order(self._slot_is_valid(batch))
            hidden_BPH = hidden_BPH.gather(1, order_BP[:, :, None].expand_as(hidden_BPH))
        return split_rows(hidden_BPH, self.tensor_parallel), self.prefix_is_valid(batch)

    def prefix_is_valid(self, batch: Batch) -> Tensor:
        """[B, P] in the order of `embed_prefix`, from the batch's masks alone."""
        is_valid_BP = self._slot_is_valid(batch)
        if self.attention_backend not in LENGTH_BACKENDS:
            return is_valid_BP
        return torch.arange(is_valid_BP.shape[1], device=is_valid_BP.device) < is_valid_BP.sum(dim=1, keepdim=True)

    def _slot_is_valid(self, batch: Batch) -> Tensor:
        """[B, P]: the views' patches in slot order, then the prompt."""
        num_patches = vision_sizes(self.config).num_patches
        patch_is_valid_BP = batch.camera_is_present_BV.repeat_interleave(num_patches, dim=1)
        return torch.cat((patch_is_valid_BP, batch.token_is_valid_BL), dim=1)

    def embed_images(self, images_ICYX: Tensor, is_present_I: Tensor) -> Tensor:
        """Patch features [I, patches, H] of images in uint8 or [-1, 1]; absent ones are black whatever the batch has there."""
        dtype = self.vision_tower.embeddings.patch_embedding.weight.dtype
        pixels_ICYX = pixels_to_model_range(images_ICYX, dtype)
        pixels_ICYX = torch.where(is_present_I[:, None, None, None], pixels_ICYX, -1.0)
        patches = self.vision_projector(self.vision_tower(pixels_ICYX))
        return join_samples(patches, vision_sizes(self.config).num_patches, self.tensor_parallel)

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Embeddings of prompt token ids [..., H], scaled by sqrt(H)."""
        return self.token_embedding(tokens) * math.sqrt(self.config.hidden_size)

    def embed_suffix(self, batch: Batch | PackedBatch, x_BTA: Tensor, time_B: Tensor) -> tuple[Tensor, Tensor]:
        """(action stream [B, T, E] in the streams' dtype, adaRMS condition [B, E] in the interface dtype)."""
        config = self.config
        if config.mask_padded_action_dims:
            is_valid_BA = batch.action_dim_is_valid_BA
            x_BTA = torch.where(repeated(is_valid_BA, x_BTA.shape[0] // is_valid_BA.shape[0])[:, None], x_BTA, 0.0)
        hidden_BTE = self.action_in_proj(x_BTA).to(self.token_embedding.weight.dtype)
        time_BE = flow_time_embedding(
            time_B, config.expert_hidden_size, config.time_min_period, config.time_max_period, self.interface_dtype
        )
        condition_BE = F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(time_BE))))
        return split_rows(hidden_BTE, self.tensor_parallel), condition_BE

    def read_out(self, suffix_BTE: Tensor, condition_BE: Tensor, plan: AnyAttentionPlan) -> Tensor:
        """Last action stream -> velocity [B, T, A]."""
        normalized_BTE, _ = self.suffix_norm(suffix_BTE, condition_BE, plan.suffix_owners)
        normalized_BTE = join_samples(normalized_BTE, plan.suffix_rotary.num_tokens, self.tensor_parallel)
        return self.action_out_proj(normalized_BTE.to(self.interface_dtype))

    def prefill(self, batch: Batch, action_horizon: int) -> PrefixCache:
        """Run the prefix once and keep what `cached_velocity` reads."""
        prefix_BPH, is_valid_BP = self.embed_prefix(batch)
        plan = self.plan(is_valid_BP, action_horizon, prefix_BPH.dtype)
        cache = []
        for layer in self.layers:
            prefix_BPH, key_value = cast(JointLayer, layer).prefix(prefix_BPH, plan)
            cache.append(key_value)
        return PrefixCache(tuple(cache), plan)

    def cached_velocity(self, cache: PrefixCache, batch: Batch, x_BTA: Tensor, time_B: Tensor) -> Tensor:
        """`velocity` with the prefix already computed; `cache` is not modified."""
        suffix_BTE, condition_BE = self.embed_suffix(batch, x_BTA, time_B)
        for layer, key_value in zip(self.layers, cache.layers, strict=True):
            suffix_BTE = cast(JointLayer, layer).suffix(suffix_BTE, condition_BE, key_value, cache.plan)
        return self.read_out(suffix_BTE, condition_BE, cache.plan)

    @torch.no_grad()
    def sample_actions(self, batch: Batch, num_steps: int, noise_BTA: Tensor) -> Tensor:
        """Normalised actions [B, T, A] by `num_steps` Euler steps from `noise_BTA` (its T is the horizon).

        Reads the batch's images, prompt, masks and `action_dim_is_valid_BA`; not its actions, noise and time.
        """
        cache = self.prefill(batch, noise_BTA.shape[1])
        return integrate_velocity(
            lambda x_BTA, time_B: self.cached_velocity(cache, batch, x_BTA, time_B),
            noise_BTA.to(self.interface_dtype),
            num_steps,
        )


def vision_sizes(config: Pi05Config) -> VisionSizes:
    """Sizes of the vision tower."""
    return VisionSizes(
        image_size=config.image_size,
        patch_size=config.patch_size,
        hidden_size=config.vision_hidden_size,
        ffn_hidden_size=config.vision_ffn_hidden_size,
        num_layers=config.vision_num_layers,
        num_attention_heads=config.vision_num_attention_heads,
        norm_epsilon=config.norm_epsilon,
    )
