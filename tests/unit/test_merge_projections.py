"""Merged projections: one product instead of several, the same numbers, names and checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_fixtures import with_empty_parameters
from pi05_fixtures import gradients, mean_loss, tiny_batch, tiny_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.kernels import SELECTION
from megatron_vla.kernels.gated_gelu import op as gated_gelu
from megatron_vla.kernels.joined_gradients import op as joined_gradients
from megatron_vla.models.common.decoder_layer import GatedMlp
from megatron_vla.models.common.merged_linear import MergesProjections, merged_linear
from megatron_vla.models.pi05.family import FAMILY
from megatron_vla.optimizations import merge_projections
from megatron_vla.optimizations.apply import apply_optimizations
from megatron_vla.parallel.tensor_parallel import NOT_PARALLEL

MERGED = OptimizationConfig(merge_projections=True, attention_backend="sdpa")


def quiet(line: str) -> None:
    """Prints nothing."""


@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_of_a_group(bias: bool) -> None:
    torch.manual_seed(0)
    linears = [nn.Linear(6, out, bias=bias, dtype=torch.float64) for out in (4, 2, 3)]
    hidden = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(2, 5, linear.out_features, dtype=torch.float64) for linear in linears]
    inputs = [hidden, *(p for linear in linears for p in linear.parameters())]
    results = []
    for merged in (False, True):
        outputs = merged_linear(hidden, linears, merged)
        total = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))
        results.append((*outputs, *torch.autograd.grad(total, inputs)))
    for plain, joined in zip(*results, strict=True):
        torch.testing.assert_close(joined, plain, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("skip_dead", [True, False])
def test_on_equals_off(skip_dead: bool) -> None:
    lines: list[str] = []
    plain, batch = tiny_model(skip_dead_compute=skip_dead), tiny_batch()
    model = apply_optimizations(tiny_model(skip_dead_compute=skip_dead), MERGED, FAMILY, lines.append)
    # Per joint layer and stream: q, k, v and gate, up; per vision layer: q, k, v. Two layers each.
    start = "merged projections: 26 linear layers in 10 products, 10 of which read neighbours in memory; gated GELU: "
    assert len(lines) == 1 and lines[0].startswith(start) and "; gradients of biased products: " in lines[0]
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    losses = [float(mean_loss(m, batch).detach()) for m in (plain, model)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-13)
    expected, found = gradients(plain, batch), gradients(model, batch)
    assert found.keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-14 * scale, msg=name)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


class ProductCounter(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_fewer_products_of_the_same_size() -> None:
    """The same FLOPs in fewer calls."""
    batch, flops, calls = tiny_batch(), [], []
    for config in (OptimizationConfig(), MERGED):
        model = apply_optimizations(tiny_model(), config, FAMILY, quiet)
        with FlopCounterMode(display=False) as counter, ProductCounter() as products:
            gradients(model, batch)
        flops.append(counter.get_total_flops())
        calls.append(products.count)
    assert flops[0] == flops[1] and 0 < calls[1] < 0.8 * calls[0]


def test_a_model_without_projections_is_an_error() -> None:
    with pytest.raises(ValueError, match="--merge-projections: model pi05 has no projections"):
        apply_optimizations(nn.Linear(2, 2), MERGED, FAMILY, quiet)


ON_CPU = "PyTorch operations (the kernel needs a GPU, and the model is on cpu)"
GELU, BIASED = "gated GELU: ", "gradients of biased products: "


def codes(model: nn.Module, monkeypatch: pytest.MonkeyPatch, is_built: bool = True, **options: Any) -> tuple[str, str]:
    """(code of gated GELU, code of biased gradients) in the line about `model`."""
    for op in (gated_gelu, joined_gradients):
        monkeypatch.setattr(op, "IS_BUILT", is_built)
    lines: list[str] = []
    config = OptimizationConfig(merge_projections=True, neighbouring_weights=False, **options)
    merge_projections.apply(model, config, FAMILY, lines.append)
    _, gelu, biased = lines[0].split("; ")
    assert gelu.startswith(GELU) and biased.startswith(BIASED)
    return gelu.removeprefix(GELU), biased.removeprefix(BIASED)


class Projections(MergesProjections):
    """Two biased layers that may be merged."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, outputs), nn.Linear(16, 8)

    def projection_groups(self) -> tuple[tuple[nn.Module, ...], ...]:
        return ((self.first, self.second),)


def model_of(width: int, dtype: torch.dtype, device: str = "cuda") -> nn.Module:
    with torch.device("meta"):
        model = nn.ModuleList([GatedMlp(16, width, NOT_PARALLEL), Projections(width)])
    return with_empty_parameters(model, dtype, device)


def test_the_line_says_which_code_runs_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernels' own conditions decide."""
    monkeypatch.setattr(SELECTION, "enabled", True)
    assert codes(model_of(24, torch.bfloat16, "cpu"), monkeypatch) == (ON_CPU, ON_CPU)
    with FakeTensorMode():
        for dtype in (torch.bfloat16, torch.float32):
            for width in (24, 20):
                model = model_of(width, dtype)
                found = codes(model, monkeypatch)
                rows = torch.empty(4, 2 * width, dtype=dtype, device="cuda")
                runs = (
                    gated_gelu.can_run(rows),
                    joined_gradients.can_run(rows, torch.empty(8 + width, dtype=dtype, device="cuda"), (width, 8)),
                )
                assert [code == "the fused kernel" for code in found] == list(runs), (dtype, width, found)
        assert (
            codes(model_of(24, torch.float32), monkeypatch)
            == ("PyTorch operations (the kernel computes in bf16, and weights are float32)",) * 2
        )
        assert (
            codes(model_of(20, torch.bfloat16), monkeypatch)
            == ("PyTorch operations (the kernel needs multiples of 8, and layers have 20 outputs)",) * 2
        )
        model = model_of(24, torch.bfloat16)
        assert codes(model, monkeypatch, is_built=False) == tuple(
            f"PyTorch operations (kernels/{name} was not built)" for name in ("gated_gelu", "joined_gradients")
        )
        assert codes(model, monkeypatch, fused_kernels=False) == ("PyTorch operations (--no-fused-kernels)",) * 2
        assert codes(model, monkeypatch, fp8="native", fp8_recipe="delayed") == (
            "the fused kernel, but not in MLPs that are all FP8",
            "the fused kernel, but not in FP8 layers",
        )


def test_one_layer_that_the_kernel_takes_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        model = nn.ModuleList([model_of(20, torch.bfloat16), model_of(24, torch.bfloat16)])
        assert codes(model, monkeypatch) == ("the fused kernel",) * 2
