"""Closes the loop on one GPU: demonstrations of MT10, a small policy trained from scratch on them, its success.

    python tools/close_the_loop.py --output outputs/loop --switches all --train-iters 4000 --num-processes 16
    python tools/close_the_loop.py --output outputs/loop_groot --model-name groot_n1_7 --switches all --train-iters 4500
    ... --compare-switches        the same once more with every speed switch off, for as many steps; success must agree

Training lasts until the time is over (constant learning rate, averaged weights), or with --train-iters for so many steps
(cosine schedule). Machines without a network: --packages FOLDER uses the wheels and GL libraries that
examples/metaworld/fetch_packages.sh collected. Each stage's command is printed; a rerun reuses recorded data and checkpoints,
and goes on with trainings of a fixed number of steps. Exit status 3: success below --min-success, or changed by the switches.
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
from typing import Any, Literal

from loop_recipes import RECIPES, FamilyRecipe

from megatron_vla.config.cli import StrictParser, add_section, build_section
from megatron_vla.evaluation.gate import paired_test
from megatron_vla.evaluation.results import read_trials
from megatron_vla.training.checkpoint_folder import CheckpointFolder, find_latest

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("mujoco", "metaworld", "gymnasium", "glfw", "OpenGL", "scipy", "imageio", "pyarrow", "PIL")
# The scene, what is between the fingers, and what is before the hand: no single one shows where a marker in the air is.
CAMERAS = {"base": "top", "left_wrist": "wrist", "right_wrist": "behind"}
CAMERA_MAP = ("--camera-map", *(f"{view}=observation.images.{camera}" for view, camera in CAMERAS.items()))
# MetaWorld's actions shift the hand's target: they are relative to the state already.
DATA_FLAGS = ("--dataset-action-representation", "delta", "--data-access", "decode_once")
CHANGED = 3
HELD_OUT = "held_out"
# So many that the mean error of an action dimension is known to some percent.
REPLAYED_SAMPLES = 512
ERROR_KEY = "mean_absolute_error"


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Closing the loop: sizes and times"""

    output: str = "outputs/loop"
    """Folder of everything that is made (about 5 GB)."""

    results: str | None = None
    """Also copy the small files (tables, videos, curves) here."""

    packages: str | None = None
    """Folder of wheels (*.whl) and GL libraries (gl/*.so*) to use, for machines without a network."""

    suite: str = "mt10"
    """MetaWorld suite to record and evaluate."""

    tasks: tuple[str, ...] = ()
    """Only these tasks. None: all of the suite."""

    episodes_per_task: int = 300
    """Demonstrations of each task."""

    held_out_episodes: int = 5
    """Demonstrations of each task that are recorded and not trained on: what the policy makes of them, beside what it makes of
    its own, says how much it has learned by heart. 0: none."""

    image_size: int | None = None
    """Side of the pictures in pixels (a multiple of the model's patch). Not set: as the family's recipe says."""

    action_repeat: int = 2
    """Control steps (80 per second) that an action is held for."""

    noise_fraction: float = 0.3
    """Share of demonstrations with noise on the executed actions."""

    noise_sigma: float = 0.3
    """Standard deviation of that noise."""

    noise_hold: int = 1
    """Recorded steps that drawn noise lasts."""

    model_name: str = "pi05"
    """Model family."""

    model_variant: str = "small"
    """Its size."""

    action_horizon: int = 16
    """Actions per prediction; half of them are executed."""

    micro_batch_size: int = 128
    """Samples per step."""

    lr: float = 5e-4
    """Peak learning rate."""

    train_seconds: float = 240.0
    """Stop training after this time, when --train-iters is not given."""

    train_iters: int | None = None
    """Train for so many steps instead, with a cosine schedule."""

    switches: Literal["default", "all"] = "default"
    """default: the speed switches that are on without flags. all: every one that the family has (needs a GPU)."""

    compare_switches: bool = False
    """Afterwards train again from the same first weights with every speed switch off, for as many steps on the same samples,
    evaluate it in the same trials, and say whether its success lies within the interval of the first."""

    train_flags: str = ""
    """Further training flags, as one string: --train-flags="--fp8 native"."""

    train_name: str = "run"
    """Name of this training's folder below --output, so that variants share the demonstrations."""

    trials_per_task: int = 20
    """Closed-loop trials of each task."""

    max_steps: int | None = None
    """Actions after which a trial has failed. Not set: MetaWorld's own limit of 500 control steps."""

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


