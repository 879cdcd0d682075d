"""Training checkpoints become released single files (weights or EMA) and files become models again, in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_fixtures import build_run, config_saving_to, take_steps

from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.models.pi05.build import build_module
from megatron_vla.models.pi05.convert import CONVERTER
from megatron_vla.parallel.groups import initialize, shut_down
from megatron_vla.training.checkpoint import load_weights
from megatron_vla.training.checkpoint_folder import iteration_folder, open_folder
from megatron_vla.training.checkpoint_saving import save_checkpoint
from megatron_vla.training.loop import TrainingRun
from tools import convert_checkpoint


def trained(folder: Path, *flags: str) -> TrainingRun:
    """A run with a checkpoint of iteration 2; its process group is gone, as it is for a conversion."""
    groups = initialize(ParallelConfig(), quiet=True)
    run = build_run(config_saving_to(folder, *flags), groups)
    take_steps(run, 2)
    save_checkpoint(run.state, run.config, groups, run.supply)
    shut_down()
    return run


def quiet(line: str) -> None:
    del line


@pytest.mark.parametrize("averaged", [False, True], ids=["weights", "ema"])
@pytest.mark.parametrize("layout", ["openpi", "lerobot", "native"])
def test_K04_training_checkpoint_to_files_and_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str, averaged: bool
) -> None:
    run = trained(tmp_path / "run", "--bf16")
    source, output = iteration_folder(tmp_path / "run", 2), tmp_path / "out"
    words = ["--input", str(source), "--to", layout, "--output", str(output), *(["--averaged"] if averaged else [])]
    assert convert_checkpoint.main(words) == 0, capsys.readouterr().err
    assert "forward pass on a fixed input: finite" in capsys.readouterr().out
    # The independent way to the expected values: the live run.
    expected = {n: p.detach() for n, p in run.state.module.named_parameters()}
    assert run.state.average is not None
    expected |= run.state.average.tensors() if averaged else {}
    again = build_module(run.config.family)
    CONVERTER.load(output, again, report=quiet)
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, expected[name].to(parameter.dtype)), name
    stored = load_file(output / "model.safetensors")
    if layout == "native":
        assert {n: t.dtype for n, t in stored.items()} == {n: t.dtype for n, t in expected.items()}
        assert all(torch.equal(stored[n], expected[n]) for n in expected)
        # Files back into our own layout: nothing is lost on the way through a released one.
        CONVERTER.to_released(output, "lerobot", tmp_path / "lerobot", report=quiet)
        CONVERTER.to_native(tmp_path / "lerobot", run.config.family, tmp_path / "back", report=quiet)
        back = load_file(tmp_path / "back" / "model.safetensors")
        assert back.keys() == stored.keys() and all(torch.equal(back[n], stored[n]) for n in stored)
    else:
        assert all(name.startswith("model.") for name in stored) == (layout == "lerobot")


def test_averages_of_a_run_without_ema_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups = initialize(ParallelConfig(), quiet=True)
    run = build_run(config_saving_to(tmp_path / "none"), groups)
    run.state.average = None
    save_checkpoint(run.state, run.config, groups, run.supply)
    shut_down()
    words = ["--input", str(iteration_folder(tmp_path / "none", 0)), "--averaged", "--output", str(tmp_path / "out")]
    assert convert_checkpoint.main(words) == 1
    assert "--ema-decay" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--ema-decay"):
        load_weights(open_folder(iteration_folder(tmp_path / "none", 0)), run.state.module, averaged=True)


def test_training_checkpoint_starts_a_new_run(tmp_path: Path) -> None:
    """--pretrained-checkpoint SAVE/iter_N, checked by headers alone before the start."""
    run = trained(tmp_path / "run")
    source = iteration_folder(tmp_path / "run", 2)
    assert CONVERTER.check_file(source, run.config.family) == []
    lines: list[str] = []
    model = build_module(run.config.family)
    CONVERTER.load(source, model, report=lines.append)
    weights = dict(run.state.module.named_parameters())
    assert lines[0].startswith(f"loaded {len(weights)}/{len(weights)} tensors from {source}")
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
