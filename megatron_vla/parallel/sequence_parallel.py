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
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn import functional as F

from megatron_vla.parallel.tensor_parallel import TensorParallel


def _group(name: str) -> Any:
    return _resolve_process_group(cast(Any, name))


# Operations of their own, with the group's name for the group, so that a compiler sees what goes in and what comes out and
# nothing else. Traced through instead, as megatron-core's mappings are, they made inductor compute wrong gradients under
# sequence parallelism: with torch 2.11 on GPUs the loss did not fall, with torch 2.13 on CPU in bf16 it was NaN.
@torch.library.custom_op("megatron_vla::gather_rows", mutates_args=())
def _all_gather_rows(rows: Tensor, group_name: str) -> Tensor:
    """[R, H] -> [R * size, H], rank after rank."""
    group = _group(group_name)
    gathered = rows.new_empty((rows.shape[0] * group.size(), *rows.shape[1:]))
    dist.all_gather_into_tensor(gathered, rows.contiguous(), group=group)
    return gathered


@_all_gather_rows.register_fake
def _(rows: Tensor, group_name: str) -> Tensor:
    return rows.new_empty((rows.shape[0] * _group(group_name).size(), *rows.shape[1:]))


@torch.library.custom_op("megatron_vla::reduce_scatter_rows", mutates_args=())
def _reduce_scatter_rows(rows: Tensor, group_name: str) -> Tensor:
    """[R * size, H], different on every rank -> this rank's [R, H] of their sum."""
    group = _group(group_name)
    own = rows.new_empty((rows.shape[0] // group.size(), *rows.shape[1:]))
    dist.reduce_scatter_tensor(own, rows.contiguous(), group=group)
    return own


@_reduce_scatter_rows.register_fake
def _(rows: Tensor, group_name: str) -> Tensor:
    return rows.new_empty((rows.shape[0] // _group(group_name).size(), *rows.shape[1:]))


@torch.library.custom_op("megatron_vla::sum_over_group", mutates_args=())
def _sum_over_group(values: Tensor, group_name: str) -> Tensor:
    """The sum of all ranks' values. A copy: other branches of the graph may share the addend."""
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_group(group_name))
    return total


@_sum_over_group.register_fake
def _(values: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


def _own_rows(rows: Tensor, group: Any) -> Tensor:
    """This rank's share of rows that every rank holds."""
    return rows.chunk(group.size())[group.rank()].contiguous()


def padded_rows(tokens: Tensor, size: int) -> Tensor:
    """[..., H] -> [rows, H] with zero rows appended until `size` divides the number of rows."""
    rows = tokens.flatten(0, -2)
    missing = -rows.shape[0] % size
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


class _SumGradient(torch.autograd.Function):
    """Identity whose gradient is summed over the group."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group_name = group.group_name
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _sum_over_group(gradient, ctx.group_name), None


class _GatherRows(torch.autograd.Function):
    """All ranks' rows. Their gradient is this rank's share: of the sum over the ranks, or of one that every rank has whole."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any, sum_gradient: bool) -> Tensor:
        ctx.group, ctx.group_name, ctx.sum_gradient = group, group.group_name, sum_gradient
        return _all_gather_rows(rows, ctx.group_name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        own = _reduce_scatter_rows(gradient, ctx.group_name) if ctx.sum_gradient else _own_rows(gradient, ctx.group)
        return own, None, None


class _SumPartial(torch.autograd.Function):
    """The sum over the ranks; its gradient, which every rank computes whole, is the gradient of each part."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Any) -> Tensor:
        return _sum_over_group(partial, group.group_name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class _SumRows(torch.autograd.Function):
    """This rank's share of the sum over the ranks; its gradient is every rank's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group_name = group.group_name
        return _reduce_scatter_rows(rows, ctx.group_name)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _all_gather_rows(gradient, ctx.group_name), None


class _SplitRows(torch.autograd.Function):
    """This rank's share of rows that every rank holds; its gradient is every rank's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group_name = group.group_name
        return _own_rows(rows, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _all_gather_rows(gradient, ctx.group_name), None


def sum_partial(partial: Tensor, tensor_parallel: TensorParallel) -> Tensor:
    """What a row-parallel matrix gives on each rank -> residual stream.

    [..., H] -> the same shape, or under sequence parallelism [R * size, H] -> [R, H].
    """
    if tensor_parallel.size == 1:
        return partial
    function = _SumRows if tensor_parallel.sequence_parallel else _SumPartial
    summed: Tensor = function.apply(partial, tensor_parallel.group)
    return summed


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
    return _SplitRows.apply(rows, tensor_parallel.group)


def gather_rows(stream: Tensor, tensor_parallel: TensorParallel) -> Tensor:
    """Residual stream -> rows that column-parallel matrices read; for layers that treat tokens one by one.

    Under sequence parallelism the rows are [R * size, H], appended ones included. Gradients of all readers are summed over the
    ranks, once.
    """
    if tensor_parallel.size == 1:
        return stream
    if not tensor_parallel.sequence_parallel:
        return _SumGradient.apply(stream, tensor_parallel.group)
    return _GatherRows.apply(stream, tensor_parallel.group, True)


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
    return _samples(_GatherRows.apply(stream, tensor_parallel.group, False), num_tokens)


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
