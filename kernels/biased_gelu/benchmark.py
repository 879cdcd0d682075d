"""Time and bandwidth at Pi0.5 base's sizes: python kernels/biased_gelu/benchmark.py [OUTPUT.json]."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_vla.kernels.biased_gelu.op import IS_BUILT, biased_gelu, biased_gelu_backward
from megatron_vla.kernels.timing import Calls, measure

ROWS, WIDTH = 16384, 4304


def main() -> None:
    """Measure, print, write."""
    if not IS_BUILT:
        raise SystemExit("kernels are not built: python setup.py build_ext --inplace, on a machine with nvcc")
    torch.manual_seed(0)
    values, gradient = (torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    measure(
        {
            "GELU": Calls([lambda: biased_gelu(values)], 4 * ROWS * WIDTH),
            "GELU backward and sums": Calls([lambda: biased_gelu_backward(gradient, values)], 6 * ROWS * WIDTH),
        }
    )


if __name__ == "__main__":
    main()
