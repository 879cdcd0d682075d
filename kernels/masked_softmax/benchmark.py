"""Time and bandwidth at Pi0.5 base's sizes: python kernels/masked_softmax/benchmark.py [OUTPUT.json]."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_vla.kernels.fp8_quantize.benchmark import median_ms
from megatron_vla.kernels.masked_softmax.op import IS_BUILT, can_run, masked_softmax
from megatron_vla.kernels.masked_softmax.reference import masked_softmax_reference

SAMPLES, HEADS = 32, 8
# Query tokens, keys that exist, keys with those that alignment adds.
SIZES = {"prefix": (576, 576, 576), "suffix": (50, 626, 632)}


def main() -> None:
    """Measure, print, write."""
    if not IS_BUILT:
        raise SystemExit("kernels are not built: python setup.py build_ext --inplace, on a machine with nvcc")
    torch.manual_seed(0)
    compiled = torch.compile(masked_softmax_reference, dynamic=False)
    results = {}
    for name, (tokens, num_keys, width) in SIZES.items():
        logits = torch.randn(SAMPLES, HEADS * tokens, width, device="cuda") * 16
        mask = torch.zeros(SAMPLES, 1, num_keys, device="cuda", dtype=torch.bfloat16)
        mask[:, :, -20:] = float("-inf")
        arguments = (logits, 1 / 16, mask, num_keys, torch.bfloat16)
        assert can_run(logits, mask, num_keys, torch.bfloat16)
        for code, function in (("kernel", masked_softmax), ("generated code", compiled)):
            milliseconds = median_ms(lambda function=function, arguments=arguments: function(*arguments))  # type: ignore[misc]
            bandwidth = logits.numel() * 6 / milliseconds / 1e9
            results[f"{name}, {code}"] = {"ms": round(milliseconds, 4), "tb_per_s": round(bandwidth, 3)}
            print(f"{name}, {code:16s} {milliseconds:8.4f} ms  {bandwidth:6.3f} TB/s", flush=True)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
