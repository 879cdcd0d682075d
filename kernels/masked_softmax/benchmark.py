"""Time and bandwidth at Pi0.5 base's sizes: python kernels/masked_softmax/benchmark.py [OUTPUT.json]."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_vla.kernels.masked_softmax.op import IS_BUILT, can_run, masked_softmax
from megatron_vla.kernels.masked_softmax.reference import masked_softmax_reference
from megatron_vla.kernels.timing import Calls, measure

SAMPLES, HEADS = 32, 8
# Query tokens, keys that exist, keys with those that alignment adds.
SIZES = {"prefix": (576, 576, 576), "suffix": (50, 626, 632)}


def main() -> None:
    """Measure, print, write."""
    if not IS_BUILT:
        raise SystemExit("kernels are not built: python setup.py build_ext --inplace, on a machine with nvcc")
    torch.manual_seed(0)
    compiled = torch.compile(masked_softmax_reference, dynamic=False)
    calls = {}
    for name, (tokens, num_keys, width) in SIZES.items():
        logits = torch.randn(SAMPLES, HEADS * tokens, width, device="cuda") * 16
        mask = torch.zeros(SAMPLES, 1, num_keys, device="cuda", dtype=torch.bfloat16)
        mask[:, :, -20:] = float("-inf")
        assert can_run(logits, mask, num_keys, torch.bfloat16)
        for code, function in (("kernel", masked_softmax), ("generated code", compiled)):
            run = partial(function, logits, 1 / 16, mask, num_keys, torch.bfloat16)
            calls[f"{name}, {code}"] = Calls([run], logits.numel() * 6)
    measure(calls)


if __name__ == "__main__":
    main()
