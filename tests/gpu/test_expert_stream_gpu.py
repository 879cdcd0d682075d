"""The expert on a stream of its own, on a GPU: the bits of one stream, eager and captured, compiled or not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from graph_fixtures import assert_same_state, take_steps_of_widths
from training_fixtures import build_run, tiny_config

from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.parallel.groups import ParallelGroups, initialize, shut_down
from megatron_vla.runner.build import prepare_device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GRAPHS = ("--runner", "full_iteration_graph", "--cuda-graph-max-buckets", "2")
# This backend's kernels add up in one order only.
EXACT = ("--attention-backend", "eager", "--bf16", "--clip-grad", "0.5", "--weight-decay", "0.01")
WIDTHS = (32, 32, 32, 32, 16, 32, 16, 24, 32, 16)


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    torch.backends.cudnn.deterministic = True
    found = initialize(ParallelConfig(), quiet=True)
    prepare_device(tiny_config(*GRAPHS), found)
    yield found
    shut_down()
    torch.backends.cudnn.deterministic = False


@pytest.mark.parametrize("runner", [(), GRAPHS], ids=["eager", "graph"])
@pytest.mark.parametrize(
    "flags",
    [("--global-batch-size", "2"), ("--global-batch-size", "6", "--merge-projections")],
    ids=["gradients as backward leaves them", "gradient buffer"],
)
def test_bits_of_one_stream(groups: ParallelGroups, runner: tuple[str, ...], flags: tuple[str, ...]) -> None:
    one, two = (build_run(tiny_config(*EXACT, *flags, *extra), groups) for extra in ((), ("--expert-stream", *runner)))
    assert take_steps_of_widths(two, WIDTHS, pin=True) == take_steps_of_widths(one, WIDTHS, pin=True)
    assert_same_state(two, one)
    two.runner.release()


@pytest.mark.parametrize("runner", [(), GRAPHS], ids=["eager", "graph"])
def test_compiled(groups: ParallelGroups, runner: tuple[str, ...]) -> None:
    """Generated code is another one where a graph is cut in two: equal within roundings."""
    flags = ("--bf16", "--global-batch-size", "2", "--compile", "--merge-projections", "--attention-backend", "matmul")
    one, two = (build_run(tiny_config(*flags, *extra), groups) for extra in ((), ("--expert-stream", *runner)))
    losses = [[step["loss"] for step in take_steps_of_widths(run, WIDTHS, pin=True)] for run in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    two.runner.release()
