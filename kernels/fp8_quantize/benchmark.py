"""Time and bandwidth at Pi0.5 base's sizes: python kernels/fp8_quantize/benchmark.py [OUTPUT.json]."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_vla.kernels.fp8_quantize.op import (
    IS_BUILT,
    fp8_gated_gelu,
    fp8_gated_gelu_backward,
    fp8_quantize,
)
from megatron_vla.kernels.timing import Calls, measure

ROWS, HIDDEN, WIDTH = 18432, 2048, 16384


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
    measure({name: Calls([function], size) for name, (function, size) in cases.items()})


if __name__ == "__main__":
    main()
