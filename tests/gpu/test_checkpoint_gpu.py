"""Checkpoints of a run on a GPU: background saves copy through page-locked memory and hold the moment of the save."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from training_fixtures import build_run, config_saving_to, take_steps

from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.parallel.groups import ParallelGroups, initialize, shut_down
from megatron_vla.training.checkpoint import load_checkpoint
from megatron_vla.training.checkpoint_folder import iteration_folder, open_folder
from megatron_vla.training.checkpoint_saving import CheckpointSaver

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    yield initialize(ParallelConfig(), quiet=True)
    shut_down()


@pytest.mark.parametrize("extra", [(), ("--async-save",)], ids=["sync", "async"])
def test_saved_on_the_gpu_comes_back_bit_equal(tmp_path: Path, groups: ParallelGroups, extra: tuple[str, ...]) -> None:
    run = build_run(config_saving_to(tmp_path, "--bf16", *extra), groups)
    saver = CheckpointSaver(run.config, groups, run.supply)
    for _ in range(2):
        take_steps(run, 1)
        saver.save(run.state)
        before = {n: t.clone() for n, t in run.state.module.state_dict().items()}
        moments = {n: t.clone() for n, t in run.state.optimizer.state_tensors().items()}
        # The writer may still be at work while the originals change.
        take_steps(run, 1)
    saver.finish()
    again = build_run(config_saving_to(tmp_path, "--bf16", "--seed", "7"), groups)
    load_checkpoint(open_folder(iteration_folder(tmp_path, 3)), again.state, groups)
    assert all(torch.equal(t, before[n]) for n, t in again.state.module.state_dict().items())
    assert all(torch.equal(t, moments[n]) for n, t in again.state.optimizer.state_tensors().items())
    assert next(iter(again.state.module.parameters())).is_cuda
