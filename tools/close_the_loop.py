"""Closes the loop on one GPU: demonstrations of MT10, a small policy trained from scratch on them, its success.

    python tools/close_the_loop.py --output outputs/loop --train-seconds 240 --num-processes 16
    python tools/close_the_loop.py --output outputs/loop --train-flags="--bf16 --compile" --train-iters 2000

The first form trains until the time is over (constant learning rate, averaged weights), the second for a fixed number of steps
with a cosine schedule, for comparisons. Machines without a network: --packages FOLDER uses the wheels and GL libraries that
examples/metaworld/fetch_packages.sh collected. Each stage's command is printed; a rerun reuses recorded data and checkpoints.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatron_vla.config.cli import StrictParser, add_section, build_section

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("mujoco", "metaworld", "gymnasium", "glfw", "OpenGL", "scipy", "imageio", "pyarrow", "sentencepiece", "PIL")
CAMERA_MAP = ("--camera-map", "base=observation.images.top", "left_wrist=observation.images.wrist")
# MetaWorld's actions shift the hand's target: they are relative to the state already.
DATA_FLAGS = ("--dataset-action-representation", "delta", "--data-access", "decode_once")


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Closing the loop: sizes and times"""

    output: str = "outputs/loop"
    """Folder of everything that is made (about 2 GB)."""

    results: str | None = None
    """Also copy the small files (tables, videos, curves) here."""

    packages: str | None = None
    """Folder of wheels (*.whl) and GL libraries (gl/*.so*) to use, for machines without a network."""

    suite: str = "mt10"
    """MetaWorld suite to record and evaluate."""

    tasks: tuple[str, ...] = ()
    """Only these tasks. None: all of the suite."""

    episodes_per_task: int = 100
    """Demonstrations of each task."""

    image_size: int = 112
    """Side of the pictures in pixels (a multiple of the model's patch)."""

    action_repeat: int = 2
    """Control steps (80 per second) that an action is held for."""

    noise_fraction: float = 0.3
    """Share of demonstrations with noise on the executed actions."""

    model_name: str = "pi05"
    """Model family."""

    model_variant: str = "small"
    """Its size."""

    action_horizon: int = 16
    """Actions per prediction; half of them are executed."""

    micro_batch_size: int = 256
    """Samples per step."""

    lr: float = 5e-4
    """Peak learning rate."""

    train_seconds: float = 240.0
    """Stop training after this time, when --train-iters is not given."""

    train_iters: int | None = None
    """Train for so many steps instead, with a cosine schedule."""

    train_flags: str = "--bf16"
    """Further training flags, the speed switches among them, as one string: --train-flags="--bf16 --compile"."""

    train_name: str = "run"
    """Name of this training's folder below --output, so that variants share the demonstrations."""

    trials_per_task: int = 20
    """Closed-loop trials of each task."""

    max_steps: int = 150
    """Actions after which a trial has failed (MetaWorld's own limit is 500 control steps)."""

    eval_flags: str = ""
    """Further evaluation flags, as one string: --eval-flags="--eval-cuda-graph"."""

    min_success: float = 0.0
    """Exit with status 3 below this mean success."""

    num_processes: int = 16
    """Simulator processes, and data workers of the training."""


@dataclass(frozen=True)
class StopAfter:
    """Ends a training by SIGTERM (it saves then) `seconds` after its first metrics: loading and compiling do not count."""

    seconds: float
    metrics: Path

    def watch(self, process: subprocess.Popen[bytes]) -> None:
        """Returns when the signal was sent, or the process has ended by itself."""
        deadline = None
        while process.poll() is None:
            if deadline is None and self.metrics.exists() and self.metrics.stat().st_size > 0:
                deadline = time.monotonic() + self.seconds
            if deadline is not None and time.monotonic() > deadline:
                print(f"   {self.seconds:.0f} s of training are over: asking it to save and stop", flush=True)
                process.send_signal(signal.SIGTERM)
                return
            time.sleep(0.2)


@dataclass
class Loop:
    """The stages of one run, their environment and their times."""

    config: LoopConfig
    environment: dict[str, str]
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self, stage: str, command: Sequence[object], accept: Sequence[int] = (0,), stop: StopAfter | None = None) -> int:
        """Print and run one command in the repository root. SystemExit when it fails."""
        words = [sys.executable, *map(str, command)]
        print(f"\n== {stage}\n$ {shlex.join(words)}", flush=True)
        started = time.monotonic()
        process = subprocess.Popen(words, cwd=ROOT, env=self.environment)
        if stop is not None:
            stop.watch(process)
        status = process.wait()
        self.seconds[stage] = time.monotonic() - started
        print(f"   {stage}: {self.seconds[stage]:.0f} s", flush=True)
        if status not in accept:
            raise SystemExit(f"close_the_loop stopped: exit status {status} of the command printed above")
        return status


