"""Weights of merged layers as neighbours in memory: the same bits as with copies, and no copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pi05_fixtures import gradients, mean_loss, tiny_batch, tiny_model
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from training_fixtures import build_run, config_saving_to, take_steps, tiny_config

from megatron_vla.config.check_optimization import optimization_findings
from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.models.common.joined_parameters import forget_moved, joined_parameter, make_neighbours, parameter_parts
from megatron_vla.models.common.merged_linear import merged_linear, projection_groups
from megatron_vla.models.pi05.family import FAMILY
from megatron_vla.models.pi05.model import Pi05Model
from megatron_vla.optimizations import compile as compile_optimization
from megatron_vla.optimizations.apply import apply_optimizations
from megatron_vla.parallel.groups import ParallelGroups, initialize, shut_down
from megatron_vla.training.checkpoint import load_checkpoint
from megatron_vla.training.checkpoint_folder import open_folder
from megatron_vla.training.checkpoint_saving import save_checkpoint

SIZES = (4, 2, 3)


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    yield initialize(ParallelConfig(), quiet=True)
    shut_down()


def layers(bias: bool = True, seed: int = 0) -> list[nn.Linear]:
    torch.manual_seed(seed)
    return [nn.Linear(6, size, bias=bias) for size in SIZES]


def built(*, neighbours: bool, **options: Any) -> Pi05Model:
    config = OptimizationConfig(
        merge_projections=True, neighbouring_weights=neighbours, **{"attention_backend": "sdpa", **options}
    )
    model = apply_optimizations(tiny_model(), config, FAMILY, lambda line: None)
    assert isinstance(model, Pi05Model)
    return model


class Copies(TorchDispatchMode):
    """Shapes of what was concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.default:
            self.shapes.append(tuple(output.shape))
        return output


