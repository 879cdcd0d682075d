"""Attention over sequences of different lengths that lie end to end in one tensor: no mask, no computation across them.

Shape legend: T query tokens of all sequences, S key tokens of all sequences, N query heads, G key/value heads, D head width,
R query heads per group, Q = T * R stacked queries,
C sequences.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

KERNEL_DTYPES = (torch.bfloat16, torch.float16)


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
    # The heads of a group read the same keys, so a token's heads are stacked as further queries of one head per group: keys are
    # read once, not once per head, and kernels without grouped heads (torch 2.11) serve.
    num_tokens, num_heads, width = query_TND.shape
    num_groups = key_SGD.shape[1]
    stack = num_heads // num_groups
    query_TRGD = query_TND.reshape(num_tokens, num_groups, stack, width).transpose(1, 2)
    query_QGD = query_TRGD.reshape(num_tokens * stack, num_groups, width)
    stacked_offsets = query_offsets * stack
    if query_TND.device.type != "cuda":
        output = _reference(query_QGD, key_SGD, value_SGD, stacked_offsets, key_offsets)
    elif query_TND.dtype in KERNEL_DTYPES:
        # Imported here: the module loads torch's compiler, which most processes never need.
        from torch.nn.attention.varlen import varlen_attn

        output = cast(
            Tensor, varlen_attn(query_QGD, key_SGD, value_SGD, stacked_offsets, key_offsets, max_query * stack, max_key)
        )
    else:
        raise ValueError(f"variable-length attention: the kernel computes in bf16 or fp16, not {query_TND.dtype}; use --bf16")
    output_TRGD = output.reshape(num_tokens, stack, num_groups, width)
    return output_TRGD.transpose(1, 2).reshape(query_TND.shape)


def sequence_numbers(offsets: Tensor, num_rows: int) -> Tensor:
    """Which sequence each of `num_rows` rows belongs to [num_rows]; rows beyond the last offset get the number C."""
    rows = torch.arange(num_rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets[1:].contiguous(), rows, right=True)


def _reference(query_QGD: Tensor, key_SGD: Tensor, value_SGD: Tensor, query_offsets: Tensor, key_offsets: Tensor) -> Tensor:
    """The definition, by a dense mask: it compiles in one graph, which a loop over lengths does not."""
    query_number_Q = sequence_numbers(query_offsets, query_QGD.shape[0])
    key_number_S = sequence_numbers(key_offsets, key_SGD.shape[0])
    may_read_QS = query_number_Q[:, None] == key_number_S[None, :]
    # A row without a key would be 0 / 0: it reads everything, and its output is replaced.
    has_key_Q1 = may_read_QS.any(dim=1, keepdim=True)
    output_GQD = F.scaled_dot_product_attention(
        query_QGD.transpose(0, 1)[None],
        key_SGD.transpose(0, 1)[None],
        value_SGD.transpose(0, 1)[None],
        attn_mask=may_read_QS | ~has_key_Q1,
    )[0]
    return torch.where(has_key_Q1[:, :, None], output_GQD.transpose(0, 1), 0.0)
