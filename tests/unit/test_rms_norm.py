"""The RMSNorm kernel's reference, its ops and the conditions under which it runs. Derivatives and tracing: test_norm_ops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_vla.kernels import SELECTION
from megatron_vla.kernels.rms_norm import op
from megatron_vla.kernels.rms_norm.reference import rms_norm_backward_reference, rms_norm_reference
from megatron_vla.models.common.normalization import RMSNorm

WIDTH, EPSILON = 24, 1e-6


def norm_and_inputs(
    dtype: torch.dtype, offset: float = 1.0, weight_dtype: torch.dtype | None = None
) -> tuple[RMSNorm, Tensor, Tensor]:
    torch.manual_seed(0)
    norm = RMSNorm(WIDTH, EPSILON, offset).to(weight_dtype or dtype)
    torch.nn.init.normal_(norm.weight)
    hidden, update = (torch.randn(2, 5, WIDTH, dtype=dtype, requires_grad=True) for _ in range(2))
    return norm, hidden, update


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_reference_is_the_module(dtype: torch.dtype, offset: float) -> None:
    """Forward bit by bit."""
    norm, hidden, _ = norm_and_inputs(dtype, offset)
    expected = norm(hidden)
    output, rstd = rms_norm_reference(hidden, norm.weight, offset, EPSILON)
    assert torch.equal(output, expected)
    accuracy = torch.finfo(dtype).eps
    gradient = torch.randn_like(expected)
    found = rms_norm_backward_reference(gradient, None, hidden, rstd, norm.weight, offset)
    for mine, theirs in zip(found, torch.autograd.grad(expected, [hidden, norm.weight], gradient), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=4 * accuracy, atol=16 * accuracy)


def test_one_rounding_of_the_summed_gradient_errs_less() -> None:
    """Than autograd's two, against fp64; and fp32 weights keep fp32 sums."""
    norm, hidden, extra = norm_and_inputs(torch.bfloat16, 1.0, torch.float32)
    gradient = torch.randn_like(hidden)

    def backward(dtype: torch.dtype, extra: Tensor | None) -> tuple[Tensor, Tensor]:
        _, rstd = rms_norm_reference(hidden.to(dtype), norm.weight, 1.0, EPSILON)
        return rms_norm_backward_reference(gradient.to(dtype), extra, hidden.to(dtype), rstd, norm.weight, 1.0)

    exact, exact_weight = backward(torch.float64, extra.double())
    once, weight_gradient = backward(torch.bfloat16, extra)
    twice = backward(torch.bfloat16, None)[0] + extra
    assert (once.double() - exact).square().mean() < 0.9 * (twice.double() - exact).square().mean()
    torch.testing.assert_close(once.double(), exact, rtol=2**-8, atol=1e-6)
    assert weight_gradient.dtype == torch.float32
    torch.testing.assert_close(weight_gradient, exact_weight, rtol=1e-6, atol=1e-5)


def test_without_the_kernel_the_bits_are_those_of_plain_code() -> None:
    for offset in (0.0, 1.0):
        norm, hidden, update = norm_and_inputs(torch.bfloat16, offset, torch.float32)
        total, output = norm(hidden, update)
        wide = (hidden + update).float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON) * (offset + norm.weight)
        assert torch.equal(total, hidden + update) and torch.equal(output, scaled.bfloat16())
        stream, again = norm(total, with_input=True)
        assert stream is total and torch.equal(again, output) and torch.equal(norm(total), output)


def test_ops_have_the_shapes_that_tracing_sees() -> None:
    norm, hidden, update = norm_and_inputs(torch.bfloat16, 1.0, torch.float32)
    hidden, update, weight = (t.detach() for t in (hidden, update, norm.weight))
    ops, checks = torch.ops.megatron_vla, ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.rms_norm, (hidden, weight, 1.0, EPSILON), test_utils=checks)
    torch.library.opcheck(ops.add_rms_norm, (hidden, update, weight, 1.0, EPSILON), test_utils=checks)
    _, rstd = ops.rms_norm(hidden, weight, 1.0, EPSILON)
    for extra in (None, update):
        torch.library.opcheck(ops.rms_norm_backward, (update, extra, hidden, rstd, weight, 1.0), test_utils=checks)
    found = ops.rms_norm_backward(update, None, hidden, rstd, weight, 1.0)
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float32


def test_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of the models' widths on a GPU in bf16; norms of heads stay with the compiler."""
    monkeypatch.setattr(op, "IS_BUILT", True)
    assert not op.can_run(torch.zeros(3, 2048, dtype=torch.bfloat16), torch.zeros(2048))
    with FakeTensorMode(allow_non_fake_inputs=True):
        for width, fits in {2048: True, 1024: True, 512: True, 128: False, 256: False, 1000: False, 2176: False}.items():
            rows, weight = torch.empty(3, 5, width, dtype=torch.bfloat16, device="cuda"), torch.empty(width, device="cuda")
            assert op.can_run(rows, weight) is fits, width
            assert op.has_width(width) is fits
        with torch.device("cuda"):
            rows, weight, fewer = torch.empty(6, 1024, dtype=torch.bfloat16), torch.empty(1024), torch.empty(512)
            other = torch.empty(1, 1024, dtype=torch.bfloat16)
            columns = torch.empty_strided((6, 1024), (1, 6), dtype=torch.bfloat16)
        assert op.can_run(rows, weight.bfloat16(), rows)
        assert not op.can_run(rows.float(), weight) and not op.can_run(rows, weight.double())
        assert not op.can_run(rows, weight, other) and not op.can_run(rows, weight, rows.float())
        assert not op.can_run(columns, weight) and not op.can_run(rows, weight, columns) and not op.can_run(rows, fewer)
        monkeypatch.setattr(SELECTION, "enabled", False)
        assert not op.can_run(rows, weight)
