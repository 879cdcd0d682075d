"""Gated GELU and sum of squares against their references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_vla.kernels import BUILD_COMMAND, load_launcher
from megatron_vla.kernels.gated_gelu import op as gated_gelu_op
from megatron_vla.kernels.gated_gelu.reference import gated_gelu_reference
from megatron_vla.kernels.square_sum.op import SquareSum
from megatron_vla.kernels.square_sum.op import can_run as square_sum_can_run
from megatron_vla.kernels.square_sum.reference import square_sum_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(load_launcher("square_sum") is None, reason=f"kernels not built: {BUILD_COMMAND}"),
]


def both_ways(values: Tensor, gradient: Tensor, function: object) -> tuple[Tensor, Tensor]:
    leaf = values.clone().requires_grad_()
    output = function(leaf)  # type: ignore[operator]
    output.backward(gradient.to(output.dtype))
    assert leaf.grad is not None
    return output.detach(), leaf.grad


@pytest.mark.parametrize("shape", [(1, 16), (3, 5, 4112), (70000, 32)], ids=str)
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_gated_gelu_errs_no_more_than_torch(shape: tuple[int, ...], is_compiled: bool) -> None:
    """Against fp64; extreme values included."""
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(shape, generator=generator) * 3).to("cuda", torch.bfloat16)
    values.view(-1)[:4] = torch.tensor([60.0, -60.0, 0.0, -0.0])
    gradient = torch.randn(*shape[:-1], shape[-1] // 2, generator=generator).to("cuda", torch.bfloat16)
    assert gated_gelu_op.can_run(values)
    ours = torch.compile(gated_gelu_op.gated_gelu, fullgraph=True) if is_compiled else gated_gelu_op.gated_gelu
    found = both_ways(values, gradient, ours)
    theirs = both_ways(values, gradient, gated_gelu_reference)
    exact = both_ways(values.double(), gradient, gated_gelu_reference)
    for mine, reference, truth in zip(found, theirs, exact, strict=True):
        assert (mine.double() - truth).abs().max() <= 2 * (reference.double() - truth).abs().max()
        # tanh differs in the last bits, which moves single bf16 roundings.
        assert (mine != reference).float().mean() <= 1e-3


def test_square_sum_of_any_layout() -> None:
    generator = torch.Generator().manual_seed(0)
    storage = torch.randn(300_000, generator=generator).cuda()
    tensors = [storage[1:70_000], storage[70_000:70_003].bfloat16(), storage[70_004:].clone(), storage[:65_536].bfloat16()]
    assert square_sum_can_run(tensors) and not square_sum_can_run([storage.double()])
    total = SquareSum([t.numel() for t in tensors], storage.device)
    for _ in range(2):
        found, expected = total(tensors), square_sum_reference(tensors)
        assert float((found - expected).abs() / expected) <= 1e-13
        tensors = [tensor.clone() * 2 for tensor in tensors]  # other addresses
    assert torch.equal(total(tensors), total(tensors))
