"""One process, two processes, any split into micro-batches, either wrap: the same samples and the same losses."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import training_cases
from worker_pool import WorkerPool, pool_fixture

from megatron_vla.training.checkpoint_folder import find_latest

ITERATIONS = 6
FLAGS = ["--global-batch-size", "8", "--train-iters", str(ITERATIONS), "--log-interval", "2"]
# 40 samples and 8 per step: the last of 6 steps is in the second epoch.


pool = pool_fixture(2)


def flags(folder: Path, *extra: str) -> list[str]:
    return [*FLAGS, "--save", str(folder), *extra]


def curve(folder: Path) -> dict[str, list[float]]:
    """Per-iteration lists of metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()]
    return {k: [v for line in lines for v in line[k]] for k in ("losses", "gradient_norms", "learning_rates", "num_valid")}


def global_order(ranks: list[training_cases.Ids]) -> list[tuple[int, int]]:
    """Sample ids in the global order: micro-batch by micro-batch, rank by rank."""
    return [sample for micro_batches in zip(*ranks, strict=True) for ids in micro_batches for sample in ids]


def train_alone(*arguments: Any) -> training_cases.Ids:
    with contextlib.redirect_stdout(io.StringIO()):
        return training_cases.train(0, *arguments)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[float]], list[tuple[int, int]]]:
    """One process, one micro-batch per step."""
    folder = tmp_path_factory.mktemp("reference")
    ids = train_alone(flags(folder, "--micro-batch-size", "8"))
    return curve(folder), global_order([ids])


def assert_same(folder: Path, ids: list[training_cases.Ids], reference: Any) -> None:
    expected, order = reference
    assert global_order(ids) == order
    assert len(order) == 8 * ITERATIONS and {epoch for epoch, _ in order} == {0, 1}
    measured = curve(folder)
    assert measured["learning_rates"] == expected["learning_rates"]  # P02: a function of samples alone
    assert measured["num_valid"] == expected["num_valid"]
    assert measured["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert measured["gradient_norms"] == pytest.approx(expected["gradient_norms"], rel=1e-5)
    assert max(measured["losses"]) > min(measured["losses"])


def test_single_process_micro_batches(tmp_path: Path, reference: Any) -> None:
    assert_same(tmp_path, [train_alone(flags(tmp_path, "--micro-batch-size", "1"))], reference)


@pytest.mark.parametrize(
    "extra",
    [
        ("--micro-batch-size", "2"),
        ("--micro-batch-size", "4", "--data-parallel-strategy", "torch_ddp"),
        ("--micro-batch-size", "2", "--data-parallel-strategy", "torch_ddp"),
        ("--micro-batch-size", "1", "--overlap-grad-reduce"),
        ("--micro-batch-size", "4", "--overlap-grad-reduce", "--num-workers", "1"),
        ("--micro-batch-size", "4", "--no-gradient-buffers"),
        ("--micro-batch-size", "4", "--no-gradient-buffers", "--overlap-grad-reduce", "--ddp-bucket-size", "3000"),
    ],
    ids=" ".join,
)
def test_two_processes(tmp_path: Path, pool: WorkerPool, reference: Any, extra: tuple[str, ...]) -> None:
    outcomes = pool.run("train", flags(tmp_path, *extra))
    assert_same(tmp_path, [o.value for o in outcomes], reference)
    assert "rank host" in outcomes[0].printed and "all-reduce self-test passed" in outcomes[0].printed
    assert outcomes[1].printed == "", "only rank 0 prints"


def test_S03_random_numbers_burnt_on_one_rank_change_nothing(tmp_path: Path, pool: WorkerPool, reference: Any) -> None:
    outcomes = pool.run("train_with_a_rank_that_burns_random_numbers", flags(tmp_path, "--micro-batch-size", "2"))
    assert_same(tmp_path, [o.value for o in outcomes], reference)


def test_P01_the_long_timeout_holds_until_the_first_step_is_done(tmp_path: Path, pool: WorkerPool) -> None:
    # Read from the backend, not waited for: a busy machine may not decide this test. What a timeout does: test_failure.py.
    # Data are built before the groups exist: a slow rank keeps the others at the rendezvous, which has the long timeout.
    timeouts = ("--distributed-startup-timeout-minutes", "9", "--distributed-timeout-minutes", "7")
    outcomes = pool.run("train_and_watch_the_timeout", flags(tmp_path, "--micro-batch-size", "4", *timeouts))
    for outcome in outcomes:
        assert outcome.value == [("data build", None), ("step", 540.0), *[("step", 420.0)] * (ITERATIONS - 1)]


@pytest.mark.parametrize("first_is_alone", [True, False])
def test_K05_resume_on_another_number_of_processes(
    tmp_path: Path, pool: WorkerPool, reference: Any, first_is_alone: bool
) -> None:
    first = flags(tmp_path, "--micro-batch-size", "2", "--exit-interval", "3")
    second = flags(tmp_path, "--micro-batch-size", "4", "--load", str(tmp_path))
    if first_is_alone:
        before = [train_alone(first)]
        after = [o.value for o in pool.run("train", second)]
    else:
        before = [o.value for o in pool.run("train", first)]
        after = [train_alone(second)]
    expected, order = reference
    assert global_order(before) + global_order(after) == order
    assert curve(tmp_path)["losses"] == pytest.approx(expected["losses"], rel=1e-6)


def test_signal_to_one_rank_stops_all_at_one_iteration(tmp_path: Path, pool: WorkerPool, reference: Any) -> None:
    arguments = flags(tmp_path, "--micro-batch-size", "4")
    outcomes = pool.run("train_until_one_rank_gets_a_signal", arguments, 1, 3)
    used = [len(o.value) for o in outcomes]
    found, _ = find_latest(tmp_path)
    assert found is not None and 3 <= found.iteration < ITERATIONS and found.consumed_samples == 8 * found.iteration
    assert used[0] == used[1]
    assert "stop signal" in outcomes[0].printed and "to go on: torchrun --nproc-per-node=2" in outcomes[0].printed
    after = [o.value for o in pool.run("train", [*arguments, "--load", str(tmp_path)])]
    assert curve(tmp_path)["losses"] == pytest.approx(reference[0]["losses"], rel=1e-6)
    assert len(after[0]) == ITERATIONS - found.iteration
