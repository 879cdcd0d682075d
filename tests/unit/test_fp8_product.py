"""FP8 products against an explicit reference: every operand rounded to a table of the format's values, multiplied in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.models.common.merged_linear import merged_linear
from megatron_vla.optimizations.fp8 import convert_layers
from megatron_vla.optimizations.fp8_product import GRADIENT_DTYPE, quantized, scale_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# A product and its sum with a bias, each rounded to bf16.
ROUNDINGS = 0.004
NATIVE = OptimizationConfig(fp8="native")
TORCHAO = OptimizationConfig(fp8="torchao")


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` as fp64 numbers that `dtype` can hold after scaling (in fp32) by the largest magnitude; ties to even codes."""
    table = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    table = table[table.isfinite()].unique()
    zero = int((table == 0).nonzero())
    scale = (torch.finfo(dtype).max / tensor.abs().max().double()).float()
    scaled = (tensor.float() * scale).double()
    upper = torch.searchsorted(table, scaled).clamp(1, len(table) - 1)
    to_below, to_above = scaled - table[upper - 1], table[upper] - scaled
    take_below = (to_below < to_above) | ((to_below == to_above) & ((upper - 1 - zero) % 2 == 0))
    return torch.where(take_below, table[upper - 1], table[upper]) / scale.double()


