"""What the linear layers of one step multiply: shapes and counts from a pass on the meta device, times from a profile.

Shape legend: M rows (tokens of a micro-batch), K input features, N output features.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from megatron_vla.config.run import RunConfig
from megatron_vla.data.batch import Batch
from megatron_vla.models.common.merged_linear import MergesProjections
from megatron_vla.models.registry import ModelFamily
from megatron_vla.optimizations import activation_checkpoint

# The operators that end in a matrix product, and where their two factors are among the arguments.
PRODUCT_OPERATORS = {"aten::mm": (0, 1), "aten::addmm": (1, 2)}


@dataclass(frozen=True)
class LinearUse:
    """Linear layers that are computed together, and how a micro-batch uses them.

    forward_calls counts recomputation. outputs: N of each layer.
    """

    names: tuple[str, ...]
    rows: int
    in_features: int
    outputs: tuple[int, ...]
    has_bias: bool
    forward_calls: int
    input_gradient: bool
    weight_gradient: bool

    @property
    def out_features(self) -> int:
        """N of all layers together."""
        return sum(self.outputs)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Everything that a timing depends on."""
        return (self.rows, self.in_features, self.outputs, self.has_bias, self.input_gradient, self.weight_gradient)

    @property
    def product_key(self) -> tuple[int, ...]:
        """Rows and features, sorted: the same for all three products of a layer."""
        return tuple(sorted((self.rows, self.in_features, self.out_features)))

    @property
    def num_products(self) -> int:
        """Matrix products per micro-batch."""
        return self.forward_calls + self.input_gradient + self.weight_gradient

    @property
    def flops(self) -> float:
        """Of all of them."""
        return 2.0 * self.rows * self.in_features * self.out_features * self.num_products


class _Recorder:
    """Forward hooks on every linear layer of a model."""

    def __init__(self, model: nn.Module):
        self.seen: dict[str, LinearUse] = {}
        self.linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        for name, module in self.linears.items():
            module.register_forward_pre_hook(lambda layer, inputs, name=name: self._record(name, layer, inputs[0]))  # type: ignore[misc]

    def _record(self, name: str, linear: nn.Linear, hidden: torch.Tensor) -> None:
        rows = hidden.numel() // linear.in_features
        earlier = self.seen.get(name)
        if earlier is not None and earlier.rows != rows:
            raise ValueError(
                f"{name} is called with {earlier.rows} and with {rows} rows in one step: it has no one shape to time"
            )
        self.seen[name] = LinearUse(
            names=(name,),
            rows=rows,
            in_features=linear.in_features,
            outputs=(linear.out_features,),
            has_bias=linear.bias is not None,
            forward_calls=1 if earlier is None else earlier.forward_calls + 1,
            input_gradient=hidden.requires_grad,
            weight_gradient=linear.weight.requires_grad,
        )


def trace_linears(config: RunConfig, family: ModelFamily, batch: Batch) -> tuple[list[LinearUse], list[str]]:
    """(uses, layers that no step runs) of one forward and backward pass over a micro-batch like `batch`.

    Nothing is computed: model and batch are on the meta device. With --merge-projections layers of one product are one use.
    """
    model = family.skeleton(config)
    recorder = _Recorder(model)
    activation_checkpoint.apply(model, config.optimization, family, lambda line: None)
    meta = type(batch)(**{k: torch.empty_like(v, device="meta") for k, v in batch.tensors().items()})
    output, loss_func = family.forward_step(iter([meta]), model)
    loss_func(output)[0].backward()
    uses = dict(recorder.seen)
    unused = [name for name in recorder.linears if name not in uses]
    return (_merged(model, uses) if config.optimization.merge_projections else list(uses.values())), unused


def _merged(model: nn.Module, uses: Mapping[str, LinearUse]) -> list[LinearUse]:
    """Uses of layers of one projection group joined, where all of a step's calls are alike."""
    remaining = dict(uses)
    name_of = {id(module): name for name, module in model.named_modules()}
    joined: dict[str, LinearUse] = {}
    for module in model.modules():
        for group in module.projection_groups() if isinstance(module, MergesProjections) else ():
            members = [remaining.pop(name) for linear in group if (name := name_of[id(linear)]) in remaining]
            for use in _join(members):
                joined[use.names[0]] = use
    order = list(uses)
    return sorted([*joined.values(), *remaining.values()], key=lambda use: order.index(use.names[0]))


def _join(members: Sequence[LinearUse]) -> list[LinearUse]:
    """One use per way of being called: a layer that is frozen or not always called is not computed with the others."""
    alike: dict[tuple[Any, ...], list[LinearUse]] = defaultdict(list)
    for use in members:
        alike[use.rows, use.in_features, use.has_bias, use.forward_calls, use.input_gradient].append(use)
    return [
        replace(
            uses[0],
            names=tuple(name for use in uses for name in use.names),
            outputs=tuple(n for use in uses for n in use.outputs),
            weight_gradient=any(use.weight_gradient for use in uses),
        )
        for uses in alike.values()
    ]


@dataclass(frozen=True)
class ProductTime:
    """Measured time of the products of one sorted shape in a profiled step."""

    calls: int
    milliseconds: float


def product_times(events: Iterable[Any]) -> dict[tuple[int, ...], ProductTime]:
    """Sorted shape -> time of all matrix products of a torch profile that was taken with `record_shapes=True`.

    On a GPU the time of the kernels, on a CPU that of the operators.
    """
    totals: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for event in events:
        places = PRODUCT_OPERATORS.get(event.name)
        if places is None:
            continue
        a, b = (event.input_shapes[place] for place in places)
        microseconds = event.device_time_total or event.cpu_time_total
        totals[tuple(sorted((a[0], a[1], b[1])))].append(microseconds)
    return {key: ProductTime(len(times), sum(times) / 1e3) for key, times in totals.items()}


def by_product_key(uses: Iterable[LinearUse]) -> dict[tuple[int, ...], list[LinearUse]]:
    """Sorted shape -> uses with it: the modules that a profile's products of this shape belong to."""
    found: dict[tuple[int, ...], list[LinearUse]] = defaultdict(list)
    for use in uses:
        found[use.product_key].append(use)
    return dict(found)
