"""The sharded optimizer on 2 and 4 processes: bit for bit plain data parallelism, and equal to one process."""

from __future__ import annotations

from typing import Any

import pytest
import sharded_cases
import torch
from sharded_cases import Trained
from worker_pool import WorkerPool, pool_fixture

STEPS = 10
# The norm of this model's gradient is 2 to 3: every step is clipped.
FLAGS = ("--global-batch-size", "8", "--clip-grad", "0.5", "--weight-decay", "0.01")
SHARDED = ("--use-distributed-optimizer",)
# 200 000 parameters in about 16 buckets of unequal size, each padded.
BUCKETS = ("--overlap-grad-reduce", "--ddp-bucket-size", "5000")
OVERLAPPED = (*SHARDED, *BUCKETS, "--overlap-param-gather")


pool = pool_fixture(2, "sharded_cases")


def train(pool: WorkerPool, *extra: str, case: str = "train", more: tuple[Any, ...] = (STEPS,)) -> Trained:
    """Rank 0's outcome (the state is put together from all ranks)."""
    return pool.run(case, [*FLAGS, *extra], *more)[0].value


@pytest.fixture(scope="module")
def alone() -> Trained:
    """One process."""
    return sharded_cases.train(0, list(FLAGS), STEPS)


@pytest.fixture(scope="module")
def plain(pool: WorkerPool) -> Trained:
    """Plain data parallelism on two processes."""
    return train(pool)


def assert_bitwise(found: Trained, expected: Trained) -> None:
    assert found.losses == expected.losses
    assert set(found.state) == set(expected.state)
    different = [name for name, tensor in expected.state.items() if not torch.equal(found.state[name], tensor)]
    assert not different


def largest_difference(found: Trained, expected: Trained, kinds: tuple[str, ...] = ("weight", "main", "ema")) -> float:
    names = [n for n in expected.state if n.split(".")[0] in kinds]
    assert set(found.state) == set(expected.state) and names
    return max(float((found.state[n].double() - expected.state[n].double()).abs().max()) for n in names)


def test_plain_on_two_equals_one_process(alone: Trained, plain: Trained) -> None:
    assert plain.losses == pytest.approx(alone.losses, rel=1e-6)
    assert plain.norms == pytest.approx(alone.norms, rel=1e-6)
    assert min(alone.norms) > 0.5, "the clip must be active"
    # Ten steps of up to 1e-3 each; Adam amplifies last-bit differences of tiny gradients.
    assert largest_difference(plain, alone) <= 1e-5


@pytest.mark.parametrize("extra", [SHARDED, (*SHARDED, *BUCKETS), OVERLAPPED, BUCKETS], ids=" ".join)
def test_sharded_is_unsharded_bit_for_bit(pool: WorkerPool, plain: Trained, extra: tuple[str, ...]) -> None:
    found = train(pool, *extra)
    assert_bitwise(found, plain)
    assert found.owned_fraction == pytest.approx(0.5 if "--use-distributed-optimizer" in extra else 1.0, abs=0.02)


def test_bf16_with_fp32_main_parameters_bit_for_bit(pool: WorkerPool) -> None:
    expected = train(pool, "--bf16")
    assert_bitwise(train(pool, "--bf16", *OVERLAPPED), expected)
    assert any(t.dtype == torch.bfloat16 for t in expected.state.values())
    for name in (n.removeprefix("main.") for n in expected.state if n.startswith("main.")):
        weight, main = expected.state[f"weight.{name}"], expected.state[f"main.{name}"]
        assert main.dtype == torch.float32 and torch.equal(weight, main.to(weight.dtype))


@pytest.mark.parametrize("extra", [OVERLAPPED, ("--bf16", *OVERLAPPED)], ids=" ".join)
def test_resume_through_state_shards_is_exact(pool: WorkerPool, extra: tuple[str, ...]) -> None:
    expected = train(pool, *extra)
    assert_bitwise(train(pool, *extra, case="train_with_a_resume", more=(STEPS, 4)), expected)


def test_torch_ddp_is_megatron_ddp(pool: WorkerPool, plain: Trained) -> None:
    assert_bitwise(train(pool, "--data-parallel-strategy", "torch_ddp", *BUCKETS), plain)


@pytest.mark.parametrize("precision", [(), ("--bf16", "--no-accumulate-allreduce-grads-in-fp32")], ids=" ".join)
def test_without_gradient_buffers_bit_for_bit(pool: WorkerPool, precision: tuple[str, ...]) -> None:
    one_pass = ("--micro-batch-size", "4", *precision)
    expected = train(pool, *one_pass)
    assert_bitwise(train(pool, *one_pass, "--no-gradient-buffers", *BUCKETS), expected)


