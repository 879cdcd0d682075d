"""Time every attention backend at Pi0.5's sizes: one prefix layer and one action layer, forward and backward, compiled.

python tools/benchmark_attention.py --output benchmarks/attention.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from megatron_vla.models.common.attention import attend
from megatron_vla.models.common.attention_mask import AttentionBackend, ReadMask, read_mask

BACKENDS: tuple[AttentionBackend, ...] = ("sdpa", "matmul", "varlen", "flex")
REPEATS = 20


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    parser.add_argument("--micro-batch-size", type=int, default=32)
    parser.add_argument("--num-prefix", type=int, default=576, help="prefix tokens: 256 per camera and the prompt's slots")
    parser.add_argument("--num-padding", type=int, default=4, help="how many of them are padding")
    parser.add_argument("--action-horizon", type=int, default=50)
    parser.add_argument("--num-attention-heads", type=int, default=8)
    parser.add_argument("--num-query-groups", type=int, default=1)
    parser.add_argument("--kv-channels", type=int, default=256)
    return parser.parse_args()


def milliseconds(run: Callable[[], object]) -> float:
    """Median time of one call on the GPU."""
    for _ in range(3):
        run()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def time_backend(backend: AttentionBackend, leaves: list[Tensor], mask: ReadMask, gradient: Tensor) -> dict[str, Any]:
    """Forward and backward times, and the output's bytes kept for backward, of one compiled call."""
    query, key, value = leaves
    compiled = torch.compile(attend, dynamic=False, fullgraph=True)

    def forward() -> Tensor:
        return compiled(query, key, value, mask, backend)

    def both() -> None:
        torch.autograd.grad(forward(), leaves, gradient)

    forward_ms, both_ms = milliseconds(forward), milliseconds(both)
    before = torch.cuda.memory_allocated()
    output = forward()
    held = torch.cuda.memory_allocated() - before
    del output
    return {
        "forward_ms": round(forward_ms, 3),
        "backward_ms": round(both_ms - forward_ms, 3),
        "held_mib": round(held / 2**20, 1),
    }


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry per backend and stream; a backend that fails is recorded with its message."""
    device, size = torch.device("cuda"), arguments.micro_batch_size
    heads, groups, width = arguments.num_attention_heads, arguments.num_query_groups, arguments.kv_channels
    prefix, horizon = arguments.num_prefix, arguments.action_horizon
    prefix_is_valid = (torch.arange(prefix, device=device) < prefix - arguments.num_padding).expand(size, -1)
    actions = prefix_is_valid.new_ones(size, horizon)
    results = []
    for stream, queries, keys in (
        ("prefix", prefix_is_valid, prefix_is_valid),
        ("actions", actions, torch.cat((actions, prefix_is_valid), dim=1)),
    ):
        shapes = ((size, queries.shape[1], heads, width), *((size, keys.shape[1], groups, width),) * 2)
        # As projections leave them: heads of a token are neighbours.
        leaves = [torch.randn(s, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for s in shapes]
        gradient = torch.randn(size, queries.shape[1], heads * width, device=device, dtype=torch.bfloat16)
        for backend in BACKENDS:
            entry: dict[str, Any] = {"stream": stream, "backend": backend}
            try:
                entry |= time_backend(backend, leaves, read_mask(backend, queries, keys, torch.bfloat16), gradient)
            except (RuntimeError, ValueError, NotImplementedError) as problem:
                entry["error"] = str(problem).splitlines()[0]
            print(" ".join(f"{key}={value}" for key, value in entry.items()), flush=True)
            results.append(entry)
    return results


def main() -> None:
    """Measure, print, write."""
    arguments = parse()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: the kernels compared here run on GPUs")
    results = measure(arguments)
    if arguments.output:
        workload = {key: value for key, value in vars(arguments).items() if key != "output"}
        content = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "workload": workload, "results": results}
        arguments.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
