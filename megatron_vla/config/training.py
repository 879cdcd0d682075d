"""Batch, optimizer, schedule, checkpoints and logging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Training: batch sizes, length, seed"""

    micro_batch_size: int = 1
    """Samples per rank and forward pass."""

    global_batch_size: int | None = None
    """Samples per optimizer step over all ranks and micro-batches. Not set: micro-batch size times data-parallel size."""

    train_iters: int = 0
    """Optimizer steps to train for, counted from the first one ever (resumes included)."""

    exit_interval: int | None = None
    """Save and exit at the first iteration divisible by this."""

    seed: int = 1234
    """Seed of weights, sample order, noise and flow time (each its own stream)."""

    check_for_nan_in_loss_and_grad: bool = True
    """Refuse the update and stop with the first non-finite module named when the loss or a gradient is not finite."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer: AdamW with fp32 main parameters"""

    lr: float = 2.5e-5
    """Peak learning rate."""

    min_lr: float = 2.5e-6
    """Learning rate at the end of the decay."""

    lr_warmup_iters: int = 1000
    """Iterations of linear warm-up (kept in samples: iterations times global batch size)."""

    lr_decay_iters: int | None = None
    """Iterations until --min-lr is reached. Not set: --train-iters."""

    lr_decay_style: Literal["cosine", "lerobot_cosine", "constant"] = "cosine"
    """cosine: phase starts after warm-up (openpi). lerobot_cosine: phase counts from 0 and short runs rescale. constant."""

    adam_beta1: float = 0.9
    """First-moment decay."""

    adam_beta2: float = 0.95
    """Second-moment decay."""

    adam_eps: float = 1e-8
    """Denominator term."""

    fused_adam: bool = True
    """On GPUs update all fp32 main parameters in one kernel: kernels/adamw, or torch's own where that was not built or
    does not take a parameter (printed).
    Off: one kernel per operation, as on CPU."""

    weight_decay: float = 1e-10
    """Decoupled weight decay on every parameter (openpi 1e-10, LeRobot 0.01)."""

    clip_grad: float = 1.0
    """Global gradient norm limit; 0 switches clipping off."""

    ema_decay: float | None = None
    """Keep an exponential moving average of the fp32 parameters with this decay. Not set: none."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints: where to save, what to load"""

    save: str | None = None
    """Folder for checkpoints (iter_0000100/ and latest_checkpointed_iteration.txt)."""

    load: str | None = None
    """Folder to resume from; the latest complete checkpoint is taken. May equal --save; an empty folder starts afresh."""

    load_iteration: int | None = None
    """Resume from this iteration instead of the latest."""

    save_interval: int | None = None
    """Iterations between checkpoints; one is always written at the end when --save is given."""

    keep_last: int | None = None
    """Keep only this many newest checkpoints. Not set: all."""

    async_save: bool = False
    """Copy a checkpoint to host memory and write it in the background while training goes on; the next save waits for it."""

    override_resume_flags: bool = False
    """Allow a resume with changed flags that alter mathematics or sample order (otherwise refused, with the difference)."""


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging: progress, metrics files, first-batch report"""

    log_interval: int = 10
    """Iterations between log lines; metrics are read from the device only then."""

    log_dir: str | None = None
    """Folder of metrics.jsonl, run.json (what the run was), plots and the first-batch report. Not set: SAVE/logs when --save is
    given, else nothing."""

    tensorboard: bool = False
    """Also write TensorBoard event files to LOG_DIR/tensorboard."""

    wandb_project: str | None = None
    """Also log to this Weights & Biases project (WANDB_MODE=offline works without a network)."""

    wandb_name: str | None = None
    """Run name in Weights & Biases."""

    first_batch_report: bool = True
    """Write and print what the model really sees in its first batch."""
