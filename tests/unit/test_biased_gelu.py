"""GELU of a biased product, whose backward sums for the bias. The kernels themselves: tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pi05_fixtures import assert_gradients_close, gradients, mean_loss, tiny_batch, tiny_model
from torch import Tensor
from torch.nn import functional as F

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.kernels import SELECTION
from megatron_vla.kernels.biased_gelu import op
from megatron_vla.kernels.biased_gelu.reference import gelu_backward_reference, gelu_reference
from megatron_vla.models.common.feed_forward import FeedForward
from megatron_vla.models.pi05.family import FAMILY
from megatron_vla.optimizations import compile as compile_optimization
from megatron_vla.optimizations import fused_kernels
from megatron_vla.optimizations.apply import apply_optimizations
from megatron_vla.optimizations.fp8_linear import Fp8Linear
from megatron_vla.parallel.tensor_parallel import NOT_PARALLEL


def always(hidden: Any, weight: Any, bias: Any) -> bool:
    """In place of the conditions of the kernels: the references run where they are not built."""
    return True


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes that the fused function was called with; it is called wherever the layer itself allows it."""
    seen: list[torch.Size] = []
    original = op.gelu_with_bias

    def counted(output: Tensor, bias: Tensor) -> Tensor:
        seen.append(output.shape)
        return original(output, bias)

    monkeypatch.setattr(op, "can_run", always)
    monkeypatch.setattr(op, "gelu_with_bias", counted)
    return seen


def layer(dtype: torch.dtype = torch.float64, **options: Any) -> FeedForward:
    torch.manual_seed(0)
    return FeedForward(6, 16, NOT_PARALLEL, **options).to(dtype)


