"""gelu_tanh(gate) * up in PyTorch: the order of roundings that csrc/gated_gelu.cu keeps."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def gated_gelu_reference(gate_up: Tensor) -> Tensor:
    """[..., 2 * F] -> [..., F]: the first half of the last dimension is the gate."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
