"""Attention over sequences of different lengths that lie end to end in one tensor: no mask, no computation across them.

Shape legend: T query tokens of all sequences, S key tokens of all sequences, N query heads, G key/value heads, D head width,
C sequences.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
# torch 2.11 has no such argument; newer ones refuse unequal numbers of heads without it.
_HAS_GROUPED_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters


def varlen_attention(
    query_TND: Tensor,
    key_SGD: Tensor,
    value_SGD: Tensor,
    query_offsets: Tensor,
    key_offsets: Tensor,
    max_query: int,
    max_key: int,
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v within each sequence -> [T, N, D]. Not causal; query head n reads key head n * G // N.

    Sequence c is query rows query_offsets[c] : query_offsets[c + 1] and key rows likewise (int32 [C + 1] on the device,
    from 0 on, not falling; nothing here reads them on the host). Either side may be empty: queries without a key give zeros.
    `max_query` and `max_key` are upper bounds of one sequence's length. The offsets must end at T and S: the kernel leaves rows
    beyond them as they were in memory, gradients too. Padding is therefore given to sequences of its own.

    On GPUs bf16 and fp16 only (ValueError otherwise). On the CPU a reference in the given dtype, which builds a [T, S] mask.
    """
    if query_TND.device.type != "cuda":
        return _reference(query_TND, key_SGD, value_SGD, query_offsets, key_offsets)
    if query_TND.dtype not in KERNEL_DTYPES:
        raise ValueError(f"variable-length attention: the kernel computes in bf16 or fp16, not {query_TND.dtype}; use --bf16")
    num_heads, num_groups = query_TND.shape[1], key_SGD.shape[1]
    if num_groups == 1:
        # All heads read the same keys, so a token's heads are stacked as further queries: keys are read once, not per head.
        stacked = query_TND.reshape(-1, 1, query_TND.shape[2])
        output = varlen_attn(
            stacked, key_SGD, value_SGD, query_offsets * num_heads, key_offsets, max_query * num_heads, max_key
        )
        return cast(Tensor, output).reshape(query_TND.shape)
    grouped: dict[str, Any] = {"enable_gqa": True} if _HAS_GROUPED_HEADS and num_groups != num_heads else {}
    output = varlen_attn(query_TND, key_SGD, value_SGD, query_offsets, key_offsets, max_query, max_key, **grouped)
    return cast(Tensor, output)


def sequence_numbers(offsets: Tensor, num_rows: int) -> Tensor:
    """Which sequence each of `num_rows` rows belongs to [num_rows]; rows beyond the last offset get the number C."""
    rows = torch.arange(num_rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets[1:].contiguous(), rows, right=True)


def _reference(query_TND: Tensor, key_SGD: Tensor, value_SGD: Tensor, query_offsets: Tensor, key_offsets: Tensor) -> Tensor:
    """The definition, by a dense mask: it compiles in one graph, which a loop over lengths does not."""
    query_number_T = sequence_numbers(query_offsets, query_TND.shape[0])
    key_number_S = sequence_numbers(key_offsets, key_SGD.shape[0])
    may_read_TS = query_number_T[:, None] == key_number_S[None, :]
    # A row without a key would be 0 / 0: it reads everything, and its output is replaced.
    has_key_T1 = may_read_TS.any(dim=1, keepdim=True)
    heads_per_group = query_TND.shape[1] // key_SGD.shape[1]
    key_NSD, value_NSD = (x.repeat_interleave(heads_per_group, dim=1).transpose(0, 1) for x in (key_SGD, value_SGD))
    output_NTD = F.scaled_dot_product_attention(
        query_TND.transpose(0, 1)[None], key_NSD[None], value_NSD[None], attn_mask=may_read_TS | ~has_key_T1
    )[0]
    return torch.where(has_key_T1[:, :, None], output_NTD.transpose(0, 1), 0.0)
