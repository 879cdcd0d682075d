"""From nothing to a trained, killed, resumed and evaluated model on two CPU cores; every command is printed to be copied.

    make quickstart          Pi0.5 (or, in an installed environment: python tools/quickstart.py)
    make quickstart-groot    GR00T N1.7 on the same recorded demonstrations (--model-name groot_n1_7 --train-iters 600)

Stages: record demonstrations in a simulator, train a tokenizer, compute statistics, check the dataset, train under torchrun
with two processes until half-way, kill them, resume to the end, let the policy act in the simulator, report. A rerun reuses
what is complete.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_vla.config.cli import StrictParser, add_section, build_section, flag_name

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class QuickstartConfig:
    """Quickstart: sizes of the demonstration run"""

    model_name: Literal["pi05", "groot_n1_7"] = "pi05"
    """Model family."""

    output: str = "outputs/quickstart"
    """Folder for everything that is made: the demonstrations, which every family uses, and a folder for each other family."""

    tasks: tuple[str, ...] = ("drawer-open", "window-close", "button-press-topdown")
    """MetaWorld tasks to record."""

    episodes_per_task: int = 8
    """Episodes of each task."""

    image_size: int = 112
    """Side of the recorded pictures and of the model's input in pixels (a multiple of 14)."""

    train_iters: int = 300
    """Optimizer steps in total; the run is killed after half of them."""

    num_processes: int = 2
    """Training processes, and simulator processes."""

    trials_per_task: int = 4
    """Closed-loop trials of each task at the end."""

    install_seconds: float = 0.0
    """How long the installation took, for the closing table."""


@dataclass(frozen=True)
class FamilyRecipe:
    """What differs between the families. sizes: of the model; flags: further words; tokenizer: its file and how it is made.

    folder: of its files below --output. statistics: flags that shape them. inference_steps: half of the model's own number
    where that is as good, and twice as fast on two cores; None: its own.
    """

    sizes: Mapping[str, object]
    flags: tuple[str, ...]
    tokenizer: str
    tokenizer_flags: tuple[str, ...]
    folder: str
    statistics: tuple[str, ...]
    inference_steps: int | None = None


# A Pi0.5 of 2 million parameters: all of its parts, in a size that two cores can train.
PI05_SIZES = {
    "vision_hidden_size": 96,
    "vision_num_layers": 4,
    "vision_num_attention_heads": 4,
    "vision_ffn_hidden_size": 256,
    "num_layers": 4,
    "hidden_size": 160,
    "ffn_hidden_size": 448,
    "expert_hidden_size": 96,
    "expert_ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "kv_channels": 32,
    "vocab_size": 1024,
    "max_prompt_length": 48,
    "action_horizon": 10,
    "max_action_dim": 8,
}
# A GR00T of 2 million parameters, which trains its backbone too: here it starts from nothing.
GROOT_SIZES = {
    "image_size": 96,
    "vision_hidden_size": 96,
    "vision_num_layers": 4,
    "vision_num_attention_heads": 4,
    "vision_ffn_hidden_size": 256,
    "num_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 32,
    "ffn_hidden_size": 320,
    "vocab_size": 1024,
    "image_token": 5,
    "padding_token": 0,
    "max_prompt_length": 128,
    # A token for every 16 x 16 pixels: with the released 32 x 32 there would be nine.
    "vision_spatial_merge_size": 1,
    "vision_num_position_embeddings": 36,
    "image_crop_fraction": 1,
    "vl_num_attention_heads": 4,
    "vl_ffn_hidden_size": 256,
    "dit_num_attention_heads": 4,
    "dit_kv_channels": 32,
    "dit_ffn_hidden_size": 320,
    "head_hidden_size": 64,
    "action_horizon": 10,
    "max_action_dim": 8,
    "max_state_dim": 48,
}
GROOT_FLAGS = (
    *("--mrope-sections", "8", "4", "4", "--tune-llm", "--tune-visual", "--embodiment-id", "0"),
    # Released values are made for wide models and many epochs: this one is narrow, and sees each frame a few times.
    *("--embodiment-init", "fan_in", "--dropout", "0", "--state-dropout-prob", "0"),
)
TRAINING_VALUES = {
    "micro_batch_size": 8,
    "global_batch_size": 16,
    "lr": 1e-3,
    "min_lr": 1e-4,
    "lr_warmup_iters": 10,
    "log_interval": 10,
    "num_workers": 1,
}
# Control steps (80 a second) that an action is held for, in the demonstrations and in the trials.
ACTION_REPEAT = 4
# MetaWorld's actions shift the hand's target: they are relative to the state already.
ACTION_FLAGS = ("--dataset-action-representation", "delta")
CAMERA_FLAGS = ("--camera-map", "base=observation.images.top", "left_wrist=observation.images.wrist")


