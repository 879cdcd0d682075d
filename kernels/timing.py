"""Time and bandwidth of kernels by themselves: what the benchmarks of the folders share."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

REPETITIONS = 20


class Calls(NamedTuple):
    """Functions that do the same on operands of their own, and the bytes that one of them has to move.

    With several whose operands L2 cannot hold together, each finds its data cold, as in a step.
    """

    functions: Sequence[Callable[[], Any]]
    size: int


def median_ms(functions: Sequence[Callable[[], Any]]) -> float:
    """Of single calls in turns, timed on the device; captured, because a call of a custom op keeps the host busy for 0.1 ms."""
    graphs = []
    for function in functions:
        function()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            function()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPETITIONS * len(graphs) + 1)]
    events[0].record()
    for graph, event in zip(graphs * REPETITIONS, events[1:], strict=True):
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(second) for first, second in itertools.pairwise(events))


def measure(calls: Mapping[str, Calls]) -> None:
    """Print milliseconds and TB/s; also write them to the file that the command line names, if it does."""
    results = {}
    for name, (functions, size) in calls.items():
        milliseconds = median_ms(functions)
        results[name] = {"ms": round(milliseconds, 4), "tb_per_s": round(size / milliseconds / 1e9, 3)}
        print(f"{name:24s} {milliseconds:8.4f} ms  {size / milliseconds / 1e9:6.3f} TB/s", flush=True)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "results": results}, indent=1))
