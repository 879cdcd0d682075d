"""The kernel that joins gradients against its reference: the same matrix bit by bit, sums in fp32, the same ones every time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_vla.kernels import BUILD_COMMAND, load_launcher
from megatron_vla.kernels.joined_gradients import op
from megatron_vla.models.common.merged_linear import merged_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(load_launcher("joined_gradients") is None, reason=f"kernel not built: {BUILD_COMMAND}"),
]


@pytest.mark.parametrize("widths", [(1152, 1152, 1152), (8, 16), (2048, 256, 256), (8, 8, 8, 1024)], ids=str)
@pytest.mark.parametrize("rows", [(1,), (3, 5), (64, 256), (1001,)], ids=str)
def test_join_and_sums(rows: tuple[int, ...], widths: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(*rows, width, generator=generator).to("cuda", torch.bfloat16) for width in widths]
    joined, sums = op.joined_gradients(parts)
    assert torch.equal(joined, torch.cat(parts, dim=-1))
    exact = joined.double().flatten(0, -2).sum(0)
    # One rounding to bf16, and fp32 sums of numbers of size 1.
    assert ((sums.double() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-5 * joined.shape[:-1].numel() ** 0.5).all()
    again, sums_again = op.joined_gradients(parts)
    assert torch.equal(again, joined) and torch.equal(sums_again, sums)


@pytest.mark.parametrize("compiled", [False, True])
def test_merged_layers_give_the_gradients_of_plain_code(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    linears = [nn.Linear(64, out, device="cuda", dtype=torch.bfloat16) for out in (64, 32, 32)]
    hidden = torch.randn(4, 100, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    inputs = [hidden, *(p for linear in linears for p in linear.parameters())]

    def loss(hidden: torch.Tensor) -> torch.Tensor:
        return torch.stack([p.float().sin().sum() for p in merged_linear(hidden, linears, merged=True)]).sum()

    assert op.can_run(hidden, linears[0].bias, (64, 32, 32))
    run = torch.compile(loss, fullgraph=True) if compiled else loss
    found = torch.autograd.grad(run(hidden), inputs)
    monkeypatch.setattr(op, "can_run", lambda *arguments: False)
    torch._dynamo.reset()
    for mine, plain in zip(found, torch.autograd.grad(loss(hidden), inputs), strict=True):
        torch.testing.assert_close(mine, plain, rtol=2**-6, atol=0.05)
