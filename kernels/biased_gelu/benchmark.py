"""Time and bandwidth at Pi0.5 base's sizes: python kernels/biased_gelu/benchmark.py [OUTPUT.json]."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_vla.kernels.biased_gelu.op import IS_BUILT, biased_gelu, biased_gelu_backward

ROWS, WIDTH = 16384, 4304
REPETITIONS = 20


def median_ms(function: Callable[[], Any]) -> float:
    """Of single calls, timed on the device."""
    function()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPETITIONS + 1)]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return times[len(times) // 2]


def main() -> None:
    """Measure, print, write."""
    if not IS_BUILT:
        raise SystemExit("kernels are not built: python setup.py build_ext --inplace, on a machine with nvcc")
    torch.manual_seed(0)
    values, gradient = (torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    cases = {
        "GELU": (lambda: biased_gelu(values), 4 * ROWS * WIDTH),
        "GELU backward and sums": (lambda: biased_gelu_backward(gradient, values), 6 * ROWS * WIDTH),
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
