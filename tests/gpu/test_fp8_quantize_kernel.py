"""Quantising kernels against their references, inside compiled layers and graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.kernels import BUILD_COMMAND, load_launcher
from megatron_vla.kernels.fp8_quantize.op import (
    CALIBRATION,
    IS_KNOWN,
    LARGEST,
    RECIPROCAL,
    SCALE,
    fp8_gated_gelu,
    fp8_gated_gelu_backward,
    fp8_quantize,
)
from megatron_vla.kernels.fp8_quantize.reference import gated_gelu_backward_reference, quantized_reference
from megatron_vla.kernels.gated_gelu.reference import gated_gelu_reference
from megatron_vla.models.common.decoder_layer import GatedMlp
from megatron_vla.optimizations.fp8 import SMALLEST_CAPABILITY, convert_layers
from megatron_vla.optimizations.fp8_linear import delayed_scaling_of
from megatron_vla.optimizations.fp8_scaling import DelayedScaling
from megatron_vla.parallel.tensor_parallel import NOT_PARALLEL

HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= SMALLEST_CAPABILITY
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_FP8, reason="no CUDA device with FP8"),
    pytest.mark.skipif(load_launcher("fp8_quantize") is None, reason=f"kernels not built: {BUILD_COMMAND}"),
]
DEVICE = torch.device("cuda")
SHAPES = [(16, 16), (144, 272), (1600, 1024), (2064, 4304)]  # tiles of 128: less than one, ragged, several


@pytest.fixture(autouse=True)
def calibration() -> Iterator[None]:
    before, CALIBRATION.active = CALIBRATION.active, False
    yield
    CALIBRATION.active = before


def drawn(*shape: int, seed: int, factor: float = 1.0) -> Tensor:
    return (factor * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16().to(DEVICE)


def slot_of(scale: float) -> Tensor:
    return torch.tensor([1 / scale, scale, 0.0, 1.0], device=DEVICE)


def bits(tensor: Tensor) -> Tensor:
    """Bytes, with one code for all NaN."""
    return torch.where(tensor.float().isnan(), 0x7F, tensor.view(torch.uint8))


@pytest.mark.parametrize("is_gradient", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_matrix_has_the_references_bits_in_both_layouts(shape: tuple[int, int], is_gradient: bool) -> None:
    dtype = torch.float8_e5m2 if is_gradient else torch.float8_e4m3fn
    values = drawn(*shape, seed=0, factor=30.0)
    values.view(-1)[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30])
    slot = slot_of(16.0)
    rows, columns = fp8_quantize([values], slot, is_gradient=is_gradient, transposed=True)
    expected = quantized_reference(values, slot[SCALE], dtype)
    assert torch.equal(bits(rows), bits(expected)) and torch.equal(bits(columns), bits(expected).t())
    assert slot[LARGEST].isnan()
    values.view(-1)[:3] = 0.0
    for _ in range(2):
        slot[LARGEST] = 0.0
        rows, columns = fp8_quantize([values], slot, is_gradient=is_gradient, transposed=False)
        assert columns.numel() == 0 and slot[LARGEST] == values.abs().amax()
        values.mul_(0.5)
    slot[LARGEST] = 1e38
    fp8_quantize([values], slot, is_gradient=is_gradient, transposed=False)
    assert slot[LARGEST] == torch.tensor(1e38)  # the largest so far


def test_joined_weights_lie_side_by_side() -> None:
    parts = [drawn(n, 272, seed=n) for n in (48, 1040, 16)]
    slot = slot_of(64.0)
    rows, columns = fp8_quantize(parts, slot, is_gradient=False, transposed=True)
    expected = bits(quantized_reference(torch.cat(parts), slot[SCALE], torch.float8_e4m3fn))
    assert torch.equal(bits(rows), expected) and torch.equal(bits(columns), expected.t())
    assert slot[LARGEST] == torch.cat(parts).abs().amax()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gated_gelu_and_its_backward(shape: tuple[int, int]) -> None:
    """tanhf may differ in the last bit from torch's, which then moves single roundings."""
    num_rows, width = shape
    gate_up, gradient = drawn(num_rows, 2 * width, seed=1, factor=2.0), drawn(num_rows, width, seed=2)
    for (rows, columns), slot, reference, dtype in (
        (
            fp8_gated_gelu(gate_up, forward_slot := slot_of(32.0), transposed=True),
            forward_slot,
            gated_gelu_reference(gate_up),
            torch.float8_e4m3fn,
        ),
        (
            fp8_gated_gelu_backward(gradient, gate_up, backward_slot := slot_of(512.0), transposed=True),
            backward_slot,
            gated_gelu_backward_reference(gradient, gate_up),
            torch.float8_e5m2,
        ),
    ):
        expected = bits(quantized_reference(reference, slot[SCALE], dtype))
        assert (bits(rows) != expected).float().mean() <= 1e-3
        assert torch.equal(bits(columns), bits(rows).t())
        assert float(slot[LARGEST]) == pytest.approx(float(reference.abs().amax()), rel=0.01)


