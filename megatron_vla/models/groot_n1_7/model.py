"""GR00T N1.7: a frozen Qwen3-VL backbone whose tokens a diffusion transformer reads to predict flow velocity.

Flow time here runs from noise (0) to data (1).

Shape legend: B samples, S backbone tokens, H backbone hidden, K image tokens and L other slots of one sample, D action chunks:
each sample's draws of noise in a row (--flow-draws; one in sampling), T action horizon, A action dimensions, Z state
and action tokens of a chunk (T + 1), E DiT hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_vla.models.common.attention_mask import AttentionBackend, key_mask, without_mask
from megatron_vla.models.common.decoder_layer import KeyValue
from megatron_vla.models.common.embodiment import EmbodimentActionEncoder, EmbodimentGroups, EmbodimentMlp
from megatron_vla.models.common.flow_matching import integer_time_code, interpolate, mean_over_draws, repeated
from megatron_vla.models.common.merged_linear import merged_linear
from megatron_vla.models.common.normalization import AdaptiveLayerNorm, LayerNorm, RMSNorm
from megatron_vla.models.common.precision import dtype_of
from megatron_vla.models.groot_n1_7.batch import GrootN17Batch
from megatron_vla.models.groot_n1_7.config import TIME_CODE_WIDTH, GrootN17Config
from megatron_vla.models.groot_n1_7.flops import training_flops
from megatron_vla.models.groot_n1_7.head_layers import (
    HEAD_NORM_EPSILON,
    OUTPUT_NORM_EPSILON,
    ActionPositions,
    DitBlock,
    VisionLanguageLayer,
)
from megatron_vla.models.groot_n1_7.text import (
    TextLayer,
    add_image_features,
    build_text_layers,
    build_token_embedding,
    embed_tokens,
    plan_text,
)
from megatron_vla.models.groot_n1_7.vision import VisionTower
from megatron_vla.parallel.linear import replicated_linear
from megatron_vla.parallel.sequence_parallel import RowOwners, gather_samples, join_samples, row_owners, split_rows
from megatron_vla.parallel.tensor_parallel import NOT_PARALLEL, TensorParallel, on_token_rows

STATE_TOKENS = 1


@dataclass(frozen=True)
class Memory:
    """Backbone tokens that DiT blocks read: text slots and image tokens apart, gathered for column-parallel matrices."""

    text_BLH: Tensor
    text_mask_B11L: Tensor
    image_BKH: Tensor
    image_mask_B11K: Tensor

    def of_block(self, block: int, attend_text_every_n_blocks: int) -> tuple[Tensor | None, Tensor | None]:
        """(tokens, mask) that DiT block number `block` reads; None: its own tokens."""
        kind = kind_read_by(block, attend_text_every_n_blocks)
        if kind == "text":
            return self.text_BLH, self.text_mask_B11L
        return (None, None) if kind is None else (self.image_BKH, self.image_mask_B11K)


def kind_read_by(block: int, attend_text_every_n_blocks: int) -> Literal["text", "image"] | None:
    """Which backbone tokens DiT block number `block` reads; None: its own tokens."""
    if block % 2:
        return None
    return "text" if block % (2 * attend_text_every_n_blocks) == 0 else "image"


class GrootN17Model(nn.Module):
    """Loss elements from a batch (`forward`), or actions from noise (sampling.py). Dropout aside it draws nothing.

    What the flags do not tune has requires_grad=False; so has the text tower's final norm, which nothing computes.
    """

    # Off where a block's weights exist during its forward alone (fsdp2): projections are then merged inside each block.
    merges_over_blocks = True

    def __init__(
        self,
        config: GrootN17Config,
        *,
        attention_backend: AttentionBackend = "sdpa",
        tensor_parallel: TensorParallel = NOT_PARALLEL,
    ) -> None:
        super().__init__()
        self.config = config
        self.tensor_parallel = tensor_parallel
        width, head = config.dit_hidden_size, config.head_hidden_size
        # Its masks are dense: --attention-backend chooses between torch's fused attention and the reference (see check.py).
        attention_backend = without_mask(attention_backend)
        parts = (config, attention_backend, tensor_parallel)
        self.vision_tower = VisionTower(*parts)
        self.token_embedding = build_token_embedding(config, tensor_parallel)
        self.text_layers = build_text_layers(*parts)
        # Released checkpoints hold it. Features are taken before it.
        self.text_norm = RMSNorm(config.hidden_size, config.norm_epsilon, offset=0.0)
        self.vl_norm = on_token_rows(LayerNorm(config.hidden_size, eps=HEAD_NORM_EPSILON), tensor_parallel)
        self.vl_layers = nn.ModuleList(VisionLanguageLayer(*parts) for _ in range(config.vl_num_layers))
        state_width = config.max_state_dim * config.state_history_length
        self.state_encoder = EmbodimentMlp(config.num_embodiments, state_width, head, width)
        self.action_encoder = EmbodimentActionEncoder(config.num_embodiments, config.max_action_dim, width)
        self.action_position_embedding = ActionPositions(config.num_action_positions, width)
        self.time_mlp_in = replicated_linear(TIME_CODE_WIDTH, width, bias=True)
        self.time_mlp_out = replicated_linear(width, width, bias=True)
        self.dit_layers = nn.ModuleList(
            DitBlock(config, index, attention_backend, tensor_parallel) for index in range(config.dit_num_layers)
        )
        self.output_norm = AdaptiveLayerNorm(width, width, OUTPUT_NORM_EPSILON, shift_first=True)
        self.output_proj = replicated_linear(width, head, bias=True)
        self.action_decoder = EmbodimentMlp(config.num_embodiments, head, head, config.max_action_dim)
        self.freeze()

    def freeze(self) -> None:
        """Take out of training what the flags do not tune."""
        self.text_norm.requires_grad_(False)
        for module, is_tuned in tuned_modules(self, self.config):
            module.requires_grad_(is_tuned)

    @property
    def interface_dtype(self) -> torch.dtype:
        """Dtype of actions and loss: fp32, also in bf16 models (fp64 in fp64 models)."""
        return self.action_position_embedding.weight.dtype

    @property
    def stream_dtype(self) -> torch.dtype:
        """Dtype of the action head's residual streams."""
        return dtype_of(self.output_proj)

    def forward(self, batch: GrootN17Batch) -> Tensor:
        """Squared velocity errors [B, T, A], unmasked; `flow_matching.masked_loss` reduces them."""
        x_DTA = self.noisy_actions(batch)
        features_BSH = self.backbone(batch)
        return self.squared_errors(batch, self.head(batch, features_BSH, x_DTA))

    def head(self, batch: GrootN17Batch, features_BSH: Tensor, x_DTA: Tensor) -> Tensor:
        """Velocity [D, T, A] from the backbone's features and the noisy actions of the batch's flow times."""
        with self.autocast(features_BSH.device):
            return self.velocity(batch, self.memory(batch, features_BSH), x_DTA, self.time_step(batch.time_B.flatten()))

    def squared_errors(self, batch: GrootN17Batch, velocity_DTA: Tensor) -> Tensor:
        """Loss elements [B, T, A]: predicted velocity against data minus noise, the mean of a sample's draws."""
        actions_DTA, noise_DTA = self.flow_inputs(batch)
        errors_DTA = (velocity_DTA.to(self.interface_dtype) - (actions_DTA - noise_DTA)).square()
        return mean_over_draws(errors_DTA, self.config.flow_draws)

    def flow_inputs(self, batch: GrootN17Batch) -> tuple[Tensor, Tensor]:
        """(actions, noise), both [D, T, A] in the interface dtype."""
        # Padded dimensions are zero by contract; selecting makes garbage there harmless.
        actions_BTA = torch.where(batch.action_dim_is_valid_BA[:, None], batch.actions_BTA, 0.0)
        actions_DTA = repeated(actions_BTA.to(self.interface_dtype), self.config.flow_draws)
        return actions_DTA, batch.noise_BTA.reshape(actions_DTA.shape).to(self.interface_dtype)

    def noisy_actions(self, batch: GrootN17Batch) -> Tensor:
        """What the DiT sees of the actions [D, T, A]: on the way from noise to data at the batch's flow times."""
        actions_DTA, noise_DTA = self.flow_inputs(batch)
        return interpolate(noise_DTA, actions_DTA, batch.time_B.flatten().to(self.interface_dtype))

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """The released recipe's bf16 matrix products on fp32 parameters, if asked for."""
        return torch.autocast(device.type, torch.bfloat16) if self.config.autocast_bf16 else nullcontext()

    def time_step(self, time_B: Tensor) -> Tensor:
        """Integer time steps [B] of flow times, in fp32 as released: exact multiples may fall either way elsewhere."""
        return (time_B.float() * self.config.num_timestep_buckets).long()

    def training_flops_per_sample(self, shapes: Mapping[str, Sequence[int]]) -> float:
        """FLOPs of forward and backward of one sample of a batch of these shapes; images count as equally large."""
        samples, num_tokens = shapes["tokens_BS"]
        images, patches = shapes["image_row_IQ"]
        sizes = [patches] * (images // samples)
        return training_flops(
            self.config, patches_of_images=sizes, num_tokens=num_tokens, action_horizon=shapes["actions_BTA"][1]
        )

    @property
    def backbone_is_trained(self) -> bool:
        """Whether any flag trains a part of the backbone."""
        return self.config.tune_llm or self.config.tune_visual or self.config.tune_top_llm_layers > 0

    @property
    def backbone_is_rounded(self) -> bool:
        """Whether the backbone already is in the dtype that autocast would choose."""
        return not self.backbone_is_trained and self.vision_tower.stream_dtype == torch.bfloat16

    @contextmanager
    def backbone_context(self, device: torch.device) -> Iterator[None]:
        """Precision of the backbone; no graph when nothing of it is trained."""
        precision = nullcontext() if self.backbone_is_rounded else self.autocast(device)
        with nullcontext() if self.backbone_is_trained else torch.no_grad(), precision:
            yield

    def backbone(self, batch: GrootN17Batch) -> Tensor:
        """Features [B, S, H] of the last kept text layer, before the final norm: a residual stream."""
        with self.backbone_context(batch.tokens_BS.device):
            image_MH, deepstack = self.vision_tower(batch)
            hidden = embed_tokens(self.token_embedding, image_MH, batch, self.tensor_parallel)
            plan = plan_text(batch, self.config, hidden.dtype)
            for index, layer in enumerate(self.text_layers):
                hidden = cast(TextLayer, layer)(hidden, plan)
                if index < len(deepstack):
                    hidden = add_image_features(hidden, deepstack[index], batch, self.tensor_parallel)
        return hidden

    def memory(self, batch: GrootN17Batch, features_BSH: Tensor) -> Memory:
        """Backbone features through the head's own norm and self-attention, and sorted into text and image tokens."""
        num_tokens = batch.tokens_BS.shape[1]
        mask = self.vl_mask(batch)
        hidden = self.vl_norm(features_BSH.to(self.stream_dtype))
        for layer in self.vl_layers:
            hidden = layer(hidden, num_tokens, mask)
        return self.sorted_tokens(batch, hidden)

    def vl_mask(self, batch: GrootN17Batch) -> Tensor | None:
        """Additive mask of the vision-language layers; None as released: padding takes part."""
        return key_mask(batch.token_is_valid_BS, self.stream_dtype) if self.config.mask_vl_self_attention else None

    def sorted_tokens(self, batch: GrootN17Batch, hidden: Tensor) -> Memory:
        """Residual stream -> what the DiT's blocks read. Each block projects only the tokens that it attends."""
        num_samples, num_tokens = batch.tokens_BS.shape
        tokens_RH = gather_samples(hidden, num_tokens, self.tensor_parallel).flatten(0, 1)
        first_B1 = torch.arange(num_samples, device=tokens_RH.device).unsqueeze(1) * num_tokens

        def rows(place_BK: Tensor) -> Tensor:
            # Several padding slots may name one row; their gradient is zero, since no query reads them.
            return tokens_RH.index_select(0, (place_BK + first_B1).flatten()).unflatten(0, place_BK.shape)

        text_mask, image_mask = (
            key_mask(is_valid_BK, self.stream_dtype)
            for is_valid_BK in (batch.text_key_is_valid_BL, batch.image_key_is_valid_BK)
        )
        return Memory(rows(batch.text_key_BL), text_mask, rows(batch.image_key_BK), image_mask)

    def velocity(self, batch: GrootN17Batch, memory: Memory, x_DTA: Tensor, step_D: Tensor) -> Tensor:
        """Predicted dx/dt [D, T, A] at integer time steps."""
        tokens, condition_DE, owners = self.embed(batch, x_DTA, step_D)
        num_tokens = x_DTA.shape[1] + STATE_TOKENS
        # Merged projections reach over the blocks: one product for all keys and values of the text, one for the images.
        is_merged = self.merges_over_blocks and any(cast(DitBlock, layer).attention.merged for layer in self.dit_layers)
        projected = self.cached_memory(memory) if is_merged else None
        for index, layer in enumerate(self.dit_layers):
            memory_BKH, mask = memory.of_block(index, self.config.attend_text_every_n_blocks)
            read = memory_BKH if projected is None else projected[index]
            tokens = layer(tokens, condition_DE, num_tokens, owners, read, mask)
        return self.read_out(batch, tokens, condition_DE, num_tokens, owners)

    def prefill(self, batch: GrootN17Batch) -> tuple[Memory, list[KeyValue | None]]:
        """What sampling computes once: the backbone's tokens, and their keys and values in every block."""
        features_BSH = self.backbone(batch)
        with self.autocast(features_BSH.device):
            memory = self.memory(batch, features_BSH)
            return memory, self.cached_memory(memory)

    def cached_memory(self, memory: Memory) -> list[KeyValue | None]:
        """Keys and values of every block that reads the backbone: they do not depend on flow time."""
        cached: list[KeyValue | None] = [None] * len(self.dit_layers)
        kinds = [kind_read_by(index, self.config.attend_text_every_n_blocks) for index in range(len(cached))]
        read = {"text": (memory.text_BLH, memory.text_mask_B11L), "image": (memory.image_BKH, memory.image_mask_B11K)}
        for kind, (tokens, mask_B11K) in read.items():
            blocks = [index for index, found in enumerate(kinds) if found == kind]
            if not blocks:
                continue
            attentions = [cast(DitBlock, self.dit_layers[index]).attention for index in blocks]
            linears = [linear for attention in attentions for linear in (attention.k_proj, attention.v_proj)]
            parts = merged_linear(tokens, linears, attentions[0].merged)
            for index, attention, key, value in zip(blocks, attentions, parts[::2], parts[1::2], strict=True):
                cached[index] = attention.of_memory(key, value, mask_B11K)
        return cached

    def cached_velocity(
        self, batch: GrootN17Batch, memory: Memory, cached: list[KeyValue | None], x_DTA: Tensor, step_D: Tensor
    ) -> Tensor:
        """`velocity` with keys and values already computed."""
        tokens, condition_DE, owners = self.embed(batch, x_DTA, step_D)
        num_tokens = x_DTA.shape[1] + STATE_TOKENS
        for index, layer in enumerate(self.dit_layers):
            _, mask = memory.of_block(index, self.config.attend_text_every_n_blocks)
            tokens = cast(DitBlock, layer).with_memory(tokens, condition_DE, num_tokens, owners, cached[index], mask)
        return self.read_out(batch, tokens, condition_DE, num_tokens, owners)

    def embed(self, batch: GrootN17Batch, x_DTA: Tensor, step_D: Tensor) -> tuple[Tensor, Tensor, RowOwners | None]:
        """(state and action tokens as a residual stream, condition [D, E] after its activation, owners of this rank's rows)."""
        num_draws = x_DTA.shape[0] // batch.size
        assert x_DTA.shape[0] == num_draws * batch.size, (tuple(x_DTA.shape), batch.size)
        if self.config.mask_padded_action_dims:
            x_DTA = torch.where(repeated(batch.action_dim_is_valid_BA, num_draws)[:, None], x_DTA, 0.0)
        state_B1E = self.state_encoder(batch.state_BHD.flatten(1).unsqueeze(1), groups_of(batch))
        state_B1E = state_B1E.masked_fill(batch.state_is_dropped_B[:, None, None], 0.0)
        width = self.config.dit_hidden_size
        code_DE = integer_time_code(step_D, width, width // 2, self.interface_dtype, cosines_first=False)
        action_DTE = self.action_position_embedding(self.action_encoder(x_DTA, code_DE, groups_of(batch, num_draws)))
        state_D1E = repeated(state_B1E, num_draws).to(action_DTE.dtype)
        tokens_DZE = torch.cat((state_D1E, action_DTE), dim=1).to(self.stream_dtype)
        owners = row_owners(tokens_DZE.shape[0], tokens_DZE.shape[1], tokens_DZE.device, self.tensor_parallel)
        return split_rows(tokens_DZE, self.tensor_parallel), self.condition(step_D), owners

    def condition(self, step_D: Tensor) -> Tensor:
        """SiLU of the time embedding [D, E]: what every adaptive norm reads."""
        dtype = dtype_of(self.time_mlp_in)
        code_DE = integer_time_code(step_D, TIME_CODE_WIDTH, TIME_CODE_WIDTH // 2 - 1, dtype, cosines_first=True)
        return F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(code_DE))))

    def read_out(
        self, batch: GrootN17Batch, tokens: Tensor, condition_DE: Tensor, num_tokens: int, owners: RowOwners | None
    ) -> Tensor:
        """Velocity [D, T, A] from the last block's tokens; the state token is dropped."""
        normalized = self.output_norm(tokens, condition_DE, owners)
        normalized_DZE = join_samples(normalized, num_tokens, self.tensor_parallel)
        groups = groups_of(batch, normalized_DZE.shape[0] // batch.size)
        return self.action_decoder(self.output_proj(normalized_DZE[:, STATE_TOKENS:]), groups)


def groups_of(batch: GrootN17Batch, num_draws: int = 1) -> EmbodimentGroups:
    """The embodiment groups of a batch's samples, or of so many action chunks for each of them."""
    return EmbodimentGroups(batch.group_embodiment_G, batch.group_sample_GN, batch.sample_place_B).of_draws(num_draws)


def tuned_modules(model: GrootN17Model, config: GrootN17Config) -> Iterator[tuple[nn.Module, bool]]:
    """(module, whether the --tune flags train it), each parameter once."""
    yield model.vision_tower, config.tune_visual
    yield model.token_embedding, config.tune_llm
    first_tuned = config.num_layers - config.tune_top_llm_layers
    yield from ((layer, config.tune_llm or index >= first_tuned) for index, layer in enumerate(model.text_layers))
    yield from ((module, config.tune_vlln) for module in (model.vl_norm, model.vl_layers))
    projector = (model.state_encoder, model.action_encoder, model.action_decoder, model.action_position_embedding)
    yield from ((module, config.tune_projector) for module in projector)
    dit = (model.time_mlp_in, model.time_mlp_out, model.dit_layers, model.output_norm, model.output_proj)
    yield from ((module, config.tune_diffusion_model) for module in dit)
