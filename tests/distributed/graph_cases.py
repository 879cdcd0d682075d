"""Cases of the graph runner on several ranks, whose batches have different shapes."""

from __future__ import annotations

from typing import Any

import torch
from graph_fixtures import everything, take_steps_of_widths, with_graphs
from recorded_operations import OperationRecorder
from training_fixtures import build_run, tiny_config

from megatron_vla.parallel.groups import initialize, shut_down
from megatron_vla.runner.build import prepare_device, prepare_environment

# Per rank. With two graphs: 32 and 16 are captured, each when the first rank meets it; 24 has no graph.
WIDTHS = ((32, 32, 32, 16, 32, 32, 24, 32), (32, 32, 32, 32, 16, 32, 32, 32))
READ_AFTER = 5


def compare_runners(rank: int, flags: list[str]) -> dict[str, Any]:
    """Eight steps with each runner, and a reader of the weights (as a checkpoint is one) after the fifth."""
    config = tiny_config(*flags)
    graph_config = tiny_config(
        *flags, "--runner", "full_iteration_graph", "--cuda-graph-max-buckets", "2", "--cuda-graph-warmup-steps", "2"
    )
    on_gpu = torch.cuda.is_available()
    torch.backends.cudnn.deterministic = True  # else two eager runs differ already
    prepare_environment(graph_config, 2)
    groups = initialize(config.parallel, quiet=True)
    prepare_device(graph_config, groups)
    widths = WIDTHS[groups.data_parallel_rank]
    curves, states, counters = [], [], {}
    for use_graphs in (False, True):
        run = build_run(graph_config if use_graphs and on_gpu else config, groups)
        if use_graphs and not on_gpu:
            with_graphs(run, OperationRecorder(), max_buckets=2)
        curve = take_steps_of_widths(run, widths[:READ_AFTER], pin=on_gpu)
        run.runner.model.gather_parameters()
        curves.append(curve + take_steps_of_widths(run, widths[READ_AFTER:], pin=on_gpu))
        states.append({name: tensor.clone() for name, tensor in everything(run).items()})
        counters = run.runner.counters()
        run.runner.release()
    shut_down()
    different = [name for name, tensor in states[0].items() if not torch.equal(tensor, states[1][name])]
    return {"eager": curves[0], "graphs": curves[1], "different": different, **counters}
