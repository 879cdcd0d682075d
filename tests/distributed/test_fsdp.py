"""FSDP2 on two processes: equal to one process and to the other strategies, also in bf16 and where dtypes mix."""

from __future__ import annotations

from typing import Any

import pytest
import sharded_cases
import torch
from sharded_cases import Trained
from worker_pool import WorkerPool, pool_fixture

STEPS = 10
FLAGS = ("--global-batch-size", "8", "--clip-grad", "0.5", "--weight-decay", "0.01")
FSDP = ("--data-parallel-strategy", "fsdp2")


pool = pool_fixture(2, "sharded_cases")


def train(pool: WorkerPool, *extra: str, case: str = "train", more: tuple[Any, ...] = (STEPS,)) -> Trained:
    """Rank 0's outcome (the state is put together from all ranks)."""
    return pool.run(case, [*FLAGS, *extra], *more)[0].value


def largest_difference(found: Trained, expected: Trained) -> float:
    names = [n for n in expected.state if n.split(".")[0] in ("weight", "main", "ema")]
    assert set(found.state) == set(expected.state)
    return max(float((found.state[n].double() - expected.state[n].double()).abs().max()) for n in names)


@pytest.mark.parametrize("extra", [(), ("--no-fsdp-reshard-after-forward",)], ids=" ".join)
def test_equals_one_process(pool: WorkerPool, extra: tuple[str, ...]) -> None:
    alone = sharded_cases.train(0, list(FLAGS), STEPS)
    found = train(pool, *FSDP, *extra)
    assert found.losses == pytest.approx(alone.losses, rel=1e-6)
    assert found.norms == pytest.approx(alone.norms, rel=1e-6)
    assert min(alone.norms) > 0.5, "the clip must be active"
    assert largest_difference(found, alone) <= 1e-5
    assert found.owned_fraction == pytest.approx(0.5, abs=0.02)


def test_fp64_sums_the_gradients_of_all_ranks_and_micro_batches(pool: WorkerPool) -> None:
    """Without a clip and without Adam's normalisation the scale of a gradient would show here at once."""
    alone = sharded_cases.train(0, [*FLAGS, "--fp64", "--clip-grad", "0"], 3)
    found = train(pool, *FSDP, "--fp64", "--clip-grad", "0", more=(3,))
    assert found.losses == pytest.approx(alone.losses, rel=1e-12)
    assert found.norms == pytest.approx(alone.norms, rel=1e-12)
    for name in (n for n in alone.state if n.startswith("exp_avg_sq.")):
        torch.testing.assert_close(found.state[name], alone.state[name], rtol=1e-9, atol=1e-20)


def test_bf16_keeps_the_dtypes_and_follows_megatron_ddp(pool: WorkerPool) -> None:
    expected = train(pool, "--bf16")
    found = train(pool, *FSDP, "--bf16")
    assert {n: t.dtype for n, t in found.state.items()} == {n: t.dtype for n, t in expected.state.items()}
    # One more rounding of each gradient to bf16 (2**-9): of the size of bf16's own noise in the loss.
    assert found.losses == pytest.approx(expected.losses, rel=1e-3)
    # Norms of bf16 gradients that are rounded once more differ by far less than one rounding.
    assert found.norms == pytest.approx(expected.norms, rel=5e-3)
    for name in (n.removeprefix("main.") for n in found.state if n.startswith("main.")):
        weight, main = found.state[f"weight.{name}"], found.state[f"main.{name}"]
        assert main.dtype == torch.float32 and torch.equal(weight, main.to(weight.dtype))


def test_activation_checkpointing_changes_nothing(pool: WorkerPool) -> None:
    pattern = ("--activation-checkpoint-module-patterns", "layers.*")
    plain, recomputed = train(pool, *FSDP, more=(4,)), train(pool, *FSDP, *pattern, more=(4,))
    assert recomputed.losses == plain.losses
    assert all(torch.equal(recomputed.state[n], t) for n, t in plain.state.items())


def test_resume_through_state_shards_is_exact(pool: WorkerPool) -> None:
    expected = train(pool, *FSDP)
    found = train(pool, *FSDP, case="train_with_a_resume", more=(STEPS, 4))
    assert found.losses == expected.losses
    assert all(torch.equal(found.state[n], t) for n, t in expected.state.items())


def test_a_nan_on_one_rank_stops_the_state_of_all(pool: WorkerPool) -> None:
    for outcome in pool.run("train_with_a_bad_step", [*FLAGS, *FSDP], 3):
        finite, stands_still = outcome.value
        assert finite == [True, False, False] and stands_still
