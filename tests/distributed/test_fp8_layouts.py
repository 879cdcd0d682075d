"""FP8 layers under every way of sharing the work, and a run that turns FP8 off half way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    *("--model-variant", "tiny", "--image-size", "28", "--num-layers", "2", "--vision-num-layers", "1", "--bf16"),
    *("--mock-data", "--mock-num-samples", "40", "--mock-num-cameras", "1", "--mock-prompt-length", "8"),
    *("--max-prompt-length", "8", "--prompt-padding", "max", "--micro-batch-size", "2", "--global-batch-size", "8"),
    *("--lr", "1e-3", "--lr-warmup-iters", "1", "--lr-decay-iters", "4", "--num-workers", "0", "--log-interval", "1"),
    *("--attention-backend", "sdpa", "--no-first-batch-report"),
)
FP8 = ("--fp8", "native", "--fp8-min-dim", "64")
DELAYED = (*FP8, "--fp8-recipe", "delayed", "--merge-projections")


def losses(folder: Path, *flags: str, processes: int = 1, iterations: int = 3) -> list[float]:
    """Loss of every iteration of a run of its own."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    command = [sys.executable, *launcher, str(ROOT / "pretrain_vla.py"), *FLAGS, "--train-iters", str(iterations)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(
        [*command, "--log-dir", str(folder), *flags], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [loss for line in lines for loss in json.loads(line)["losses"]]


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [FP8, DELAYED], ids=["tensorwise", "delayed"])
def test_layouts_train_alike(fp8: tuple[str, ...], tmp_path: Path) -> None:
    """Scales are those of a rank's own micro-batch, or of all ranks', so equal micro-batches give equal numbers everywhere."""
    expected = losses(tmp_path / "one", *fp8)
    assert losses(tmp_path / "bf16") != expected
    for name, flags in {
        "pipeline": ("--pipeline-model-parallel-size", "2"),
        "fsdp2": ("--data-parallel-strategy", "fsdp2"),
        "sharded": ("--use-distributed-optimizer", "--overlap-grad-reduce"),
    }.items():
        assert losses(tmp_path / name, *fp8, *flags, processes=2) == pytest.approx(expected, rel=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [FP8, DELAYED], ids=["tensorwise", "delayed"])
def test_a_checkpoint_goes_on_with_and_without(fp8: tuple[str, ...], tmp_path: Path) -> None:
    save = ("--save", str(tmp_path / "save"))
    first = losses(tmp_path / "first", *fp8, *save, iterations=2)
    load = ("--load", str(tmp_path / "save"))
    with_fp8 = losses(tmp_path / "with", *fp8, *load, iterations=4)
    without = losses(tmp_path / "without", *load, iterations=4)
    assert len(first) == len(with_fp8) == len(without) == 2
    assert with_fp8 != without and with_fp8 == pytest.approx(without, rel=0.02)
    assert with_fp8 == losses(tmp_path / "whole", *fp8, iterations=4)[2:]
