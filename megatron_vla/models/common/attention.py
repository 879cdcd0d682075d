"""Attention: which token may read which, and the kernels that compute it.

Shape legend: B samples, S tokens, Q query tokens, K key tokens, N query heads, G key/value heads, R query heads per group,
M = Q * R stacked queries, C = B * G, D head width.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megatron_vla.models.common.attention_mask import AttentionBackend, ReadMask, SequenceBounds
from megatron_vla.models.common.matmul_attention import matmul_attention
from megatron_vla.models.common.normalization import at_least_fp32
from megatron_vla.models.common.varlen import varlen_attention


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


def attend(
    query_BNQD: Tensor, key_BGKD: Tensor, value_BGKD: Tensor, mask: ReadMask, backend: AttentionBackend = "sdpa"
) -> Tensor:
    """softmax(q k^T / sqrt(D) + mask) v -> [B, Q, N * D]; `mask` is the backend's own (attention_mask.read_mask) or None.

    The mask is the same for all heads, and for all valid queries of a sample; a dense one may also have a row per query, with
    the backends sdpa and eager (attention_mask.causal_mask).
    """
    if isinstance(mask, SequenceBounds):
        attend_rows = _flash_attention_package() if backend == "flash_attn" else varlen_attention
        return _attend_sequences(query_BNQD, key_BGKD, value_BGKD, mask, attend_rows)
    if backend == "flash":
        assert mask is None
        # The operator itself: the choice that scaled_dot_product_attention makes cannot be steered inside a compiled graph.
        output_BNQD = torch.ops.aten._scaled_dot_product_flash_attention(query_BNQD, key_BGKD, value_BGKD)[0]
    elif backend == "flex":
        output_BNQD = _attend_flex(query_BNQD, key_BGKD, value_BGKD, cast(BlockMask | None, mask))
    elif backend == "eager":
        output_BNQD = _attend_eager(query_BNQD, key_BGKD, value_BGKD, cast(Tensor | None, mask))
    else:
        return _attend_stacked(query_BNQD, key_BGKD, value_BGKD, cast(Tensor | None, mask), backend)
    return output_BNQD.transpose(1, 2).flatten(2)


def _attend_stacked(
    query_BNQD: Tensor, key_BGKD: Tensor, value_BGKD: Tensor, mask_B1QK: Tensor | None, backend: AttentionBackend
) -> Tensor:
    """torch's fused attention or plain products: [B, Q, N * D].

    The heads of a group read the same keys under the same mask, so they are stacked as further queries: keys and values are not
    repeated, and kernels without grouped queries serve. H200, 32 x 8 heads x 50 queries on 762 keys, forward and backward: 0.27
    ms against 0.45 ms with enable_gqa, 0.11 against 0.30 GiB (cuDNN kernel in both). A token's heads stay neighbours, as
    projections leave them, so with one group neither the queries nor the output are copied.
    """
    num_samples, num_heads, num_queries, width = query_BNQD.shape
    num_groups = key_BGKD.shape[1]
    query_BGQRD = query_BNQD.transpose(1, 2).unflatten(2, (num_groups, -1)).transpose(1, 2)
    stacked_BGMD = query_BGQRD.reshape(num_samples, num_groups, -1, width)
    if backend == "matmul":
        assert mask_B1QK is None or mask_B1QK.shape[2] == 1
        query_CMD, key_CKD, value_CKD = (x.flatten(0, 1) for x in (stacked_BGMD, key_BGKD, value_BGKD))
        mask_C1K = None if mask_B1QK is None else mask_B1QK[:, 0].repeat_interleave(num_groups, dim=0)
        output_CMD = matmul_attention(query_CMD, key_CKD, value_CKD, mask_C1K)
    else:
        if mask_B1QK is not None and mask_B1QK.shape[2] > 1:
            mask_B1QK = mask_B1QK.repeat_interleave(num_heads // num_groups, dim=2)
        output_CMD = F.scaled_dot_product_attention(stacked_BGMD, key_BGKD, value_BGKD, attn_mask=mask_B1QK)
    output_BGQRD = output_CMD.reshape(num_samples, num_groups, num_queries, num_heads // num_groups, width)
    return output_BGQRD.transpose(1, 2).flatten(2)


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


def _attend_flex(query_BNQD: Tensor, key_BGKD: Tensor, value_BGKD: Tensor, mask: BlockMask | None) -> Tensor:
    """torch's flex attention; on the CPU its uncompiled form, which has no backward."""
    needs_compiling = query_BNQD.device.type == "cuda" and not torch.compiler.is_compiling()
    flex = _compiled_flex_attention() if needs_compiling else cast(Callable[..., Any], flex_attention)
    # Below 128 queries torch would choose its kernel for decoding, whose tile holds all queries of all heads of a group: 50
    # action tokens of 8 heads are more than a block of the mask, and it finds no configuration at all.
    options = {"FORCE_USE_FLEX_ATTENTION": True}
    return cast(Tensor, flex(query_BNQD, key_BGKD, value_BGKD, block_mask=mask, enable_gqa=True, kernel_options=options))


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    """For models that are not compiled: as it stands, flex attention computes all logits."""
    return torch.compile(flex_attention, dynamic=False)


def _attend_sequences(
    query_BNQD: Tensor, key_BGKD: Tensor, value_BGKD: Tensor, bounds: SequenceBounds, attend_rows: Callable[..., Tensor]
) -> Tensor:
    """The samples' sequences end to end: [B, Q, N * D]."""
    num_samples, num_queries = query_BNQD.shape[0], query_BNQD.shape[2]
    query_TND, key_TGD, value_TGD = (x.transpose(1, 2).flatten(0, 1) for x in (query_BNQD, key_BGKD, value_BGKD))
    output_TND = attend_rows(
        query_TND, key_TGD, value_TGD, bounds.query_offsets, bounds.key_offsets, bounds.max_query, bounds.max_key
    )
    return output_TND.flatten(1).unflatten(0, (num_samples, num_queries))


def _flash_attention(kernel: Callable[..., Any], *arguments: Any) -> Tensor:
    output = kernel(*arguments)
    # The Hopper build also returns log sums.
    return cast(Tensor, output[0] if isinstance(output, tuple) else output)


@functools.cache
def _flash_attention_package() -> Callable[..., Tensor]:
    """`varlen_attention` by the installed flash-attn package: its Hopper build (flash_attn_interface) before its older one.

    Raises ValueError when neither can be imported.
    """
    for name in ("flash_attn_interface", "flash_attn"):
        try:
            return partial(_flash_attention, importlib.import_module(name).flash_attn_varlen_func)
        except ImportError:
            continue
    raise ValueError(
        "--attention-backend flash_attn: neither flash_attn_interface nor flash_attn can be imported; "
        "install one, or use --attention-backend auto"
    )
