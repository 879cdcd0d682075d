"""The LayerNorm kernel's reference and its ops. Derivatives and tracing: test_norm_ops. The kernel itself: tests/gpu."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_vla.kernels.layer_norm.reference import layer_norm_backward_reference, layer_norm_reference
from megatron_vla.models.common.normalization import LayerNorm

WIDTH, EPSILON = 24, 1e-6


def norm_and_inputs(dtype: torch.dtype, parameter_dtype: torch.dtype | None = None) -> tuple[LayerNorm, Tensor, Tensor]:
    torch.manual_seed(0)
    norm = LayerNorm(WIDTH, eps=EPSILON, dtype=parameter_dtype or dtype)
    with torch.no_grad():
        norm.weight.normal_(), norm.bias.normal_()
    hidden, update = (torch.randn(2, 5, WIDTH, dtype=dtype, requires_grad=True) for _ in range(2))
    return norm, hidden, update


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_reference_is_torch_layer_norm(dtype: torch.dtype) -> None:
    norm, hidden, _ = norm_and_inputs(dtype)
    output, mean, rstd = layer_norm_reference(hidden, norm.weight, norm.bias, EPSILON)
    expected = F.layer_norm(hidden, (WIDTH,), norm.weight, norm.bias, EPSILON)
    accuracy = torch.finfo(dtype).eps
    torch.testing.assert_close(output, expected, rtol=4 * accuracy, atol=4 * accuracy)
    gradient = torch.randn_like(expected)
    found = layer_norm_backward_reference(gradient, None, hidden, mean, rstd, norm.weight)
    for mine, theirs in zip(found, torch.autograd.grad(expected, [hidden, norm.weight, norm.bias], gradient), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=4 * accuracy, atol=16 * accuracy)


def test_one_rounding_of_the_summed_gradient_errs_less() -> None:
    """Than autograd's two, against fp64; and fp32 parameters keep fp32 sums."""
    norm, hidden, extra = norm_and_inputs(torch.bfloat16, torch.float32)
    gradient = torch.randn_like(hidden)

    def backward(dtype: torch.dtype, extra: Tensor | None) -> tuple[Tensor, ...]:
        # fp64 with the parameters that bf16 rows see.
        weight, bias = (p if dtype == torch.bfloat16 else p.bfloat16().to(dtype) for p in (norm.weight, norm.bias))
        _, mean, rstd = layer_norm_reference(hidden.to(dtype), weight, bias, EPSILON)
        return layer_norm_backward_reference(gradient.to(dtype), extra, hidden.to(dtype), mean, rstd, weight)

    exact = backward(torch.float64, extra.double())
    once, weight_gradient, bias_gradient = backward(torch.bfloat16, extra)
    twice = backward(torch.bfloat16, None)[0] + extra
    assert (once.double() - exact[0]).square().mean() < 0.9 * (twice.double() - exact[0]).square().mean()
    torch.testing.assert_close(once.double(), exact[0], rtol=2**-8, atol=1e-6)
    for found, wanted in zip((weight_gradient, bias_gradient), exact[1:], strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-5)


def test_without_the_kernel_the_bits_are_those_of_torch() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        norm, hidden, update = norm_and_inputs(dtype, torch.float32)
        total, output = norm(hidden, update)
        parameters = norm.weight.to(dtype), norm.bias.to(dtype)
        assert torch.equal(total, hidden + update)
        assert torch.equal(output, F.layer_norm(total, (WIDTH,), *parameters, EPSILON))
        assert torch.equal(norm(total), output)


def test_ops_have_the_shapes_that_tracing_sees() -> None:
    norm, hidden, update = norm_and_inputs(torch.bfloat16, torch.float32)
    hidden, update, weight, bias = (t.detach() for t in (hidden, update, norm.weight, norm.bias))
    ops = torch.ops.megatron_vla
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.layer_norm, (hidden, weight, bias, EPSILON), test_utils=checks)
    torch.library.opcheck(ops.add_layer_norm, (hidden, update, weight, bias, EPSILON), test_utils=checks)
    _, mean, rstd = ops.layer_norm(hidden, weight, bias, EPSILON)
    for extra in (None, update):
        torch.library.opcheck(ops.layer_norm_backward, (update, extra, hidden, mean, rstd, weight), test_utils=checks)
    found = ops.layer_norm_backward(update, None, hidden, mean, rstd, weight)
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == found[2].dtype == torch.float32
