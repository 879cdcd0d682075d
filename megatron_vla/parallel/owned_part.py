"""Which elements of a parameter this rank updates: all of them, or its shard. The optimizer knows no more of the layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """The accumulated gradient: megatron-core's `main_grad` where there is one, torch's `grad` otherwise."""
    main_grad = getattr(parameter, "main_grad", None)
    gradient = parameter.grad if main_grad is None else main_grad
    if gradient is None:
        raise ValueError(
            f"a trainable parameter of shape {tuple(parameter.shape)} received no gradient: "
            "the model must set requires_grad=False on parameters that the loss does not reach"
        )
    return gradient


@dataclass(frozen=True)
class OwnedPart:
    """Elements `flat_range` (start, stop) of the row-major flattened rank-local parameter.

    weight: live view of the model's own storage of these elements; of the parameter's shape when the part is everything.
    local_shape: shape of the rank-local parameter (a tensor-parallel rank's part of the global one, whatever data parallelism
        makes of it).
    read_gradient: the accumulated gradient of these elements, of weight's shape; valid after finish_gradients.
    """

    parameter: nn.Parameter
    weight: Tensor
    flat_range: tuple[int, int]
    local_shape: tuple[int, ...]
    read_gradient: Callable[[], Tensor]

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Dtype in which gradients are accumulated; known before the first backward."""
        main_grad: Tensor | None = getattr(self.parameter, "main_grad", None)
        return self.parameter.dtype if main_grad is None else main_grad.dtype


# Answers which part of a parameter this rank updates; None: no element of it.
OwnerRule = Callable[[nn.Parameter], OwnedPart | None]


def whole_part(parameter: nn.Parameter) -> OwnedPart:
    """Every rank updates every element."""
    shape = tuple(parameter.shape)
    return OwnedPart(parameter, parameter.detach(), (0, parameter.numel()), shape, lambda: gradient_of(parameter))
