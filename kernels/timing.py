"""Time and bandwidth of kernels by themselves: what the benchmarks of the folders share."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

REPETITIONS = 20
WARM_UP_CALLS = 3
# sustained_ms: calls per graph, so that the gap between two launches is shared by many; groups of which the median counts; how
# long a group and the work before the first one last at least. Under load the clock needs tens of milliseconds to settle.
CALLS, GROUPS, GROUP_MS, BUSY_MS = 10, 7, 10.0, 100.0


class Calls(NamedTuple):
    """Functions that do the same on operands of their own, and the bytes that one of them has to move.

    With several whose operands L2 cannot hold together, each finds its data cold, as in a step.
    """

    functions: Sequence[Callable[[], Any]]
    size: int


def captured(function: Callable[[], Any], calls: int = 1) -> torch.cuda.CUDAGraph:
    """A graph of so many calls, after some on a side stream that compile, choose algorithms and find workspaces.

    Raises RuntimeError when `function` does what a graph cannot hold, such as waiting for the device.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_CALLS):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(calls):
                function()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RuntimeError(f"cannot be captured in a CUDA graph, so its device time cannot be measured: {error}") from error
    return graph


def median_ms(functions: Sequence[Callable[[], Any]]) -> float:
    """Of single calls in turns, timed on the device; captured, because a call of a custom op keeps the host busy for 0.1 ms."""
    graphs = [captured(function) for function in functions]
    return statistics.median(_intervals_ms(graphs * REPETITIONS))


def sustained_ms(function: Callable[[], Any]) -> float:
    """Device time of one call between others of its kind on a busy GPU, whatever the host needs to launch it.

    Operands that fit into L2 are found there.
    """
    graph = captured(function, CALLS)
    # The first replay also uploads the graph.
    _, milliseconds = _intervals_ms([graph] * 2)
    for _ in range(math.ceil(BUSY_MS / milliseconds)):
        graph.replay()
    replays = math.ceil(GROUP_MS / milliseconds)
    return statistics.median(_intervals_ms([graph] * GROUPS, replays)) / (replays * CALLS)


def _intervals_ms(graphs: Sequence[torch.cuda.CUDAGraph], replays: int = 1) -> list[float]:
    """Device time of so many replays of each of `graphs`, issued without waiting in between."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)]
    events[0].record()
    for graph, event in zip(graphs, events[1:], strict=True):
        for _ in range(replays):
            graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) for first, second in itertools.pairwise(events)]


def measure(calls: Mapping[str, Calls]) -> None:
    """Print milliseconds and TB/s; also write them to the file that the command line names, if it does."""
    results = {}
    for name, (functions, size) in calls.items():
        milliseconds = median_ms(functions)
        results[name] = {"ms": round(milliseconds, 4), "tb_per_s": round(size / milliseconds / 1e9, 3)}
        print(f"{name:24s} {milliseconds:8.4f} ms  {size / milliseconds / 1e9:6.3f} TB/s", flush=True)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "results": results}, indent=1))
