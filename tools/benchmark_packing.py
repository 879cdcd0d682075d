"""Packing of a mixture of robots with 1 to 4 cameras: useful tokens, and training speed against padding.

    python tools/benchmark_packing.py --output benchmarks/packing.json             # useful tokens; seconds on a CPU
    python tools/benchmark_packing.py --train --output benchmarks/packing.json     # also samples/s of `base` on this GPU

Useful tokens: valid prefix tokens over those that the model computes, of Pi0.5's sizes (256 tokens per image, prompts of up to
200). Training runs on the same mock samples in every form, one process after the other; samples are counted, not slots. A call
without --train keeps the training figures that are in the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CAMERAS, PROMPT = (1, 2, 3, 4), (20, 80)
MIXTURE = (
    *("--mock-data", "--mock-num-samples", "20000", "--mock-camera-counts", *map(str, CAMERAS)),
    *("--mock-min-prompt-length", str(PROMPT[0]), "--mock-prompt-length", str(PROMPT[1])),
)
COMMON = (
    *("--bf16", "--train-iters", "1000", "--lr-warmup-iters", "10", "--seed", "1234", "--allow-tf32"),
    *("--activation-checkpoint-module-patterns", "vision_tower.layers.*", "--no-first-batch-report"),
)
PACKED = ("--packing", "--pack-token-budget", "18432", "--pack-max-images", "68", "--micro-batch-size", "32")
GRAPH = ("--compile", "--runner", "full_iteration_graph")
# name -> flags: about equally many tokens per micro-batch, as activation memory allows the same number.
TRAIN_RUNGS: dict[str, tuple[str, ...]] = {
    "padded_prompt_max": ("--micro-batch-size", "16", "--prompt-padding", "max"),
    "padded_prompt_bucket": ("--micro-batch-size", "16", "--prompt-padding", "bucket"),
    "packed": PACKED,
    "padded_compiled_graph": ("--micro-batch-size", "16", "--prompt-padding", "max", "--max-prompt-length", "96", *GRAPH),
    "packed_compiled_graph": (*PACKED, *GRAPH),
}
PLANNED_PACKS, PADDED_BATCH = 400, 32


def parse() -> argparse.Namespace:
    """Command line; `--rung` is the form in which this tool calls itself for one training run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the result (and to read what is kept)")
    parser.add_argument("--train", action="store_true", help="measure training too")
    parser.add_argument("--model-variant", default="base")
    parser.add_argument("--steps", type=int, default=20, help="measured steps per form")
    parser.add_argument("--warmup", type=int, default=8, help="steps before the timing starts (captures included)")
    parser.add_argument("--num-workers", type=int, default=8)
    parser.add_argument("--rung", choices=tuple(TRAIN_RUNGS), help=argparse.SUPPRESS)
    parser.add_argument("--extra-flags", nargs=argparse.REMAINDER, default=[], help="appended to every run (last argument)")
    return parser.parse_args()


