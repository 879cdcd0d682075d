"""Progress line, metrics.jsonl, TensorBoard and Weights & Biases, all fed from one record per log interval (rank 0 only).

An evaluation beside the run gives a record of its own, without steps: {"iteration": of the checkpoint, "iterations": [],
"losses": [], "evaluation": {...}}.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_vla.config.run import RunConfig
from megatron_vla.kernels import FALLBACKS
from megatron_vla.training.metrics import StepRecord
from megatron_vla.training.plot import draw_loss_curve
from megatron_vla.whole_file import replace_text

METRICS_FILE = "metrics.jsonl"
CURVE_FILE = "loss_curve.png"
DATA_WAIT_HINT_SHARE = 0.10
HINT_REPEAT_WINDOWS = 50
DATA_STAGES = ("read", "decode", "transform", "copy")


@dataclass(frozen=True)
class WindowTiming:
    """Host-side numbers of one log window. Data wait, its stages and memory are those of the worst rank, which is named.

    data_wait_p50_ms, data_wait_p99_ms: wait for one micro-batch, of every rank. data: what DataSupply.metrics returned.
    """

    seconds: float
    data_wait_seconds: float
    data_wait_rank: int
    peak_memory_gib: float
    samples: int
    data_wait_p50_ms: tuple[float, ...] = ()
    data_wait_p99_ms: tuple[float, ...] = ()
    data: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Position:
    """Where the run stands after a window."""

    consumed_samples: int
    epoch: float
    remaining_iters: int


def print_once(*lines: object) -> None:
    """Print on rank 0; works before any process group exists."""
    if os.environ.get("RANK", "0") == "0":
        for line in lines:
            print(line, flush=True)


def log_folder(config: RunConfig) -> Path | None:
    """--log-dir, else SAVE/logs, else nothing is written."""
    if config.logging.log_dir is not None:
        return Path(config.logging.log_dir)
    return Path(config.checkpoint.save) / "logs" if config.checkpoint.save is not None else None


def _duration(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


def window_record(steps: list[StepRecord], timing: WindowTiming, position: Position) -> dict[str, Any]:
    """One JSON-ready object for a window; per-iteration lists keep the curve exact at any interval."""
    count = len(steps)
    step_seconds = timing.seconds / count
    extra_names = sorted(steps[-1].extra)
    return {
        "iteration": steps[-1].iteration,
        "consumed_samples": position.consumed_samples,
        "epoch": round(position.epoch, 6),
        "loss": math.fsum(s.loss for s in steps) / count,
        "gradient_norm": math.fsum(s.gradient_norm for s in steps) / count,
        "learning_rate": steps[-1].learning_rate,
        "samples_per_s": timing.samples / timing.seconds,
        "step_ms": step_seconds * 1e3,
        "data_wait_ms": timing.data_wait_seconds / count * 1e3,
        "data_wait_share": timing.data_wait_seconds / timing.seconds,
        "data_wait_rank": timing.data_wait_rank,
        "data_wait_p50_ms_by_rank": list(timing.data_wait_p50_ms),
        "data_wait_p99_ms_by_rank": list(timing.data_wait_p99_ms),
        **timing.data,
        "peak_memory_gib": timing.peak_memory_gib,
        "eta_seconds": step_seconds * position.remaining_iters,
        "iterations": [s.iteration for s in steps],
        "losses": [s.loss for s in steps],
        "gradient_norms": [s.gradient_norm for s in steps],
        "learning_rates": [s.learning_rate for s in steps],
        "num_valid": [s.num_valid for s in steps],
        **{name: math.fsum(s.extra[name] for s in steps) / count for name in extra_names},
    }


def progress_line(record: Mapping[str, Any], train_iters: int) -> str:
    """The line for people."""
    return " | ".join(
        (
            f"iteration {record['iteration']:>7}/{train_iters}",
            f"loss {record['loss']:.6f}",
            f"grad norm {record['gradient_norm']:.4f}",
            f"lr {record['learning_rate']:.3e}",
            f"{record['samples_per_s']:.1f} samples/s",
            f"step {record['step_ms']:.0f} ms",
            f"data wait {record['data_wait_ms']:.0f} ms",
            *_worker_memory(record),
            *_pack_shares(record),
            f"peak {record['peak_memory_gib']:.2f} GiB",
            f"samples {record['consumed_samples']}",
            f"epoch {record['epoch']:.3f}",
            f"ETA {_duration(record['eta_seconds'])}",
        )
    )


def _worker_memory(record: Mapping[str, Any]) -> Iterator[str]:
    if record.get("data_worker_memory_gib"):
        yield f"data workers {record['data_worker_memory_gib']:.2f} GiB"


def _pack_shares(record: Mapping[str, Any]) -> Iterator[str]:
    if "samples_per_pack" in record:
        yield f"{record['samples_per_pack']:.1f} samples/pack, {record['pack_useful_token_share']:.1%} useful tokens"


def data_wait_hint(record: Mapping[str, Any], config: RunConfig) -> str | None:
    """What to try when training waits for data, or None below 10 % of the window."""
    share = record["data_wait_share"]
    if share <= DATA_WAIT_HINT_SHARE:
        return None
    # Worker milliseconds per sample, as the data supply measured them: the largest one is the stage to work on.
    stages = {stage: record[f"data_{stage}_ms"] for stage in DATA_STAGES if f"data_{stage}_ms" in record}
    slowest = max(stages, key=lambda name: stages[name]) if stages else None
    stage = f", mostly {slowest} at {stages[slowest]:.1f} ms per sample" if slowest else ""
    return (
        f"hint: {share:.0%} of this window was waiting for data (rank {record['data_wait_rank']}{stage}): "
        f"{_stage_advice(slowest, config)}raise --num-workers (now {config.data.num_workers}) or --prefetch-factor (now "
        f"{config.data.prefetch_factor}); --mock-data shows the speed without it"
    )


def _stage_advice(stage: str | None, config: RunConfig) -> str:
    """The flag that helps one stage, ahead of the general ones."""
    data = config.data
    if stage == "read":
        return f"copy the dataset to a local disk, raise --video-decoder-cache-size (now {data.video_decoder_cache_size}), "
    if stage == "decode" and data.data_access == "random":
        return f"use --data-access decode_once, try another --video-backend (now {data.video_backend}), "
    if stage == "decode":
        # Each shard is decoded by one worker: fewer shards than workers leave some idle.
        few = data.prefetch_shards is not None and data.prefetch_shards < max(1, data.num_workers)
        raised = f"raise --prefetch-shards (now {data.prefetch_shards}), " if few else ""
        return f"{raised}try another --video-backend (now {data.video_backend}), "
    if stage == "transform" and data.augmentation != "none" and data.augmentation_device == "cpu":
        return "use --augmentation-device gpu, "
    return ""


class HintFilter:
    """Says a hint once, and again only when its advice changes or after a while: every line would drown the log.

    The first window is passed over: workers start in it, and everybody waits for them.
    """

    def __init__(self) -> None:
        self._windows = 0
        self._said: str | None = None
        self._said_at = 0

    def passes(self, hint: str | None) -> bool:
        """Called once per window."""
        self._windows += 1
        if hint is None or self._windows == 1:
            return False
        advice = hint.partition("): ")[2]
        if advice == self._said and self._windows < self._said_at + HINT_REPEAT_WINDOWS:
            return False
        self._said, self._said_at = advice, self._windows
        return True


class RunLogger:
    """Writers of rank 0; on other ranks construct none. `resumed_iteration` cuts what a killed run wrote beyond it."""

    def __init__(self, config: RunConfig, resumed_iteration: int):
        self.config = config
        self.folder = log_folder(config)
        self._iterations: list[int] = []
        self._losses: list[float] = []
        self._last_iteration = resumed_iteration
        self._hints = HintFilter()
        self._terminal = sys.stdout.isatty()
        self._live_width = 0
        self._tensorboard: Any = None
        self._wandb: Any = None
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._keep_up_to(resumed_iteration)
        if config.logging.tensorboard:
            self._tensorboard = _tensorboard_writer(self.folder, resumed_iteration)
        if config.logging.wandb_project is not None:
            self._wandb = _wandb_run(config, self.folder)

    def _keep_up_to(self, iteration: int) -> None:
        """Rewrite metrics.jsonl without iterations that will be done again, and take its curve over."""
        assert self.folder is not None
        path = self.folder / METRICS_FILE
        if not path.is_file():
            return
        kept: list[str] = []
        for line in path.read_text().splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue  # a killed process may leave half a line at the end
            if record["iteration"] <= iteration:
                kept.append(line)
                self._iterations += record["iterations"]
                self._losses += record["losses"]
        replace_text(path, "".join(f"{line}\n" for line in kept))

    def message(self, text: str) -> None:
        """A line that stays."""
        self._clear_live_line()
        print(text, flush=True)

    def live(self, text: str) -> None:
        """A line that the next one replaces; only on a terminal."""
        if self._terminal:
            self._clear_live_line()
            print(text, end="", flush=True)
            self._live_width = len(text)

    def _clear_live_line(self) -> None:
        if self._live_width:
            print("\r" + " " * self._live_width + "\r", end="")
            self._live_width = 0

    def window(self, record: dict[str, Any]) -> None:
        """Write one window everywhere."""
        self._iterations += record["iterations"]
        self._losses += record["losses"]
        self.message(progress_line(record, self.config.training.train_iters))
        for line in FALLBACKS.news():
            self.message(line)
        hint = data_wait_hint(record, self.config)
        if self._hints.passes(hint):
            self.message(str(hint))
        self._last_iteration = record["iteration"]
        self._append(record)
        scalars = {k: v for k, v in record.items() if isinstance(v, (int, float)) and k != "iteration"}
        if self._tensorboard is not None:
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, record["iteration"])
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(scalars, step=record["iteration"])

    def evaluation(self, iteration: int, results: Mapping[str, float]) -> None:
        """Write what an evaluation of the checkpoint of `iteration` found; training may be far beyond it."""
        # Empty lists: whoever reads the losses of all records finds none here.
        self._append({"iteration": iteration, "iterations": [], "losses": [], "evaluation": dict(results)})
        named = {f"evaluation/{name}": value for name, value in results.items()}
        if self._tensorboard is not None:
            for name, value in named.items():
                self._tensorboard.add_scalar(name, value, iteration)
            self._tensorboard.flush()
        if self._wandb is not None:
            # Its steps only go forward, so these have an axis of their own.
            self._wandb.log({**named, "evaluation/iteration": iteration}, step=self._last_iteration)

    def _append(self, record: Mapping[str, Any]) -> None:
        if self.folder is not None:
            with open(self.folder / METRICS_FILE, "a") as file:
                file.write(json.dumps(record) + "\n")

    def draw_curve(self) -> Path | None:
        """Write the loss curve; returns its path when there is a log folder and something to draw."""
        if self.folder is None or not self._losses:
            return None
        path = self.folder / CURVE_FILE
        draw_loss_curve(path, self._iterations, self._losses)
        return path

    def close(self) -> None:
        """Flush and end the external writers."""
        self._clear_live_line()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _tensorboard_writer(folder: Path | None, resumed_iteration: int) -> Any:
    if folder is None:
        raise ValueError("--tensorboard needs a folder: give --log-dir or --save")
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as exception:
        raise ValueError("--tensorboard: the package is not installed; pip install tensorboard") from exception
    # purge_step hides what a killed run wrote beyond the checkpoint.
    return SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_iteration + 1 if resumed_iteration else None)


def _wandb_run(config: RunConfig, folder: Path | None) -> Any:
    try:
        import wandb
    except ImportError as exception:
        raise ValueError("--wandb-project: the package is not installed; pip install wandb") from exception
    run = wandb.init(
        project=config.logging.wandb_project,
        name=config.logging.wandb_name,
        dir=str(folder) if folder is not None else None,
        config=config.to_dict(),
    )
    run.define_metric("evaluation/*", step_metric="evaluation/iteration")
    return run
