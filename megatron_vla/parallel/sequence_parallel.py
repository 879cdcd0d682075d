"""Token rows between the matrices of tensor-parallel layers, with and without sequence parallelism.

Matrices work on all tokens; norms and residual additions work on the *residual stream*. Three layouts of that stream:
- tensor-parallel size 1: the tokens themselves, [B, S, H]; every function here returns its argument;
- larger sizes: the same, on every rank; what a column-parallel matrix reads gets its gradient summed over the ranks;
- with sequence parallelism: tokens flattened to B * S rows, zero rows appended until the size divides them, each rank holding
  one contiguous share [R, H]. Appended rows never reach a token: they are dropped before attention and before read-outs, and
  their gradient is zero.

Shape legend: B samples, S tokens, H hidden, R token rows of this rank, X channels of some per-sample values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from megatron_vla.parallel.tensor_parallel import TensorParallel


def _mappings() -> Any:
    """megatron-core's autograd collectives, loaded with the layers that need them; a plain import is no break in a graph."""
    from megatron_vla.parallel.megatron_layers import mappings

    return mappings


def padded_rows(tokens: Tensor, size: int) -> Tensor:
    """[..., H] -> [rows, H] with zero rows appended until `size` divides the number of rows."""
    rows = tokens.flatten(0, -2)
    missing = -rows.shape[0] % size
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


class _SumGradient(torch.autograd.Function):
    """Identity whose gradient is summed over the group.

    megatron-core's own (copy_to_tensor_model_parallel_region) reduces the incoming gradient in place, which other branches of
    the graph may share, and loses the sum of a non-contiguous one. The copy here costs far less than the reduction.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        summed = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


def stream_shape(num_samples: int, num_tokens: int, width: int, tensor_parallel: TensorParallel) -> tuple[int, ...]:
    """Shape of the residual stream of [B, S] tokens on one rank."""
    if not tensor_parallel.sequence_parallel:
        return num_samples, num_tokens, width
    return -(-num_samples * num_tokens // tensor_parallel.size), width


def split_rows(tokens_BSH: Tensor, tensor_parallel: TensorParallel) -> Tensor:
    """Tokens that every rank holds -> residual stream."""
    if not tensor_parallel.sequence_parallel:
        return tokens_BSH
    rows = padded_rows(tokens_BSH, tensor_parallel.size)
    return _mappings().scatter_to_sequence_parallel_region(rows, group=tensor_parallel.group)


def gather_rows(stream: Tensor, tensor_parallel: TensorParallel) -> Tensor:
    """Residual stream -> rows that column-parallel matrices read; for layers that treat tokens one by one.

    Under sequence parallelism the rows are [R * size, H], appended ones included. Gradients of all readers are summed over the
    ranks, once.
    """
    if tensor_parallel.size == 1:
        return stream
    if not tensor_parallel.sequence_parallel:
        return _SumGradient.apply(stream, tensor_parallel.group)
    return _mappings().gather_from_sequence_parallel_region(stream, group=tensor_parallel.group)


def gather_samples(stream: Tensor, num_tokens: int, tensor_parallel: TensorParallel) -> Tensor:
    """Residual stream -> tokens [B, S, H] that column-parallel matrices read; for attention, which needs samples.

    `num_tokens` is S; it must not be smaller than the tensor-parallel size, so that B follows from the number of rows.
    """
    rows = gather_rows(stream, tensor_parallel)
    return _samples(rows, num_tokens) if tensor_parallel.sequence_parallel else rows


def join_samples(stream: Tensor, num_tokens: int, tensor_parallel: TensorParallel) -> Tensor:
    """Residual stream -> tokens [B, S, H] for computation that every rank repeats (its gradient is complete, not summed)."""
    if not tensor_parallel.sequence_parallel:
        return stream
    rows = _mappings().gather_from_sequence_parallel_region(
        stream, tensor_parallel_output_grad=False, group=tensor_parallel.group
    )
    return _samples(rows, num_tokens)


def _samples(rows: Tensor, num_tokens: int) -> Tensor:
    """[R * size, H] -> [B, S, H] without the appended rows, of which there are fewer than `num_tokens`."""
    num_samples = rows.shape[0] // num_tokens
    return rows[: num_samples * num_tokens].unflatten(0, (num_samples, num_tokens))


@dataclass(frozen=True)
class RowOwners:
    """Which sample each of this rank's rows belongs to (sequence parallelism only)."""

    sample_R: Tensor
    group: Any

    def per_row(self, values_BX: Tensor) -> Tensor:
        """Each row's own values [R, X]. `values_BX` are equal on all ranks; their gradient is summed over the ranks.

        An embedding look-up, because its backward adds up in a fixed order on GPUs, unlike indexing.
        """
        return F.embedding(self.sample_R, _SumGradient.apply(values_BX, self.group))


def row_owners(num_samples: int, num_tokens: int, device: torch.device, tensor_parallel: TensorParallel) -> RowOwners | None:
    """Owners of this rank's rows of a [B, S] stream; None when the stream keeps its [B, S, H] shape.

    Appended rows count to the last sample: what they compute is dropped.
    """
    if not tensor_parallel.sequence_parallel:
        return None
    rows_per_rank, _ = stream_shape(num_samples, num_tokens, 1, tensor_parallel)
    first = tensor_parallel.rank * rows_per_rank
    row_R = torch.arange(first, first + rows_per_rank, device=device)
    return RowOwners((row_R // num_tokens).clamp(max=num_samples - 1), tensor_parallel.group)
