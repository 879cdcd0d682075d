"""Milliseconds and bytes per second of one update, beside torch's fused kernel: python kernels/adamw/benchmark.py"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_vla.kernels.adamw.op import AdamWTensors, FusedAdamW
from megatron_vla.kernels.adamw.reference import Coefficients

WIDTH = 2048


def median_ms(call: Callable[[], object], repeats: int = 20) -> float:
    """Median time of `call` on the device, after three calls that are not counted."""
    times = []
    for repeat in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def main() -> None:
    """Time both on matrices of 2048 columns with as many elements as asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=float, default=3.2e9)
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--untouched", type=float, default=0.16, help="share of tensors without gradients and moments")
    arguments = parser.parse_args()
    rows = max(1, int(arguments.elements / arguments.tensors / WIDTH))

    def made(dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.full((rows, WIDTH), 0.01, dtype=dtype, device="cuda") for _ in range(arguments.tensors)]

    mains, first, second = made(torch.float32), made(torch.float32), made(torch.float32)
    weights, gradients = made(torch.bfloat16), made(torch.bfloat16)
    scalars = {name: torch.tensor(value, device="cuda") for name, value in (("one", 1.0), ("step", -1e-3))}
    coefficients = Coefficients(scalars["one"], scalars["one"], scalars["one"], scalars["one"], scalars["step"])
    kernel = FusedAdamW([AdamWTensors(*t) for t in zip(mains, first, second, weights, strict=True)], (0.9, 0.95), 1e-8)
    count = rows * WIDTH * arguments.tensors
    ms = median_ms(lambda: kernel.step(gradients, scalars["one"], coefficients, None))
    print(f"kernels/adamw: {ms:.2f} ms, {count * 28 / ms / 1e9:.2f} TB/s (28 bytes per parameter, weight included)")
    if arguments.untouched:
        untouched = round(arguments.tensors * arguments.untouched)
        for tensor in [t for group in (first, second, gradients) for t in group[:untouched]]:
            tensor.zero_()
        kernel.forget_moments()
        ms = median_ms(lambda: kernel.step(gradients, scalars["one"], coefficients, None))
        size = untouched * rows * WIDTH * 2 + (arguments.tensors - untouched) * rows * WIDTH * 28
        print(f"{untouched} of {arguments.tensors} tensors untouched: {ms:.2f} ms, {size / ms / 1e9:.2f} TB/s")
    wide = [gradient.float() for gradient in gradients]
    step = torch.ones((), device="cuda")

    def fused() -> None:
        torch._fused_adamw_(
            mains,
            wide,
            first,
            second,
            [],
            [step] * len(mains),
            lr=step * 1e-3,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            grad_scale=step,
        )
        torch._foreach_copy_(weights, mains)

    ms = median_ms(fused)
    print(f"torch fused AdamW and copy: {ms:.2f} ms, {count * 36 / ms / 1e9:.2f} TB/s (36 bytes per parameter)")


if __name__ == "__main__":
    main()
