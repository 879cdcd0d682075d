"""The graph runner on two ranks that meet different shapes: the eager runner's steps, bit for bit, decided together."""

from __future__ import annotations

import pytest
from worker_pool import WorkerPool, pool_fixture

FLAGS = ("--global-batch-size", "8", "--clip-grad", "0.5")
OVERLAPPED = ("--overlap-grad-reduce", "--ddp-bucket-size", "5000")
# The layout with the most host state: counters of ready gradients, and which buckets were gathered.
SHARDED = (*OVERLAPPED, "--use-distributed-optimizer", "--overlap-param-gather")
MORE_LAYOUTS = {
    "dp2": (),
    "dp2_overlap": OVERLAPPED,
    "dp2_unbuffered": (*OVERLAPPED, "--no-gradient-buffers", "--micro-batch-size", "4"),
    "dp2_zero1": ("--use-distributed-optimizer",),
    "tp2_sp": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
}


pool = pool_fixture(2, "graph_cases")


def assert_equal_to_eager(pool: WorkerPool, layout: tuple[str, ...]) -> None:
    outcomes = [outcome.value for outcome in pool.run("compare_runners", [*FLAGS, *layout])]
    for found in outcomes:
        assert found["graphs"] == found["eager"]
        assert not found["different"], found["different"][:5]
        # Two warm-up steps; the shape without a graph stops the other rank's replay too.
        assert (found["graph_replays"], found["graph_captures"], found["graph_eager_steps"]) == (5, 2, 1)


def test_ranks_capture_replay_and_fall_back_together(pool: WorkerPool) -> None:
    assert_equal_to_eager(pool, SHARDED)


@pytest.mark.distributed_full
@pytest.mark.parametrize("name", MORE_LAYOUTS)
def test_more_layouts(pool: WorkerPool, name: str) -> None:
    assert_equal_to_eager(pool, MORE_LAYOUTS[name])
