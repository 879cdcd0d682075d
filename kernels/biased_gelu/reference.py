"""gelu_tanh, and its backward with the sums of the columns, in PyTorch: the roundings that csrc/biased_gelu.cu keeps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def gelu_reference(values: Tensor) -> Tensor:
    """gelu_tanh: computed in fp32 at least, rounded once."""
    return F.gelu(values, approximate="tanh")


def gelu_backward_reference(gradient: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of `values`, its sums over all rows [N]), both rounded once; the sums are those of the rounded gradient."""
    inner = torch.ops.aten.gelu_backward(gradient, values, approximate="tanh")
    return inner, inner.flatten(0, -2).sum(dim=0)