def end(process: subprocess.Popen[bytes]) -> None:
    """Nothing may go on when the loop was stopped: a training saves on SIGTERM, so it gets some time."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


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
        try:
            if stop is not None:
                stop.watch(process)
            status = process.wait()
        finally:
            end(process)
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


def suits_this_python(wheel: str) -> bool:
    """Whether a wheel's file name promises that this interpreter can load it."""
    python, abi, _ = wheel.removesuffix(".whl").rsplit("-", 3)[1:]
    return abi in ("none", "abi3") or f"cp{sys.version_info.major}{sys.version_info.minor}" in python.split(".")


def prepared_environment(packages: str | None, needed: Sequence[str]) -> dict[str, str]:
    """Environment of the stages, with --packages unpacked. Raises ValueError naming what is still missing."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    paths = [str(ROOT)]
    if packages is not None:
        folder = Path(packages).resolve()
        wheels = sorted(folder.glob("*.whl"))
        if not wheels:
            raise ValueError(f"--packages {packages}: no wheels there -> run examples/metaworld/fetch_packages.sh {packages}")
        needed_wheels = [wheel for wheel in wheels if not is_installed(wheel.name.partition("-")[0])]
        if foreign := [wheel.name for wheel in needed_wheels if not suits_this_python(wheel.name)]:
            python = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise ValueError(
                f"--packages {packages}: {foreign[0]} is not for Python {python} -> empty the folder and run "
                f"examples/metaworld/fetch_packages.sh {packages} {python}"
            )
        # A folder of its own, in front of what is installed: so only what is missing goes there. Complete or not there.
        site = folder / f"site-{sys.implementation.cache_tag}"
        if not site.is_dir():
            partial = site.with_name(f"{site.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            for wheel in needed_wheels:
                zipfile.ZipFile(wheel).extractall(partial)
            partial.rename(site)
        sys.path.append(str(site))
        paths.append(str(site))
        libraries = [str(folder / "gl")] if (folder / "gl").is_dir() else []
        environment["LD_LIBRARY_PATH"] = os.pathsep.join([*libraries, *filter(None, [environment.get("LD_LIBRARY_PATH")])])
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [environment.get("PYTHONPATH")])])
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"not installed: {', '.join(missing)} -> pip install -e '.[data,groot,eval]', or --packages FOLDER")
    return environment


@dataclass(frozen=True)
class Training:
    """One training: its folder, the flags that it has of its own, and its steps (None: until the time is over)."""

    save: Path
    flags: tuple[str, ...]
    steps: int | None

    @property
    def results(self) -> Path:
        """Folder of its evaluation."""
        return self.save.with_name(f"{self.save.name}_evaluation")


def recipe_of(config: LoopConfig) -> FamilyRecipe:
    """Raises ValueError for a family without one."""
    if config.model_name not in RECIPES:
        raise ValueError(f"--model-name {config.model_name}: known are {', '.join(RECIPES)}")
    return RECIPES[config.model_name]


def image_size(config: LoopConfig) -> str:
    """--image-size, or the recipe's."""
    return str(config.image_size or recipe_of(config).image_size)


def latest_checkpoint(save: Path) -> CheckpointFolder | None:
    """None before the first."""
    return find_latest(save)[0] if save.is_dir() else None


def saved_steps(save: Path) -> int | None:
    """Iteration of the latest checkpoint; None before the first."""
    found = latest_checkpoint(save)
    return None if found is None else found.iteration


