"""Several linear layers that read the same rows, computed as one matrix product. Their parameters stay separate.

The weights are joined inside forward, so checkpoints, optimizers and sharding see `q_proj.weight`, `k_proj.weight`, ... as
before; the gradient of the join is a view per weight, without a copy. So is the join itself where the weights are neighbours
in memory (joined_parameters.py).

Pi0.5 base, 32 samples of 576 prefix and 50 action tokens, bf16, what one pass through the joint layers costs and saves:
- q, k, v of the prefix: k and v have 256 outputs each, a product of 19 GFLOP that moves 88 MB. Merged with q (2048 outputs)
  the rows (75 MB) are read once, not three times, in forward and twice more in backward, and the three input gradients become
  one product instead of two more additions over 75 MB. Joining moves 2 x 10 MB per layer.
- gate, up of the prefix: each product is large enough alone; merged, the two input gradients are summed inside one product
  (saves 3 x 75 MB per layer), but joining by copying moves 2 x 134 MB per layer. At 4.3 TB/s that is 0.05 ms against 0.06 ms
  per layer: a gain only with neighbours.
- q, k, v of the vision tower (1152 -> 3 x 1152): the rows (38 MB) are read once; joining by copying moves 2 x 8 MB per layer.
The number of FLOPs is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_vla.kernels.joined_gradients import op as joined_gradients
from megatron_vla.models.common.joined_parameters import forget_moved, joined_parameter


@runtime_checkable
class JointLinear(Protocol):
    """A linear layer whose class has its own way to compute several layers of this class in one product."""

    def joint_output(self, hidden: Tensor, linears: Sequence[nn.Module]) -> Tensor:
        """Outputs of `linears` (this layer among them) on `hidden`, side by side: [..., sum of out]."""
        ...


@runtime_checkable
class FusesGatedMlp(Protocol):
    """A linear layer whose class can compute a whole gated MLP (gelu_tanh, gate and up merged) as one function."""

    def fuses_gated_mlp(self, layers: Sequence[nn.Module]) -> bool:
        """Whether it does so for these (gate, up, down)."""
        ...

    def gated_mlp(self, hidden: Tensor, layers: Sequence[nn.Module]) -> Tensor:
        """down(gelu_tanh(gate(hidden)) * up(hidden)): [..., H] -> [..., H]."""
        ...


def merged_linear(hidden: Tensor, linears: Sequence[nn.Module], merged: bool) -> tuple[Tensor, ...]:
    """Output [..., out] of each of `linears` on `hidden` [..., in]; if `merged`, in one product per class of layer.

    Merging reads weights and biases without calling the layers: all are plain matrices (torch's or megatron-core's
    column-parallel ones) or a JointLinear, with a bias in all of them or in none.
    """
    if not merged:
        return tuple(linear(hidden) for linear in linears)
    outputs: dict[int, Tensor] = {}
    for kind in {type(linear): None for linear in linears}:
        alike = {number: linear for number, linear in enumerate(linears) if type(linear) is kind}
        parts = _outputs_of_one_class(hidden, list(alike.values()))
        outputs.update(zip(alike, parts, strict=True))
    return tuple(outputs[number] for number in range(len(linears)))


def _outputs_of_one_class(hidden: Tensor, linears: Sequence[nn.Module]) -> Sequence[Tensor]:
    sizes = [linear.get_parameter("weight").shape[0] for linear in linears]
    bias = None if isinstance(linears[0], JointLinear) else joined_bias(linears)
    if bias is not None and joined_gradients.can_run(hidden, bias, sizes):
        output = F.linear(hidden, joined_parameter(linears, "weight"), bias.detach())
        return joined_gradients.split_with_bias(output, bias, sizes)
    return _joint_output(hidden, linears).split(sizes, dim=-1)


def joined_linear(hidden: Tensor, linears: Sequence[nn.Module]) -> Tensor:
    """[..., sum of the outputs]: the outputs of `linears` side by side, from one product if all are of one class."""
    if len({type(linear) for linear in linears}) == 1:
        return _joint_output(hidden, linears)
    return torch.cat(merged_linear(hidden, linears, merged=True), dim=-1)


def _joint_output(hidden: Tensor, linears: Sequence[nn.Module]) -> Tensor:
    first = linears[0]
    if isinstance(first, JointLinear):
        return first.joint_output(hidden, linears)
    return F.linear(hidden, joined_parameter(linears, "weight"), joined_bias(linears))


def joined_bias(linears: Sequence[nn.Module]) -> Tensor | None:
    """The biases side by side; None when the layers have none."""
    if not isinstance(linears[0].bias, Tensor):
        return None
    return joined_parameter(linears, "bias")


class MergesProjections(nn.Module):
    """A module with linear layers that may be merged: `merged` is set by the optimization of that name, off when built."""

    merged = False

    def projection_groups(self) -> tuple[tuple[nn.Module, ...], ...]:
        """Layers that are computed together when `merged`."""
        raise NotImplementedError


def projection_groups(model: nn.Module) -> list[tuple[nn.Module, ...]]:
    """Those of all modules that may merge, in the model's order."""
    return [group for m in model.modules() if isinstance(m, MergesProjections) for group in m.projection_groups()]


def forget_moved_weights(model: nn.Module) -> int:
    """After wrapping a model: how many groups have lost their place in memory and join by copying from now on."""
    return sum(map(forget_moved, projection_groups(model)))
