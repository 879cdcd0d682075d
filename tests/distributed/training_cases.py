"""Cases that a worker (or the test process, as the single rank) runs: a training session, watched or disturbed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
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
    used: Ids = []
    honest = DataSupply.iterator

    def iterator(self: DataSupply, *arguments: Any) -> Iterator[Batch]:
        for batch in honest(self, *arguments):
            used.append(list(zip(batch.epoch_B.tolist(), batch.sample_index_B.tolist(), strict=True)))
            yield batch

    with mock.patch.object(DataSupply, "iterator", iterator), training_session(config, model_family("pi05")) as run:
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


def train_with_a_slow_data_build(rank: int, flags: list[str]) -> Ids:
    """Rank 0 takes longer to build its data than the short collective timeout."""
    honest = preparation.build_data

    def build_data(*arguments: Any) -> DataSupply:
        if rank == 0:
            time.sleep(2.5)
        return honest(*arguments)

    with mock.patch.object(preparation, "build_data", build_data):
        return train(rank, flags)


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
