"""Time and bandwidth at Pi0.5 base's sizes: python kernels/layer_norm/benchmark.py [OUTPUT.json]."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_vla.kernels.layer_norm.op import IS_BUILT
from megatron_vla.kernels.timing import Calls, measure

ROWS, WIDTH, EPSILON = 16384, 1152, 1e-6
SETS = 4  # of operands: L2 cannot hold them


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
    measure(
        {
            "forward": Calls([partial(ops.layer_norm, x, weight, bias, EPSILON) for x, _, _ in sets], 2 * matrix),
            "forward after addition": Calls(
                [partial(ops.add_layer_norm, x, r, weight, bias, EPSILON) for x, r, _ in sets], 4 * matrix
            ),
            "backward": Calls(
                [partial(ops.layer_norm_backward, d, None, x, *s, weight) for (x, _, d), s in together], 3 * matrix
            ),
            "backward, two gradients": Calls(
                [partial(ops.layer_norm_backward, d, r, x, *s, weight) for (x, r, d), s in together], 4 * matrix
            ),
        }
    )


if __name__ == "__main__":
    main()
