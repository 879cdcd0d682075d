"""The LayerNorm kernels against fp64: within the roundings to bf16, the same bits every time, eager, compiled and captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_fixtures import assert_within, captured, drawn, needs_kernel
from torch import Tensor
from torch.nn import functional as F

from megatron_vla.kernels import SELECTION
from megatron_vla.kernels.layer_norm import op
from megatron_vla.models.common.normalization import LayerNorm
from megatron_vla.models.common.vision_encoder import VisionLayer, VisionLayerSizes, VisionPlan
from megatron_vla.parallel.tensor_parallel import NOT_PARALLEL

pytestmark = needs_kernel("layer_norm")

EPSILON = 1e-6
HALF_ULP = 2.0**-8  # of bf16, relative: one rounding


def exact_backward(gradient: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
    """Gradients of (x, weight, bias) in fp64, of parameters rounded to bf16."""
    wide = x.double().requires_grad_()
    parameters = [weight.bfloat16().double().requires_grad_(), torch.zeros_like(weight, dtype=torch.float64).requires_grad_()]
    output = F.layer_norm(wide, x.shape[-1:], *parameters, EPSILON)
    return list(torch.autograd.grad(output, [wide, *parameters], gradient.double()))


@pytest.mark.parametrize("form", ["plain", "addition", "input"])
@pytest.mark.parametrize("width", [128 * k for k in range(1, 17)])
@pytest.mark.parametrize("rows", [(1,), (3, 5), (4, 256), (2371,)], ids=str)
def test_forward_and_backward(rows: tuple[int, ...], width: int, form: str) -> None:
    with_addition, with_stream = form == "addition", form != "plain"
    parameter_dtype = torch.float32 if width % 256 else torch.bfloat16
    weight, bias = drawn(width, seed=1, dtype=parameter_dtype), drawn(width, seed=2, dtype=parameter_dtype)
    x, update = drawn(*rows, width, seed=3) * 3 + 1, drawn(*rows, width, seed=4)
    leaves = [t.requires_grad_() for t in (x, weight, bias, *([update] if with_addition else []))]
    assert op.can_run(x, weight, bias, update if with_addition else None)
    gradient, extra = drawn(*rows, width, seed=5), drawn(*rows, width, seed=6)

    def run() -> list[Tensor]:
        if not with_stream:
            output = op.layer_norm(x, weight, bias, EPSILON)
            return [output, *torch.autograd.grad(output, leaves, gradient)]
        if with_addition:
            total, output = op.add_layer_norm(x, update, weight, bias, EPSILON)
        else:
            total, output = op.layer_norm_and_input(x, weight, bias, EPSILON)
            assert total.data_ptr() == x.data_ptr()
        return [output, total, *torch.autograd.grad([total, output], leaves, [extra, gradient])]

    output, *others = (t.detach() for t in run())
    total = x.detach()
    if with_stream:
        total, *others = others
        assert torch.equal(total, x + update if with_addition else x)
    if with_addition:
        assert torch.equal(others[0], others[3])
    parameters = [p.detach().bfloat16().double() for p in (weight, bias)]
    exact = F.layer_norm(total.double(), (width,), *parameters, EPSILON)
    magnitude = (exact - parameters[1]).abs() + parameters[1].abs()
    assert_within(output, exact, relative=HALF_ULP, scale=magnitude + parameters[0].abs())
    exact_x, exact_weight, exact_bias = exact_backward(gradient, total, weight.detach())
    deviation = total.double().std(-1, correction=0, keepdim=True)
    extra_wide = extra.double() if with_stream else torch.zeros_like(exact_x)
    sizes = (gradient.double() * parameters[0]).abs().amax(-1, keepdim=True) * 8 / deviation + extra_wide.abs()
    assert_within(others[0], exact_x + extra_wide, relative=HALF_ULP, scale=sizes)
    rounding = 0.0 if parameter_dtype == torch.float32 else HALF_ULP
    for found, wanted in zip(others[1:3], (exact_weight, exact_bias), strict=True):
        assert found.dtype == parameter_dtype
        assert_within(found, wanted, relative=rounding, scale=8 * total.shape[:-1].numel() ** 0.5)
    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second), "the same bits every time"


def test_many_rows_and_extreme_ones() -> None:
    """More rows than one wave; constant rows give the bias, and finite gradients; large and tiny numbers."""
    width = 1152
    weight, bias = drawn(width, seed=1, dtype=torch.float32), drawn(width, seed=2, dtype=torch.float32)
    x = drawn(20001, width, seed=3)
    x[:4] = torch.tensor([0.0, 3.140625, -1000.0, 1e-20], device="cuda", dtype=torch.bfloat16)[:, None]
    x[4] *= 1e30**0.5
    x[5] *= 1e-10
    x.requires_grad_()
    output = op.layer_norm(x, weight, bias, EPSILON)
    assert torch.equal(output[:4], bias.bfloat16().expand(4, -1))
    exact = F.layer_norm(x.double(), (width,), weight.bfloat16().double(), bias.bfloat16().double(), EPSILON)
    assert_within(output.detach(), exact.detach(), relative=HALF_ULP, scale=10.0)
    gradient = drawn(20001, width, seed=4)
    (found,) = torch.autograd.grad(output, x, gradient)
    assert bool(found.isfinite().all())
    wanted = exact_backward(gradient, x.detach(), weight)[0]
    torch.testing.assert_close(found[6:].double(), wanted[6:], rtol=HALF_ULP, atol=1e-4)


def test_other_tensors_are_refused_or_take_the_reference() -> None:
    weight, bias, x = drawn(256, seed=1), drawn(256, seed=2), drawn(8, 256, seed=3)
    assert op.can_run(x, weight, bias) and op.can_run(x, weight.float(), bias.float())
    assert not op.can_run(x.float(), weight, bias)
    assert not op.can_run(x[:, ::2], weight[:128], bias[:128])
    assert not op.can_run(drawn(8, 100, seed=1), weight[:100], bias[:100])
    assert not op.can_run(drawn(8, 17 * 128, seed=1), drawn(17 * 128, seed=2), drawn(17 * 128, seed=3))
    assert not op.can_run(x, weight, bias, x[:1]) and not op.can_run(x, weight, bias, x.float())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert not op.can_run(x, weight, bias)
    shifted = torch.empty(8 * 256 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(8, 256).copy_(x)
    found, expected = (op.layer_norm(t, weight, bias, EPSILON) for t in (shifted, x))
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-5)
    assert op.layer_norm(x[:0], weight, bias, EPSILON).shape == (0, 256)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    for gradient in (drawn(256, 8, seed=9).t(), drawn(1, 256, seed=9).expand(8, -1)):
        strided, plain = (
            torch.autograd.grad(op.layer_norm(x, weight, bias, EPSILON), leaves, g) for g in (gradient, gradient.contiguous())
        )
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(strided, plain, strict=True))
    gradients = torch.autograd.grad(op.layer_norm(x[:0], weight, bias, EPSILON).sum(), leaves)
    assert not any(bool(gradient.any()) for gradient in gradients)


def layer_and_inputs(width: int) -> tuple[VisionLayer, Tensor, VisionPlan]:
    torch.manual_seed(0)
    sizes = VisionLayerSizes(
        hidden_size=width, ffn_hidden_size=2 * width, num_attention_heads=width // 64, norm_epsilon=EPSILON
    )
    layer = VisionLayer(sizes, "sdpa", NOT_PARALLEL).to("cuda", torch.bfloat16)
    for module in layer.modules():
        if isinstance(module, LayerNorm):
            module.float()
            torch.nn.init.normal_(module.weight, 1.0, 0.2)
            torch.nn.init.normal_(module.bias, 0.0, 0.2)
    return layer, drawn(3, 50, width, seed=7).requires_grad_(), VisionPlan(50)


@pytest.mark.parametrize("width", [128, 384])
@pytest.mark.parametrize("compiled", [False, True])
def test_layers_compute_the_same(compiled: bool, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On and off, against fp64: on errs no more. Off is not compiled: generated code does not round between operations."""
    layer, hidden, plan = layer_and_inputs(width)
    gradient = drawn(3, 50, width, seed=8)

    def both_ways(layer: VisionLayer, hidden: Tensor, compiled: bool) -> list[Tensor]:
        torch._dynamo.reset()
        run: Any = torch.compile(layer, fullgraph=True) if compiled else layer
        output = run(hidden, plan)
        inputs = [hidden, *layer.parameters()]
        return [output.detach(), *torch.autograd.grad(output, inputs, gradient.to(output.dtype))]

    found = both_ways(layer, hidden, compiled)
    monkeypatch.setattr(SELECTION, "enabled", False)
    plain = both_ways(layer, hidden, compiled=False)
    exact = both_ways(layer.double(), hidden.detach().double().requires_grad_(), compiled=False)
    torch._dynamo.reset()
    for mine, theirs, truth in zip(found, plain, exact, strict=True):
        assert mine.dtype == theirs.dtype
        error, allowed = ((t.double() - truth).square().mean().sqrt() for t in (mine, theirs))
        assert float(error) <= 1.3 * float(allowed) + 1e-6


def test_captured_and_replayed() -> None:
    weight, bias, x, update = drawn(1152, seed=1), drawn(1152, seed=2), drawn(999, 1152, seed=3), drawn(999, 1152, seed=4)
    gradient, extra = drawn(999, 1152, seed=5), drawn(999, 1152, seed=6)
    leaves = [t.requires_grad_() for t in (x, update, weight, bias)]

    def run() -> list[Tensor]:
        outputs = op.add_layer_norm(x, update, weight, bias, EPSILON)
        return [*outputs, *torch.autograd.grad(outputs, leaves, [extra, gradient])]

    graph, found = captured(run)
    with torch.no_grad():
        x.add_(1.0), gradient.mul_(2.0)
    graph.replay()
    for replayed, expected in zip(found, run(), strict=True):
        assert torch.equal(replayed, expected)
