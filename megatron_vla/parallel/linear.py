"""The one place that decides the class of a linear layer and of a token embedding.

Tensor-parallel size 1 gives torch's own, which compile, TorchAO and checkpoint tools understand. Larger sizes give
megatron-core's ColumnParallelLinear, RowParallelLinear and VocabParallelEmbedding. Parameter names are `weight` and `bias` in
all of them.

A column-parallel layer reads rows that `sequence_parallel.gather_rows` or `gather_samples` has prepared: they are gathered once
for all projections that share an input, and their gradients are summed once.
"""

from __future__ import annotations

from torch import nn

from megatron_vla.parallel.tensor_parallel import NOT_PARALLEL, TensorParallel, on_token_rows


def column_parallel_linear(
    in_features: int, out_features: int, *, bias: bool, tensor_parallel: TensorParallel = NOT_PARALLEL
) -> nn.Module:
    """Linear whose output features are split over the tensor-parallel ranks; weight [out_features / size, in_features].

    The output stays split: the caller works on its own part and a `row_parallel_linear` brings the parts together.
    """
    if tensor_parallel.size == 1:
        return nn.Linear(in_features, out_features, bias=bias)
    from megatron_vla.parallel.megatron_layers import ColumnParallel

    return ColumnParallel(in_features, out_features, bias=bias, tensor_parallel=tensor_parallel)


def row_parallel_linear(
    in_features: int, out_features: int, *, bias: bool, tensor_parallel: TensorParallel = NOT_PARALLEL
) -> nn.Module:
    """Linear whose input features are split over the tensor-parallel ranks; sums the parts, then adds `bias` once."""
    if tensor_parallel.size == 1:
        return nn.Linear(in_features, out_features, bias=bias)
    from megatron_vla.parallel.megatron_layers import RowParallel

    return RowParallel(in_features, out_features, bias=bias, tensor_parallel=tensor_parallel)


def replicated_linear(in_features: int, out_features: int, *, bias: bool) -> nn.Module:
    """Linear that every tensor-parallel rank holds whole: small projections and conditioning layers."""
    return nn.Linear(in_features, out_features, bias=bias)


def row_local_linear(
    in_features: int, out_features: int, *, bias: bool, tensor_parallel: TensorParallel = NOT_PARALLEL
) -> nn.Module:
    """A whole linear applied between the matrices, to this rank's share of the token rows under sequence parallelism."""
    return on_token_rows(nn.Linear(in_features, out_features, bias=bias), tensor_parallel)


def token_embedding(
    vocab_size: int, hidden_size: int, *, padding_index: int | None = None, tensor_parallel: TensorParallel = NOT_PARALLEL
) -> nn.Module:
    """Embedding table `weight` [vocab_size, hidden_size], split by rows over the tensor-parallel ranks."""
    if tensor_parallel.size == 1:
        return nn.Embedding(vocab_size, hidden_size, padding_idx=padding_index)
    from megatron_vla.parallel.megatron_layers import VocabParallel

    return VocabParallel(vocab_size, hidden_size, padding_index=padding_index, tensor_parallel=tensor_parallel)
