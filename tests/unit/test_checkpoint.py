"""Checkpoints: atomic under a kill at any moment, strict, self-contained, readable by the public format's own library."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from training_fixtures import build_run, config_saving_to, take_steps

from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.config.run import from_dict
from megatron_vla.findings import CheckError
from megatron_vla.parallel.groups import ParallelGroups, initialize, shut_down
from megatron_vla.training import checkpoint, random_state
from megatron_vla.training.checkpoint import load_checkpoint, load_weights, save_checkpoint
from megatron_vla.training.checkpoint_folder import POINTER, find_latest, iteration_folder, iterations_in, open_folder
from megatron_vla.training.loop import TrainingRun
from megatron_vla.training.tensor_file import TensorReader, read_header, write_tensors


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    yield initialize(ParallelConfig(), quiet=True)
    shut_down()


@pytest.fixture
def saved(tmp_path: Path, groups: ParallelGroups) -> TrainingRun:
    """A run with a checkpoint of iteration 1 in tmp_path."""
    run = build_run(config_saving_to(tmp_path), groups)
    take_steps(run, 1)
    save_checkpoint(run.state, run.config, groups, run.supply)
    return run


def rewrite(path: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace (or delete, with None) tensors of a file, and record its new size, as a faulty tool would."""
    tensors = safetensors.torch.load_file(path)
    for name, tensor in change.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    safetensors.torch.save_file(tensors, path)
    state_file = path.parent / "state.json"
    state = json.loads(state_file.read_text())
    state["files"][path.name] = path.stat().st_size
    state_file.write_text(json.dumps(state))


