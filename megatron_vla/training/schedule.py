"""Learning rate as a pure function of consumed samples.

Counting samples and not scheduler calls makes the curve the same for any number of ranks and micro-batches at one global batch
size, and needs no state in a checkpoint. Warm-up and cosine follow openpi's schedule; `lerobot_cosine` follows LeRobot's, whose
phase counts from zero and whose lengths shrink when training is shorter than the decay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_vla.config.training import OptimizerConfig


@dataclass(frozen=True)
class Schedule:
    """Learning-rate curve; lengths in iterations of `global_batch_size` samples."""

    style: str
    peak_lr: float
    min_lr: float
    warmup_iters: int
    decay_iters: int
    global_batch_size: int

    def learning_rate(self, consumed_samples: int) -> float:
        """Rate of the optimizer step that starts after `consumed_samples` samples (0 for the first step)."""
        warmup_samples = self.warmup_iters * self.global_batch_size
        decay_samples = self.decay_iters * self.global_batch_size
        if consumed_samples < warmup_samples:
            # The first step already moves: the ramp starts at peak / (warm-up + 1), as in openpi, optax and LeRobot.
            first = self.peak_lr / (self.warmup_iters + 1)
            return first + (self.peak_lr - first) * (consumed_samples / warmup_samples)
        if self.style == "constant":
            return self.peak_lr
        start = 0 if self.style == "lerobot_cosine" else warmup_samples
        length = decay_samples - start
        phase = min(1.0, (consumed_samples - start) / length) if length > 0 else 1.0
        return self.min_lr + (self.peak_lr - self.min_lr) * 0.5 * (1.0 + math.cos(math.pi * phase))


def build_schedule(optimizer: OptimizerConfig, train_iters: int, global_batch_size: int) -> Schedule:
    """Schedule of one run. `lerobot_cosine` rescales warm-up and decay when `train_iters` is below the decay."""
    warmup_iters = optimizer.lr_warmup_iters
    decay_iters = optimizer.lr_decay_iters or train_iters
    if optimizer.lr_decay_style == "lerobot_cosine" and train_iters < decay_iters:
        warmup_iters = int(warmup_iters * (train_iters / decay_iters))
        decay_iters = train_iters
    return Schedule(
        style=optimizer.lr_decay_style,
        peak_lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        warmup_iters=warmup_iters,
        decay_iters=decay_iters,
        global_batch_size=global_batch_size,
    )
