"""FP8 products on a GPU: real kernels against emulated ones and against bf16, compiled, captured, without host syncs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from step_profile import activities_of
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.models.common.merged_linear import merged_linear
from megatron_vla.optimizations.fp8 import SMALLEST_CAPABILITY, convert_layers
from megatron_vla.optimizations.fp8_timing import measured_timer, passes_of
from megatron_vla.optimizations.fp8_trace import LinearUse

HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= SMALLEST_CAPABILITY
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_FP8, reason="no CUDA device with FP8")]
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
BACKENDS = [
    pytest.param("native", "tensorwise", id="native"),
    pytest.param("torchao", "tensorwise", id="torchao", marks=needs_torchao),
    pytest.param("torchao", "rowwise", id="torchao-rowwise", marks=needs_torchao),
    pytest.param("native", "delayed", id="native-delayed"),
]
DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def no_compiled_code() -> None:
    """All cases share `Layers.forward`, which dynamo refuses to compile a ninth time."""
    torch.compiler.reset()


class Layers(nn.Module):
    """One or several layers that read the same 512 features."""

    def __init__(self, outputs: tuple[int, ...]):
        super().__init__()
        torch.manual_seed(1)
        self.linears = nn.ModuleList(nn.Linear(512, n, dtype=torch.bfloat16) for n in outputs).to(DEVICE)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.cat(merged_linear(hidden, list(self.linears), len(self.linears) > 1), dim=-1)


def converted(outputs: tuple[int, ...], backend: Any, recipe: Any, emulate: bool = False) -> Layers:
    layers = Layers(outputs)
    config = OptimizationConfig(fp8=backend, fp8_recipe=recipe)
    convert_layers(layers, [f"linears.{i}" for i in range(len(outputs))], config, emulate=emulate)
    return layers


def inputs(rows: tuple[int, ...], width: int, device: torch.device = DEVICE) -> tuple[Tensor, Tensor]:
    """(hidden that requires a gradient, gradient of the output)."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(*rows, 512, generator=generator).bfloat16().to(device).requires_grad_()
    return hidden, torch.randn(*rows, width, generator=generator).bfloat16().to(device)


def results(run: Any, layers: nn.Module, rows: tuple[int, ...], width: int, device: torch.device = DEVICE) -> list[Tensor]:
    """Output, input gradient, parameter gradients."""
    hidden, gradient = inputs(rows, width, device)
    layers.zero_grad()
    output = run(hidden)
    output.backward(gradient)
    found = [output.detach(), hidden.grad, *(p.grad for p in layers.parameters())]
    return [t.cpu() for t in found if t is not None]


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("outputs", [(1024,), (1024, 256, 256)], ids=str)
@pytest.mark.parametrize("rows", [(8, 64), (3, 50)], ids=str)  # 150 rows: padded to 160
@pytest.mark.parametrize(("backend", "recipe"), BACKENDS)
def test_error_against_bf16_is_that_of_the_format(
    backend: str, recipe: str, rows: tuple[int, ...], outputs: tuple[int, ...], compiled: bool
) -> None:
    """Normal data: 3 mantissa bits give about 2.6 % per operand, 2 bits (gradients) about 5 %."""
    layers, exact = converted(outputs, backend, recipe), Layers(outputs)
    run = torch.compile(layers, fullgraph=True, dynamic=False) if compiled else layers
    found, expected = results(run, layers, rows, sum(outputs)), results(exact, exact, rows, sum(outputs))
    assert 0.01 < distance(found[0], expected[0]) < 0.06
    assert len(found) == len(expected)
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert distance(ours, theirs) < 0.1


@pytest.mark.parametrize("outputs", [(1024,), (1024, 256, 256)], ids=str)
def test_kernels_multiply_what_the_emulation_multiplies(outputs: tuple[int, ...]) -> None:
    layers, emulated = converted(outputs, "native", "tensorwise"), converted(outputs, "native", "tensorwise").cpu()
    found = results(layers, layers, (8, 64), sum(outputs))
    expected = results(emulated, emulated, (8, 64), sum(outputs), torch.device("cpu"))
    for ours, theirs in zip(found, expected, strict=True):
        assert distance(ours, theirs) < 0.005  # bf16 rounding, and fast accumulation in forward


@pytest.mark.parametrize(("backend", "recipe"), BACKENDS[:2])
def test_no_host_synchronisation(backend: str, recipe: str) -> None:
    layers = converted((1024, 256), backend, recipe)
    results(layers, layers, (8, 64), 1280)
    hidden, gradient = inputs((8, 64), 1280)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layers(hidden).backward(gradient)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("backend", "recipe"), BACKENDS[:2])
def test_a_captured_graph_follows_new_values(backend: str, recipe: str, compiled: bool) -> None:
    """Scales are computed inside the graph: ten times larger inputs give ten times larger outputs, not saturated ones."""
    layers = converted((1024,), backend, recipe)
    run = torch.compile(layers, fullgraph=True, dynamic=False) if compiled else layers
    hidden, gradient = inputs((8, 64), 1024)
    wanted = [hidden, *layers.parameters()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(run(hidden), wanted, gradient)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run(hidden)
        captured = [output, *torch.autograd.grad(output, wanted, gradient)]
    for factor in (1.0, 10.0):
        with torch.no_grad():
            hidden.mul_(factor)
        graph.replay()
        torch.cuda.synchronize()
        found = [t.detach().clone() for t in captured]
        output = run(hidden)
        expected = [output.detach(), *torch.autograd.grad(output, wanted, gradient)]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", [None, "tensorwise", "delayed"])
def test_the_tools_timer_measures_the_gpu_not_the_host(recipe: Any, compiled: bool) -> None:
    """Queries, keys and values of 128 rows: Python and autograd take ten times as long to launch these kernels."""
    use = LinearUse(("q", "k", "v"), 128, 1024, (2048, 256, 256), False, 1, True, True)
    config = OptimizationConfig(fp8="native", fp8_recipe=recipe or "delayed")
    measured_ms = measured_timer(config, compiled=compiled)(use, recipe is not None).of_micro_batch(use)
    _, whole = passes_of(use, config if recipe else None, compiled=compiled)
    # With shapes, as the tool profiles its step: they make an annotation of every compiled graph.
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiler:
        for _ in range(20):
            whole()
        torch.cuda.synchronize()
    activities = activities_of(profiler.events())
    assert activities and not any("CompiledFxGraph" in activity.name for activity in activities)
    traced_ms = sum(activity.duration for activity in activities) / 20 / 1e3
    print(f"measured {measured_ms:.4f} ms, kernels traced {traced_ms:.4f} ms")
    assert traced_ms / 3 < measured_ms < 3 * traced_ms