def test_tensor_file_is_read_by_the_public_library(tmp_path: Path) -> None:
    tensors = {
        "z": torch.randn(3, 4).t(),
        "half": torch.randn(5).to(torch.bfloat16),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False]),
    }
    write_tensors(tmp_path / "x.safetensors", tensors)
    theirs = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert theirs.keys() == tensors.keys()
    assert all(theirs[n].dtype == t.dtype and torch.equal(theirs[n], t) for n, t in tensors.items())
    assert read_header(tmp_path / "x.safetensors")["z"].shape == (4, 3)
    (tmp_path / "bad.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    with pytest.raises(ValueError, match=r"bad\.safetensors: damaged"):
        read_header(tmp_path / "bad.safetensors")


def test_K09_folder_is_self_contained(saved: TrainingRun, tmp_path: Path) -> None:
    folder = open_folder(iteration_folder(tmp_path, 1))
    names = {p.name for p in folder.path.iterdir()}
    assert names == {
        "model.safetensors", "optimizer.safetensors", "ema.safetensors", "rng.safetensors", "config.json", "state.json"
    }  # fmt: skip
    assert from_dict(folder.config()) == saved.config
    assert folder.state["consumed_samples"] == 4 and folder.state["order_hash"] == saved.supply.order_hash
    weights, average = read_header(folder.path / "model.safetensors"), read_header(folder.path / "ema.safetensors")
    assert weights.keys() == average.keys() == saved.state.module.state_dict().keys()


def test_everything_comes_back(saved: TrainingRun, tmp_path: Path, groups: ParallelGroups) -> None:
    torch.manual_seed(5)
    take_steps(saved, 2)
    save_checkpoint(saved.state, saved.config, groups, saved.supply)
    drawn = torch.rand(3)
    other = build_run(config_saving_to(tmp_path, "--seed", "99"), groups)
    found, remarks = find_latest(tmp_path)
    assert found is not None and found.iteration == 3 and not remarks
    lines = load_checkpoint(found, other.state, groups)
    assert torch.equal(torch.rand(3), drawn)
    total = len(saved.state.module.state_dict())
    assert lines[0].startswith(f"loaded {total}/{total} tensors") and lines[0].endswith("max |difference| 0")
    mine, theirs = saved.state, other.state
    assert (theirs.iteration, theirs.consumed_samples, theirs.optimizer.param_groups[0]["step"]) == (3, 12, 3)
    pairs = [
        (mine.module.state_dict(), theirs.module.state_dict()),
        (mine.optimizer.state_tensors(), theirs.optimizer.state_tensors()),
    ]
    assert mine.average is not None and theirs.average is not None
    pairs.append((mine.average.tensors(), theirs.average.tensors()))
    for before, after in pairs:
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_kill_at_any_moment_leaves_a_valid_checkpoint(saved: TrainingRun, tmp_path: Path) -> None:
    """The process ends at the k-th flush of a save, for every k: what the pointer names is complete each time."""
    take_steps(saved, 1)
    states = random_state.capture(0)
    outcomes = []
    for kill_at in range(1, 40):
        child = os.fork()
        if child == 0:
            count = 0
            flush = os.fsync

            def flush_or_die(descriptor: int) -> None:
                nonlocal count
                count += 1
                if count == kill_at:  # noqa: B023
                    os._exit(7)
                flush(descriptor)  # noqa: B023

            os.fsync = flush_or_die
            checkpoint._write_folder(tmp_path, saved.state, saved.config, saved.groups, saved.supply, states)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found, _ = find_latest(tmp_path)
        assert found is not None, f"nothing to resume from after a kill at flush {kill_at}"
        outcomes.append(found.iteration)
        with TensorReader(found.path / "optimizer.safetensors") as reader:
            assert len(reader.names) == len(saved.state.optimizer.state_tensors())
        if os.waitstatus_to_exitcode(status) == 0:
            break
    assert outcomes[0] == 1 and outcomes[-1] == 2 and outcomes == sorted(outcomes) and len(outcomes) > 8
    assert not list(tmp_path.glob("*.incomplete")), "leftovers of killed saves were not cleaned"


def test_full_disk_is_an_error_and_the_old_checkpoint_stays(
    saved: TrainingRun, tmp_path: Path, groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint.write_tensors

    def fail(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        if path.name == "optimizer.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, tensors)

    monkeypatch.setattr(checkpoint, "write_tensors", fail)
    take_steps(saved, 1)
    with pytest.raises(RuntimeError, match=r"iteration 2 .*No space left.*iter_0000001 is intact.*--keep-last"):
        save_checkpoint(saved.state, saved.config, groups, saved.supply)
    assert iterations_in(tmp_path) == [1] and not list(tmp_path.glob("*.incomplete"))
    found, _ = find_latest(tmp_path)
    assert found is not None and found.iteration == 1


def test_keep_last_and_saving_an_iteration_again(tmp_path: Path, groups: ParallelGroups) -> None:
    run = build_run(config_saving_to(tmp_path, "--keep-last", "2"), groups)
    for _ in range(3):
        take_steps(run, 1)
        save_checkpoint(run.state, run.config, groups, run.supply)
    assert iterations_in(tmp_path) == [2, 3]
    save_checkpoint(run.state, run.config, groups, run.supply)
    assert iterations_in(tmp_path) == [2, 3] and (tmp_path / POINTER).read_text() == "3\n"


def test_damaged_folder_is_skipped_and_said(saved: TrainingRun, tmp_path: Path, groups: ParallelGroups) -> None:
    take_steps(saved, 1)
    save_checkpoint(saved.state, saved.config, groups, saved.supply)
    path = iteration_folder(tmp_path, 2) / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    found, remarks = find_latest(tmp_path)
    assert found is not None and found.iteration == 1
    assert "iter_0000002" in remarks[0] and "optimizer.safetensors has" in remarks[0]
    with pytest.raises(ValueError, match="--load-iteration"):
        open_folder(iteration_folder(tmp_path, 2))


def test_pointer_wins_over_a_newer_folder(saved: TrainingRun, tmp_path: Path, groups: ParallelGroups) -> None:
    take_steps(saved, 1)
    save_checkpoint(saved.state, saved.config, groups, saved.supply)
    (tmp_path / POINTER).write_text("1\n")
    found, _ = find_latest(tmp_path)
    assert found is not None and found.iteration == 1


@pytest.mark.parametrize("averaged", [False, True])
def test_K01_missing_renamed_or_misshapen_tensors_are_all_listed(saved: TrainingRun, tmp_path: Path, averaged: bool) -> None:
    folder = iteration_folder(tmp_path, 1)
    names = sorted(saved.state.module.state_dict())
    missing, misshapen = names[0], names[-1]
    change = {missing: None, "renamed.weight": torch.zeros(2), misshapen: torch.zeros(2, 3, 5)}
    rewrite(folder / ("ema.safetensors" if averaged else "model.safetensors"), change)
    before = {name: tensor.clone() for name, tensor in saved.state.module.state_dict().items()}
    take_steps(saved, 1)
    trained = {name: tensor.clone() for name, tensor in saved.state.module.state_dict().items()}
    assert any(not torch.equal(before[n], trained[n]) for n in before)
    with pytest.raises(CheckError) as caught:
        load_weights(open_folder(folder), saved.state.module, averaged=averaged)
    text = str(caught.value)
    assert "3 problem(s)" in text
    for part in (f"{missing} is missing", "renamed.weight is not in the model", f"{misshapen} has shape (2, 3, 5)"):
        assert part in text
    assert all(torch.equal(trained[n], t) for n, t in saved.state.module.state_dict().items()), "nothing may be loaded"


def test_missing_optimizer_moment_is_an_error(saved: TrainingRun, tmp_path: Path, groups: ParallelGroups) -> None:
    name = next(n for n in saved.state.optimizer.state_tensors() if n.startswith("exp_avg_sq."))
    rewrite(iteration_folder(tmp_path, 1) / "optimizer.safetensors", {name: None})
    with pytest.raises(CheckError, match=f"{name} is missing"):
        load_checkpoint(open_folder(iteration_folder(tmp_path, 1)), saved.state, groups)


def test_bf16_run_resumes_its_fp32_main_parameters(tmp_path: Path, groups: ParallelGroups) -> None:
    run = build_run(config_saving_to(tmp_path, "--bf16"), groups)
    take_steps(run, 2)
    save_checkpoint(run.state, run.config, groups, run.supply)
    stored = read_header(iteration_folder(tmp_path, 2) / "optimizer.safetensors")
    assert any(n.startswith("main.") for n in stored)
    again = build_run(config_saving_to(tmp_path, "--bf16"), groups)
    take_steps(again, 1)
    load_checkpoint(open_folder(iteration_folder(tmp_path, 2)), again.state, groups)
    for mine, theirs in zip(run.state.optimizer.parameters, again.state.optimizer.parameters, strict=True):
        assert torch.equal(mine.main, theirs.main) and torch.equal(mine.parameter, theirs.parameter)
    assert take_steps(run, 2) == take_steps(again, 2)
