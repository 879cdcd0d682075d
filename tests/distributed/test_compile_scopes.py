"""Compiled models on two processes: the same losses as plain ones, and which scope lets reductions start during backward."""

from __future__ import annotations

import pytest
from compile_cases import Compiled
from worker_pool import WorkerPool, pool_fixture

STEPS = 2
FLAGS = ("--global-batch-size", "4", "--num-layers", "3")
OVERLAP = ("--overlap-grad-reduce", "--ddp-bucket-size", "2000")


pool = pool_fixture(2, "compile_cases")


@pytest.fixture(scope="module")
def plain(pool: WorkerPool) -> Compiled:
    return train(pool)


def train(pool: WorkerPool, *extra: str, backend: str = "aot_eager") -> Compiled:
    outcomes = pool.run("train", [*FLAGS, *extra], STEPS, backend)
    assert outcomes[0].value.losses == outcomes[1].value.losses
    found: Compiled = outcomes[0].value
    return found


def products_before_each_reduction(run: Compiled) -> list[int]:
    return [run.events[:place].count("product") for place, event in enumerate(run.events) if event == "reduce"]


def test_only_graphs_per_layer_let_reductions_start_during_backward(pool: WorkerPool, plain: Compiled) -> None:
    """With one graph for all layers no gradient is ready before the whole graph is computed: reductions come in a burst."""
    found = {scope: train(pool, *OVERLAP, "--compile", "--compile-scope", scope) for scope in ("multi_group", "backbone")}
    before = {scope: products_before_each_reduction(run) for scope, run in found.items()}
    assert len(before["multi_group"]) == len(before["backbone"]) > 8
    totals = {scope: run.events.count("product") for scope, run in found.items()}
    assert totals["multi_group"] == totals["backbone"]
    # The layers' products are most of all; the vision tower, the second graph, comes after them.
    assert before["backbone"][0] > 0.6 * totals["backbone"]
    assert before["multi_group"][0] < 0.5 * before["backbone"][0], "the last layer alone, not all three"
    assert len(set(before["backbone"])) <= 5 < len(set(before["multi_group"])), "bursts of reductions"
    for run in found.values():
        assert run.losses == pytest.approx(plain.losses, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ("--data-parallel-strategy", "torch_ddp", "--no-dynamo-optimize-ddp"),
        ("--use-distributed-optimizer", "--overlap-grad-reduce"),
        ("--data-parallel-strategy", "fsdp2"),
        ("--tensor-model-parallel-size", "2"),
        ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
        ("--pipeline-model-parallel-size", "2", "--prompt-padding", "max"),
    ],
    ids=" ".join,
)
def test_layouts_train_alike(pool: WorkerPool, plain: Compiled, layout: tuple[str, ...]) -> None:
    found = train(pool, *layout, "--compile", "--merge-projections")
    assert found.losses == pytest.approx(plain.losses, rel=1e-6)
    assert 0 < found.num_graphs <= 3


@pytest.mark.slow
def test_generated_code_of_sequence_parallelism(pool: WorkerPool) -> None:
    """Collectives that inductor looks into came out wrong: NaN here, and gradients of GPUs that trained nothing."""
    flags = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--bf16", "--attention-backend", "matmul")
    plain = train(pool, *flags)
    found = train(pool, *flags, "--compile", backend="inductor")
    assert found.num_graphs > 0 == plain.num_graphs
    assert found.losses == pytest.approx(plain.losses, rel=1e-3)
