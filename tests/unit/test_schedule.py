"""Learning-rate curves against the community implementations, and their independence of the number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_vla.config.training import OptimizerConfig
from megatron_vla.training.schedule import build_schedule

GOLDEN = Path(__file__).parents[1] / "golden" / "pi05_schedule"


def config(style: str) -> OptimizerConfig:
    return OptimizerConfig(lr=2.5e-5, min_lr=2.5e-6, lr_warmup_iters=1000, lr_decay_iters=30000, lr_decay_style=style)  # type: ignore[arg-type]


def test_openpi_curve() -> None:
    points = json.loads((GOLDEN / "lr_schedule_openpi.json").read_text())["lr_at_step"]
    schedule = build_schedule(config("cosine"), train_iters=30000, global_batch_size=32)
    for step, expected in points:
        # The reference evaluates in fp32: one part in 1e5 at the foot of the ramp.
        assert schedule.learning_rate(step * 32) == pytest.approx(expected, rel=2e-5), step
    assert len(points) > 10


@pytest.mark.parametrize("train_iters", [30000, 3000])
def test_lerobot_curve(train_iters: int) -> None:
    points = json.loads((GOLDEN / "lr_schedule_lerobot.json").read_text())["by_num_training_steps"][str(train_iters)]
    schedule = build_schedule(config("lerobot_cosine"), train_iters, global_batch_size=8)
    for step, expected in points:
        assert schedule.learning_rate(step * 8) == pytest.approx(expected, rel=1e-12), step


def test_constant_after_warm_up_and_no_warm_up() -> None:
    constant = build_schedule(config("constant"), 30000, 4)
    assert constant.learning_rate(1000 * 4) == constant.learning_rate(10**9) == 2.5e-5
    none = build_schedule(OptimizerConfig(lr=1.0, min_lr=0.0, lr_warmup_iters=0, lr_decay_iters=10), 10, 4)
    assert none.learning_rate(0) == 1.0
    assert none.learning_rate(5 * 4) == pytest.approx(0.5)


def test_decay_follows_train_iters_when_not_given() -> None:
    schedule = build_schedule(OptimizerConfig(lr=1.0, min_lr=0.1, lr_warmup_iters=2), 50, 4)
    assert schedule.decay_iters == 50 and schedule.learning_rate(50 * 4) == pytest.approx(0.1)


def test_P02_curve_counts_samples_and_not_ranks() -> None:
    """At one global batch size nothing about ranks or micro-batches can enter: the curve is a function of samples alone."""
    small = build_schedule(config("cosine"), 30000, 8)
    large = build_schedule(config("cosine"), 30000, 64)
    for step in (0, 1, 17, 999, 1000, 12345, 29999):
        assert small.learning_rate(step * 8) == large.learning_rate(step * 64)
