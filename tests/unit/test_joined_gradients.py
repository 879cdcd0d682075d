"""The backward that joins gradients of a merged product and sums them for its bias. The kernel itself: tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pi05_fixtures import assert_gradients_close, gradients, mean_loss, tiny_batch, tiny_model
from torch import nn

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.kernels.joined_gradients import op
from megatron_vla.kernels.joined_gradients.reference import joined_gradients_reference
from megatron_vla.models.common.merged_linear import merged_linear
from megatron_vla.models.pi05.family import FAMILY
from megatron_vla.optimizations import compile as compile_optimization
from megatron_vla.optimizations.apply import apply_optimizations


def always(output: Any, bias: Any, sizes: Any) -> bool:
    """In place of the conditions of the kernel: the reference runs where it is not built."""
    return True


@pytest.mark.parametrize("unused", [None, 1])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_split_has_the_derivatives_of_plain_code(
    compiled: bool, unused: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing reads one of the parts."""
    torch.manual_seed(0)
    linears = [nn.Linear(6, out, dtype=torch.float64) for out in (4, 2, 3)]
    hidden = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    inputs = [hidden, *(p for linear in linears for p in linear.parameters())]

    def loss(hidden: torch.Tensor) -> torch.Tensor:
        parts = merged_linear(hidden, linears, merged=True)
        return torch.stack([p.sin().sum() for i, p in enumerate(parts) if i != unused]).sum()

    expected = torch.autograd.grad(loss(hidden), inputs)
    monkeypatch.setattr(op, "can_run", always)
    torch._dynamo.reset()
    run: Any = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
    for found, wanted in zip(torch.autograd.grad(run(hidden), inputs), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-14)
    torch._dynamo.reset()


def test_reference_and_shapes() -> None:
    parts = [torch.randn(3, 7, width, dtype=torch.float64) for width in (8, 16)]
    joined, sums = op.joined_gradients(parts)
    expected, expected_sums = joined_gradients_reference(parts)
    assert torch.equal(joined, expected) and torch.equal(sums, expected_sums)
    assert joined.shape == (3, 7, 24) and sums.shape == (24,)
    torch.library.opcheck(torch.ops.megatron_vla.joined_gradients, (parts,), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("compiled", [False, True])
def test_model_computes_the_same(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_optimization, "BACKEND", "aot_eager")
    results = []
    for used in (False, True):
        if used:
            monkeypatch.setattr(op, "can_run", always)
        torch._dynamo.reset()
        config = OptimizationConfig(merge_projections=True, attention_backend="sdpa", compile=compiled)
        model, batch = apply_optimizations(tiny_model(), config, FAMILY, lambda line: None), tiny_batch()
        results.append((float(mean_loss(model, batch).detach()), gradients(model, batch)))
    torch._dynamo.reset()
    assert results[0][0] == results[1][0]
    assert_gradients_close(results[1][1], results[0][1])
