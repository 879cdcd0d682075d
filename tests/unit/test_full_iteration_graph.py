"""The graph runner against the eager one, bit by bit, with recorded operations in place of CUDA graphs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_fixtures import assert_same_state, narrowed, take_steps_of_widths, with_graphs
from recorded_operations import HostReadError, OperationRecorder
from training_fixtures import build_run, config_saving_to, tiny_config

from megatron_vla.config.check import check
from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.models.registry import model_family
from megatron_vla.parallel.groups import ParallelGroups, initialize, shut_down
from megatron_vla.runner.contract import contract_of
from megatron_vla.training.checkpoint import load_checkpoint
from megatron_vla.training.checkpoint_folder import find_latest
from megatron_vla.training.checkpoint_saving import save_checkpoint
from megatron_vla.training.loop import TrainingRun, train
from megatron_vla.training.metrics import MetricWindow
from megatron_vla.training.preparation import device_findings

GRAPHS = ("--runner", "full_iteration_graph")
ONE = ("--global-batch-size", "2")  # one micro-batch: no gradient buffer
THREE = ("--global-batch-size", "6")
WIDTHS = (32, 32, 32, 16, 16, 32, 16, 32)


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    yield initialize(ParallelConfig(), quiet=True)
    shut_down()


def pair(groups: ParallelGroups, *flags: str, **limits: int) -> tuple[TrainingRun, TrainingRun, OperationRecorder]:
    """An eager run and an equal one with graphs."""
    recorder = OperationRecorder()
    eager, graphs = build_run(tiny_config(*flags), groups), build_run(tiny_config(*flags), groups)
    with_graphs(graphs, recorder, **limits)
    return eager, graphs, recorder


@pytest.mark.parametrize(
    ("flags", "widths", "captures"),
    [
        (ONE, WIDTHS, 2),
        (("--bf16", *ONE, "--activation-checkpoint-module-patterns", "layers.*"), WIDTHS, 2),
        (THREE, (32, 32, (32, 16, 32), 16, (32, 16, 32), 32, 16, 16), 3),
        (("--overlap-grad-reduce", "--no-check-for-nan-in-loss-and-grad", "--clip-grad", "0"), WIDTHS, 2),
    ],
    ids=["one", "one_bf16_recompute", "three", "two_overlap"],
)
def test_steps_are_those_of_the_eager_runner(
    groups: ParallelGroups, flags: tuple[str, ...], widths: tuple[Any, ...], captures: int
) -> None:
    eager, graphs, recorder = pair(groups, *flags)
    assert take_steps_of_widths(graphs, widths) == take_steps_of_widths(eager, widths)
    assert_same_state(graphs, eager)
    assert len(recorder.recordings) == captures
    assert sum(recording.replays for recording in recorder.recordings) == 6, "one launch per step after two warm-up steps"


def test_shapes_beyond_the_limit_run_eagerly_and_are_counted(groups: ParallelGroups) -> None:
    """Eager steps between replays, with gradient buffers and their hooks, and the message."""
    widths = (32, 32, 32, 16, 32, 24, 32, 16)
    eager, graphs, _ = pair(groups, "--overlap-grad-reduce", max_buckets=1)
    assert take_steps_of_widths(graphs, widths) == take_steps_of_widths(eager, widths)
    assert_same_state(graphs, eager)
    counts = graphs.runner.counters()
    assert (counts["graph_replays"], counts["graph_captures"], counts["graph_eager_steps"]) == (3, 1, 3)
    captured, fallback = graphs.runner.poll()
    assert "captured graph 1 (at most 1)" in captured and "tokens_BL 2x32 int64" in captured
    assert "--cuda-graph-max-buckets" in fallback and "tokens_BL 2x16 int64" in fallback and "--prompt-padding max" in fallback
    assert "3 eager steps of other shapes" in graphs.runner.summary()[0] and graphs.runner.poll() == []


def test_memory_that_the_model_keeps_discards_older_graphs(groups: ParallelGroups) -> None:
    eager, graphs, recorder = pair(groups, *ONE)
    assert take_steps_of_widths(graphs, (32, 32, 32)) == take_steps_of_widths(eager, (32, 32, 32))
    recorder.leaves_behind = 512
    assert take_steps_of_widths(graphs, (16, 32, 16)) == take_steps_of_widths(eager, (16, 32, 16))
    assert_same_state(graphs, eager)
    assert [recording.replays for recording in recorder.recordings] == [1, 2, 1]
    assert any("kept 512 bytes" in line for line in graphs.runner.poll())


def test_a_number_baked_at_capture_is_noticed(groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in is sharp: an optimizer that reads its learning rate from Python trains eagerly, and wrongly from graphs."""
    from megatron_vla.training.optimizer import AdamW

    honest = AdamW._coefficients

    def from_the_host(self: AdamW, is_finite: Any) -> Any:
        self._lr = torch.full_like(self._lr, self.param_groups[0]["lr"])
        return honest(self, is_finite)

    eager, graphs, _ = pair(groups, *ONE)
    monkeypatch.setattr(AdamW, "_coefficients", from_the_host)
    losses = [[step["loss"] for step in take_steps_of_widths(run, (32,) * 6)] for run in (eager, graphs)]
    assert losses[0][:3] == losses[1][:3] and losses[0][3:] != losses[1][3:]