def useful_tokens() -> list[dict[str, Any]]:
    """One row per form of batching: useful share of the prefix tokens, and what planning costs."""
    from megatron_vla.config.run import parse_args
    from megatron_vla.data.build import build_data
    from megatron_vla.data.pack_sampler import PackWindow
    from megatron_vla.data.packing import PackLimits, PackStream
    from megatron_vla.models.registry import model_family

    config = parse_args(["--model-variant", "base", *MIXTURE, "--num-workers", "0"])
    supply = build_data(config, model_family("pi05"))
    order, source = supply.order, supply.source
    sizes = [source.size_of(order.at(position)[1]) for position in range(20000)]
    limits = PackLimits(
        tokens=8192,
        images=32,
        samples=32,
        image_tokens=256,
        most_images=max(CAMERAS),
        most_prompt_tokens=200,
        pool_size=32,
        max_wait=16,
    )
    tokens_N = np.array([limits.tokens_of(size) for size in sizes])
    prompts_N = np.array([size.prompt_tokens for size in sizes])
    batches = tokens_N[: len(tokens_N) // PADDED_BATCH * PADDED_BATCH].reshape(-1, PADDED_BATCH)
    prompts = prompts_N[: batches.size].reshape(batches.shape)
    bucket = -(-prompts.max(axis=1) // 32) * 32
    views = max(CAMERAS) * limits.image_tokens
    rows: list[dict[str, Any]] = [
        {"name": "padded, prompts to 200", "useful_token_share": float(tokens_N.mean() / limits.longest_prefix)},
        {
            "name": f"padded, prompts to a multiple of 32, batches of {PADDED_BATCH}",
            "useful_token_share": float(batches.sum() / ((views + bucket) * PADDED_BATCH).sum()),
        },
        {
            "name": f"padded to the longest of {PADDED_BATCH}",
            "useful_token_share": float(batches.sum() / (batches.max(axis=1) * PADDED_BATCH).sum()),
        },
    ]
    for changes in (
        {"pool_size": 1, "max_wait": 1},
        {"pool_size": 16},
        {},
        {"tokens": 16384, "images": 64, "samples": 64},
        {"tokens": 16384, "images": 60, "samples": 32},
    ):
        limited = dataclasses.replace(limits, **changes)
        stream = PackStream(limited, sizes.__getitem__)
        started = time.process_time()
        packs = list(itertools.islice(stream, PLANNED_PACKS * 8192 // limited.tokens))
        seconds = time.process_time() - started
        window = PackWindow.of(packs, limited)
        figures = {name: round(value, 4) for name, value in window.metrics().items()}
        rows.append(
            {
                "name": f"packed to {limited.tokens}, at most {limited.images} images and {limited.samples} samples, "
                f"pool {limited.pool_size}",
                "useful_token_share": figures.pop("pack_useful_token_share"),
                **figures,
                "planning_us_per_sample": round(seconds / window.samples * 1e6, 1),
            }
        )
    return [{**row, "useful_token_share": round(row["useful_token_share"], 4)} for row in rows]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one form in this process; samples are those with a real sample behind their slot."""
    import torch

    from megatron_vla.config.run import parse_args
    from megatron_vla.models.registry import model_family
    from megatron_vla.training.session import training_session

    flags = ["--model-variant", arguments.model_variant, *MIXTURE, *COMMON, *TRAIN_RUNGS[arguments.rung]]
    flags += ["--num-workers", str(arguments.num_workers), *arguments.extra_flags]
    config = parse_args(flags)
    with training_session(config, model_family("pi05")) as run:
        device = run.groups.device
        steps = arguments.warmup + arguments.steps
        batches = run.supply.iterator(0, 0, 1, steps, device.type == "cuda")
        times_ms, counts, useful, losses = [], [], [], []
        for step in range(steps):
            batch = next(batches)
            _synchronize(device)
            started = time.perf_counter()
            metrics = run.runner.step(iter([batch]), run.state.schedule.learning_rate(step * batch.size))
            _synchronize(device)
            times_ms.append((time.perf_counter() - started) * 1e3)
            count, share = _samples_and_useful_share(batch)
            counts.append(count)
            useful.append(share)
            losses.append(float(metrics.loss))
        measured = slice(arguments.warmup, None)
        on_gpu = device.type == "cuda"
        return {
            "name": arguments.rung,
            "flags": flags,
            "precision": "bf16",
            "samples_per_s": round(sum(counts[measured]) / sum(times_ms[measured]) * 1e3, 2),
            "step_ms": round(statistics.median(times_ms[measured]), 1),
            "samples_per_step": round(statistics.mean(counts[measured]), 2),
            "useful_token_share": round(statistics.mean(useful[measured]), 4),
            "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None,
            "gpu": torch.cuda.get_device_name() if on_gpu else None,
            "losses": losses[:10],
        }


def _synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def _samples_and_useful_share(batch: Any) -> tuple[int, float]:
    from megatron_vla.data.packed_batch import PackedBatch

    if isinstance(batch, PackedBatch):
        return int((batch.sample_index_B >= 0).sum()), float(batch.num_prefix_B.sum()) / batch.tokens_P.shape[0]
    patches = (batch.images_BVCHW.shape[-1] // 14) ** 2
    slots = batch.size * (batch.camera_is_present_BV.shape[1] * patches + batch.tokens_BL.shape[1])
    return batch.size, (int(batch.camera_is_present_BV.sum()) * patches + int(batch.token_is_valid_BL.sum())) / slots


def main() -> None:
    """Plan, and train when asked; write after each step."""
    arguments = parse()
    if arguments.rung is not None:
        print(json.dumps(measure(arguments)))
        return
    import torch

    old = json.loads(arguments.output.read_text()) if arguments.output is not None and arguments.output.is_file() else {}
    result: dict[str, Any] = {
        **{name: old.get(name) for name in ("gpu", "num_gpus", "rungs")},
        "date": datetime.date.today().isoformat(),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "numpy": version("numpy")},
        "command": "python tools/benchmark_packing.py " + " ".join(sys.argv[1:]),
        "workload": {"model": f"pi05 {arguments.model_variant}", "cameras": list(CAMERAS), "prompt_tokens": list(PROMPT)},
        "useful_tokens": useful_tokens(),
    }
    for row in result["useful_tokens"]:
        print(json.dumps(row), flush=True)
    _write(arguments.output, result)
    if not arguments.train:
        return
    result["rungs"] = []
    for rung in TRAIN_RUNGS:
        command = [sys.executable, __file__, "--rung", rung, *sys.argv[1:]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr[-2000:], file=sys.stderr)
            result["rungs"].append({"name": rung, "error": done.stderr.strip().splitlines()[-1][:300]})
        else:
            result["rungs"].append(json.loads(done.stdout.strip().splitlines()[-1]))
            result |= {"gpu": result["rungs"][-1]["gpu"], "num_gpus": 1}
        print(json.dumps(result["rungs"][-1]), flush=True)
        _write(arguments.output, result)
    if any("error" in rung for rung in result["rungs"]):
        raise SystemExit(1)


def _write(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