def drawn(*shape: int, seed: int, outlier: float = 0.0) -> Tensor:
    """bf16 normal numbers, with one large value when asked."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if outlier:
        tensor.view(-1)[7] = outlier
    return tensor.bfloat16()


def layers(outputs: tuple[int, ...], config: OptimizationConfig, bias: bool = True) -> nn.ModuleList:
    """Converted linear layers that read the same 64 features."""
    made = nn.ModuleList(nn.Linear(64, n, bias=bias, dtype=torch.bfloat16) for n in outputs)
    for number, parameter in enumerate(made.parameters()):
        parameter.data = drawn(*parameter.shape, seed=number)
    convert_layers(made, [str(i) for i in range(len(outputs))], config, emulate=True)
    return made


def distance(found: Tensor | None, expected: Tensor) -> float:
    """Norm of the difference over the norm of `expected`."""
    assert found is not None and found.shape == expected.shape
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("config", [NATIVE, TORCHAO], ids=["native", "torchao"])
@pytest.mark.parametrize("outputs", [(48,), (48, 16, 32)], ids=str)
@pytest.mark.parametrize("rows", [(32,), (3, 7)], ids=str)  # 21 rows: padded to 32 for the weight gradient
def test_forward_and_both_gradients_are_the_rounded_operands_products(
    config: OptimizationConfig, outputs: tuple[int, ...], rows: tuple[int, ...]
) -> None:
    linears = layers(outputs, config)
    hidden = drawn(*rows, 64, seed=10, outlier=30.0).requires_grad_()
    gradient = drawn(*rows, sum(outputs), seed=11, outlier=5e3)
    joined = torch.cat(merged_linear(hidden, list(linears), merged=True), dim=-1)
    joined.backward(gradient)
    rows_MK, gradient_MN = hidden.detach().flatten(0, -2), gradient.flatten(0, -2)
    weight_NK = torch.cat([linear.get_parameter("weight").detach() for linear in linears])
    bias_N = torch.cat([linear.get_parameter("bias").detach() for linear in linears]).double()
    rows8, weight8, gradient8 = rounded(rows_MK, E4M3), rounded(weight_NK, E4M3), rounded(gradient_MN, E5M2)
    assert distance(joined.detach().flatten(0, -2), rows8 @ weight8.T + bias_N) < ROUNDINGS
    assert hidden.grad is not None
    assert distance(hidden.grad.flatten(0, -2), gradient8 @ weight8) < ROUNDINGS
    weight_gradient = torch.cat([linear.get_parameter("weight").grad for linear in linears])
    assert distance(weight_gradient, gradient8.T @ rows8) < ROUNDINGS
    bias_gradient = torch.cat([linear.get_parameter("bias").grad for linear in linears])
    assert distance(bias_gradient, gradient_MN.double().sum(0)) < ROUNDINGS
    # The bound can tell FP8 from bf16.
    assert distance(joined.detach().flatten(0, -2), rows_MK.double() @ weight_NK.double().T + bias_N) > 3 * ROUNDINGS


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_scales_per_row_keep_rows_beside_an_outlier(recipe: str) -> None:
    def error(config: OptimizationConfig) -> float:
        hidden = drawn(32, 64, seed=10, outlier=3e5)
        linear = layers((48,), config, bias=False)[0]
        exact = hidden[1:].double() @ linear.get_parameter("weight").detach().double().T
        return float((linear(hidden)[1:].detach().double() - exact).norm() / exact.norm())

    assert error(TORCHAO) > 5 * error(replace(TORCHAO, fp8_recipe=recipe))  # type: ignore[arg-type]


def test_native_and_torchao_agree() -> None:
    hidden, gradient = drawn(5, 16, 64, seed=10), drawn(5, 16, 48, seed=11)
    results = []
    for config in (NATIVE, TORCHAO):
        linear, leaf = layers((48,), config)[0], hidden.clone().requires_grad_()
        output = linear(leaf)
        output.backward(gradient)
        results.append((output.detach(), leaf.grad, linear.get_parameter("weight").grad))
    for native, torchao in zip(*results, strict=True):
        # Scaled back before the product or after it: at most a last bit somewhere.
        assert torchao is not None and distance(native, torchao.double()) < 1e-4


def test_torchao_is_what_its_own_layer_computes() -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    ours = layers((48,), TORCHAO)[0]
    plain = nn.Linear(64, 48, dtype=torch.bfloat16)
    plain.load_state_dict(ours.state_dict())
    theirs = convert_to_float8_training(plain, config=Float8LinearConfig(emulate=True))
    assert torch.equal(ours(drawn(32, 64, seed=3)), theirs(drawn(32, 64, seed=3)))


@pytest.mark.parametrize("config", [NATIVE, TORCHAO], ids=["native", "torchao"])
def test_compiled_layers_are_one_graph_with_the_same_numbers(config: OptimizationConfig) -> None:
    def results(compiled: bool) -> list[Tensor | None]:
        linears, leaf = list(layers((48, 16), config)), drawn(3, 7, 64, seed=10).requires_grad_()

        def run(hidden: Tensor) -> Tensor:
            return torch.cat(merged_linear(hidden, linears, merged=True), dim=-1)

        output = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(leaf)
        output.backward(drawn(3, 7, 64, seed=11))
        return [output.detach(), leaf.grad, *(linear.get_parameter("weight").grad for linear in linears)]

    for found, expected in zip(results(True), results(False), strict=True):
        assert found is not None and expected is not None and torch.equal(found, expected)


def test_native_keeps_rows_in_fp8_for_backward() -> None:
    def stored_bytes(config: OptimizationConfig) -> int:
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += 0 if isinstance(tensor, nn.Parameter) else tensor.nbytes
            return tensor

        linears = list(layers((48, 16), config, bias=False))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            merged_linear(drawn(32, 64, seed=1).requires_grad_(), linears, merged=True)
        return total

    assert stored_bytes(NATIVE) == 32 * 64 + 8  # one byte each, two fp32 scales; no joined weight
    assert stored_bytes(TORCHAO) > 2 * 32 * 64


@pytest.mark.parametrize("config", [NATIVE, TORCHAO], ids=["native", "torchao"])
def test_frozen_layers_and_inputs_get_no_gradient(config: OptimizationConfig) -> None:
    linear = layers((48,), config)[0].requires_grad_(False)
    leaf = drawn(16, 64, seed=1).requires_grad_()
    linear(leaf).sum().backward()
    assert leaf.grad is not None and linear.get_parameter("weight").grad is None
    linear.requires_grad_(True)
    linear(drawn(16, 64, seed=1)).sum().backward()
    assert linear.get_parameter("weight").grad is not None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    """A diverged run must be seen in its loss, not hidden by saturation."""
    hidden = drawn(16, 64, seed=1, outlier=bad)
    assert not layers((48,), NATIVE)[0](hidden).isfinite().all()


def test_zeros_stay_zeros() -> None:
    linear, leaf = layers((48,), NATIVE, bias=False)[0], torch.zeros(16, 64, dtype=torch.bfloat16).requires_grad_()
    output = linear(leaf)
    output.backward(torch.zeros_like(output))
    assert leaf.grad is not None
    assert not output.any() and not leaf.grad.any() and not linear.get_parameter("weight").grad.any()


def test_the_largest_value_does_not_overflow() -> None:
    """The scale brings it to the last finite value; one rounding up must not leave the format."""
    for seed in range(200):
        tensor = drawn(1, 3, seed=seed)
        for dtype in (E4M3, GRADIENT_DTYPE):
            found = quantized(tensor, scale_of([tensor], dtype), dtype).float()
            assert found.isfinite().all() and float(found.abs().max()) == torch.finfo(dtype).max
