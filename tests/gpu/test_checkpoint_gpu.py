"""Checkpoints of a run on a GPU: background saves copy through page-locked memory and hold the moment of the save."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from training_fixtures import build_run, config_saving_to, take_steps

from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.parallel.groups import ParallelGroups, initialize, shut_down
from megatron_vla.training.checkpoint import load_checkpoint
from megatron_vla.training.checkpoint_folder import iteration_folder, open_folder
from megatron_vla.training.checkpoint_saving import CheckpointSaver
from megatron_vla.training.distributed_checkpoint import PartReader, ReadRequest, write_parts
from megatron_vla.training.tensor_parts import Piece, StoredTensor

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


def test_loaded_values_come_after_what_the_stream_still_does(tmp_path: Path, groups: ParallelGroups) -> None:
    """A run's steps have a stream of their own, and threads that read begin on another."""
    stored = {name: torch.randn(512, 512) for name in "ab"}
    pieces = {name: StoredTensor(name, (512, 512), torch.float32, (Piece((0, 0), tensor),)) for name, tensor in stored.items()}
    write_parts(tmp_path, pieces, dist.group.WORLD)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # One of them is cut by columns: its copy on the GPU is not one piece of memory.
        targets = {"a": torch.empty(512, 512, device="cuda"), "b": torch.empty(512, 512, device="cuda").t()}
        torch.cuda._sleep(1_000_000_000)  # cycles: about half a second
        for target in targets.values():
            target.fill_(7.0)
        requests = [
            ReadRequest(name, StoredTensor(name, (512, 512), torch.float32, (Piece((0, 0), target),)))
            for name, target in targets.items()
        ]
        assert PartReader(tmp_path).load(requests) == 0.0
        found = {name: target.cpu() for name, target in targets.items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())
