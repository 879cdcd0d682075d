"""Two-matrix MLP of transformer layers, and the activations of all MLPs.

Shape legend: B samples, S tokens, H hidden, O output width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from megatron_vla.kernels.biased_gelu import op as biased_gelu
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
        self.is_gelu_tanh = activation == "gelu_tanh"
        output_size = hidden_size if output_size is None else output_size
        self.fc1 = column_parallel_linear(hidden_size, ffn_hidden_size, bias=True, tensor_parallel=tensor_parallel)
        self.fc2 = row_parallel_linear(ffn_hidden_size, output_size, bias=True, tensor_parallel=tensor_parallel)
        self.inner_dropout = Dropout(dropout, is_split=tensor_parallel.size > 1)
        self.output_dropout = Dropout(dropout, is_split=tensor_parallel.sequence_parallel)

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, O]."""
        inner = self._activated(gather_rows(hidden_BSH, self.tensor_parallel))
        return self.output_dropout(self.fc2(self.inner_dropout(inner)))

    @property
    def can_fuse_bias(self) -> bool:
        """Whether bias and activation may be one function: fc1 is torch's own layer, and nothing wants to see it called."""
        return self.is_gelu_tanh and type(self.fc1) is nn.Linear and not _is_watched(self.fc1)

    def _activated(self, hidden: Tensor) -> Tensor:
        """activation(fc1(hidden)): [..., H] -> [..., F]."""
        fc1 = self.fc1
        if isinstance(fc1, nn.Linear) and self.can_fuse_bias and biased_gelu.can_run(hidden, fc1.weight, fc1.bias):
            return biased_gelu.gelu_with_bias(F.linear(hidden, fc1.weight, fc1.bias.detach()), fc1.bias)
        return self.activation(fc1(hidden))


def _is_watched(module: nn.Module) -> bool:
    """Whether calling `module` does more than its class's forward: hooks (tracers, gathering of weights), recomputation."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(len(kind) > 0 for kind in hooks) or "forward" in module.__dict__
