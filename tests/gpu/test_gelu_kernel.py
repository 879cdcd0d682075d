"""GELU of a biased product against torch's: the same bits forward, within a rounding backward, the same sums every time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from kernel_fixtures import captured, drawn, needs_kernel
from torch import Tensor
from torch.nn import functional as F

from megatron_vla.kernels import SELECTION
from megatron_vla.kernels.biased_gelu import op
from megatron_vla.kernels.biased_gelu.reference import gelu_backward_reference, gelu_reference
from megatron_vla.models.common.feed_forward import FeedForward
from megatron_vla.parallel.tensor_parallel import NOT_PARALLEL

pytestmark = needs_kernel("biased_gelu")


def test_forward_of_every_bf16_number() -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).cuda()
    values = patterns.view(torch.bfloat16).view(64, 1024)
    found, expected = op.biased_gelu(values), gelu_reference(values)
    assert torch.equal(found.isnan(), expected.isnan())
    differ = (found != expected) & ~expected.isnan()
    print("numbers whose GELU differs from torch's:", values[differ].tolist())
    # Numbers so small that halving them rounds, and in the far tail, where 1 + tanh is a single bit of fp32.
    normal = values.float().abs() > 1e-37
    assert int((differ & normal).sum()) <= 16
    assert not bool((differ & (values > -4.5) & normal).any())
    assert float((found.float() - expected.float())[differ].abs().max() if bool(differ.any()) else 0.0) <= 1e-6


@pytest.mark.parametrize("width", [8, 24, 1032, 4304, 6144])
@pytest.mark.parametrize("rows", [(1,), (3, 5), (127,), (64, 256), (1001,)], ids=str)
def test_backward_and_sums(rows: tuple[int, ...], width: int) -> None:
    values, gradient = drawn(*rows, width, factor=3.0), drawn(*rows, width, seed=1)
    inner, sums = op.biased_gelu_backward(gradient, values)
    exact, _ = gelu_backward_reference(gradient.double(), values.double())
    # One rounding to bf16; fp32 errors where the slope is nearly zero.
    assert ((inner.double() - exact).abs() <= exact.abs() * 2.0**-8 + 2e-6 * gradient.double().abs()).all()
    exact_sums = inner.double().flatten(0, -2).sum(0)
    assert ((sums.double() - exact_sums).abs() <= exact_sums.abs() * 2.0**-8 + 1e-5 * inner.shape[:-1].numel() ** 0.5).all()
    again, sums_again = op.biased_gelu_backward(gradient, values)
    assert torch.equal(again, inner) and torch.equal(sums_again, sums)
    assert torch.equal(op.biased_gelu(values), op.biased_gelu(values))


def test_what_the_kernel_does_not_take_goes_to_torch() -> None:
    storage = drawn(4 * 64 + 8)
    unaligned = storage[1 : 1 + 4 * 64].view(4, 64)
    assert torch.equal(op.biased_gelu(unaligned), gelu_reference(unaligned))
    strided = drawn(64, 48).t()
    inner, sums = op.biased_gelu_backward(strided, strided)
    same, same_sums = op.biased_gelu_backward(strided.contiguous(), strided.contiguous())
    assert torch.equal(inner, same) and torch.equal(sums, same_sums)
    empty, none = op.biased_gelu_backward(drawn(0, 16), drawn(0, 16))
    assert empty.shape == (0, 16) and not none.any()


def run(mlp: FeedForward, hidden: Tensor, used: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    monkeypatch.setattr(SELECTION, "enabled", used)
    assert op.can_run(hidden, mlp.fc1.weight, mlp.fc1.bias) == used
    torch._dynamo.reset()
    function: Any = torch.compile(mlp, fullgraph=True) if compiled else mlp
    output = function(hidden)
    inputs = [t for t in (hidden, *mlp.parameters()) if t.requires_grad]
    if not inputs:
        return [output]
    return [output.detach(), *torch.autograd.grad(output.float().sin().sum(), inputs)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("frozen", ["nothing", "input", "fc1", "all"])
def test_layer_with_and_without_the_kernel(compiled: bool, frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    mlp = FeedForward(64, 1072, NOT_PARALLEL).to("cuda", torch.bfloat16)
    hidden = drawn(4, 101, 64).requires_grad_(frozen not in ("input", "all"))
    if frozen == "fc1":
        mlp.fc1.requires_grad_(False)
    elif frozen == "all":
        mlp.requires_grad_(False)
    # The yardstick computes in fp64 from the same numbers: no one may err more than torch in bf16 does, times two.
    wide, wide_hidden = copy.deepcopy(mlp).double(), hidden.detach().double().requires_grad_(hidden.requires_grad)
    output = wide.fc2(F.gelu(wide.fc1(wide_hidden), approximate="tanh"))
    wide_inputs = [t for t in (wide_hidden, *wide.parameters()) if t.requires_grad]
    exact = [output.detach(), *(torch.autograd.grad(output.sin().sum(), wide_inputs) if wide_inputs else ())]
    plain = run(mlp, hidden, False, compiled, monkeypatch)
    fused = run(mlp, hidden, True, compiled, monkeypatch)
    torch._dynamo.reset()
    assert len(fused) == len(plain) == len(exact)
    for mine, theirs, truth in zip(fused, plain, exact, strict=True):
        assert mine.dtype == torch.bfloat16 and mine.shape == theirs.shape
        error, allowed = (mine.double() - truth).abs().max(), (theirs.double() - truth).abs().max()
        assert error <= 2 * allowed + 2.0**-8 * truth.abs().max()


def test_graph_replays_with_new_numbers() -> None:
    torch.manual_seed(0)
    mlp = FeedForward(64, 256, NOT_PARALLEL).to("cuda", torch.bfloat16)
    hidden = drawn(512, 64).requires_grad_()
    assert op.can_run(hidden, mlp.fc1.weight, mlp.fc1.bias)

    def step() -> list[Tensor]:
        return list(torch.autograd.grad(mlp(hidden).float().sin().sum(), [hidden, *mlp.parameters()]))

    graph, found = captured(step)
    for seed in (1, 2):
        with torch.no_grad():
            hidden.copy_(drawn(512, 64, seed=seed))
        graph.replay()
        replayed = [t.clone() for t in found]
        for mine, eager in zip(replayed, step(), strict=True):
            torch.testing.assert_close(mine, eager, rtol=2**-6, atol=0.05)
