"""Layer and RMS norms through their ops, alone, with the addition before them or with their input: derivatives and tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from groot_model_fixtures import gradients as groot_gradients
from groot_model_fixtures import tiny_batch as groot_batch
from groot_model_fixtures import tiny_config as groot_config
from groot_model_fixtures import tiny_model as groot_model
from pi05_fixtures import assert_gradients_close, gradients, tiny_batch, tiny_model
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.kernels.layer_norm import op as layer_norm_op
from megatron_vla.kernels.rms_norm import op as rms_norm_op
from megatron_vla.models.common.normalization import LayerNorm, RMSNorm
from megatron_vla.models.groot_n1_7.family import FAMILY as GROOT
from megatron_vla.models.pi05.family import FAMILY as PI05
from megatron_vla.optimizations.apply import apply_optimizations

WIDTH, EPSILON = 24, 1e-6
NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer_norm": lambda: LayerNorm(WIDTH, eps=EPSILON),
    "rms_norm": lambda: RMSNorm(WIDTH, EPSILON),
    "rms_norm, no offset": lambda: RMSNorm(WIDTH, EPSILON, offset=0.0),
}


def use_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the conditions of the kernels: references run where they are not built."""
    for op in (layer_norm_op, rms_norm_op):
        monkeypatch.setattr(op, "can_run", lambda *tensors: True)


def norm_and_inputs(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    norm = NORMS[name]().double()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    hidden, update = (torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(2))
    return norm, hidden, update


@pytest.mark.parametrize("used", ["output", "stream", "both"])
@pytest.mark.parametrize("form", ["plain", "addition", "input"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_derivatives_are_those_of_plain_code(
    name: str, compiled: bool, form: str, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing reads one of the two results."""
    norm, hidden, update = norm_and_inputs(name)
    inputs = [hidden, *([update] if form == "addition" else []), *norm.parameters()]

    def loss(hidden: Tensor, update: Tensor) -> Tensor:
        if form == "plain":
            stream, output = hidden, norm(hidden)
        else:
            stream, output = norm(hidden, update) if form == "addition" else norm(hidden, with_input=True)
        parts = {"output": [output.sin()], "stream": [stream.cos()], "both": [output.sin(), stream.cos()]}[used]
        return torch.stack([part.sum() for part in parts]).sum()

    def run(function: Callable[[Tensor, Tensor], Tensor]) -> tuple[Any, ...]:
        value = function(hidden, update)
        return value, *torch.autograd.grad(value, inputs, allow_unused=True, materialize_grads=True)

    expected = run(loss)
    use_ops(monkeypatch)
    torch._dynamo.reset()
    function: Any = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
    for found, wanted in zip(run(function), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)
    torch._dynamo.reset()


@pytest.mark.parametrize("form", ["addition", "input"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("frozen", ["parameters", "streams", "everything"])
def test_what_is_frozen_gets_no_gradient(frozen: str, compiled: bool, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a frozen backbone, in its first trained layer, and below that."""

    def gradients_of(name: str, compiled: bool) -> list[Tensor | None]:
        norm, hidden, update = norm_and_inputs(name)
        norm.requires_grad_(frozen == "streams")
        streams = [hidden, update] if form == "addition" else [hidden]
        for stream in streams:
            stream.requires_grad_(frozen == "parameters")
        run: Any = torch.compile(norm, backend="aot_eager", fullgraph=True) if compiled else norm
        total, output = run(*streams) if form == "addition" else run(hidden, with_input=True)
        assert output.requires_grad == (frozen != "everything")
        if frozen == "everything":
            assert not total.requires_grad
            return [total, output]
        (output.sin() * total.detach().cos() + total.cos()).sum().backward()
        return [leaf.grad for leaf in (*streams, *norm.parameters())]

    for name in NORMS:
        expected = gradients_of(name, compiled=False)
        with monkeypatch.context() as patch:
            use_ops(patch)
            torch._dynamo.reset()
            found = gradients_of(name, compiled)
        for mine, plain in zip(found, expected, strict=True):
            assert (mine is None) == (plain is None)
            if mine is not None and plain is not None:
                torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-13)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", NORMS)
def test_no_copy_and_no_addition_of_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's graphs: the input goes on as it is, and each backward op takes both gradients of its stream."""
    use_ops(monkeypatch)
    first, second = norm_and_inputs(name)[0], norm_and_inputs(name)[0]
    matrix, hidden = (torch.randn(n, WIDTH, dtype=torch.float64, requires_grad=True) for n in (WIDTH, 5))
    graphs: list[list[str]] = []

    def keep(module: fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return make_boxed_func(module.forward)

    def layer(hidden: Tensor) -> Tensor:
        hidden, normalized = first(hidden, with_input=True)
        hidden, normalized = second(hidden, normalized @ matrix)
        return hidden + normalized

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    torch.compile(layer, backend=backend, fullgraph=True)(hidden).sum().backward()
    torch._dynamo.reset()
    moved = ("clone", "copy", "contiguous")
    assert len(graphs) == 2 and not [t for graph in graphs for t in graph if any(word in t for word in moved)]
    kind = f"megatron_vla.{name.split(',')[0]}"
    for graph, adds, ops in zip(graphs, (1, 0), ((kind,), (f"{kind}_backward",) * 2), strict=True):
        assert sum(t.startswith("aten.add") for t in graph) == adds, graph
        assert [t for t in graph if t.startswith(kind)] == [f"{op}.default" for op in ops], graph
    assert hidden.grad is not None


def test_streams_are_not_copied_in_eager_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NORMS:
        norm, hidden, _ = norm_and_inputs(name)
        stream, plain = norm(hidden, with_input=True)
        assert stream is hidden
        with monkeypatch.context() as patch:
            use_ops(patch)
            stream, output = norm(hidden, with_input=True)
            assert stream.data_ptr() == hidden.data_ptr() and stream.grad_fn is output.grad_fn
            torch.testing.assert_close(output, plain, rtol=1e-13, atol=1e-14)
            for without_gradient in (torch.no_grad, torch.inference_mode):
                with without_gradient():
                    stream, again = norm(hidden, with_input=True)
                    assert stream.data_ptr() == hidden.data_ptr() and torch.equal(again, output)
                    assert torch.equal(norm(hidden), output) and torch.equal(norm(hidden, hidden)[0], hidden + hidden)


SWITCHES: dict[str, dict[str, Any]] = {
    "eager": {},
    "compiled": {"compile": True},
    "recomputed": {"activation_checkpoint_module_patterns": ("layers.*",)},
}


@pytest.mark.parametrize(
    ("family", "switches"),
    [("pi05", "eager"), ("pi05", "compiled"), ("pi05", "recomputed"), ("groot_n1_7", "eager"), ("groot_n1_7", "compiled")],
)
def test_models_compute_the_same(family: str, switches: str, aot_eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer and RMS norm of both models through the ops, in fp64."""
    results = []
    for used in (False, True):
        if used:
            use_ops(monkeypatch)
        torch._dynamo.reset()
        config = OptimizationConfig(attention_backend="sdpa", **SWITCHES[switches])
        if family == "pi05":
            results.append(gradients(apply_optimizations(tiny_model(), config, PI05, lambda line: None), tiny_batch()))
        else:
            model = groot_model(groot_config(tune_visual=True, tune_llm=True))
            results.append(groot_gradients(apply_optimizations(model, config, GROOT, lambda line: None), groot_batch()))
    assert_gradients_close(results[1], results[0], rtol=1e-11, atol=1e-14)