def test_a_host_read_in_a_captured_step_is_an_error(groups: ParallelGroups) -> None:
    _, graphs, _ = pair(groups, *ONE)
    projection = graphs.state.module.get_submodule("action_out_proj")
    seen = []
    projection.register_forward_hook(lambda module, inputs, output: seen.append(float(output.detach().sum())))
    with pytest.raises(HostReadError):
        take_steps_of_widths(graphs, (32, 32, 32))
    assert len(seen) == 3, "two warm-up steps and the pass before the capture may read"


def test_checkpoint_between_replays_and_resume(groups: ParallelGroups, tmp_path: Path) -> None:
    config = config_saving_to(tmp_path, *ONE)
    eager, graphs = build_run(config, groups), build_run(config, groups)
    with_graphs(graphs, OperationRecorder())
    expected = take_steps_of_widths(eager, WIDTHS)
    assert take_steps_of_widths(graphs, WIDTHS[:5]) == expected[:5]
    save_checkpoint(graphs.state, config, groups, graphs.supply)
    assert take_steps_of_widths(graphs, WIDTHS[5:]) == expected[5:]
    assert_same_state(graphs, eager)
    resumed = build_run(tiny_config(*ONE, "--seed", "7"), groups)
    resumed.supply = graphs.supply  # samples and noise follow from the seed
    found, _ = find_latest(tmp_path)
    assert found is not None
    load_checkpoint(found, resumed.state, groups)
    with_graphs(resumed, OperationRecorder(), warmup=1)
    assert take_steps_of_widths(resumed, WIDTHS[5:]) == expected[5:]
    assert_same_state(resumed, eager)


def test_readers_between_replays_disturb_nothing(groups: ParallelGroups) -> None:
    """Sampling, a pass without update, and reading the metrics of several steps at once."""
    eager, graphs, _ = pair(groups, *ONE)
    windows = []
    for run in (eager, graphs):
        window = MetricWindow()
        batches = list(run.supply.iterator(0, 0, 1, 6, False))
        for iteration, batch in enumerate(batches):
            if iteration > 3 and run is graphs:
                run.state.module.sample_actions(batch, 2, batch.noise_BTA)
                run.runner.schedule.run(run.family.forward_step, iter([batches[0]]), 1)
                torch.rand(3)
            window.append(iteration, 1e-3, run.runner.step(iter([batch]), 1e-3))
        windows.append(window.read())
    assert windows[0] == windows[1]
    assert_same_state(graphs, eager)


def test_a_refused_step_stays_refused_in_later_replays(groups: ParallelGroups) -> None:
    eager, graphs, _ = pair(groups, *ONE)
    outcomes = []
    for run in (eager, graphs):
        batches = list(run.supply.iterator(0, 0, 1, 6, False))
        batches[3].actions_BTA[0, 0, 0] = float("nan")
        batches[3].action_is_valid_BTA[:] = True
        outcomes.append([bool(run.runner.step(iter([batch]), 1e-3).is_finite) for batch in batches])
    assert outcomes == [[True, True, True, False, False, False]] * 2
    assert_same_state(graphs, eager)


