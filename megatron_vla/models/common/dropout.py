"""Dropout whose masks fit tensor parallelism: equal where all ranks repeat a computation, different where they share it.

Its draws are the only ones in a forward pass. They come from torch's generators (seeded per rank at start, see
parallel/tensor_parallel.py), so losses with dropout depend on the layout of ranks; everything else does not.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


class Dropout(nn.Module):
    """Zero elements with `probability` in training and scale the others up.

    is_split: the ranks of a tensor-parallel group hold different elements here, so each draws from its own stream.
    """

    def __init__(self, probability: float, *, is_split: bool = False) -> None:
        super().__init__()
        self.probability = probability
        self.is_split = is_split

    def extra_repr(self) -> str:
        """For printed models."""
        return f"{self.probability}"

    def forward(self, values: Tensor) -> Tensor:
        """Same shape and dtype."""
        if not self.training or self.probability == 0.0:
            return values
        if self.is_split and values.is_cuda:
            with _tracker().fork():
                return F.dropout(values, self.probability)
        return F.dropout(values, self.probability)


def twice(probability: float) -> float:
    """The probability of one dropout that is distributed as two in a row."""
    return 1.0 - (1.0 - probability) ** 2


def draws_in_forward(module: nn.Module) -> bool:
    """Whether a forward pass of `module` in training draws random numbers."""
    return any(isinstance(m, Dropout) and m.probability > 0.0 for m in module.modules())


def _tracker() -> Any:
    """megatron-core's per-rank random streams."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("megatron.core.tensor_parallel.random").get_cuda_rng_tracker()
