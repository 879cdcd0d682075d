"""Attention: which token may read which, and the kernels that compute it.

Shape legend: B samples, S tokens, Q query tokens, K key tokens, N query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_vla.models.common.normalization import at_least_fp32

AttentionBackend = Literal["sdpa", "eager"]


def token_positions(is_valid_BS: Tensor) -> Tensor:
    """Position of each token: the number of valid tokens before it (padding does not advance; -1 before the first valid)."""
    return is_valid_BS.long().cumsum(dim=1) - 1


def block_attention_mask(starts_block_BS: Tensor, is_valid_BS: Tensor) -> Tensor:
    """The definition: bool [B, Q, K], True where query q may read key k.

    A token reads its own block and all earlier ones (`starts_block_BS` marks the first token of each block; token 0 need not be
    marked), among valid tokens only. Rows of padded queries are all False. All ones = causal, all zeros = bidirectional.
    """
    block_BS = starts_block_BS.long().cumsum(dim=1)
    may_read_BQK = block_BS[:, None, :] <= block_BS[:, :, None]
    return may_read_BQK & is_valid_BS[:, None, :] & is_valid_BS[:, :, None]


def key_mask(is_valid_BK: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, 1, 1, K] in `dtype`: 0 for valid keys, -inf for padding.

    Padded *queries* get the same row as valid ones, since nothing ever reads them. That leaves one way to a fully masked row,
    a sample without any valid key; there every key is allowed, so the output is finite instead of NaN, and still never read.
    """
    may_read_BK = is_valid_BK | ~is_valid_BK.any(dim=1, keepdim=True)
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


def attend(
    query_BNQD: Tensor, key_BGKD: Tensor, value_BGKD: Tensor, mask_B1QK: Tensor | None, backend: AttentionBackend = "sdpa"
) -> Tensor:
    """softmax(q k^T / sqrt(D) + mask) v -> [B, Q, N * D].

    The additive mask is the same for all heads, and for all queries when its axis 2 is 1.
    """
    if backend == "eager":
        output_BNQD = _attend_eager(query_BNQD, key_BGKD, value_BGKD, mask_B1QK)
    else:
        # The heads of a group read the same keys under the same mask, so they are stacked as further queries: keys and values
        # are not repeated, and kernels without grouped queries serve. H200, 32 x 8 heads x 50 queries on 762 keys, forward and
        # backward: 0.27 ms against 0.45 ms with enable_gqa, 0.11 against 0.30 GiB (cuDNN kernel in both).
        stacked_BGQD = query_BNQD.reshape(query_BNQD.shape[0], key_BGKD.shape[1], -1, query_BNQD.shape[3])
        if mask_B1QK is not None and mask_B1QK.shape[2] > 1:
            mask_B1QK = mask_B1QK.repeat(1, 1, query_BNQD.shape[1] // key_BGKD.shape[1], 1)
        output_BGQD = F.scaled_dot_product_attention(stacked_BGQD, key_BGKD, value_BGKD, attn_mask=mask_B1QK)
        output_BNQD = output_BGQD.reshape(query_BNQD.shape)
    return output_BNQD.transpose(1, 2).flatten(2)


def _attend_eager(query_BNQD: Tensor, key_BGKD: Tensor, value_BGKD: Tensor, mask_B1QK: Tensor | None) -> Tensor:
    """Explicit reference: logits and softmax in at least fp32 (as JAX), probabilities rounded to the activations' dtype."""
    wide = at_least_fp32(query_BNQD.dtype)
    heads_per_group = query_BNQD.shape[1] // key_BGKD.shape[1]
    key_BNKD = key_BGKD.repeat_interleave(heads_per_group, dim=1)
    value_BNKD = value_BGKD.repeat_interleave(heads_per_group, dim=1)
    logits_BNQK = query_BNQD.to(wide) @ key_BNKD.to(wide).transpose(-1, -2) * query_BNQD.shape[-1] ** -0.5
    if mask_B1QK is not None:
        logits_BNQK = logits_BNQK + mask_B1QK.to(wide)
    return logits_BNQK.softmax(dim=-1).to(value_BNKD.dtype) @ value_BNKD
