"""The full-iteration CUDA graph on GPUs: the eager runner's bits, one launch per step, no waiting, no second set of memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from graph_fixtures import assert_same_state, take_steps_of_widths
from step_profile import device_events
from torch.profiler import ProfilerActivity, profile
from training_fixtures import build_run, tiny_config

from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.parallel.groups import ParallelGroups, initialize, shut_down
from megatron_vla.runner.build import prepare_device
from megatron_vla.training.checkpoint_saving import save_checkpoint
from megatron_vla.training.loop import TrainingRun

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))  # worker processes and their cases

from test_graph_runner import MORE_LAYOUTS, SHARDED, assert_equal_to_eager
from worker_pool import WorkerPool

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GRAPHS = ("--runner", "full_iteration_graph", "--cuda-graph-max-buckets", "2")
# The kernels of this backend add up in one order only, so that two runs can be compared bit by bit.
EXACT = ("--attention-backend", "eager", "--clip-grad", "0.5", "--weight-decay", "0.01")
ONE = ("--global-batch-size", "2")
# Three warm-up steps; 32 and 16 get graphs, 24 runs eagerly between replays.
WIDTHS = (32, 32, 32, 32, 16, 32, 16, 24, 32, 16)


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    torch.backends.cudnn.deterministic = True
    found = initialize(ParallelConfig(), quiet=True)
    prepare_device(tiny_config(*GRAPHS), found)
    yield found
    shut_down()
    torch.backends.cudnn.deterministic = False


def finish(run: TrainingRun) -> None:
    """Graphs must be gone before the process groups."""
    run.runner.release()


@pytest.mark.parametrize(
    "flags",
    [
        ONE,
        ("--bf16", *ONE),
        ("--bf16", "--global-batch-size", "6", "--overlap-grad-reduce"),
        ("--bf16", *ONE, "--no-fused-adam"),
        ("--bf16", "--activation-checkpoint-module-patterns", "vision_tower.layers.*", "layers.*"),
    ],
    ids=" ".join,
)
def test_steps_are_those_of_the_eager_runner(groups: ParallelGroups, flags: tuple[str, ...], tmp_path: Path) -> None:
    """Ten steps of two shapes, with a step outside of all graphs and a checkpoint in the middle."""
    first, second = build_run(tiny_config(*EXACT, *flags), groups), build_run(tiny_config(*EXACT, *flags), groups)
    expected = take_steps_of_widths(first, WIDTHS, pin=True)
    assert take_steps_of_widths(second, WIDTHS, pin=True) == expected, "the eager runner itself does not repeat its bits"
    config = tiny_config(*EXACT, *flags, *GRAPHS, "--save", str(tmp_path))
    graphs = build_run(config, groups)
    found = take_steps_of_widths(graphs, WIDTHS[:6], pin=True)
    save_checkpoint(graphs.state, config, groups, graphs.supply)
    found += take_steps_of_widths(graphs, WIDTHS[6:], pin=True)
    print(*graphs.runner.poll(), *graphs.runner.summary(), sep="\n")
    assert found == expected
    assert_same_state(graphs, first)
    counts = graphs.runner.counters()
    assert (counts["graph_replays"], counts["graph_captures"], counts["graph_eager_steps"]) == (6, 2, 1)
    finish(graphs)


def test_compiled_layers_are_captured(groups: ParallelGroups) -> None:
    """Compilation of a new width happens in the pass before its capture. Choices of kernels may round differently per run."""
    flags = ("--bf16", *ONE, "--compile")
    eager, graphs = build_run(tiny_config(*flags), groups), build_run(tiny_config(*flags, *GRAPHS), groups)
    expected = [step["loss"] for step in take_steps_of_widths(eager, WIDTHS, pin=True)]
    found = [step["loss"] for step in take_steps_of_widths(graphs, WIDTHS, pin=True)]
    assert found == pytest.approx(expected, rel=1e-2)
    counts = graphs.runner.counters()
    assert (counts["graph_replays"], counts["graph_captures"], counts["graph_eager_steps"]) == (6, 2, 1)
    finish(graphs)


def test_every_switch_of_the_fastest_run_together(groups: ParallelGroups) -> None:
    """Compiled layers, merged products, attention by products, FP8 with delayed scaling and fused kernels in graphs have the
    eager runner's losses, and those of plain bf16 within FP8's roundings."""
    plain = ("--bf16", *ONE)
    compiled = (*plain, "--compile", "--merge-projections", "--attention-backend", "matmul")
    fp8 = ("--fp8", "native", "--fp8-recipe", "delayed", "--fp8-fast-accumulation", "all", "--fp8-min-dim", "64")
    fast = (*compiled, *fp8)
    losses = {}
    for name, flags in (("plain", plain), ("compiled", compiled), ("fast", fast), ("graphs", (*fast, *GRAPHS))):
        run = build_run(tiny_config(*flags), groups)
        losses[name] = [step["loss"] for step in take_steps_of_widths(run, WIDTHS, pin=True)]
        counts = run.runner.counters()
        finish(run)
    assert losses["graphs"] == pytest.approx(losses["fast"], rel=1e-2)
    assert losses["compiled"] == pytest.approx(losses["plain"], rel=1e-2)
    assert losses["fast"] == pytest.approx(losses["compiled"], rel=5e-2)
    assert losses["fast"] != losses["compiled"]
    assert (counts["graph_replays"], counts["graph_captures"], counts["graph_eager_steps"]) == (6, 2, 1)


@pytest.mark.parametrize("flags", [("--bf16", *ONE), ("--bf16", "--global-batch-size", "6")], ids=" ".join)
def test_a_step_is_one_launch_and_never_waits(groups: ParallelGroups, flags: tuple[str, ...]) -> None:
    run = build_run(tiny_config(*flags, *GRAPHS), groups)
    count = run.config.num_microbatches(1)
    batches = iter([batch.pin_memory() for batch in run.supply.iterator(0, 0, 1, 10, False)])
    for _ in range(5):
        run.runner.step(batches, 1e-3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        metrics = [run.runner.step(batches, 1e-3) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(bool(m.is_finite) for m in metrics)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run.runner.step(batches, 1e-3)
        torch.cuda.synchronize()
    events = profiler.events()
    launches = {e.id for e in events if e.name == "cudaGraphLaunch"}
    kernels = [e for e in device_events(events) if not e.name.startswith("Mem")]
    outside = [e.name for e in kernels if e.id not in launches]
    print(f"{len(kernels)} kernels, {len(outside)} outside of the graph, {count} micro-batch(es)")
    assert len(launches) == 1
    assert len(outside) < 20, outside  # learning rate, step count, copies of the metrics
    finish(run)


def test_graphs_and_eager_steps_share_their_memory(groups: ParallelGroups) -> None:
    """Activations of some GiB: two graphs and an eager step between them take what one eager step takes."""
    flags = ("--bf16", "--micro-batch-size", "256", "--global-batch-size", "256", "--image-size", "112")
    peaks = []
    for extra in ((), GRAPHS):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        run = build_run(tiny_config(*flags, *extra), groups)
        take_steps_of_widths(run, WIDTHS, pin=True)
        peaks.append((torch.cuda.max_memory_reserved() - before) / 2**20)
        print(*run.runner.summary(), f"peak {peaks[-1]:.0f} MiB", sep="\n")
        finish(run)
        del run
    assert peaks[1] < 1.25 * peaks[0] + 64, peaks


@pytest.fixture(scope="module")
def two() -> Iterator[WorkerPool]:
    if NUM_GPUS < 2:
        pytest.skip(f"{NUM_GPUS} CUDA device(s), two are needed")
    workers = WorkerPool(2, "graph_cases")
    yield workers
    workers.close()


@pytest.mark.parametrize("name", [*MORE_LAYOUTS, "dp2_zero1_overlap"])
def test_two_gpus_capture_replay_and_fall_back_together(two: WorkerPool, name: str) -> None:
    layout = (*MORE_LAYOUTS.get(name, SHARDED), *EXACT, "--bf16")
    assert_equal_to_eager(two, layout)
