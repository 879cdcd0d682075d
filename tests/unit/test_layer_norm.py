"""LayerNorm with the addition before it: reference, autograd and tracing. The kernel itself: tests/gpu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from groot_model_fixtures import gradients as groot_gradients
from groot_model_fixtures import tiny_batch as groot_batch
from groot_model_fixtures import tiny_config as groot_config
from groot_model_fixtures import tiny_model as groot_model
from pi05_fixtures import gradients, tiny_batch, tiny_model
from torch import Tensor
from torch.nn import functional as F

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.kernels.layer_norm import op
from megatron_vla.kernels.layer_norm.reference import layer_norm_backward_reference, layer_norm_reference
from megatron_vla.models.common.normalization import LayerNorm
from megatron_vla.models.groot_n1_7.family import FAMILY as GROOT
from megatron_vla.models.pi05.family import FAMILY as PI05
from megatron_vla.optimizations.apply import apply_optimizations

WIDTH, EPSILON = 24, 1e-6


def always(*tensors: Any) -> bool:
    """In place of the conditions of the kernel: the reference runs where it is not built."""
    return True


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


@pytest.mark.parametrize("used", ["output", "sum", "both"])
@pytest.mark.parametrize("with_addition", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_derivatives_are_those_of_plain_code(
    compiled: bool, with_addition: bool, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing reads one of the two results."""
    norm, hidden, update = norm_and_inputs(torch.float64)
    inputs = [hidden, *([update] if with_addition else []), norm.weight, norm.bias]

    def loss(hidden: Tensor, update: Tensor) -> Tensor:
        total, output = norm(hidden, update) if with_addition else (hidden, norm(hidden))
        parts = {"output": [output.sin()], "sum": [total.cos()], "both": [output.sin(), total.cos()]}[used]
        return torch.stack([part.sum() for part in parts]).sum()

    def run(function: Callable[[Tensor, Tensor], Tensor]) -> tuple[Any, ...]:
        value = function(hidden, update)
        return value, *torch.autograd.grad(value, inputs, allow_unused=True, materialize_grads=True)

    expected = run(loss)
    monkeypatch.setattr(op, "can_run", always)
    torch._dynamo.reset()
    function: Any = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
    for found, wanted in zip(run(function), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)
    torch._dynamo.reset()


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


@pytest.mark.parametrize("switches", [{}, {"compile": True}], ids=["eager", "compiled"])
@pytest.mark.parametrize("family", ["pi05", "groot_n1_7"])
def test_models_compute_the_same(
    family: str, switches: dict[str, Any], aot_eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer norm of both models through the ops, in fp64."""
    results = []
    for used in (False, True):
        if used:
            monkeypatch.setattr(op, "can_run", always)
        torch._dynamo.reset()
        config = OptimizationConfig(attention_backend="sdpa", **switches)
        if family == "pi05":
            results.append(gradients(apply_optimizations(tiny_model(), config, PI05, lambda line: None), tiny_batch()))
        else:
            model = groot_model(groot_config(tune_visual=True, tune_llm=True))
            results.append(groot_gradients(apply_optimizations(model, config, GROOT, lambda line: None), groot_batch()))
    scale = max(float(g.abs().max()) for g in results[0].values())
    assert results[0].keys() == results[1].keys()
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, rtol=1e-11, atol=1e-14 * scale, msg=name)