def plain(mlp: FeedForward, hidden: Tensor) -> Tensor:
    """What FeedForward computes without the kernels."""
    output: Tensor = mlp.fc2(F.gelu(mlp.fc1(hidden), approximate="tanh"))
    return output


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("frozen", ["nothing", "input", "weights", "bias"])
def test_the_derivatives_are_those_of_plain_code(compiled: bool, frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = layer()
    hidden = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=frozen != "input")
    mlp.fc1.weight.requires_grad_(frozen != "weights")
    mlp.fc1.bias.requires_grad_(frozen not in ("weights", "bias"))
    inputs = [t for t in (hidden, *mlp.parameters()) if t.requires_grad]
    expected_output = plain(mlp, hidden)
    expected = torch.autograd.grad(expected_output.sin().sum(), inputs)
    monkeypatch.setattr(op, "can_run", always)
    torch._dynamo.reset()
    run: Any = torch.compile(mlp, backend="aot_eager", fullgraph=True) if compiled else mlp
    output = run(hidden)
    assert torch.equal(output, expected_output)
    for found, wanted in zip(torch.autograd.grad(output.sin().sum(), inputs), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-14)
    torch._dynamo.reset()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_frozen_layer_keeps_nothing_for_backward(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, hidden = layer().requires_grad_(False), torch.randn(3, 6, dtype=torch.float64)
    monkeypatch.setattr(op, "can_run", always)
    torch._dynamo.reset()
    run: Any = torch.compile(mlp, backend="aot_eager", fullgraph=True) if compiled else mlp
    assert not run(hidden).requires_grad and torch.equal(run(hidden), plain(mlp, hidden))
    mlp.requires_grad_(True)
    with torch.no_grad():
        assert torch.equal(run(hidden), plain(mlp, hidden))
    with torch.inference_mode():
        assert torch.equal(mlp(hidden), plain(mlp, hidden))
    torch._dynamo.reset()


def test_which_layers_take_it(calls: list[torch.Size]) -> None:
    hidden = torch.randn(3, 6, dtype=torch.float64)
    layer()(hidden)
    assert calls.pop() == (3, 16) and not calls
    layer(dropout=0.5)(hidden)
    assert calls.pop() == (3, 16) and not calls
    for mlp in (layer(activation="gelu"), layer(activation="silu")):
        mlp(hidden)
    hooked = layer()
    seen: list[Tensor] = []
    handle = hooked.fc1.register_forward_hook(lambda module, inputs, output: seen.append(output))
    hooked(hidden)
    assert len(seen) == 1 and not calls, "a hook on fc1 sees the call"
    handle.remove()
    replaced = layer()
    replaced.fc1.forward = replaced.fc1.forward  # as activation checkpointing does
    replaced(hidden)
    other = layer()
    other.fc1.__class__ = Fp8Linear
    assert not other.can_fuse_bias and not calls
    hooked(hidden)
    assert len(calls) == 1 and len(seen) == 1


@pytest.mark.parametrize("is_built", [True, False])
def test_the_report_says_which_code_runs(is_built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SELECTION, "enabled", SELECTION.enabled)
    ((label, folder),) = ((k[0], k[1]) for k in fused_kernels.KERNELS if k[1] == "biased_gelu")
    code = "the fused kernel" if is_built else "PyTorch operations (kernels/biased_gelu was not built)"

    def report_of(used: bool) -> list[str]:
        lines: list[str] = []
        model, config = layer(torch.bfloat16), OptimizationConfig(fused_kernels=used)
        assert fused_kernels.apply(model, config, FAMILY, lines.append) is model
        return lines

    assert report_of(True) == [], "no layer on a CPU can use it"
    monkeypatch.setattr(fused_kernels, "KERNELS", ((label, folder, is_built, lambda model, config: True),))
    assert report_of(True) == [f"GELU of biased layers: {code}"]
    assert report_of(False) == ["fused kernels: none, PyTorch operations instead (--no-fused-kernels)"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_references_and_shapes(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values, gradient = (torch.randn(3, 7, 16, generator=generator).to(dtype) for _ in range(2))
    leaf = values.clone().requires_grad_()
    output = F.gelu(leaf, approximate="tanh")
    output.backward(gradient)
    assert leaf.grad is not None
    assert torch.equal(op.biased_gelu(values), output.detach()) and torch.equal(gelu_reference(values), output.detach())
    inner, sums = op.biased_gelu_backward(gradient, values)
    expected, expected_sums = gelu_backward_reference(gradient, values)
    assert torch.equal(inner, leaf.grad) and torch.equal(inner, expected) and torch.equal(sums, expected_sums)
    relative = 2.0**-8 if dtype == torch.bfloat16 else 1e-12
    torch.testing.assert_close(sums.double(), inner.double().sum((0, 1)), rtol=relative, atol=1e-12)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.megatron_vla.biased_gelu, (values,), test_utils=tests)
    torch.library.opcheck(torch.ops.megatron_vla.biased_gelu_backward, (gradient.mT.contiguous().mT, values), test_utils=tests)


@pytest.mark.parametrize(
    ("compiled", "patterns"),
    [
        (False, ()),
        (False, ("vision_tower.layers.*.mlp",)),
        (False, ("vision_tower.layers.*.mlp.fc1",)),
        (True, ("vision_tower.layers.*.mlp",)),
    ],
    ids=str,
)
def test_model_computes_the_same(compiled: bool, patterns: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, with recomputation, and without."""
    monkeypatch.setattr(compile_optimization, "BACKEND", "aot_eager")
    results = []
    for used in (False, True):
        if used:
            monkeypatch.setattr(op, "can_run", always)
        torch._dynamo.reset()
        config = OptimizationConfig(attention_backend="sdpa", compile=compiled, activation_checkpoint_module_patterns=patterns)
        model, batch = apply_optimizations(tiny_model(), config, FAMILY, lambda line: None), tiny_batch()
        results.append((float(mean_loss(model, batch).detach()), gradients(model, batch)))
    torch._dynamo.reset()
    assert results[0][0] == results[1][0]
    assert_gradients_close(results[1][1], results[0][1])


def test_layers_of_equal_shapes_share_one_graph(aot_eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setattr(op, "can_run", always)
    hidden = torch.randn(4, 6, dtype=torch.float64)
    for _ in range(3):
        mlp = layer()
        torch.compile(mlp.forward, backend="aot_eager", fullgraph=True)(hidden).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
