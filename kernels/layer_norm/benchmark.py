"""Time and bandwidth at Pi0.5 base's sizes: python kernels/layer_norm/benchmark.py [OUTPUT.json]."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_vla.kernels.layer_norm.op import IS_BUILT

ROWS, WIDTH, EPSILON = 16384, 1152, 1e-6
REPETITIONS = 20
# Cold data, as in a step: this many sets of operands, which L2 cannot hold.
SETS = 4


def median_ms(functions: list[Callable[[], Any]]) -> float:
    """Of single calls, timed on the device."""
    for function in functions:
        function()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPETITIONS * len(functions) + 1)]
    torch.cuda._sleep(20_000_000)  # the device begins when the host is ahead
    events[0].record()
    for event, function in zip(events[1:], itertools.cycle(functions), strict=False):
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
    ops = torch.ops.megatron_vla
    with torch.device("cuda"):
        weight, bias = torch.randn(WIDTH), torch.randn(WIDTH)
        sets = [[torch.randn(ROWS, WIDTH, dtype=torch.bfloat16) for _ in range(3)] for _ in range(SETS)]
    statistics = [ops.layer_norm(x, weight, bias, EPSILON)[1:] for x, _, _ in sets]
    together = list(zip(sets, statistics, strict=True))
    matrix = 2 * ROWS * WIDTH
    calls: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]], int]] = {
        "forward": (ops.layer_norm, [(x, weight, bias, EPSILON) for x, _, _ in sets], 2),
        "forward after addition": (ops.add_layer_norm, [(x, r, weight, bias, EPSILON) for x, r, _ in sets], 4),
        "backward": (ops.layer_norm_backward, [(d, None, x, *s, weight) for (x, _, d), s in together], 3),
        "backward after addition": (ops.layer_norm_backward, [(d, r, x, *s, weight) for (x, r, d), s in together], 4),
    }
    results = {}
    for name, (function, arguments, matrices) in calls.items():
        milliseconds, size = median_ms([partial(function, *a) for a in arguments]), matrices * matrix
        results[name] = {"ms": round(milliseconds, 4), "tb_per_s": round(size / milliseconds / 1e9, 3)}
        print(f"{name:24s} {milliseconds:8.4f} ms  {size / milliseconds / 1e9:6.3f} TB/s", flush=True)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
