"""Time and bandwidth at Pi0.5 base's sizes: python kernels/rms_norm/benchmark.py [OUTPUT.json]."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_vla.kernels.layer_norm.benchmark import SETS, median_ms
from megatron_vla.kernels.rms_norm.op import IS_BUILT

ROWS, WIDTH, EPSILON, OFFSET = 18432, 2048, 1e-6, 1.0


def main() -> None:
    """Measure, print, write."""
    if not IS_BUILT:
        raise SystemExit("kernels are not built: python setup.py build_ext --inplace, on a machine with nvcc")
    torch.manual_seed(0)
    ops = torch.ops.megatron_vla
    with torch.device("cuda"):
        weight = torch.randn(WIDTH)
        sets = [[torch.randn(ROWS, WIDTH, dtype=torch.bfloat16) for _ in range(3)] for _ in range(SETS)]
    together = [(matrices, ops.rms_norm(matrices[0], weight, OFFSET, EPSILON)[1]) for matrices in sets]
    matrix = 2 * ROWS * WIDTH
    calls: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]], int]] = {
        "forward": (ops.rms_norm, [(x, weight, OFFSET, EPSILON) for x, _, _ in sets], 2),
        "forward after addition": (ops.add_rms_norm, [(x, r, weight, OFFSET, EPSILON) for x, r, _ in sets], 4),
        "backward": (ops.rms_norm_backward, [(d, None, x, rstd, weight, OFFSET) for (x, _, d), rstd in together], 3),
        "backward, two gradients": (
            ops.rms_norm_backward,
            [(d, r, x, rstd, weight, OFFSET) for (x, r, d), rstd in together],
            4,
        ),
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
