"""Which keys each query may read, in the form that each attention backend wants. None of them is a dense [B, Q, K] mask.

Shape legend: B samples, Q query tokens, K key tokens, C sequences, E blocks of BLOCK keys, F blocks of BLOCK queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

AttentionBackend = Literal["flash", "sdpa", "matmul", "eager", "flex", "varlen", "flash_attn"]
# What --attention-backend auto stands for: the fastest fused kernel for both streams of Pi0.5 on an H200 (cuDNN's, 48 ms of a
# 557 ms step at 32 samples; flex and two variable-length calls took 1.3 and 1.05 times as long). Plain products take less time
# there (9 ms, and 6 more with the project's kernel for their softmax), but keep all probabilities (3 GiB).
AUTO_BACKEND: AttentionBackend = "sdpa"
# These describe a sample by its length: its valid tokens must come first (see `valid_first_order`).
LENGTH_BACKENDS: tuple[AttentionBackend, ...] = ("varlen", "flash_attn")
BLOCK = 128  # flex attention's own default tile


@dataclass(frozen=True)
class SequenceBounds:
    """Where each sequence lies among B * Q query and B * K key rows; arguments of `varlen_attention`.

    A sample is two sequences: its valid tokens, and its padding, which reads itself and is never read.
    """

    query_offsets: Tensor
    key_offsets: Tensor
    max_query: int
    max_key: int


ReadMask = Tensor | BlockMask | SequenceBounds | None


def resolve_backend(requested: Literal["auto", "varlen", "flex", "sdpa", "matmul", "flash_attn", "eager"]) -> AttentionBackend:
    """The backend that --attention-backend means."""
    return AUTO_BACKEND if requested == "auto" else requested


def without_mask(backend: AttentionBackend) -> AttentionBackend:
    """The backend for attention in which every token reads every token: there torch's own kernels need no description."""
    return "eager" if backend == "eager" else "sdpa"


def read_mask(backend: AttentionBackend, query_is_valid_BQ: Tensor, key_is_valid_BK: Tensor, dtype: torch.dtype) -> ReadMask:
    """Every query reads the valid keys of its own sample; what padded queries read does not matter, but must be finite."""
    if backend in LENGTH_BACKENDS:
        return sequence_bounds(query_is_valid_BQ, key_is_valid_BK)
    if backend == "flex":
        return key_block_mask(key_is_valid_BK, query_is_valid_BQ.shape[1])
    return key_mask(key_is_valid_BK, dtype)


def _readable_keys(is_valid_BK: Tensor) -> Tensor:
    """`is_valid_BK`, or everything for a sample without any valid key: the output is then finite instead of 0 / 0."""
    return is_valid_BK | ~is_valid_BK.any(dim=1, keepdim=True)


def key_mask(is_valid_BK: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, 1, 1, K] in `dtype`: 0 for valid keys, -inf for padding.

    Padded *queries* get the same row as valid ones, since nothing ever reads them. That leaves one way to a fully masked row,
    a sample without any valid key; there every key is allowed, so the output is finite instead of NaN, and still never read.
    """
    may_read_BK = _readable_keys(is_valid_BK)
    mask_BK = torch.zeros(may_read_BK.shape, dtype=dtype, device=may_read_BK.device)
    return mask_BK.masked_fill(~may_read_BK, float("-inf"))[:, None, None, :]


def causal_mask(is_valid_BS: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, 1, S, S] in `dtype`: a token reads valid tokens up to itself.

    Padding reads itself, so that no row is empty; what it computes is for the caller to drop.
    """
    num_tokens = is_valid_BS.shape[1]
    place_S = torch.arange(num_tokens, device=is_valid_BS.device)
    may_read_BQK = (place_S[:, None] >= place_S[None, :]) & is_valid_BS[:, None, :] | (place_S[:, None] == place_S[None, :])
    mask_BQK = torch.zeros(may_read_BQK.shape, dtype=dtype, device=is_valid_BS.device)
    return mask_BQK.masked_fill(~may_read_BQK, float("-inf"))[:, None]


def key_block_mask(is_valid_BK: Tensor, num_queries: int) -> BlockMask:
    """The same rule for flex attention: per sample, which blocks of keys are read whole, in part, or not at all.

    Built from key validity by sorting E flags per sample; torch's create_block_mask would evaluate all B x Q x K pairs.
    """
    num_keys = is_valid_BK.shape[1]
    # The last block reaches beyond the keys: padded as invalid, it is never called whole.
    may_read_BK = F.pad(_readable_keys(is_valid_BK), (0, -num_keys % BLOCK))
    readable_BE = may_read_BK.unflatten(1, (-1, BLOCK)).sum(dim=2)
    num_query_blocks = -(-num_queries // BLOCK)

    def listed(chosen_BE: Tensor) -> tuple[Tensor, Tensor]:
        """(how many, their numbers first), repeated for every block of queries: they all read the same keys."""
        order_BE = chosen_BE.int().argsort(dim=1, descending=True, stable=True).to(torch.int32)
        count_B1F = chosen_BE.sum(dim=1, dtype=torch.int32)[:, None, None].expand(-1, 1, num_query_blocks)
        return count_B1F.contiguous(), order_BE[:, None, None, :].expand(-1, 1, num_query_blocks, -1).contiguous()

    def mask_mod(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return may_read_BK[sample, key]

    is_whole_BE = readable_BE == BLOCK
    return BlockMask.from_kv_blocks(
        *listed((readable_BE > 0) & ~is_whole_BE),
        *listed(is_whole_BE),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(num_queries, num_keys),
    )


def sequence_bounds(query_is_valid_BQ: Tensor, key_is_valid_BK: Tensor) -> SequenceBounds:
    """The same rule by lengths, for samples whose valid tokens come first: nothing is gathered, no shape depends on a length.

    Sequences alternate: sample 0's valid tokens, its padding, sample 1's valid tokens, ...
    """

    def offsets(is_valid_BS: Tensor) -> Tensor:
        num_samples, num_tokens = is_valid_BS.shape
        start_B = torch.arange(num_samples, device=is_valid_BS.device) * num_tokens
        inner = torch.stack((start_B, start_B + is_valid_BS.sum(dim=1)), dim=1).flatten()
        return F.pad(inner, (0, 1), value=num_samples * num_tokens).to(torch.int32)

    return SequenceBounds(
        offsets(query_is_valid_BQ), offsets(key_is_valid_BK), query_is_valid_BQ.shape[1], key_is_valid_BK.shape[1]
    )


def valid_first_order(is_valid_BS: Tensor) -> Tensor:
    """Permutation [B, S] that puts valid tokens first, padding last, each in its old order.

    A token's place follows from counting, so no sort is needed and the host reads nothing.
    """
    num_valid_B1 = is_valid_BS.sum(dim=1, keepdim=True)
    place_BS = torch.where(is_valid_BS, is_valid_BS.cumsum(1) - 1, num_valid_B1 + (~is_valid_BS).cumsum(1) - 1)
    token_BS = torch.arange(is_valid_BS.shape[1], device=is_valid_BS.device).expand_as(place_BS)
    return torch.empty_like(place_BS).scatter_(1, place_BS, token_BS)