def test_ranks_without_gradient_buffers_reduce_alike_whatever_they_reach(pool: WorkerPool) -> None:
    """They use their layers in opposite orders; in the second step one leaves a layer out."""
    expected, *found = [outcome.value for outcome in pool.run("reduce_what_ranks_reach_differently")]
    assert found == [expected]
    assert expected == {"first": [3.0, 2.0], "second": [30.0, 20.0], "third": [300.0, 100.0]}


def test_a_weight_read_without_calling_its_module_is_not_stale(pool: WorkerPool) -> None:
    at_once = [o.value for o in pool.run("train_reading_a_weight_from_outside", False)]
    overlapped = [o.value for o in pool.run("train_reading_a_weight_from_outside", True)]
    assert overlapped == at_once


def test_the_search_for_a_nan_reduces_nothing_without_buffers(pool: WorkerPool) -> None:
    flags = [*FLAGS, "--micro-batch-size", "4", "--no-gradient-buffers", *BUCKETS]
    innocent, guilty = [outcome.value for outcome in pool.run("search_for_a_nan_of_rank_1", flags)]
    assert innocent == ([], 0)
    assert guilty[0] and guilty[1] == 0


@pytest.mark.parametrize(
    "extra", [(), OVERLAPPED, ("--micro-batch-size", "4", "--no-gradient-buffers", *BUCKETS)], ids=" ".join
)
def test_a_nan_on_one_rank_stops_the_state_of_all(pool: WorkerPool, extra: tuple[str, ...]) -> None:
    for outcome in pool.run("train_with_a_bad_step", [*FLAGS, *extra], 3):
        finite, stands_still = outcome.value
        assert finite == [True, False, False] and stands_still


@pytest.mark.parametrize(
    "extra",
    [BUCKETS, (*SHARDED, *BUCKETS), ("--data-parallel-strategy", "torch_ddp", *BUCKETS)],
    ids=" ".join,
)
def test_reductions_start_before_backward_ends(pool: WorkerPool, extra: tuple[str, ...]) -> None:
    """Two micro-batches: none of the first's gradients is sent, most of the second's are on their way before its last one."""
    for outcome in pool.run("order_of_events", [*FLAGS, *extra]):
        events = outcome.value
        first, last = (index for index, event in enumerate(events) if event == "last gradient")
        assert first == 0 and "reduce" not in events
        assert events[first:last].count("reduce async") >= 10
        assert events[-1] == "finish"


def test_without_overlap_reductions_wait_for_backward(pool: WorkerPool) -> None:
    for extra in ((), ("--data-parallel-strategy", "torch_ddp")):
        events = pool.run("order_of_events", [*FLAGS, *extra])[0].value
        assert events[:2] == ["last gradient", "last gradient"]


@pytest.mark.distributed_full
def test_four_processes_equal_one(alone: Trained) -> None:
    workers = WorkerPool(4, "sharded_cases")
    try:
        tensor_parallel = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
        for extra in (OVERLAPPED, ("--data-parallel-strategy", "fsdp2")):
            # Parts of matrices, whole norms with partial gradients, and shards of both in one global norm.
            found = workers.run("train_curves", [*FLAGS, *tensor_parallel, *extra], 5)
            for outcome in found:
                assert outcome.value[0] == pytest.approx(alone.losses[:5], rel=1e-5)
                assert outcome.value[1] == pytest.approx(alone.norms[:5], rel=1e-5)
        for extra in (OVERLAPPED, ("--data-parallel-strategy", "fsdp2", "--fsdp-replicate-size", "2")):
            found = train(workers, *extra)
            assert found.losses == pytest.approx(alone.losses, rel=1e-6)
            assert found.norms == pytest.approx(alone.norms, rel=1e-6)
            assert largest_difference(found, alone) <= 1e-5
            assert found.owned_fraction == pytest.approx(0.25 if "--use-distributed-optimizer" in extra else 0.5, abs=0.02)
    finally:
        workers.close()


def test_reductions_without_buffers_start_before_backward_ends(pool: WorkerPool) -> None:
    flags = [*FLAGS, "--micro-batch-size", "4", "--no-gradient-buffers", *BUCKETS]
    for outcome in pool.run("order_of_events", flags):
        events = outcome.value
        assert events[: events.index("last gradient")].count("reduce async") >= 10
        assert events[-1] == "finish"
