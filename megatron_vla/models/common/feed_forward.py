"""Two-matrix MLP of transformer layers, and the activations of all MLPs.

Shape legend: B samples, S tokens, H hidden, O output width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from megatron_vla.models.common.dropout import Dropout
from megatron_vla.parallel.linear import column_parallel_linear, row_parallel_linear
from megatron_vla.parallel.sequence_parallel import gather_rows
from megatron_vla.parallel.tensor_parallel import TensorParallel

ActivationName = Literal["gelu", "gelu_tanh", "silu"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class FeedForward(nn.Module):
    """fc2(activation(fc1(x))) with biases; dropout after the activation and after fc2."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        tensor_parallel: TensorParallel,
        *,
        activation: ActivationName = "gelu_tanh",
        output_size: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tensor_parallel = tensor_parallel
        self.activation = ACTIVATIONS[activation]
        output_size = hidden_size if output_size is None else output_size
        self.fc1 = column_parallel_linear(hidden_size, ffn_hidden_size, bias=True, tensor_parallel=tensor_parallel)
        self.fc2 = row_parallel_linear(ffn_hidden_size, output_size, bias=True, tensor_parallel=tensor_parallel)
        self.inner_dropout = Dropout(dropout, is_split=tensor_parallel.size > 1)
        self.output_dropout = Dropout(dropout, is_split=tensor_parallel.sequence_parallel)

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, O]."""
        inner = self.activation(self.fc1(gather_rows(hidden_BSH, self.tensor_parallel)))
        return self.output_dropout(self.fc2(self.inner_dropout(inner)))
