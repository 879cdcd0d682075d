"""Time and bandwidth at Pi0.5 base's sizes: python kernels/fp8_quantize/benchmark.py [OUTPUT.json]."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_vla.kernels.fp8_quantize.op import (
    IS_BUILT,
    fp8_gated_gelu,
    fp8_gated_gelu_backward,
    fp8_quantize,
)

ROWS, HIDDEN, WIDTH = 18432, 2048, 16384
REPETITIONS = 20


def median_ms(function: Callable[[], Any]) -> float:
    """Of single calls, timed on the device; captured, because a call of a custom op keeps the host busy for 0.1 ms."""
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPETITIONS + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return times[len(times) // 2]


def main() -> None:
    """Measure, print, write."""
    if not IS_BUILT:
        raise SystemExit("kernels are not built: python setup.py build_ext --inplace, on a machine with nvcc")
    torch.manual_seed(0)
    with torch.device("cuda"):
        slot = torch.tensor([1 / 16, 16.0, 0.0, 1.0])
        hidden = torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16)
        weights = [torch.randn(WIDTH, HIDDEN, dtype=torch.bfloat16) for _ in range(2)]
        gate_up = torch.randn(ROWS, 2 * WIDTH, dtype=torch.bfloat16)
        gradient = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    cases = {
        "hidden": (lambda: fp8_quantize([hidden], slot, is_gradient=False, transposed=True), 4 * ROWS * HIDDEN),
        "hidden, rows only": (lambda: fp8_quantize([hidden], slot, is_gradient=False, transposed=False), 3 * ROWS * HIDDEN),
        "gate and up weights": (lambda: fp8_quantize(weights, slot, is_gradient=False, transposed=True), 8 * WIDTH * HIDDEN),
        "gated GELU": (lambda: fp8_gated_gelu(gate_up, slot, transposed=True), 6 * ROWS * WIDTH),
        "gated GELU backward": (
            lambda: fp8_gated_gelu_backward(gradient, gate_up, slot, transposed=True),
            10 * ROWS * WIDTH,
        ),
    }
    results = {}
    for name, (function, size) in cases.items():
        milliseconds = median_ms(function)
        results[name] = {"ms": round(milliseconds, 4), "tb_per_s": round(size / milliseconds / 1e9, 3)}
        print(f"{name:24s} {milliseconds:8.4f} ms  {size / milliseconds / 1e9:6.3f} TB/s", flush=True)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