def is_installed(distribution: str) -> bool:
    """Whether pip knows it here."""
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def prepared_environment(packages: str | None) -> dict[str, str]:
    """Environment of the stages, with --packages unpacked. Raises ValueError naming what is still missing."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    paths = [str(ROOT)]
    if packages is not None:
        folder = Path(packages).resolve()
        wheels = sorted(folder.glob("*.whl"))
        if not wheels:
            raise ValueError(f"--packages {packages}: no wheels there -> run examples/metaworld/fetch_packages.sh {packages}")
        site = folder / "site"
        for wheel in [] if site.is_dir() else wheels:
            # A folder of its own, in front of what is installed: so only what is missing goes there.
            if not is_installed(wheel.name.partition("-")[0]):
                zipfile.ZipFile(wheel).extractall(site)
        sys.path.append(str(site))
        paths.append(str(site))
        libraries = [str(folder / "gl")] if (folder / "gl").is_dir() else []
        environment["LD_LIBRARY_PATH"] = os.pathsep.join([*libraries, *filter(None, [environment.get("LD_LIBRARY_PATH")])])
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [environment.get("PYTHONPATH")])])
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"not installed: {', '.join(missing)} -> pip install -e '.[eval]', or --packages FOLDER")
    return environment


def training_command(config: LoopConfig, output: Path) -> list[object]:
    """Train from scratch on the recorded demonstrations."""
    save = output / config.train_name
    schedule = ["--train-iters", "1000000", "--lr-decay-style", "constant"]
    if config.train_iters is not None:
        schedule = ["--train-iters", str(config.train_iters), "--min-lr", str(config.lr / 50)]
    return [
        "pretrain_vla.py",
        *("--model-name", config.model_name, "--model-variant", config.model_variant),
        *("--image-size", str(config.image_size), "--action-horizon", str(config.action_horizon), "--max-action-dim", "8"),
        *("--vocab-size", "1024", "--max-prompt-length", "48"),
        *("--data-path", output / "demonstrations", "--tokenizer-model", output / "tokenizer.model"),
        *(*CAMERA_MAP, *DATA_FLAGS, "--num-workers", str(max(1, config.num_processes - 2))),
        *("--micro-batch-size", str(config.micro_batch_size), "--lr", str(config.lr), "--lr-warmup-iters", "100"),
        *("--weight-decay", "0.01", "--ema-decay", "0.995", "--log-interval", "20", *schedule),
        *("--save", save, "--load", save, *shlex.split(config.train_flags)),
    ]


def evaluation_command(config: LoopConfig, output: Path, results: Path) -> list[object]:
    """Closed-loop trials from starts that no demonstration had."""
    return [
        *("-m", "megatron_vla.evaluation", "--checkpoint", output / config.train_name, "--output", results),
        *("--eval-suite", config.suite, "--eval-tasks", *config.tasks),
        *("--eval-image-size", str(config.image_size), "--eval-action-repeat", str(config.action_repeat)),
        *("--eval-max-steps", str(config.max_steps), "--eval-trials-per-task", str(config.trials_per_task)),
        *("--eval-workers", str(2 * config.num_processes), "--eval-gate", f"min_success={config.min_success}"),
        *shlex.split(config.eval_flags),
    ]


def record_and_train(loop: Loop, output: Path) -> None:
    """Everything up to the checkpoint."""
    config, demonstrations = loop.config, output / "demonstrations"
    recorder: list[object] = [
        *("tools/record_demonstrations.py", "--output", demonstrations, "--suite", config.suite, "--tasks", *config.tasks),
        *("--episodes-per-task", str(config.episodes_per_task), "--image-size", str(config.image_size)),
        *("--action-repeat", str(config.action_repeat), "--noise-fraction", str(config.noise_fraction)),
        *("--picture-format", "png", "--num-processes", str(config.num_processes)),
    ]
    loop.run("record", recorder)
    tokenizer = output / "tokenizer.model"
    if not tokenizer.exists():
        loop.run("tokenizer", ["tools/train_tokenizer.py", "--data-path", demonstrations, "--output", tokenizer])
    save = output / config.train_name
    if config.train_iters is None and save.exists():
        print(f"\n== train\n{save} is there, reused (another --train-name trains again)")
        return
    stop = None if config.train_iters is not None else StopAfter(config.train_seconds, save / "logs/metrics.jsonl")
    loop.run("train", training_command(config, output), stop=stop)


def close_the_loop(config: LoopConfig) -> int:
    """All stages; the exit status of the gate."""
    output = Path(config.output).resolve()
    output.mkdir(parents=True, exist_ok=True)
    loop = Loop(config, prepared_environment(config.packages))
    record_and_train(loop, output)
    results = output / f"{config.train_name}_evaluation"
    status = loop.run("evaluate", evaluation_command(config, output, results), accept=(0, 3))
    loop.run("replay", ["-m", "megatron_vla.evaluation", "--checkpoint", output / config.train_name, "--replay", "64"])
    (results / "times.json").write_text(json.dumps({name: round(value, 1) for name, value in loop.seconds.items()}))
    if config.results is not None:
        copied = Path(config.results) / config.train_name
        shutil.copytree(results, copied, dirs_exist_ok=True)
        for source in (output / config.train_name / "logs/metrics.jsonl", output / config.train_name / "logs/loss_curve.png"):
            if source.exists():
                shutil.copy(source, copied)
        shutil.copy(output / "demonstrations/meta/recording.json", copied)
    print(f"\n== done in {sum(loop.seconds.values()):.0f} s: {loop.seconds}")
    print((results / "report.md").read_text())
    return status


if __name__ == "__main__":
    parser = StrictParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_section(parser, LoopConfig)
    try:
        sys.exit(close_the_loop(build_section(LoopConfig, parser.parse_flags(sys.argv[1:]))))
    except ValueError as failure:
        raise SystemExit(f"error: {failure}") from None
