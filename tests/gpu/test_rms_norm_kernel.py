"""The RMSNorm kernels against fp64: within the roundings to bf16, the same bits every time, eager, compiled and captured."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from kernel_fixtures import assert_within, captured, drawn, needs_kernel
from pi05_fixtures import CASE_NAMES, GOLDEN, load_case
from torch import Tensor

from megatron_vla.kernels import FALLBACKS, SELECTION
from megatron_vla.kernels.rms_norm import op
from megatron_vla.models.common.normalization import RMSNorm
from megatron_vla.models.pi05.layers import AttentionPlan, PrefixLayer, plan_attention
from megatron_vla.parallel.tensor_parallel import NOT_PARALLEL

pytestmark = needs_kernel("rms_norm")

EPSILON = 1e-6
HALF_ULP = 2.0**-8  # of bf16, relative: one rounding


def exact_norm(x: Tensor, weight: Tensor, offset: float) -> Tensor:
    """In fp64."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * (offset + weight)


def exact_backward(gradient: Tensor, x: Tensor, weight: Tensor, offset: float) -> tuple[Tensor, ...]:
    """Gradients of (x, weight) in fp64."""
    leaves = [t.detach().double().requires_grad_() for t in (x, weight)]
    return torch.autograd.grad(exact_norm(leaves[0], leaves[1], offset), leaves, gradient.double())


@pytest.mark.parametrize("form", ["plain", "addition", "input"])
@pytest.mark.parametrize("width", [128 * k for k in range(4, 17)])
@pytest.mark.parametrize("rows", [(1,), (3, 5), (4, 256), (2371,)], ids=str)
def test_forward_and_backward(rows: tuple[int, ...], width: int, form: str) -> None:
    weight_dtype, offset = (torch.float32, 1.0) if width % 512 else (torch.bfloat16, float(form == "input"))
    weight, x, update = drawn(width, seed=1, dtype=weight_dtype), drawn(*rows, width, seed=3) * 3, drawn(*rows, width, seed=4)
    leaves = [t.requires_grad_() for t in (x, weight, *([update] if form == "addition" else []))]
    assert op.can_run(x, weight, update if form == "addition" else None)
    gradient, extra = drawn(*rows, width, seed=5), drawn(*rows, width, seed=6)

    def run() -> tuple[list[Tensor], list[Tensor]]:
        """(output and stream, gradients)."""
        if form == "plain":
            outputs: list[Tensor] = [op.rms_norm(x, weight, offset, EPSILON)]
            return outputs, list(torch.autograd.grad(outputs, leaves, [gradient]))
        if form == "addition":
            stream, output = op.add_rms_norm(x, update, weight, offset, EPSILON)
        else:
            stream, output = op.rms_norm_and_input(x, weight, offset, EPSILON)
            assert stream.data_ptr() == x.data_ptr()
        outputs = [output, stream]
        return outputs, list(torch.autograd.grad(outputs, leaves, [gradient, extra]))

    outputs, found = run()
    stream = x.detach()
    if form == "addition":
        stream = x.detach() + update.detach()
        assert torch.equal(outputs[1], stream) and torch.equal(found[0], found[2])
    exact = exact_norm(stream.double(), weight.detach().double(), offset)
    assert_within(outputs[0].detach(), exact, relative=HALF_ULP, scale=exact.abs())
    exact_x, exact_weight = exact_backward(gradient, stream, weight, offset)
    other = torch.zeros_like(exact_x) if form == "plain" else extra.double()
    rms = stream.double().square().mean(-1, keepdim=True).sqrt()
    largest = (gradient.double() * (offset + weight.detach().double())).abs().amax(-1, keepdim=True)
    assert_within(found[0], exact_x + other, relative=HALF_ULP, scale=8 * largest / rms + other.abs())
    assert found[1].dtype == weight_dtype
    rounding = 0.0 if weight_dtype == torch.float32 else HALF_ULP
    assert_within(found[1], exact_weight, relative=rounding, scale=8 * stream.shape[:-1].numel() ** 0.5)
    again = run()
    for first, second in zip(outputs + found, again[0] + again[1], strict=True):
        assert torch.equal(first, second), "the same bits every time"


def test_many_rows_and_extreme_ones() -> None:
    """More rows than one wave; zero rows give zeros and finite gradients; large and tiny numbers."""
    width = 2048
    weight, x = drawn(width, seed=1, dtype=torch.float32), drawn(20001, width, seed=3)
    x[:2] = torch.tensor([0.0, 1e-20], device="cuda", dtype=torch.bfloat16)[:, None]
    x[2] *= 1e15
    x[3] *= 1e-10
    x.requires_grad_()
    output = op.rms_norm(x, weight, 1.0, EPSILON)
    assert not bool(output[0].any())
    exact = exact_norm(x.detach().double(), weight.double(), 1.0)
    assert_within(output.detach()[3:], exact[3:], relative=HALF_ULP, scale=exact[3:].abs())
    torch.testing.assert_close(output.detach().double(), exact, rtol=2**-7, atol=1e-12)
    gradient = drawn(20001, width, seed=4)
    (found,) = torch.autograd.grad(output, x, gradient)
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found[4:].double(), exact_backward(gradient, x, weight, 1.0)[0][4:], rtol=HALF_ULP, atol=1e-4)


