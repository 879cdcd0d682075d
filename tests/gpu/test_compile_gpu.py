"""Generated code and attention kernels on a GPU: against fp64, without graph breaks, new graphs or waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pi05_fixtures import gradients, mean_loss, tiny_batch, tiny_config, tiny_model, uniform
from torch import Tensor
from torch._dynamo.utils import counters
from training_fixtures import build_run
from training_fixtures import tiny_config as tiny_run_config

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.models.common.attention import attend
from megatron_vla.models.common.attention_mask import read_mask
from megatron_vla.models.pi05.family import FAMILY
from megatron_vla.optimizations.apply import apply_optimizations
from megatron_vla.parallel.groups import ParallelGroups, initialize, shut_down
from megatron_vla.runner.warm_up import warm_up

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def empty_caches() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    yield initialize(ParallelConfig(), quiet=True)
    shut_down()


def attention_results(backend: Any, dtype: torch.dtype, num_queries: int) -> list[Tensor]:
    """Output and gradients at Pi0.5's head width, for the valid queries and keys of three samples of different lengths."""
    num_keys = 700
    lengths = torch.tensor([[700], [513], [1]], device=DEVICE)
    key_is_valid = torch.arange(num_keys, device=DEVICE) < lengths
    is_prefix = num_queries == num_keys
    query_is_valid = key_is_valid if is_prefix else key_is_valid.new_ones(3, num_queries)
    shapes = ((8, num_queries), (1, num_keys), (1, num_keys))
    leaves = [uniform(i, (3, n, s, 256)).to(DEVICE, dtype).requires_grad_() for i, (n, s) in enumerate(shapes)]
    weight = uniform(9, (3, num_queries, 2048)).to(DEVICE, dtype) * query_is_valid[:, :, None]
    output = attend(*leaves, read_mask(backend, query_is_valid, key_is_valid, dtype), backend)
    found = torch.autograd.grad((output * weight).sum(), leaves)
    masks = (query_is_valid[:, None, :, None], key_is_valid[:, None, :, None], key_is_valid[:, None, :, None])
    # What padding computes is nobody's business, except that it must be finite.
    assert all(bool(t.isfinite().all()) for t in (output, *found))
    return [output * query_is_valid[:, :, None], *(g * m for g, m in zip(found, masks, strict=True))]


@pytest.mark.parametrize("num_queries", [50, 700])
@pytest.mark.parametrize("backend", ["varlen", "flex", "sdpa", "matmul"])
def test_attention_kernels_against_fp64(backend: Any, num_queries: int) -> None:
    exact = attention_results("eager", torch.float64, num_queries)
    plain = attention_results("eager", torch.bfloat16, num_queries)
    found = attention_results(backend, torch.bfloat16, num_queries)
    for ours, same_precision, reference in zip(found, plain, exact, strict=True):
        error, allowed = ((t.double() - reference).norm() / reference.norm() for t in (ours, same_precision))
        assert float(error) <= 2 * float(allowed) + 1e-3


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("backend", ["sdpa", "matmul", "varlen", "flex"])
@pytest.mark.parametrize("scope", ["per_layer", "backbone", "multi_group"])
def test_compiled_bf16_model_is_as_close_to_fp64_as_the_plain_one(scope: Any, backend: Any, merge: bool) -> None:
    # Head width 16 at least: the smallest tile of flex attention.
    config = tiny_config(kv_channels=32)
    batch = tiny_batch(config).to(DEVICE)
    exact = gradients(tiny_model(config, attention_backend="eager").to(DEVICE), batch)
    plain = gradients(tiny_model(config, torch.bfloat16).to(DEVICE), batch)
    switches = OptimizationConfig(compile=True, compile_scope=scope, attention_backend=backend, merge_projections=merge)
    model = tiny_model(config, torch.bfloat16, attention_backend=backend).to(DEVICE)
    model = apply_optimizations(model, switches, FAMILY, lambda line: None)
    assert bool(mean_loss(model, batch).isfinite())
    found = gradients(model, batch)
    assert found.keys() == exact.keys()

    def error(of: dict[str, Tensor]) -> float:
        squares = [(of[n].double() - exact[n]).square().sum() for n in exact]
        return float(torch.stack(squares).sum().sqrt() / torch.stack([g.square().sum() for g in exact.values()]).sum().sqrt())

    assert error(found) <= 1.5 * error(plain) + 1e-3


@pytest.mark.parametrize("backend", ["sdpa", "matmul", "varlen", "flex"])
def test_a_compiled_step_never_waits_and_never_compiles_again(groups: ParallelGroups, backend: str) -> None:
    flags = ("--bf16", "--compile", "--merge-projections", "--attention-backend", backend, "--kv-channels", "32")
    run = build_run(tiny_run_config(*flags), groups)
    warm_up(run.runner.model, FAMILY, groups, run.config, run.supply.first_batch(), lambda line: None)
    batches = iter([batch.pin_memory() for batch in run.supply.iterator(0, 0, 1, 6, False)])
    for _ in range(3):
        run.runner.step(batches, 1e-3)
    warmed = counters["stats"]["unique_graphs"]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        metrics = [run.runner.step(batches, 1e-3) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(bool(m.is_finite) for m in metrics)
    assert counters["stats"]["unique_graphs"] == warmed