def test_training_loop_reports_the_runner(groups: ParallelGroups, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = build_run(tiny_config("--train-iters", "5", "--log-dir", str(tmp_path)), groups)
    with_graphs(run, OperationRecorder())
    train(run)
    output = capsys.readouterr().out
    assert "captured graph 1" in output
    assert "runner: full_iteration_graph, 1 graph(s)" in output and "3 replays, 2 warm-up steps" in output
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["graph_replays"] == 3 and record["graph_captures"] == 1 and record["graph_eager_steps"] == 0


@dataclasses.dataclass
class Fields:
    """A batch of some family."""

    tokens_BL: torch.Tensor | None
    longest: Any = 3


def test_contract_tells_shapes_optional_fields_and_plain_numbers(groups: ParallelGroups) -> None:
    batch = Fields(torch.zeros(2, 4))
    contract = contract_of([batch])
    assert contract == contract_of([Fields(torch.ones(2, 4))]) and hash(contract) == hash(contract_of([batch]))
    others = {
        "tokens_BL 2x4 float32 -> 2x5 float32": [Fields(torch.zeros(2, 5))],
        "tokens_BL 2x4 float32 -> 2x4 float64": [Fields(torch.zeros(2, 4).double())],
        "tokens_BL 2x4 float32 -> None": [Fields(None)],
        "longest 3 -> 4": [Fields(torch.zeros(2, 4), 4)],
        "1 micro-batches -> 2": [batch, batch],
    }
    for difference, batches in others.items():
        assert difference in contract.differences(contract_of(batches))[0]
    with pytest.raises(ValueError, match=r"Fields.longest is a list.*--runner eager"):
        contract_of([Fields(torch.zeros(2, 4), [3])])


def test_data_that_ends_inside_a_step_is_an_error(groups: ParallelGroups) -> None:
    _, graphs, _ = pair(groups)
    batch = narrowed(next(graphs.supply.iterator(0, 0, 1, 1, False)), 16)
    with pytest.raises(ValueError, match="ended after 1 of 2 micro-batches"):
        graphs.runner.step(iter([batch]), 1e-3)


@pytest.mark.parametrize(
    ("flags", "world_size", "expected"),
    [
        (("--pipeline-model-parallel-size", "2", "--prompt-padding", "max"), 2, "stages send to"),
        (("--data-parallel-strategy", "torch_ddp"), 1, "torch's reducer"),
        (("--data-parallel-strategy", "fsdp2"), 2, "--use-distributed-optimizer"),
        (("--cuda-graph-warmup-steps", "0"), 1, "--cuda-graph-warmup-steps"),
        (("--cuda-graph-max-buckets", "0"), 1, "--cuda-graph-max-buckets"),
        (("--runner", "eager", "--cuda-graph-max-buckets", "2"), 1, "has no effect with --runner eager"),
    ],
)
def test_what_cannot_be_captured_is_refused(flags: tuple[str, ...], world_size: int, expected: str) -> None:
    config = tiny_config(*GRAPHS, *flags)
    errors = [str(f) for f in check(config, model_family("pi05"), world_size) if f.severity == "error"]
    assert any(expected in text for text in errors), errors


def test_findings_about_machine_and_widths(groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(*GRAPHS)
    assert any("there is no GPU" in str(finding) for finding in device_findings(config, False))
    assert not [*device_findings(config, True), *device_findings(tiny_config(), False)]
    assert any("--prompt-padding max" in str(f) for f in check(config, model_family("pi05"), 1) if f.severity == "warning")
    assert not [f for f in check(tiny_config(*GRAPHS, *ONE), model_family("pi05"), 1) if "padding" in f.where]
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    assert any("NCCL_GRAPH_REGISTER" in f.where for f in check(config, model_family("pi05"), 2))
    with pytest.raises(ValueError, match="there is no GPU"):
        build_run(config, groups)