def gated_mlp() -> tuple[GatedMlp, DelayedScaling]:
    mlp = GatedMlp(512, 1024, NOT_PARALLEL).bfloat16().to(DEVICE)
    for number, parameter in enumerate(mlp.parameters()):
        parameter.data = drawn(*parameter.shape, seed=number, factor=0.05)
    mlp.merged = True
    config = OptimizationConfig(fp8="native", fp8_recipe="delayed")
    convert_layers(mlp, ["gate_proj", "up_proj", "down_proj"], config, emulate=False)
    scaling = delayed_scaling_of(mlp)
    assert scaling is not None
    return mlp, scaling


def pass_of(run: Any, mlp: GatedMlp, hidden: Tensor, gradient: Tensor) -> list[Tensor]:
    leaf = hidden.clone().requires_grad_()
    output = run(leaf)
    return [output.detach(), *torch.autograd.grad(output, [leaf, *mlp.parameters()], gradient)]


@pytest.mark.parametrize("compiled", [False, True])
def test_an_mlp_is_near_bf16_from_the_first_step_on(compiled: bool) -> None:
    """Compiled too, the products read the factors that calibration has just written."""
    mlp, scaling = gated_mlp()
    exact = GatedMlp(512, 1024, NOT_PARALLEL).bfloat16().to(DEVICE)
    exact.load_state_dict(mlp.state_dict())
    run: Any = torch.compile(mlp, fullgraph=True, dynamic=False) if compiled else mlp
    # Inputs 20 times as large saturate once, and what is computed from them then, once more. Their gate gradients reach from the
    # slope's zeros to its ones: 0.16 is lost of them in E5M2, by the reference code too.
    for step, (size, limit) in enumerate(((1.0, 0.12), (1.0, 0.12), (20.0, None), (20.0, None), (20.0, 0.2), (1.0, 0.12))):
        hidden, gradient = drawn(3, 50, 512, seed=10 + step, factor=size), drawn(3, 50, 512, seed=20 + step, factor=1e-4)
        found, expected = pass_of(run, mlp, hidden, gradient), pass_of(exact, exact, hidden, gradient)
        if limit is not None:
            for ours, theirs in zip(found, expected, strict=True):
                error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
                assert error < limit, (step, float(error))
        scaling.roll(None)
    assert (scaling._slots[:, IS_KNOWN] == 1).sum() == 6 and scaling._slots[:, RECIPROCAL].isfinite().all()


def test_a_graph_holds_step_and_roll_without_host_synchronisation() -> None:
    mlp, scaling = gated_mlp()
    other, other_scaling = gated_mlp()
    hidden, gradient = drawn(64, 512, seed=3), drawn(64, 512, seed=4, factor=1e-3)

    def step(module: GatedMlp, table: DelayedScaling) -> list[Tensor]:
        found = pass_of(module, module, hidden, gradient)
        table.roll(None)
        return found

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(mlp, scaling)
        step(other, other_scaling)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(mlp, scaling)
            step(other, other_scaling)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(mlp, scaling)
    for factor in (1.0, 4.0, 4.0):
        hidden.mul_(factor)
        graph.replay()
        expected = step(other, other_scaling)
        for ours, theirs in zip(captured, expected, strict=True):
            assert torch.equal(ours, theirs)
        assert torch.equal(scaling._slots, other_scaling._slots)
