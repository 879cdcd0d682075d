"""Metrics window, log records, hints, and the files that they end in."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from PIL import Image
from training_fixtures import tiny_config

from megatron_vla.training.logging import (
    HintFilter,
    Position,
    RunLogger,
    WindowTiming,
    data_wait_hint,
    progress_line,
    window_record,
)
from megatron_vla.training.metrics import MetricWindow, StepMetrics, StepRecord
from megatron_vla.training.plot import draw_loss_curve, smoothed, ticks
from tools.compare_loss import read_losses


def records(first: int, losses: list[float]) -> list[StepRecord]:
    return [StepRecord(first + i, loss, 100, 2.0 * loss, 1e-3, True, {"fraction": 0.5}) for i, loss in enumerate(losses)]


def record(first: int, losses: list[float], wait: float = 0.0) -> dict[str, object]:
    timing = WindowTiming(seconds=2.0, data_wait_seconds=wait, data_wait_rank=1, peak_memory_gib=3.0, samples=8 * len(losses))
    return window_record(records(first, losses), timing, Position(consumed_samples=64, epoch=1.5, remaining_iters=6))


def test_window_reads_exactly_what_was_appended() -> None:
    window = MetricWindow()
    for step in range(3):
        loss = torch.tensor(1.0 / (step + 3), dtype=torch.float64)
        window.append(
            step + 1, 0.1 * step, StepMetrics(loss, torch.tensor(7.0), loss * 2, torch.tensor(step != 2), {"a": loss * 3})
        )
    assert len(window) == 3
    read = window.read()
    assert [r.iteration for r in read] == [1, 2, 3] and len(window) == 0 and window.read() == []
    assert [r.loss for r in read] == [1 / 3, 1 / 4, 1 / 5]  # fp64 all the way: the curve is exact
    assert [r.is_finite for r in read] == [True, True, False]
    assert read[1].num_valid == 7 and read[1].extra == {"a": 0.75}


def test_record_holds_means_rates_and_every_step() -> None:
    result = record(11, [1.0, 3.0], wait=0.5)
    assert result["loss"] == 2.0 and result["losses"] == [1.0, 3.0] and result["iterations"] == [11, 12]
    assert result["samples_per_s"] == 8.0 and result["step_ms"] == 1000.0 and result["eta_seconds"] == 6.0
    assert result["data_wait_ms"] == 250.0 and result["data_wait_share"] == 0.25 and result["fraction"] == 0.5
    line = progress_line(result, 20)
    for part in ("12/20", "loss 2.0", "8.0 samples/s", "data wait 250 ms", "peak 3.00 GiB", "epoch 1.5", "ETA 0:00:06"):
        assert part in line
    assert "data workers" not in line
    assert "| data workers 1.25 GiB |" in progress_line({**result, "data_worker_memory_gib": 1.25}, 20)


def test_V08_hint_comes_once_until_its_advice_changes() -> None:
    config, filter_ = tiny_config(), HintFilter()
    decode = {**record(1, [1.0], wait=0.5), "data_decode_ms": 9.0, "data_read_ms": 1.0}
    hints = [data_wait_hint({**decode, "data_wait_share": 0.3 + n / 1000}, config) for n in range(70)]
    said = [n for n, hint in enumerate(hints) if filter_.passes(hint)]
    assert said == [1, 51]  # not while workers start; the changing share alone is no news
    assert not filter_.passes(None)
    assert filter_.passes(data_wait_hint({**decode, "data_read_ms": 20.0}, config))


def test_V08_hint_names_the_stage_and_the_flags() -> None:
    config = tiny_config()
    assert data_wait_hint(record(1, [1.0], wait=0.2), config) is None
    advice = {
        "read": "local disk",
        "decode": "--data-access decode_once",
        "transform": "--augmentation-device gpu",
        "copy": "--prefetch-factor",
    }
    config = tiny_config("--augmentation", "openpi_torch")
    for stage, flag in advice.items():
        times = {f"data_{name}_ms": 40.0 if name == stage else 3.0 for name in advice}
        hint = data_wait_hint({**record(1, [1.0], wait=0.21), **times}, config)
        assert hint is not None
        for part in ("rank 1", f"mostly {stage} at 40.0 ms", "--num-workers (now 0)", "--prefetch-factor", flag):
            assert part in hint


def test_resume_cuts_what_a_killed_run_wrote_beyond_the_checkpoint(tmp_path: Path) -> None:
    config = tiny_config("--log-dir", str(tmp_path))
    logger = RunLogger(config, 0)
    for first in (1, 3, 5):
        logger.window(record(first, [0.1 * first, 0.2]))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 8, "los')
    resumed = RunLogger(config, 4)
    resumed.window(record(5, [9.0, 9.5]))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["iterations"] for line in lines] == [[1, 2], [3, 4], [5, 6]]
    assert lines[2]["losses"] == [9.0, 9.5]
    assert resumed._iterations == [1, 2, 3, 4, 5, 6]


def test_curve_is_drawn(tmp_path: Path) -> None:
    assert smoothed([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]
    assert ticks(0.03, 3.0, True) == pytest.approx([0.05, 0.1, 0.2, 0.5, 1.0, 2.0])
    assert ticks(1, 4000, False) == pytest.approx([1000, 2000, 3000, 4000])
    assert ticks(-0.1, 0.4, False) == pytest.approx([-0.1, 0.0, 0.1, 0.2, 0.3, 0.4])
    path = tmp_path / "curve.png"
    draw_loss_curve(path, [1, 2, 3, 4], [4.0, 2.0, math.nan, 1.0])
    image = Image.open(path)
    assert image.size == (900, 480) and len(image.getcolors(1 << 20) or []) >= 4
    draw_loss_curve(tmp_path / "none.png", [1], [math.nan])
    assert not (tmp_path / "none.png").exists()
    draw_loss_curve(tmp_path / "below.png", [1, 2], [0.5, -0.5])
    draw_loss_curve(tmp_path / "flat.png", [7], [1.0])
    assert Image.open(tmp_path / "below.png").size == Image.open(tmp_path / "flat.png").size == (900, 480)


def test_tensorboard_and_offline_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = tiny_config("--log-dir", str(tmp_path), "--tensorboard", "--wandb-project", "vla")
    logger = RunLogger(config, 0)
    logger.window(record(1, [1.25]))
    logger.evaluation(1, {"success": 0.75, "success/reach-v3": 0.5})
    logger.window(record(2, [1.0]))
    logger.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.25), (2, 1.0)]
    assert [(e.step, e.value) for e in events.Scalars("evaluation/success/reach-v3")] == [(1, 0.5)]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[1] == {
        "iteration": 1,
        "iterations": [],
        "losses": [],
        "evaluation": {"success": 0.75, "success/reach-v3": 0.5},
    }
    # Those who read losses read on, and a resume from before the evaluated checkpoint cuts its evaluation, too.
    assert read_losses(str(tmp_path)) == {1: 1.25, 2: 1.0}
    again = RunLogger(tiny_config("--log-dir", str(tmp_path)), 1)
    assert again._losses == [1.25] and len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    RunLogger(tiny_config("--log-dir", str(tmp_path)), 0)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert list((tmp_path / "wandb").glob("offline-run-*"))


def test_tensorboard_without_a_folder_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"--tensorboard needs a folder: give --log-dir or --save"):
        RunLogger(tiny_config("--tensorboard"), 0)
