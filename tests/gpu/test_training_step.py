"""The training step on a GPU: the host never waits for the device in the steady state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from training_fixtures import build_run, tiny_config

from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.parallel.groups import ParallelGroups, initialize, shut_down

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    yield initialize(ParallelConfig(), quiet=True)
    shut_down()


@pytest.mark.parametrize(
    "flags", [(), ("--bf16",), ("--data-parallel-strategy", "torch_ddp"), ("--bf16", "--overlap-grad-reduce")], ids=" ".join
)
def test_steady_state_step_never_waits_for_the_device(groups: ParallelGroups, flags: tuple[str, ...]) -> None:
    run = build_run(tiny_config(*flags), groups)
    batches = iter([batch.pin_memory() for batch in run.supply.iterator(0, 0, 1, 6, False)])
    for _ in range(3):  # lazy set-up of libraries and communicators may synchronise
        run.runner.step(batches, 1e-3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        metrics = [run.runner.step(batches, 1e-3) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(bool(m.is_finite) for m in metrics)
