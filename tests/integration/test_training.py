"""The entry script under torchrun: stop signals, a killed rank, and findings before the start."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from training_fixtures import TINY

from megatron_vla.training.checkpoint_folder import find_latest

ROOT = Path(__file__).resolve().parents[2]
LONG = ("--train-iters", "100000", "--log-interval", "1", "--micro-batch-size", "2")


def start(output: Path, *flags: str) -> subprocess.Popen[bytes]:
    """Two ranks in the background; everything printed goes to `output`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with open(output, "wb") as file:
        command = [*launcher, str(ROOT / "pretrain_vla.py"), *TINY, *LONG, *flags]
        return subprocess.Popen(command, cwd=output.parent, env=environment, stdout=file, stderr=subprocess.STDOUT)


def wait_for(output: Path, pattern: str, process: subprocess.Popen[bytes], seconds: float = 300.0) -> re.Match[str]:
    """The first match of `pattern` in the output; fails with the output when the process ends or time is up."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        match = re.search(pattern, output.read_text(errors="replace"))
        if match:
            return match
        assert process.poll() is None, output.read_text(errors="replace")
        time.sleep(0.1)
    raise AssertionError(f"no {pattern!r} within {seconds} s:\n{output.read_text(errors='replace')}")


def test_sigterm_saves_and_a_killed_rank_ends_the_run(tmp_path: Path) -> None:
    """SIGTERM to the launcher (what Slurm sends) leaves a checkpoint; resumed from it, SIGKILL to one rank ends both ranks."""
    save = tmp_path / "checkpoints"
    process = start(tmp_path / "first.log", "--save", str(save))
    wait_for(tmp_path / "first.log", r"iteration +3/", process)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=240)
    text = (tmp_path / "first.log").read_text()
    assert re.search(r"finished at iteration \d+ \(stop signal\)", text) and "to go on: torchrun --nproc-per-node=2" in text
    found, remarks = find_latest(save)
    assert found is not None and not remarks and found.iteration >= 3

    second = tmp_path / "second.log"
    process = start(second, "--save", str(save), "--load", str(save))
    wait_for(second, rf"resumed at iteration {found.iteration}, ", process)
    wait_for(second, rf"iteration +{found.iteration + 2}/", process)
    row = re.search(r"^ +1 \S+ +(\d+) ", second.read_text(), re.M)
    assert row is not None, "the start-up table names the process of rank 1"
    os.kill(int(row.group(1)), signal.SIGKILL)
    killed = time.monotonic()
    assert process.wait(timeout=240) != 0
    assert time.monotonic() - killed < 45
    latest, _ = find_latest(save)
    assert latest is not None and latest.iteration == found.iteration, "a failed run writes no checkpoint"


def test_findings_are_printed_alone_with_status_2(tmp_path: Path) -> None:
    flags = ("--global-batch-size", "3", "--lr-warmup-iters", "200000", "--bf16", "--fp64")
    command = [sys.executable, str(ROOT / "pretrain_vla.py"), *TINY, *LONG, *flags]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=400, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert result.returncode == 2
    text = result.stdout + result.stderr
    for part in ("3 problem(s)", "--global-batch-size", "--lr-warmup-iters", "--bf16, --fp64"):
        assert part in text
    assert "Traceback" not in text
