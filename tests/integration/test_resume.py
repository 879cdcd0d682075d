"""K05: a run that was stopped and resumed is the run that was not, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from training_fixtures import tiny_config

from megatron_vla.findings import CheckError
from megatron_vla.models.registry import model_family
from megatron_vla.training.checkpoint_folder import iteration_folder
from megatron_vla.training.distributed_checkpoint import PartReader
from megatron_vla.training.loop import train
from megatron_vla.training.session import training_session


def run(*flags: str) -> None:
    config = tiny_config(*flags)
    with training_session(config, model_family("pi05")) as session:
        train(session)


def losses(folder: Path) -> list[float]:
    lines = (folder / "logs" / "metrics.jsonl").read_text().splitlines()
    return [loss for line in lines for loss in json.loads(line)["losses"]]


def assert_bit_equal(first: Path, second: Path, iteration: int) -> None:
    one, two = (PartReader(iteration_folder(root, iteration) / "tensors") for root in (first, second))
    assert one.entries == two.entries
    assert all(torch.equal(one.read(name), two.read(name)) for name in one.entries)


@pytest.mark.parametrize(
    "extra",
    [
        (),
        ("--async-save", "--save-interval", "3"),
        ("--bf16", "--data-parallel-strategy", "megatron_ddp"),
        ("--data-parallel-strategy", "torch_ddp", "--num-workers", "2"),
        (
            *("--packing", "--pack-token-budget", "140", "--pack-pool-size", "8", "--mock-camera-counts", "1", "3"),
            *("--mock-min-prompt-length", "3", "--micro-batch-size", "10", "--global-batch-size", "20", "--num-workers", "1"),
        ),
    ],
    ids=["fp32", "async_save", "bf16", "torch_ddp", "packing"],
)
def test_K05_twenty_iterations_equal_ten_and_ten(tmp_path: Path, extra: tuple[str, ...]) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run("--save", str(whole), *extra)
    # Logging and micro-batches in between differ on purpose where they must not matter.
    run("--save", str(parts), "--exit-interval", "10", *extra)
    assert (parts / "latest_checkpointed_iteration.txt").read_text() == "10\n"
    run("--save", str(parts), "--load", str(parts), "--log-interval", "4", *extra)
    assert len(losses(whole)) == 20 and losses(parts) == losses(whole)
    assert_bit_equal(whole, parts, 20)


def test_K05_longer_run_continues_where_a_shorter_one_ended(tmp_path: Path) -> None:
    """With the decay given, --train-iters may grow: nothing else depends on it."""
    decay = ("--lr-decay-iters", "20")
    run("--save", str(tmp_path / "whole"), *decay)
    run("--save", str(tmp_path / "parts"), "--train-iters", "7", *decay)
    run("--save", str(tmp_path / "parts"), "--load", str(tmp_path / "parts"), *decay)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert_bit_equal(tmp_path / "whole", tmp_path / "parts", 20)


def test_K05_killed_between_checkpoints_repeats_the_lost_iterations(tmp_path: Path) -> None:
    run("--save", str(tmp_path / "whole"))
    killed = tmp_path / "killed"
    run("--save", str(killed), "--save-interval", "4", "--exit-interval", "11", "--log-interval", "1")
    # As if the process had been killed in iteration 12 without its last checkpoint.
    (killed / "latest_checkpointed_iteration.txt").write_text("8\n")
    assert len(losses(killed)) == 11
    run("--save", str(killed), "--load", str(killed), "--log-interval", "1")
    assert losses(killed) == losses(tmp_path / "whole")
    assert_bit_equal(tmp_path / "whole", killed, 20)


def test_first_run_may_load_from_its_empty_save_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--save", str(tmp_path), "--load", str(tmp_path), "--train-iters", "6", "--lr-warmup-iters", "1")
    run(*flags)
    assert "starting afresh" in capsys.readouterr().out
    run(*flags)
    printed = capsys.readouterr().out
    assert "resumed at iteration 6" in printed and "raise --train-iters" in printed and "saved" not in printed
    run(*flags, "--train-iters", "7")
    printed = capsys.readouterr().out
    assert "resume with changed flag --train-iters: 6 -> 7" in printed and "finished at iteration 7" in printed


def test_resume_with_another_seed_is_refused_before_any_process_group(tmp_path: Path) -> None:
    run("--save", str(tmp_path), "--train-iters", "5")
    with pytest.raises(CheckError, match=r"--seed: changed since .*: 1234 -> 5"):
        run("--save", str(tmp_path), "--load", str(tmp_path), "--seed", "5")
    # Nothing was joined, so the next run in this process starts without a complaint.
    run("--save", str(tmp_path), "--load", str(tmp_path), "--seed", "5", "--override-resume-flags")