def test_other_tensors_are_refused_or_take_the_reference() -> None:
    weight, x = drawn(512, seed=1), drawn(8, 512, seed=3)
    assert op.can_run(x, weight) and op.can_run(x, weight.float(), x)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert op.can_run(x, weight)
    assert not op.can_run(x.float(), weight) and not op.can_run(x, weight.double())
    assert not op.can_run(x.t().contiguous().t(), weight) and not op.can_run(x, weight, x[:1])
    assert not op.can_run(drawn(8, 128, seed=1), drawn(128, seed=2)), "norms of heads"
    shifted = torch.empty(8 * 512 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(8, 512).copy_(x)
    found, expected = (op.rms_norm(t, weight, 1.0, EPSILON) for t in (shifted, x))
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-5)
    assert op.rms_norm(x[:0], weight, 1.0, EPSILON).shape == (0, 512)
    leaves = [t.requires_grad_() for t in (x, weight)]
    for gradient in (drawn(512, 8, seed=9).t(), drawn(1, 512, seed=9).expand(8, -1)):
        strided, plain = (
            torch.autograd.grad(op.rms_norm(x, weight, 1.0, EPSILON), leaves, g) for g in (gradient, gradient.contiguous())
        )
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(strided, plain, strict=True))
    gradients = torch.autograd.grad(op.rms_norm(x[:0], weight, 1.0, EPSILON).sum(), leaves)
    assert not any(bool(gradient.any()) for gradient in gradients)


def layer_and_inputs() -> tuple[PrefixLayer, Tensor, AttentionPlan]:
    """A prefix layer of 512 columns with fp32 norms; 3 samples of 50 tokens."""
    torch.manual_seed(0)
    config = dataclasses.replace(load_case(GOLDEN / CASE_NAMES[0]).config, hidden_size=512)
    layer = PrefixLayer(config, keys_only=False, backend="sdpa", tensor_parallel=NOT_PARALLEL).to("cuda", torch.bfloat16)
    for module in layer.modules():
        if isinstance(module, RMSNorm):
            module.float()
            torch.nn.init.normal_(module.weight, 0.0, 0.2)
    plan = plan_attention(torch.ones(3, 50, dtype=torch.bool, device="cuda"), 4, config, torch.bfloat16)
    return layer, drawn(3, 50, 512, seed=7).requires_grad_(), plan


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_compute_the_same(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On and off, against fp64: on errs no more. Off is not compiled: generated code does not round between operations."""
    layer, hidden, plan = layer_and_inputs()
    gradient = drawn(3, 50, 512, seed=8)

    def both_ways(layer: PrefixLayer, hidden: Tensor, plan: AttentionPlan, compiled: bool) -> list[Tensor]:
        torch._dynamo.reset()
        run: Any = torch.compile(layer, fullgraph=True) if compiled else layer
        output, key_value = run(hidden, plan)
        inputs = [hidden, *layer.parameters()]
        sources = [output, *key_value]
        gradients = [gradient.to(output.dtype), *(torch.ones_like(t) for t in key_value)]
        return [output.detach(), *torch.autograd.grad(sources, inputs, gradients)]

    found = both_ways(layer, hidden, plan, compiled)
    monkeypatch.setattr(SELECTION, "enabled", False)
    plain = both_ways(layer, hidden, plan, compiled=False)
    config = dataclasses.replace(load_case(GOLDEN / CASE_NAMES[0]).config, hidden_size=512)
    wide_plan = plan_attention(torch.ones(3, 50, dtype=torch.bool, device="cuda"), 4, config, torch.float64)
    exact = both_ways(layer.double(), hidden.detach().double().requires_grad_(), wide_plan, compiled=False)
    torch._dynamo.reset()
    for mine, theirs, truth in zip(found, plain, exact, strict=True):
        assert mine.dtype == theirs.dtype
        error, allowed = ((t.double() - truth).square().mean().sqrt() for t in (mine, theirs))
        assert float(error) <= 1.3 * float(allowed) + 1e-6


def test_captured_and_replayed() -> None:
    weight, x, update = drawn(2048, seed=1), drawn(999, 2048, seed=3), drawn(999, 2048, seed=4)
    gradient, extra = drawn(999, 2048, seed=5), drawn(999, 2048, seed=6)
    leaves = [t.requires_grad_() for t in (x, update, weight)]

    def run() -> list[Tensor]:
        outputs = op.add_rms_norm(x, update, weight, 1.0, EPSILON)
        return [*outputs, *torch.autograd.grad(outputs, leaves, [extra, gradient])]

    graph, found = captured(run)
    with torch.no_grad():
        x.add_(1.0), gradient.mul_(2.0)
    graph.replay()
    for replayed, expected in zip(found, run(), strict=True):
        assert torch.equal(replayed, expected)


def test_rows_at_odd_addresses_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view that starts between two places that the kernel can load from: the reference computes it."""
    monkeypatch.setattr(FALLBACKS, "counts", {})
    x = drawn(4 * 512 + 1, seed=1)[1:].view(4, 512)
    weight = drawn(512, seed=2)
    assert op.can_run(x, weight) and x.data_ptr() % 16 == 2
    found = op.rms_norm(x, weight, 1.0, EPSILON)
    assert FALLBACKS.counts == {"rms_norm": 1}
    torch.testing.assert_close(found, op.rms_norm(x.clone(), weight, 1.0, EPSILON), rtol=2 * HALF_ULP, atol=0)
    assert FALLBACKS.counts == {"rms_norm": 1}
