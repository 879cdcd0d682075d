"""Parallel layouts over NCCL on as many GPUs as there are: every layout gives the curves of one GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))  # worker processes and their cases

import sharded_cases
from groot_parallel_cases import TRAIN_FLAGS as GROOT
from worker_pool import WorkerPool

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS < 2, reason=f"{NUM_GPUS} CUDA device(s), two are needed")]

STEPS = 6
# One prompt length and a global batch that four data-parallel ranks with two micro-batches each can share.
FLAGS = ("--global-batch-size", "16", "--prompt-padding", "max", "--clip-grad", "0.5")
TENSOR, PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
ON_TWO = {
    "dp2": ("--overlap-grad-reduce",),
    "dp2_unbuffered": ("--overlap-grad-reduce", "--no-gradient-buffers", "--micro-batch-size", "8"),
    "dp2_torch": ("--data-parallel-strategy", "torch_ddp"),
    "dp2_zero1": ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    "dp2_fsdp2": ("--data-parallel-strategy", "fsdp2"),
    "tp2": (TENSOR, "2"),
    "tp2_sp": (TENSOR, "2", "--sequence-parallel"),
    "pp2": (PIPELINE, "2"),
    "pp2_interleaved": (PIPELINE, "2", "--num-layers", "4", "--virtual-pipeline-model-parallel-size", "2"),
}
ON_FOUR = {
    "tp2_sp_pp2": (TENSOR, "2", "--sequence-parallel", PIPELINE, "2"),
    "tp2_sp_dp2_zero1": (TENSOR, "2", "--sequence-parallel", "--use-distributed-optimizer"),
    "pp2_dp2_zero1": (PIPELINE, "2", "--use-distributed-optimizer"),
}


def pool_of(world_size: int) -> Iterator[WorkerPool]:
    if world_size > NUM_GPUS:
        pytest.skip(f"{NUM_GPUS} CUDA devices, {world_size} are needed")
    workers = WorkerPool(world_size, "sharded_cases")
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def two() -> Iterator[WorkerPool]:
    yield from pool_of(2)


@pytest.fixture(scope="module")
def four() -> Iterator[WorkerPool]:
    yield from pool_of(4)


def assert_like_one_gpu(pool: WorkerPool, layout: tuple[str, ...], *extra: str, relative: float) -> None:
    model = layout[2:4] if "--num-layers" in layout else ()
    losses, norms = sharded_cases.train_curves(0, [*FLAGS, *model, *extra], STEPS)
    for outcome in pool.run("train_curves", [*FLAGS, *layout, *extra], STEPS):
        found_losses, found_norms = outcome.value
        assert found_losses == pytest.approx(losses, rel=relative)
        assert found_norms == pytest.approx(norms, rel=10 * relative)


@pytest.mark.parametrize("layout", ON_TWO.values(), ids=ON_TWO)
def test_two_gpus_follow_one(two: WorkerPool, layout: tuple[str, ...]) -> None:
    assert_like_one_gpu(two, layout, relative=1e-5)


@pytest.mark.parametrize("name", ["dp2_zero1", "tp2_sp", "pp2"])
def test_bf16_on_two_gpus_follows_one(two: WorkerPool, name: str) -> None:
    """Within the rounding of bf16 (8 bits): another order of sums changes single roundings."""
    assert_like_one_gpu(two, ON_TWO[name], "--bf16", relative=1e-2)


@pytest.mark.parametrize("name", ["tp2_sp", "dp2_unbuffered"])
def test_compiled_bf16_on_two_gpus_follows_one(two: WorkerPool, name: str) -> None:
    limited = ("--data-parallel-sms", "4") if name == "dp2_unbuffered" else ()
    in_bf16 = ("--bf16", "--no-accumulate-allreduce-grads-in-fp32")
    assert_like_one_gpu(two, (*ON_TWO[name], *limited), *in_bf16, "--compile", "--merge-projections", relative=1e-2)


@pytest.mark.parametrize("name", ["dp2_zero1", "dp2_fsdp2", "tp2_sp"])
@pytest.mark.parametrize("precision", [(), ("--autocast-bf16",)], ids=["fp32", "autocast"])
def test_groot_with_a_frozen_bf16_backbone_on_two_gpus_follows_one(
    two: WorkerPool, name: str, precision: tuple[str, ...]
) -> None:
    """fsdp2 gathers frozen bf16 matrices and fp32 norms of a layer together, as bytes."""
    flags = (*GROOT, "--frozen-dtype", "bf16", *precision)
    assert_like_one_gpu(two, ON_TWO[name], *flags, relative=1e-2 if precision or name == "tp2_sp" else 1e-4)


@pytest.mark.parametrize("layout", ON_FOUR.values(), ids=ON_FOUR)
def test_four_gpus_follow_one(four: WorkerPool, layout: tuple[str, ...]) -> None:
    assert_like_one_gpu(four, layout, relative=1e-5)
