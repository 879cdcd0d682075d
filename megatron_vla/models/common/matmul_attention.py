"""Attention as four plain matrix products with fp32 logits, and their backward as four more: for few, wide heads.

Fused kernels avoid storing probabilities. That pays when sequences are long; at 626 tokens and one key/value head of width 256
it does not: all 8 query heads read the same keys, so a sample's logits are one product of 8 x 576 rows by 576 keys, which the
GEMM library computes several times faster than a fused backward of that width.

Predicted for Pi0.5 base on an H200, 32 samples, one prefix layer, at 700 TFLOP/s for the products and 4.3 TB/s:
- forward: 2 products of 43 GFLOP; 340 MB of fp32 logits written and read, 170 MB of probabilities written and read: 0.3 ms;
- backward: 4 products of 43 GFLOP; 170 MB of the probabilities' gradients written and read, probabilities read twice, 170 MB
  of logit gradients written and read twice: 0.45 ms;
- stored for backward: 170 MB of probabilities per layer, 3 GiB over 18 layers.
cuDNN's kernel takes 1.5 ms for the backward alone (150 TFLOP/s), so about 24 ms of a step should be gained.

Shape legend: B samples times key/value heads, M query rows (tokens times heads of the group), K keys, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_vla.kernels.masked_softmax.op import masked_softmax
from megatron_vla.models.common.normalization import at_least_fp32

# Row lengths in elements at which GEMM kernels load 16 bytes at a time, in 2-byte dtypes.
KEY_ALIGNMENT = 8


def matmul_attention(query_BMD: Tensor, key_BKD: Tensor, value_BKD: Tensor, mask_B1K: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(D) + mask) v -> [B, M, D]; logits and softmax in at least fp32, probabilities rounded once."""
    num_keys = key_BKD.shape[1]
    missing = -num_keys % KEY_ALIGNMENT
    if missing:
        # Rows of an odd length would make every product and every pass over the logits slow. Padded keys are masked.
        key_BKD, value_BKD = F.pad(key_BKD, (0, 0, 0, missing)), F.pad(value_BKD, (0, 0, 0, missing))
    output_BMD: Tensor = _MatmulAttention.apply(query_BMD, key_BKD, value_BKD, mask_B1K, num_keys)
    return output_BMD


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in at least fp32. Tensor cores multiply 16-bit numbers exactly and add in fp32; only the result is wider."""
    wide = at_least_fp32(left.dtype)
    if left.is_cuda and left.dtype != wide:
        return torch.bmm(left, right, out_dtype=wide)
    return left.to(wide) @ right.to(wide)


class _MatmulAttention(torch.autograd.Function):
    """Written out, because the product with a wider result has no derivative in torch, and to store nothing in fp32."""

    @staticmethod
    def forward(
        ctx: Any, query_BMD: Tensor, key_BKD: Tensor, value_BKD: Tensor, mask_B1K: Tensor | None, num_keys: int
    ) -> Tensor:
        ctx.scale = query_BMD.shape[-1] ** -0.5
        logits_BMK = _wide_product(query_BMD, key_BKD.transpose(1, 2))
        weights_BMK = masked_softmax(logits_BMK, ctx.scale, mask_B1K, num_keys, value_BKD.dtype)
        ctx.save_for_backward(query_BMD, key_BKD, value_BKD, weights_BMK)
        return weights_BMK @ value_BKD

    @staticmethod
    def backward(ctx: Any, gradient_BMD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # type: ignore[override]
        query_BMD, key_BKD, value_BKD, weights_BMK = ctx.saved_tensors
        gradient_BMD = gradient_BMD.contiguous()
        value_gradient_BKD = weights_BMK.transpose(1, 2) @ gradient_BMD
        # In the probabilities' own dtype, as autograd makes it for probabilities that were rounded (the eager backend, JAX).
        weights_gradient_BMK = gradient_BMD @ value_BKD.transpose(1, 2)
        wide = at_least_fp32(weights_BMK.dtype)
        weighted_BMK = weights_BMK.to(wide) * weights_gradient_BMK.to(wide)
        # d softmax = p * (g - sum(p g)), written so that each factor is read once.
        row_sum_BM1 = weighted_BMK.sum(dim=-1, keepdim=True)
        logits_gradient_BMK = (weighted_BMK - weights_BMK.to(wide) * row_sum_BM1) * ctx.scale
        logits_gradient_BMK = logits_gradient_BMK.to(query_BMD.dtype)
        query_gradient_BMD = logits_gradient_BMK @ key_BKD
        key_gradient_BKD = logits_gradient_BMK.transpose(1, 2) @ query_BMD
        return query_gradient_BMD, key_gradient_BKD, value_gradient_BKD, None, None