def training_command(config: LoopConfig, output: Path, training: Training) -> list[object]:
    """Train from scratch on the recorded demonstrations."""
    recipe, save = recipe_of(config), training.save
    schedule = ["--train-iters", str(training.steps or 1_000_000), "--lr-decay-style", "constant"]
    warmup = 100 if config.train_iters is None else min(100, config.train_iters // 2)
    if config.train_iters is not None:
        schedule = ["--train-iters", str(config.train_iters), "--min-lr", str(config.lr / 50)]
    if training.steps is not None:
        # So that a machine whose time is over loses little.
        schedule += ["--save-interval", "1000", "--keep-last", "1"]
    return [
        "pretrain_vla.py",
        *("--model-name", config.model_name, "--model-variant", config.model_variant),
        *("--image-size", image_size(config), "--max-action-dim", "8", "--vocab-size", "1024", *recipe.model),
        *(word for flag in recipe.horizon for word in (flag, str(config.action_horizon))),
        *("--data-path", output / "demonstrations", "--tokenizer-model", output / recipe.tokenizer),
        *(*CAMERA_MAP, *DATA_FLAGS, "--num-workers", str(max(1, config.num_processes - 2))),
        *("--micro-batch-size", str(config.micro_batch_size), "--lr", str(config.lr), "--lr-warmup-iters", str(warmup)),
        *("--weight-decay", "0.01", "--ema-decay", "0.995", "--log-interval", "20", *schedule, "--bf16"),
        *("--save", save, "--load", save, *training.flags),
    ]


def evaluation_command(config: LoopConfig, training: Training, baseline: Training | None = None) -> list[object]:
    """Closed-loop trials from starts that no demonstration had; compared with another training's in pairs."""
    return [
        *("-m", "megatron_vla.evaluation", "--checkpoint", training.save, "--output", training.results),
        *(("--baseline", baseline.results) if baseline is not None else ()),
        *("--eval-suite", config.suite, "--eval-tasks", *config.tasks),
        *("--eval-image-size", image_size(config), "--eval-action-repeat", str(config.action_repeat)),
        *(("--eval-max-steps", str(config.max_steps)) if config.max_steps is not None else ()),
        *("--eval-trials-per-task", str(config.trials_per_task)),
        *("--eval-workers", str(2 * config.num_processes), "--eval-gate", f"min_success={config.min_success}"),
        *shlex.split(config.eval_flags),
    ]


def record(loop: Loop, output: Path) -> None:
    """Demonstrations and tokenizer."""
    config, recipe, demonstrations = loop.config, recipe_of(loop.config), output / "demonstrations"
    recorder: list[object] = [
        *("tools/record_demonstrations.py", "--output", demonstrations, "--suite", config.suite, "--tasks", *config.tasks),
        *("--episodes-per-task", str(config.episodes_per_task), "--image-size", image_size(config)),
        *("--cameras", *CAMERAS.values()),
        *("--action-repeat", str(config.action_repeat), "--noise-fraction", str(config.noise_fraction)),
        *("--noise-sigma", str(config.noise_sigma), "--noise-hold", str(config.noise_hold)),
        *("--picture-format", "png", "--num-processes", str(config.num_processes)),
    ]
    loop.run("record", recorder)
    if config.held_out_episodes:
        # A repeated flag: the last one counts.
        others = ("--output", output / HELD_OUT, "--episodes-per-task", str(config.held_out_episodes), "--seed", "1")
        loop.run("record held-out", [*recorder, *others])
    tokenizer = output / recipe.tokenizer
    if not tokenizer.exists():
        command = ["tools/train_tokenizer.py", "--data-path", demonstrations, "--output", tokenizer, *recipe.tokenizer_flags]
        loop.run("tokenizer", command)


def train(loop: Loop, output: Path, training: Training, stage: str) -> None:
    """A complete checkpoint in `training.save`: made, gone on with, or reused."""
    if training.steps is None and saved_steps(training.save) is not None:
        print(f"\n== {stage}\n{training.save} is there, reused (another --train-name trains again)")
        return
    stop = None
    if training.steps is None:
        # What a killed training left would stop the clock at once.
        metrics = training.save / "logs/metrics.jsonl"
        metrics.unlink(missing_ok=True)
        stop = StopAfter(loop.config.train_seconds, metrics)
    loop.run(stage, training_command(loop.config, output, training), stop=stop)


def replay(loop: Loop, output: Path, training: Training) -> None:
    """Demonstrations through the serving path: the same tensors as in training, and the errors of what was predicted."""
    results = training.results / "replay"
    command = ["-m", "megatron_vla.evaluation", "--checkpoint", training.save, "--replay", str(REPLAYED_SAMPLES)]
    loop.run("replay", [*command, "--output", results])
    if loop.config.held_out_episodes:
        loop.run("replay held-out", [*command, "--data-path", output / HELD_OUT, "--output", results / HELD_OUT])
        own, others = (json.loads((folder / "replay.json").read_text()) for folder in (results, results / HELD_OUT))
        print("\nmean |error| of actions, demonstrations of its own and held-out ones:")
        for name, seen, unseen in zip(own["action_names"], own[ERROR_KEY], others[ERROR_KEY], strict=True):
            print(f"  {name:24s} {seen:9.4g} {unseen:9.4g}")


def keep_results(loop: Loop, output: Path, training: Training) -> None:
    """Times and, with --results, copies of the small files."""
    results = training.results
    (results / "times.json").write_text(json.dumps({name: round(value, 1) for name, value in loop.seconds.items()}))
    if loop.config.results is None:
        return
    copied = Path(loop.config.results) / training.save.name
    shutil.copytree(results, copied, dirs_exist_ok=True)
    for source in (training.save / "logs/metrics.jsonl", training.save / "logs/loss_curve.png"):
        if source.exists():
            shutil.copy(source, copied)
    shutil.copy(output / "demonstrations/meta/recording.json", copied)


def comparison(switched: Training, plain: Training) -> tuple[dict[str, Any], list[str]]:
    """Success with the switches on and off: JSON-ready, and for people."""
    on, off = (json.loads((training.results / "report.json").read_text()) for training in (switched, plain))
    test = paired_test(read_trials(plain.results), read_trials(switched.results))
    low, high = on["interval_95"]
    is_inside = bool(low <= off["success"] <= high)
    result = {
        "steps": saved_steps(plain.save),
        "switches_on": {name: on[name] for name in ("success", "interval_95", "trials")},
        "switches_off": {name: off[name] for name in ("success", "interval_95", "trials")},
        "off_is_within_interval": is_inside,
        "trials_gained_by_off": test.gained,
        "trials_lost_by_off": test.lost,
        "p_off_is_worse": test.p_worse,
        "p_off_is_better": test.p_better,
    }
    lines = [
        f"switches on   success {on['success']:.1%} ({low:.1%} to {high:.1%}, {on['trials']} trials)",
        f"switches off  success {off['success']:.1%}, {'within' if is_inside else 'OUTSIDE'} that interval, after "
        f"{result['steps']} steps as well",
        f"in pairs      {test.gained} trials gained and {test.lost} lost without them of {test.trials}, exact McNemar "
        f"p = {test.p_worse:.3g} (worse), {test.p_better:.3g} (better)",
    ]
    return result, lines


def compare_switches(loop: Loop, output: Path, switched: Training) -> bool:
    """Train and evaluate without any speed switch; whether success lies within the interval of `switched`."""
    trained = latest_checkpoint(switched.save)
    assert trained is not None, "evaluated just now"
    used = trained.config()["optimizer"]["lr_decay_style"]
    if (used == "constant") != (loop.config.train_iters is None):
        raise ValueError(
            f"{switched.save} was trained with a {used} schedule -> compare with the --train-iters of that training"
        )
    flags = (*recipe_of(loop.config).no_switches, *shlex.split(loop.config.train_flags))
    plain = Training(switched.save.with_name(f"{switched.save.name}_plain"), flags, trained.iteration)
    train(loop, output, plain, "train without switches")
    loop.run("evaluate without switches", evaluation_command(loop.config, plain, switched), accept=(0, 3))
    result, lines = comparison(switched, plain)
    (plain.results / "comparison.json").write_text(json.dumps(result, indent=1) + "\n")
    keep_results(loop, output, plain)
    print("\n".join(["", *lines]))
    return bool(result["off_is_within_interval"])


def close_the_loop(config: LoopConfig) -> int:
    """All stages; the exit status."""
    recipe = recipe_of(config)
    if config.held_out_episodes < 0:
        raise ValueError(f"--held-out-episodes {config.held_out_episodes}: 0 or more are needed")
    output = Path(config.output).resolve()
    output.mkdir(parents=True, exist_ok=True)
    loop = Loop(config, prepared_environment(config.packages, (*NEEDED, recipe.tokenizer_package)))
    record(loop, output)
    switches = recipe.all_switches if config.switches == "all" else ()
    training = Training(output / config.train_name, (*switches, *shlex.split(config.train_flags)), config.train_iters)
    train(loop, output, training, "train")
    status = loop.run("evaluate", evaluation_command(config, training), accept=(0, 3))
    keep_results(loop, output, training)  # what follows takes a while, and a time limit may end it
    replay(loop, output, training)
    keep_results(loop, output, training)
    print(f"\n== done in {sum(loop.seconds.values()):.0f} s: {loop.seconds}")
    print((training.results / "report.md").read_text())
    if config.compare_switches and not compare_switches(loop, output, training):
        return CHANGED
    return status


if __name__ == "__main__":
    parser = StrictParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_section(parser, LoopConfig)
    # So that `finally` runs when a time limit ends the loop.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        sys.exit(close_the_loop(build_section(LoopConfig, parser.parse_flags(sys.argv[1:]))))
    except ValueError as failure:
        raise SystemExit(f"error: {failure}") from None
