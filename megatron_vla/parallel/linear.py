"""The one place that decides a linear layer's class.

Tensor-parallel size 1 gives `torch.nn.Linear`, which compile, TorchAO and checkpoint tools understand. Every later
implementation keeps the parameter names `weight` and `bias`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """How a layer's matrices are shared: `size` ranks, of which this is number `rank`; `sequence_parallel` splits norms too."""

    size: int = 1
    rank: int = 0
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if self.size != 1 or self.sequence_parallel:
            raise ValueError(
                f"--tensor-model-parallel-size {self.size}, sequence parallel {self.sequence_parallel}: linears are only built "
                "for size 1 without sequence parallelism; use --tensor-model-parallel-size 1 --no-sequence-parallel"
            )


NOT_PARALLEL = TensorParallel()


def column_parallel_linear(
    in_features: int, out_features: int, *, bias: bool, tensor_parallel: TensorParallel = NOT_PARALLEL
) -> nn.Module:
    """Linear whose output features are split over the tensor-parallel ranks; weight [out_features, in_features].

    The output stays split: the caller works on its own part and a `row_parallel_linear` brings the parts together.
    """
    del tensor_parallel  # size 1 (TensorParallel refuses others): both kinds are the plain layer
    return nn.Linear(in_features, out_features, bias=bias)


def row_parallel_linear(
    in_features: int, out_features: int, *, bias: bool, tensor_parallel: TensorParallel = NOT_PARALLEL
) -> nn.Module:
    """Linear whose input features are split over the tensor-parallel ranks; sums the parts, then adds `bias` once."""
    del tensor_parallel
    return nn.Linear(in_features, out_features, bias=bias)


def replicated_linear(in_features: int, out_features: int, *, bias: bool) -> nn.Module:
    """Linear that every tensor-parallel rank holds whole: small projections and conditioning layers."""
    return nn.Linear(in_features, out_features, bias=bias)
