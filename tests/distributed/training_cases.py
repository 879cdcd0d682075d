"""Cases that a worker (or the test process, as the single rank) runs: a training session, watched or disturbed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from training_fixtures import tiny_config

from megatron_vla.data.batch import Batch
from megatron_vla.data.build import DataSupply
from megatron_vla.models.registry import model_family
from megatron_vla.runner.eager import EagerRunner
from megatron_vla.training import preparation
from megatron_vla.training.loop import train as train_loop
from megatron_vla.training.session import training_session

Ids = list[list[tuple[int, int]]]


def train(rank: int, flags: list[str]) -> Ids:
    """Train; returns (epoch, sample index) of every micro-batch that this rank used, in order."""
    config = tiny_config(*flags)
    family = model_family(config.model.model_name)
    used: Ids = []
    honest = DataSupply.iterator

    def iterator(self: DataSupply, *arguments: Any) -> Iterator[Batch]:
        for batch in honest(self, *arguments):
            used.append(list(zip(batch.epoch_B.tolist(), batch.sample_index_B.tolist(), strict=True)))
            yield batch

    with mock.patch.object(DataSupply, "iterator", iterator), training_session(config, family) as run:
        train_loop(run)
    return used


def train_with_a_rank_that_burns_random_numbers(rank: int, flags: list[str]) -> Ids:
    """Rank 0 draws from the global generators before every step."""
    honest = EagerRunner.step

    def step(self: EagerRunner, *arguments: Any) -> Any:
        if rank == 0:
            torch.rand(17)
        return honest(self, *arguments)

    with mock.patch.object(EagerRunner, "step", step):
        return train(rank, flags)


def train_and_watch_the_timeout(rank: int, flags: list[str]) -> list[tuple[str, float | None]]:
    """(what runs, collective timeout in seconds while it starts, None without a group) of the data build and every step."""
    honest_build, honest_step = preparation.build_data, EagerRunner.step
    seen: list[tuple[str, float | None]] = []

    def watch(what: str) -> None:
        group = dist.group.WORLD
        seconds = group and group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        seen.append((what, seconds))

    def build_data(*arguments: Any) -> DataSupply:
        watch("data build")
        return honest_build(*arguments)

    def step(self: EagerRunner, *arguments: Any) -> Any:
        watch("step")
        return honest_step(self, *arguments)

    with mock.patch.object(preparation, "build_data", build_data), mock.patch.object(EagerRunner, "step", step):
        train(rank, flags)
    return seen


def train_until_one_rank_gets_a_signal(rank: int, flags: list[str], signalled_rank: int, step_number: int) -> Ids:
    """One rank receives SIGTERM during a step."""
    honest = EagerRunner.step
    steps = 0

    def step(self: EagerRunner, *arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if rank == signalled_rank and steps == step_number:
            os.kill(os.getpid(), signal.SIGTERM)
        return honest(self, *arguments)

    with mock.patch.object(EagerRunner, "step", step):
        return train(rank, flags)
