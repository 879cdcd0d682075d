"""Time and bandwidth at Pi0.5 base's sizes: python kernels/rms_norm/benchmark.py [OUTPUT.json]."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_vla.kernels.rms_norm.op import IS_BUILT
from megatron_vla.kernels.timing import Calls, measure

ROWS, WIDTH, EPSILON, OFFSET = 18432, 2048, 1e-6, 1.0
SETS = 4  # of operands: L2 cannot hold them


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
    measure(
        {
            "forward": Calls([partial(ops.rms_norm, x, weight, OFFSET, EPSILON) for x, _, _ in sets], 2 * matrix),
            "forward after addition": Calls(
                [partial(ops.add_rms_norm, x, r, weight, OFFSET, EPSILON) for x, r, _ in sets], 4 * matrix
            ),
            "backward": Calls(
                [partial(ops.rms_norm_backward, d, None, x, rstd, weight, OFFSET) for (x, _, d), rstd in together], 3 * matrix
            ),
            "backward, two gradients": Calls(
                [partial(ops.rms_norm_backward, d, r, x, rstd, weight, OFFSET) for (x, r, d), rstd in together], 4 * matrix
            ),
        }
    )


if __name__ == "__main__":
    main()
