"""Pi0.5's joint layers: a prefix stream (images and prompt) and an action stream that reads it.

The prefix is blind to the actions, so a joint layer is computed in two calls without a mask between the streams: prefix tokens
attend to prefix keys, action tokens to prefix and action keys. Training and sampling run the same two calls; sampling only runs
the first one once.

Under sequence parallelism the streams between layers are this rank's rows [R, H] and [R, E] (parallel/sequence_parallel.py).

Shape legend: B samples, P prefix tokens, T action horizon, H prefix hidden, E expert hidden, C condition. The action stream
has a sample's draws of noise in a row (--flow-draws): its B is then D = B * K chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_vla.models.common.attention import attend, token_positions
from megatron_vla.models.common.attention_mask import LENGTH_BACKENDS, AttentionBackend, ReadMask, read_mask
from megatron_vla.models.common.decoder_layer import AttentionProjections, GatedMlp, KeyValue
from megatron_vla.models.common.flow_matching import repeated
from megatron_vla.models.common.normalization import AdaptiveRMSNorm, RMSNorm
from megatron_vla.models.common.rotary import RotaryTable, rotary_table
from megatron_vla.models.pi05.config import Pi05Config
from megatron_vla.models.pi05.packed import PackedAttentionPlan
from megatron_vla.parallel.sequence_parallel import RowOwners, row_owners
from megatron_vla.parallel.tensor_parallel import NOT_PARALLEL, TensorParallel, on_token_rows


@dataclass(frozen=True)
class AttentionPlan:
    """What all layers of one forward pass share, computed once: rotary tables and read masks of both streams.

    `num_draws`: action chunks of a sample, which follow each other; each reads the prefix and itself.
    `actions_first`: action tokens read keys in the order (action, prefix) instead of (prefix, action).
    `suffix_owners`: whose condition each of this rank's action rows takes, under sequence parallelism.
    """

    prefix_rotary: RotaryTable
    suffix_rotary: RotaryTable
    prefix_mask: ReadMask
    suffix_mask: ReadMask
    num_draws: int
    actions_first: bool
    suffix_owners: RowOwners | None

    def attend_prefix(self, query_BNPD: Tensor, prefix: KeyValue, backend: AttentionBackend) -> Tensor:
        """Prefix tokens read prefix tokens: [B, P, N * D]."""
        return attend(query_BNPD, *prefix, self.prefix_mask, backend)

    def attend_suffix(self, query_BNTD: Tensor, prefix: KeyValue, own: KeyValue, backend: AttentionBackend) -> Tensor:
        """Actions read prefix and actions: [B, T, N * D]."""
        prefix = KeyValue(*(repeated(tensor, self.num_draws) for tensor in prefix))
        sources = (own, prefix) if self.actions_first else (prefix, own)
        key, value = (torch.cat(parts, dim=2) for parts in zip(*sources, strict=True))
        return attend(query_BNTD, key, value, self.suffix_mask, backend)


AnyAttentionPlan = AttentionPlan | PackedAttentionPlan


def plan_attention(
    prefix_is_valid_BP: Tensor,
    action_horizon: int,
    config: Pi05Config,
    dtype: torch.dtype,
    tensor_parallel: TensorParallel = NOT_PARALLEL,
    backend: AttentionBackend = "sdpa",
    num_draws: int = 1,
) -> AttentionPlan:
    """Plan for these prefix tokens followed by `action_horizon` action tokens, all valid; `dtype` is the activations'.

    `num_draws`: so many times `action_horizon` action tokens follow, at the same positions, blind to each other.

    For backends that know samples by their lengths (LENGTH_BACKENDS), valid prefix tokens come before padding.
    """
    action_is_valid_BT = prefix_is_valid_BP.new_ones(prefix_is_valid_BP.shape[0], action_horizon)
    is_valid_BS = torch.cat((prefix_is_valid_BP, action_is_valid_BT), dim=1)
    rotary = rotary_table(token_positions(is_valid_BS), config.kv_channels, config.rope_theta, dtype)
    num_prefix, num_tokens = prefix_is_valid_BP.shape[1], is_valid_BS.shape[1]
    # With the prefix's padding at the very end, the keys that an action token reads are one run: nothing need be gathered.
    actions_first = backend in LENGTH_BACKENDS
    keys_are_valid_BS = torch.cat((action_is_valid_BT, prefix_is_valid_BP), dim=1) if actions_first else is_valid_BS
    queries_DT, keys_DS = repeated(action_is_valid_BT, num_draws), repeated(keys_are_valid_BS, num_draws)
    return AttentionPlan(
        prefix_rotary=rotary.tokens(0, num_prefix),
        suffix_rotary=RotaryTable(*(repeated(table, num_draws) for table in rotary.tokens(num_prefix, num_tokens))),
        prefix_mask=read_mask(backend, prefix_is_valid_BP, prefix_is_valid_BP, dtype),
        suffix_mask=read_mask(backend, queries_DT, keys_DS, dtype),
        num_draws=num_draws,
        actions_first=actions_first,
        suffix_owners=row_owners(queries_DT.shape[0], action_horizon, is_valid_BS.device, tensor_parallel),
    )


class PrefixLayer(nn.Module):
    """One layer of the prefix stream (Gemma)."""

    def __init__(
        self, config: Pi05Config, *, keys_only: bool, backend: AttentionBackend, tensor_parallel: TensorParallel
    ) -> None:
        super().__init__()
        self.keys_only = keys_only
        self.backend = backend
        self.input_norm = on_token_rows(RMSNorm(config.hidden_size, config.norm_epsilon), tensor_parallel)
        self.attention = _projections(config, config.hidden_size, tensor_parallel)
        self.post_attention_norm = on_token_rows(RMSNorm(config.hidden_size, config.norm_epsilon), tensor_parallel)
        self.mlp = GatedMlp(config.hidden_size, config.ffn_hidden_size, tensor_parallel)

    def forward(self, hidden_BPH: Tensor, plan: AnyAttentionPlan) -> tuple[Tensor, KeyValue]:
        """(next hidden [B, P, H], this layer's keys and values for the action stream).

        With `keys_only` (the last layer, where nothing reads the next hidden) the hidden comes back unchanged.
        """
        if self.keys_only:
            normalized_BPH = self.attention.tokens(self.input_norm(hidden_BPH), plan.prefix_rotary)
            return hidden_BPH, self.attention.key_value(normalized_BPH, plan.prefix_rotary)
        hidden_BPH, normalized_BPH = self.input_norm(hidden_BPH, with_input=True)
        normalized_BPH = self.attention.tokens(normalized_BPH, plan.prefix_rotary)
        query, key_value = self.attention.query_key_value(normalized_BPH, plan.prefix_rotary)
        attended_BPH = self.attention.o_proj(plan.attend_prefix(query, key_value, self.backend))
        hidden_BPH, normalized_BPH = self.post_attention_norm(hidden_BPH, attended_BPH)
        return hidden_BPH + self.mlp(normalized_BPH), key_value


class SuffixLayer(nn.Module):
    """One layer of the action expert: adaRMS norms, whose gates scale the two residual branches."""

    def __init__(self, config: Pi05Config, *, backend: AttentionBackend, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.backend = backend
        width = config.expert_hidden_size
        self.input_norm = AdaptiveRMSNorm(width, width, config.norm_epsilon)
        self.attention = _projections(config, width, tensor_parallel)
        self.post_attention_norm = AdaptiveRMSNorm(width, width, config.norm_epsilon)
        self.mlp = GatedMlp(width, config.expert_ffn_hidden_size, tensor_parallel)

    def forward(self, hidden_BTE: Tensor, condition_BC: Tensor, prefix: KeyValue, plan: AnyAttentionPlan) -> Tensor:
        """Next hidden [B, T, E]. `prefix` is read, never extended."""
        normalized_BTE, gate_B1E = self.input_norm(hidden_BTE, condition_BC, plan.suffix_owners)
        normalized_BTE = self.attention.tokens(normalized_BTE, plan.suffix_rotary)
        query, own = self.attention.query_key_value(normalized_BTE, plan.suffix_rotary)
        attended = plan.attend_suffix(query, prefix, own, self.backend)
        hidden_BTE = hidden_BTE + self.attention.o_proj(attended) * gate_B1E
        normalized_BTE, gate_B1E = self.post_attention_norm(hidden_BTE, condition_BC, plan.suffix_owners)
        return hidden_BTE + self.mlp(normalized_BTE) * gate_B1E


class JointLayer(nn.Module):
    """Prefix layer and expert layer of one depth: the unit that checkpointing, compile and sharding wrap.

    The two share an attention, so wrapping either alone would gather its parameters at the wrong time.
    """

    def __init__(
        self, config: Pi05Config, *, prefix_keys_only: bool, backend: AttentionBackend, tensor_parallel: TensorParallel
    ) -> None:
        super().__init__()
        self.prefix = PrefixLayer(config, keys_only=prefix_keys_only, backend=backend, tensor_parallel=tensor_parallel)
        self.suffix = SuffixLayer(config, backend=backend, tensor_parallel=tensor_parallel)

    def forward(
        self, prefix_BPH: Tensor, suffix_BTE: Tensor, condition_BC: Tensor, plan: AnyAttentionPlan
    ) -> tuple[Tensor, Tensor]:
        """Next (prefix, suffix)."""
        prefix_BPH, key_value = self.prefix(prefix_BPH, plan)
        return prefix_BPH, self.suffix(suffix_BTE, condition_BC, key_value, plan)


def _projections(config: Pi05Config, width: int, tensor_parallel: TensorParallel) -> AttentionProjections:
    return AttentionProjections(
        width,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        head_width=config.kv_channels,
        tensor_parallel=tensor_parallel,
    )