RECIPES = {
    "pi05": FamilyRecipe(
        PI05_SIZES, (), "tokenizer.model", (), "", ("--action-horizon", "10", *ACTION_FLAGS), inference_steps=5
    ),
    "groot_n1_7": FamilyRecipe(
        GROOT_SIZES,
        GROOT_FLAGS,
        "tokenizer.json",
        ("--kind", "byte_pair"),
        "groot_n1_7",
        ("--action-horizon", "10", *ACTION_FLAGS, "--embodiment-id", "0"),
    ),
}


@dataclass
class Stages:
    """Runs the numbered stages and remembers how long each took."""

    total: int
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, title: str) -> Any:
        """Print the heading now and the time at the end."""
        print(f"\n== [{len(self.seconds) + 1}/{self.total}] {title}", flush=True)
        start = time.monotonic()
        yield
        self.seconds[title] = time.monotonic() - start
        print(f"   {self.seconds[title]:.0f} s", flush=True)


def python_command(*words: str | Path) -> list[str]:
    """A command line of this interpreter, as short as it can be pasted from the repository root."""
    interpreter = Path(sys.executable)
    name = str(interpreter.relative_to(ROOT)) if interpreter.is_relative_to(ROOT) else sys.executable
    return [name, *map(str, words)]


def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Print the command and start it in the repository root, one computing thread per process."""
    print(f"$ OMP_NUM_THREADS=1 {shlex.join(command)}", flush=True)
    # The interpreter's path is relative to the root, as printed; -m and scripts find the package there too.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=environment)


def run(command: Sequence[str]) -> None:
    """Run to the end; SystemExit naming the command when it fails (it has said why above)."""
    status = start(command).wait()
    if status != 0:
        raise SystemExit(f"quickstart stopped: exit status {status} of the command printed above")


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL torchrun and its workers: nobody gets a chance to save anything."""
    import psutil

    parent = psutil.Process(process.pid)
    processes = [*parent.children(recursive=True), parent]
    for one in processes:
        one.kill()
    psutil.wait_procs(processes, timeout=30)
    process.wait()


def read_losses(save: Path) -> dict[int, float]:
    """Loss of every logged iteration."""
    path = save / "logs/metrics.jsonl"
    # The last line may be half written while the run is going on.
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    records = [json.loads(line) for line in lines]
    return {i: loss for record in records for i, loss in zip(record["iterations"], record["losses"], strict=True)}


def saved_iteration(save: Path) -> int:
    """Latest complete checkpoint of `save`; 0 if none."""
    path = save / "latest_checkpointed_iteration.txt"
    return int(path.read_text()) if path.exists() else 0


def train_and_kill(command: Sequence[str], save: Path, half: int) -> dict[int, float]:
    """Start training and SIGKILL it a little after the checkpoint of iteration `half`; the losses logged until then."""
    process = start(command)
    while process.poll() is None:
        losses = read_losses(save)
        if saved_iteration(save) >= half and max(losses, default=0) >= half + 10:
            kill_tree(process)
            print(f"   killed (SIGKILL) after iteration {max(losses)}; checkpoint: iteration {saved_iteration(save)}")
            return losses
        time.sleep(0.05)
    raise SystemExit(f"quickstart stopped: training ended before it was killed, exit status {process.returncode}, see above")


