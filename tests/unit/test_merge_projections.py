"""Merged projections: one product instead of several, the same numbers, names and checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pi05_fixtures import gradients, mean_loss, tiny_batch, tiny_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.models.common.merged_linear import merged_linear
from megatron_vla.models.pi05.family import FAMILY
from megatron_vla.optimizations.apply import apply_optimizations

MERGED = OptimizationConfig(merge_projections=True, attention_backend="sdpa")


def quiet(line: str) -> None:
    """Prints nothing."""


@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_of_a_group(bias: bool) -> None:
    torch.manual_seed(0)
    linears = [nn.Linear(6, out, bias=bias, dtype=torch.float64) for out in (4, 2, 3)]
    hidden = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(2, 5, linear.out_features, dtype=torch.float64) for linear in linears]
    inputs = [hidden, *(p for linear in linears for p in linear.parameters())]
    results = []
    for merged in (False, True):
        outputs = merged_linear(hidden, linears, merged)
        total = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))
        results.append((*outputs, *torch.autograd.grad(total, inputs)))
    for plain, joined in zip(*results, strict=True):
        torch.testing.assert_close(joined, plain, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("skip_dead", [True, False])
def test_on_equals_off(skip_dead: bool) -> None:
    lines: list[str] = []
    plain, batch = tiny_model(skip_dead_compute=skip_dead), tiny_batch()
    model = apply_optimizations(tiny_model(skip_dead_compute=skip_dead), MERGED, FAMILY, lines.append)
    # Per joint layer and stream: q, k, v and gate, up; per vision layer: q, k, v. Two layers each.
    start = "merged projections: 26 linear layers in 10 products, 10 of which read neighbours in memory; gated GELU: "
    assert len(lines) == 1 and lines[0].startswith(start) and "; gradients of biased products: " in lines[0]
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    losses = [float(mean_loss(m, batch).detach()) for m in (plain, model)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-13)
    expected, found = gradients(plain, batch), gradients(model, batch)
    assert found.keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-14 * scale, msg=name)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


class ProductCounter(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_fewer_products_of_the_same_size() -> None:
    """The same FLOPs in fewer calls."""
    batch, flops, calls = tiny_batch(), [], []
    for config in (OptimizationConfig(), MERGED):
        model = apply_optimizations(tiny_model(), config, FAMILY, quiet)
        with FlopCounterMode(display=False) as counter, ProductCounter() as products:
            gradients(model, batch)
        flops.append(counter.get_total_flops())
        calls.append(products.count)
    assert flops[0] == flops[1] and 0 < calls[1] < 0.8 * calls[0]


def test_a_model_without_projections_is_an_error() -> None:
    with pytest.raises(ValueError, match="--merge-projections: model pi05 has no projections"):
        apply_optimizations(nn.Linear(2, 2), MERGED, FAMILY, quiet)