@pytest.mark.parametrize("chosen", [(0, 1, 2), (0, 1), (1, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_run_of_neighbours_is_joined_without_a_copy(chosen: Sequence[int], bias: bool) -> None:
    """Whole groups and parts of them, against concatenation: the same bits, gradients included."""
    hidden = torch.randn(2, 5, 6)
    results: list[list[Tensor]] = []
    for neighbours in (False, True):
        linears = layers(bias)
        if neighbours:
            before = [p.detach().clone() for linear in linears for p in linear.parameters()]
            assert make_neighbours(linears)
            after = [p for linear in linears for p in linear.parameters()]
            assert all(torch.equal(a, b) and b.is_contiguous() for a, b in zip(before, after, strict=True))
        used = [linears[i] for i in chosen]
        rows = hidden.clone().requires_grad_()
        with Copies() as copies:
            outputs = merged_linear(rows, used, merged=True)
            torch.stack([o.square().sum() for o in outputs]).sum().backward()
        found = [rows.grad, *(p.grad for linear in used for p in linear.parameters())]
        assert all(isinstance(g, Tensor) for g in found)
        results.append([o.detach() for o in outputs] + [g for g in found if g is not None])
        size = sum(SIZES[i] for i in chosen)
        assert ((size, 6) in copies.shapes) == ((size,) in copies.shapes or (not bias and not neighbours)) == (not neighbours)
        if neighbours:
            assert joined_parameter(used, "weight").data_ptr() == used[0].weight.data_ptr()
            # One tensor holds the gradients: nothing was copied to hand them out.
            assert len({linear.weight.grad.untyped_storage().data_ptr() for linear in used}) == 1  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_layers_that_do_not_follow_each_other_are_copied() -> None:
    linears = layers()
    make_neighbours(linears)
    for order in ((0, 2), (1, 0), (2, 1, 0), (1,)):
        used = [linears[i] for i in order]
        assert len(parameter_parts(used, "weight")) == len(used)
        assert torch.equal(joined_parameter(used, "weight"), torch.cat([linear.weight for linear in used]))
    other = layers(seed=1)
    make_neighbours(other)
    assert len(parameter_parts([linears[0], other[1]], "weight")) == 2


def test_what_cannot_be_one_tensor_is_left_alone() -> None:
    first = layers()[0]
    wide, double = nn.Linear(7, 2), nn.Linear(6, 2, dtype=torch.float64)
    with torch.device("meta"):
        nowhere = layers()
    for group in ([first], [first, wide], [first, double], nowhere):
        assert not make_neighbours(group)
        assert len(parameter_parts(group, "weight")) == len(group)


def test_moved_parameters_are_an_error_until_they_are_forgotten() -> None:
    linears = layers()
    make_neighbours(linears)
    assert not forget_moved(linears)
    linears[1].bias.data = linears[1].bias.data.clone()
    assert joined_parameter(linears, "weight") is not None
    with pytest.raises(RuntimeError, match="bias of 3 merged layers was moved"):
        joined_parameter(linears, "bias")
    assert forget_moved(linears) and not forget_moved(linears)
    assert torch.equal(joined_parameter(linears, "bias"), torch.cat([linear.bias for linear in linears]))


def test_a_frozen_layer_among_them_gets_no_gradient() -> None:
    linears = layers()
    linears[0].requires_grad_(False)
    make_neighbours(linears)
    F.linear(torch.randn(3, 6), joined_parameter(linears, "weight")).sum().backward()
    assert linears[0].weight.grad is None and linears[1].weight.grad is not None
    for linear in linears:
        linear.requires_grad_(False)
    assert not joined_parameter(linears, "weight").requires_grad


@pytest.mark.parametrize("compiled", [False, True])
def test_model_gives_the_same_bits_and_keeps_names(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled: one graph per kind of layer, as with copies."""
    monkeypatch.setattr(compile_optimization, "BACKEND", "aot_eager")
    results, graphs = [], []
    for neighbours in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model, batch = built(neighbours=neighbours, compile=compiled), tiny_batch()
        assert list(model.state_dict()) == list(tiny_model().state_dict())
        results.append((float(mean_loss(model, batch).detach()), gradients(model, batch)))
        graphs.append(counters["stats"]["unique_graphs"])
    assert results[0][0] == results[1][0] and results[0][1].keys() == results[1][1].keys()
    assert all(torch.equal(results[0][1][name], g) for name, g in results[1][1].items())
    assert graphs[0] == graphs[1] == (3 if compiled else 0)
    torch._dynamo.reset()


def test_fp8_quantises_neighbours_to_the_same_bits() -> None:
    results = []
    for neighbours in (False, True):
        config = OptimizationConfig(
            attention_backend="sdpa", merge_projections=True, neighbouring_weights=neighbours, fp8="native", fp8_min_dim=64
        )
        model = apply_optimizations(tiny_model(dtype=torch.bfloat16), config, FAMILY, lambda line: None)
        results.append(gradients(model, tiny_batch()))
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][name], gradient) for name, gradient in results[1].items())


def test_no_weight_is_copied_in_a_step() -> None:
    for neighbours in (False, True):
        model = built(neighbours=neighbours)
        with Copies() as copies:
            gradients(model, tiny_batch())
        groups = [[linear.get_parameter("weight") for linear in group] for group in projection_groups(model)]
        joined = {(sum(w.shape[0] for w in weights), weights[0].shape[1]) for weights in groups}
        assert bool(joined & set(copies.shapes)) != neighbours


@pytest.mark.parametrize(
    "extra",
    [
        (),
        ("--global-batch-size", "2"),  # gradients as backward leaves them
        ("--data-parallel-strategy", "torch_ddp"),
        ("--use-distributed-optimizer",),
        ("--bf16",),
        ("--recompute",),
    ],
    ids=" ".join,
)
def test_training_gives_the_same_bits(
    groups: ParallelGroups, tmp_path: Path, extra: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, moments and average after three steps; a checkpoint of one run goes on in the other."""
    if extra == ("--recompute",):
        extra = ("--activation-checkpoint-module-patterns", "vision_tower.layers.*", "layers.*")
    states, losses = [], []
    for number, neighbours in enumerate(("--no-neighbouring-weights", "--neighbouring-weights")):
        config = config_saving_to(tmp_path / str(number), "--merge-projections", neighbours, *extra)
        run = build_run(config, groups)
        losses.append(take_steps(run, 3))
        save_checkpoint(run.state, config, groups, run.supply)
        assert run.state.average is not None
        states.append({**run.state.module.state_dict(), **run.state.optimizer.state_tensors()})
        states[-1] |= {f"ema.{name}": t for name, t in run.state.average.tensors().items()}
        told = "products copy their weights together" in capsys.readouterr().out
        assert told == (number == 1 and extra == ("--use-distributed-optimizer",))
    assert losses[0] == losses[1] and states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())
    sizes = [sum(f.stat().st_size for f in (tmp_path / str(n)).rglob("*.distcp")) for n in (0, 1)]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)
    resumed = []
    for number, neighbours in enumerate(("--neighbouring-weights", "--no-neighbouring-weights")):
        run = build_run(tiny_config("--merge-projections", neighbours, *extra), groups)
        folder = next(p for p in (tmp_path / str(number)).iterdir() if p.is_dir())
        load_checkpoint(open_folder(folder), run.state, groups)
        resumed.append(take_steps(run, 1))
    assert resumed[0] == resumed[1]


def test_the_flag_needs_merged_projections() -> None:
    (finding,) = optimization_findings(tiny_config("--no-neighbouring-weights"))
    assert "has no effect without --merge-projections" in str(finding)