def as_flags(values: Mapping[str, object]) -> list[str]:
    """{"lr": 0.1} -> ["--lr", "0.1"]."""
    return [word for name, value in values.items() for word in (flag_name(name), str(value))]


def training_command(config: QuickstartConfig, output: Path, train_iters: int) -> list[str]:
    """The torchrun command; it starts, and it resumes."""
    distributed = ("--standalone", "--nproc-per-node", str(config.num_processes))
    recipe = RECIPES[config.model_name]
    own = output / recipe.folder
    save = own / "checkpoints"
    return [
        *python_command("-m", "torch.distributed.run", *distributed, "pretrain_vla.py"),
        *("--model-name", config.model_name, "--model-variant", "tiny"),
        *as_flags({"image_size": config.image_size, **recipe.sizes}),
        *recipe.flags,
        *("--data-path", str(output / "demonstrations"), "--tokenizer-model", str(own / recipe.tokenizer)),
        *("--statistics-path", str(own / "statistics.json"), *ACTION_FLAGS),
        *CAMERA_FLAGS,
        *as_flags(TRAINING_VALUES),
        *("--train-iters", str(train_iters), "--lr-decay-iters", str(config.train_iters)),
        *("--save", str(save), "--load", str(save), "--save-interval", str(config.train_iters // 2), "--tensorboard"),
    ]


def evaluation_folder(config: QuickstartConfig, output: Path) -> Path:
    """Where the results of the last checkpoint's evaluation are."""
    return output / RECIPES[config.model_name].folder / f"checkpoints/evaluation/iter_{config.train_iters:07d}"


def evaluation_command(config: QuickstartConfig, output: Path) -> list[str]:
    """Closed-loop trials from new starts, with the pictures and the rate of the demonstrations."""
    values = {
        "eval_trials_per_task": config.trials_per_task,
        "eval_image_size": config.image_size,
        "eval_action_repeat": ACTION_REPEAT,
        "eval_max_steps": 60,
        "eval_workers": config.num_processes,
    }
    recipe = RECIPES[config.model_name]
    if recipe.inference_steps is not None:
        values["eval_inference_steps"] = recipe.inference_steps
    suite = ("--eval-suite", "mt50", "--eval-tasks", *config.tasks)
    return python_command(
        "tools/evaluate.py", "--checkpoint", output / recipe.folder / "checkpoints", *suite, *as_flags(values)
    )


def report(config: QuickstartConfig, output: Path, stages: Stages, losses_until_kill: Mapping[int, float]) -> None:
    """The closing page. SystemExit when the loss did not fall: this is also a test."""
    save = output / RECIPES[config.model_name].folder / "checkpoints"
    logs = save / "logs"
    losses = [loss for _, loss in sorted(read_losses(ROOT / save).items())]
    first, last = losses[: max(1, len(losses) // 60)], losses[-max(1, len(losses) // 15) :]
    before, after = sum(first) / len(first), sum(last) / len(last)
    replayed = {i: abs(loss - losses_until_kill[i]) for i, loss in read_losses(ROOT / save).items() if i in losses_until_kill}
    replayed = {i: difference for i, difference in replayed.items() if i > config.train_iters // 2}
    print("\n== done")
    print(f"loss before         {before:.4f}   (mean of the first {len(first)} of {len(losses)} iterations)")
    print(f"loss after          {after:.4f}   (mean of the last {len(last)})")
    if replayed:
        print(f"killed and resumed  {len(replayed)} iterations ran twice, largest loss difference {max(replayed.values()):.1e}")
    print(f"checkpoint          {save / f'iter_{saved_iteration(ROOT / save):07d}'}")
    print(f"first-batch picture {logs / 'first_batch.png'}")
    print(f"loss plot           {logs / 'loss_curve.png'}")
    print(f"metrics             {logs / 'metrics.jsonl'}   (TensorBoard: {logs / 'tensorboard'})")
    print(f"recorded scenes     {output / 'demonstrations/montage.png'}")
    results = evaluation_folder(config, output)
    if (ROOT / results / "report.md").exists():
        print(f"success table       {results / 'report.md'}")
        print(f"rollout videos      {results / 'montage.gif'} (single ones in {results / 'videos'})")
    times = {"install": config.install_seconds, **stages.seconds}
    print(f"time                {', '.join(f'{name} {seconds:.0f} s' for name, seconds in times.items())}")
    print(f"                    {sum(times.values()):.0f} s in total")
    more = training_command(config, output, config.train_iters * 5)
    print("\nTo go on, for example for five times as long:\n")
    print(f"OMP_NUM_THREADS=1 {shlex.join(more)}\n")
    if not after < before:
        raise SystemExit(f"quickstart failed: the loss did not fall ({before:.4f} -> {after:.4f})")


def is_fresh(made: Path, source: Path) -> bool:
    """Whether `made` exists and is not older than `source`."""
    return made.exists() and made.stat().st_mtime >= source.stat().st_mtime


def quickstart(config: QuickstartConfig) -> None:
    """All stages."""
    output, recipe = Path(config.output), RECIPES[config.model_name]
    own = output / recipe.folder
    demonstrations, save = output / "demonstrations", own / "checkpoints"
    (ROOT / own).mkdir(parents=True, exist_ok=True)
    half = config.train_iters // 2
    stages = Stages(total=7)
    with stages.stage("record"):
        flags = (
            f"--episodes-per-task {config.episodes_per_task} --image-size {config.image_size} --action-repeat {ACTION_REPEAT}"
        )
        recorder = python_command("tools/record_demonstrations.py", "--output", demonstrations, "--tasks", *config.tasks)
        run([*recorder, *flags.split(), "--num-processes", str(config.num_processes)])
    recording = ROOT / demonstrations / "meta/recording.json"
    data = ("--data-path", demonstrations)
    with stages.stage("tokenizer"):
        if is_fresh(ROOT / own / recipe.tokenizer, recording):
            print("   complete, reused")
        else:
            made = ("--output", own / recipe.tokenizer)
            run(python_command("tools/train_tokenizer.py", *data, *recipe.tokenizer_flags, *made))
    with stages.stage("statistics"):
        if is_fresh(ROOT / own / "statistics.json", recording):
            print("   complete, reused")
        else:
            model = ("--model-name", config.model_name, "--model-variant", "tiny")
            written = ("--output", own / "statistics.json", "--overwrite")
            run(python_command("tools/compute_norm_stats.py", *data, *model, *recipe.statistics, *written))
    with stages.stage("check data"):
        run(python_command("tools/check_dataset.py", *data, "--deep", *ACTION_FLAGS))
    command = training_command(config, output, config.train_iters)
    kill_file = ROOT / own / "losses_until_kill.json"
    with stages.stage("train, kill"):
        if saved_iteration(ROOT / save) >= half:
            print(f"   checkpoint of iteration {saved_iteration(ROOT / save)} is there, reused")
        else:
            kill_file.write_text(json.dumps(train_and_kill(command, ROOT / save, half)))
    with stages.stage("resume"):
        if saved_iteration(ROOT / save) >= config.train_iters:
            print("   training is complete, reused")
        else:
            run(command)
    with stages.stage("evaluate"):
        if (ROOT / evaluation_folder(config, output) / "report.json").exists():
            print("   complete, reused")
        else:
            run(evaluation_command(config, output))
    # JSON turns the iterations into text.
    until_kill = json.loads(kill_file.read_text()) if kill_file.exists() else {}
    report(config, output, stages, {int(iteration): loss for iteration, loss in until_kill.items()})


if __name__ == "__main__":
    parser = StrictParser(description=__doc__)
    add_section(parser, QuickstartConfig)
    quickstart(build_section(QuickstartConfig, parser.parse_flags(sys.argv[1:])))
