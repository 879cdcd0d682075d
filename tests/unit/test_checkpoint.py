"""Checkpoints: atomic under a kill at any moment, strict, self-contained; in the background or not."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from training_fixtures import build_run, config_saving_to, take_steps

from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.config.run import from_dict
from megatron_vla.findings import CheckError
from megatron_vla.parallel.groups import ParallelGroups, initialize, shut_down
from megatron_vla.training import checkpoint_saving
from megatron_vla.training.checkpoint import load_checkpoint, load_weights
from megatron_vla.training.checkpoint_folder import POINTER, find_latest, iteration_folder, iterations_in, open_folder
from megatron_vla.training.checkpoint_saving import CheckpointSaver, save_checkpoint
from megatron_vla.training.distributed_checkpoint import PartReader, write_parts
from megatron_vla.training.loop import TrainingRun, train
from megatron_vla.training.tensor_file import read_header, write_tensors
from megatron_vla.training.tensor_parts import Piece, StoredTensor


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


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every stored tensor of a checkpoint folder, whole."""
    reader = PartReader(folder / "tensors")
    return {name: reader.read(name) for name in reader.entries}


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace (or delete, with None) stored tensors, and record the new sizes, as a faulty tool would."""
    tensors = {n: t for n, t in {**all_tensors(folder), **change}.items() if t is not None}
    shutil.rmtree(folder / "tensors")
    parts = {n: StoredTensor(n, tuple(t.shape), t.dtype, (Piece((0,) * t.dim(), t),)) for n, t in tensors.items()}
    write_parts(folder / "tensors", parts, None)
    state_file = folder / "state.json"
    state = json.loads(state_file.read_text())
    for path in (folder / "tensors").iterdir():
        state["files"][f"tensors/{path.name}"] = path.stat().st_size
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
    assert {p.name for p in folder.path.iterdir()} == {"tensors", "rng.safetensors", "config.json", "state.json"}
    assert from_dict(folder.config()) == saved.config
    assert folder.state["consumed_samples"] == 4 and folder.state["order_hash"] == saved.supply.order_hash
    stored = PartReader(folder.path / "tensors").entries
    names = saved.state.module.state_dict().keys()
    live = [n for n, p in saved.state.module.named_parameters() if p.requires_grad]
    decayed = [p.name for p in saved.state.optimizer.parameters if p.exp_avg is None]
    expected = {f"model.{n}" for n in names} | {f"ema.{n}" for n in (*live, *decayed)}
    assert stored.keys() == expected | {f"{kind}.{n}" for kind in ("exp_avg", "exp_avg_sq") for n in live}


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


@pytest.mark.parametrize("in_background", [False, True])
def test_kill_at_any_moment_leaves_a_valid_checkpoint(saved: TrainingRun, tmp_path: Path, in_background: bool) -> None:
    """The process ends at the k-th flush of a save, for every k: what the pointer names is complete each time."""
    take_steps(saved, 1)
    config = config_saving_to(tmp_path, *(("--async-save",) if in_background else ()))
    expected = PartReader(iteration_folder(tmp_path, 1) / "tensors").entries
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
            saver = CheckpointSaver(config, saved.groups, saved.supply)
            saver.save(saved.state)
            saver.finish()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found, _ = find_latest(tmp_path)
        assert found is not None, f"nothing to resume from after a kill at flush {kill_at}"
        outcomes.append(found.iteration)
        assert PartReader(found.path / "tensors").entries == expected
        if os.waitstatus_to_exitcode(status) == 0:
            break
    assert outcomes[0] == 1 and outcomes[-1] == 2 and outcomes == sorted(outcomes) and len(outcomes) > 8
    assert not list(tmp_path.glob("*.incomplete")), "leftovers of killed saves were not cleaned"


def full_disk(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


FULL_DISK = r"iteration 2 .*No space left.*iter_0000001 is intact.*--keep-last"


def test_full_disk_is_an_error_and_the_old_checkpoint_stays(
    saved: TrainingRun, tmp_path: Path, groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_steps(saved, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(RuntimeError, match=FULL_DISK):
            save_checkpoint(saved.state, saved.config, groups, saved.supply)
    assert iterations_in(tmp_path) == [1] and not list(tmp_path.glob("*.incomplete"))
    found, _ = find_latest(tmp_path)
    assert found is not None and found.iteration == 1


def test_background_save_holds_the_moment_of_the_save(saved: TrainingRun, tmp_path: Path, groups: ParallelGroups) -> None:
    """Training goes on while the writer is held up; the stored tensors are those of the iteration that it names."""
    saver = CheckpointSaver(config_saving_to(tmp_path, "--async-save"), groups, saved.supply)
    take_steps(saved, 1)
    gate = threading.Event()
    honest = checkpoint_saving.write_parts

    def held_up(*arguments: Any) -> None:
        gate.wait()
        honest(*arguments)

    with mock.patch.object(checkpoint_saving, "write_parts", held_up):
        (line,) = saver.save(saved.state)
        assert "in the background" in line
        before = {n: t.clone() for n, t in saved.state.module.state_dict().items()}
        moments = {n: t.clone() for n, t in saved.state.optimizer.state_tensors().items()}
        take_steps(saved, 2)
        assert saver.poll() == [] and (tmp_path / POINTER).read_text() == "1\n", "nothing is claimed before it is written"
        gate.set()
        (line,) = saver.finish()
    assert "iter_0000002" in line and (tmp_path / POINTER).read_text() == "2\n" and saver.poll() == []
    stored = all_tensors(iteration_folder(tmp_path, 2))
    assert all(torch.equal(stored[f"model.{n}"], t) for n, t in before.items())
    assert all(torch.equal(stored[n], t) for n, t in moments.items())
    assert any(not torch.equal(before[n], t) for n, t in saved.state.module.state_dict().items())
    # The next one waits for nothing, uses the host memory again, and holds the new values.
    saver.save(saved.state)
    saver.finish()
    stored = all_tensors(iteration_folder(tmp_path, 4))
    assert all(torch.equal(stored[f"model.{n}"], t) for n, t in saved.state.module.state_dict().items())


def test_next_save_waits_for_the_one_in_the_background(saved: TrainingRun, tmp_path: Path, groups: ParallelGroups) -> None:
    saver = CheckpointSaver(config_saving_to(tmp_path, "--async-save"), groups, saved.supply)
    gate, order = threading.Event(), []
    honest = checkpoint_saving.write_parts

    def noted(*arguments: Any) -> None:
        order.append("start")
        gate.wait(timeout=120)
        honest(*arguments)
        order.append("end")

    with mock.patch.object(checkpoint_saving, "write_parts", noted):
        for _ in range(2):
            take_steps(saved, 1)
            threading.Timer(0.3, gate.set).start()
            saver.save(saved.state)
        saver.finish()
    assert order == ["start", "end", "start", "end"] and iterations_in(tmp_path) == [1, 2, 3]


def test_failed_background_write_is_an_error_at_the_next_step(
    saved: TrainingRun, tmp_path: Path, groups: ParallelGroups
) -> None:
    saver = CheckpointSaver(config_saving_to(tmp_path, "--async-save"), groups, saved.supply)
    take_steps(saved, 1)
    with mock.patch.object(os, "fsync", full_disk):
        saver.save(saved.state)
        assert saver._thread is not None
        saver._thread.join()
    with pytest.raises(RuntimeError, match=FULL_DISK):
        saver.poll()
    assert iterations_in(tmp_path) == [1] and not list(tmp_path.glob("*.incomplete"))
    # Once reported it is over: a caller that goes on can save again.
    assert saver.poll() == []
    saver.save(saved.state)
    saver.finish()
    assert iterations_in(tmp_path) == [1, 2]


def test_failed_background_write_ends_the_training_loop(
    tmp_path: Path, groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--async-save", "--save-interval", "1", "--log-interval", "1")
    run = build_run(config_saving_to(tmp_path, *flags), groups)
    honest = checkpoint_saving.CheckpointSaver._seal

    def full(self: CheckpointSaver, temporary: Path, snapshot: checkpoint_saving.Snapshot) -> None:
        if snapshot.iteration == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        honest(self, temporary, snapshot)

    monkeypatch.setattr(checkpoint_saving.CheckpointSaver, "_seal", full)
    with pytest.raises(RuntimeError, match=r"iteration 3 .*iter_0000002 is intact"):
        train(run)
    assert run.state.iteration in (3, 4) and iterations_in(tmp_path) == [1, 2]


def test_save_folder_that_hosts_do_not_share_is_an_error(
    saved: TrainingRun, tmp_path: Path, groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = checkpoint_saving.write_parts

    def on_another_disk(folder: Path, *arguments: Any) -> None:
        honest(folder, *arguments)
        (folder / "__0_0.distcp").unlink()

    monkeypatch.setattr(checkpoint_saving, "write_parts", on_another_disk)
    monkeypatch.setattr(checkpoint_saving, "SHARED_FOLDER_SECONDS", 0.3)
    take_steps(saved, 1)
    with pytest.raises(RuntimeError, match=r"ranks \[0\] are not visible.*shared by all hosts.*iter_0000001 is intact"):
        save_checkpoint(saved.state, saved.config, groups, saved.supply)


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
    path = iteration_folder(tmp_path, 2) / "tensors" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])
    found, remarks = find_latest(tmp_path)
    assert found is not None and found.iteration == 1
    assert "iter_0000002" in remarks[0] and "tensors/__0_0.distcp has" in remarks[0]
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
    kind = "ema" if averaged else "model"
    names = sorted(f"{kind}.{p.name}" for p in saved.state.optimizer.parameters)
    missing, misshapen, renamed = names[0], names[-1], f"{kind}.renamed.weight"
    rewrite(folder, {missing: None, renamed: torch.zeros(2), misshapen: torch.zeros(2, 3, 5)})
    before = {name: tensor.clone() for name, tensor in saved.state.module.state_dict().items()}
    take_steps(saved, 1)
    trained = {name: tensor.clone() for name, tensor in saved.state.module.state_dict().items()}
    assert any(not torch.equal(before[n], trained[n]) for n in before)
    with pytest.raises(CheckError) as caught:
        load_weights(open_folder(folder), saved.state.module, averaged=averaged)
    text = str(caught.value)
    assert "3 problem(s)" in text
    for part in (f"{missing} is missing", f"{renamed} is not in the model", f"{misshapen} has shape (2, 3, 5)"):
        assert part in text
    assert all(torch.equal(trained[n], t) for n, t in saved.state.module.state_dict().items()), "nothing may be loaded"


def test_missing_optimizer_moment_is_an_error(saved: TrainingRun, tmp_path: Path, groups: ParallelGroups) -> None:
    name = next(n for n in saved.state.optimizer.state_tensors() if n.startswith("exp_avg_sq."))
    rewrite(iteration_folder(tmp_path, 1), {name: None})
    with pytest.raises(CheckError, match=f"{name} is missing"):
        load_checkpoint(open_folder(iteration_folder(tmp_path, 1)), saved.state, groups)


def test_bf16_run_resumes_its_fp32_main_parameters(tmp_path: Path, groups: ParallelGroups) -> None:
    run = build_run(config_saving_to(tmp_path, "--bf16"), groups)
    take_steps(run, 2)
    save_checkpoint(run.state, run.config, groups, run.supply)
    stored = PartReader(iteration_folder(tmp_path, 2) / "tensors").entries
    mains = [n for n in stored if n.startswith("main.")]
    lowered = {p.name for p in run.state.optimizer.parameters if p.parameter.dtype == torch.bfloat16}
    assert {n.removeprefix("main.") for n in mains} == lowered
    again = build_run(config_saving_to(tmp_path, "--bf16"), groups)
    take_steps(again, 1)
    load_checkpoint(open_folder(iteration_folder(tmp_path, 2)), again.state, groups)
    for mine, theirs in zip(run.state.optimizer.parameters, again.state.optimizer.parameters, strict=True):
        assert torch.equal(mine.main, theirs.main) and torch.equal(mine.parameter, theirs.parameter)
    assert take_steps(run, 2) == take_steps(again, 2)


def test_change_of_precision_keeps_the_best_stored_values(tmp_path: Path, groups: ParallelGroups) -> None:
    """bf16 -> fp32: the weights are the fp32 main parameters. fp32 -> bf16: the main parameters are the fp32 weights."""
    low = build_run(config_saving_to(tmp_path / "low", "--bf16"), groups)
    take_steps(low, 2)
    save_checkpoint(low.state, low.config, groups, low.supply)
    high = build_run(config_saving_to(tmp_path / "high"), groups)
    load_checkpoint(open_folder(iteration_folder(tmp_path / "low", 2)), high.state, groups)
    mains = {p.name: p.main for p in low.state.optimizer.parameters}
    assert all(torch.equal(p.parameter, mains[p.name]) for p in high.state.optimizer.parameters)
    save_checkpoint(high.state, high.config, groups, high.supply)
    again = build_run(config_saving_to(tmp_path / "low", "--bf16"), groups)
    lines = load_checkpoint(open_folder(iteration_folder(tmp_path / "high", 2)), again.state, groups)
    for mine, theirs in zip(low.state.optimizer.parameters, again.state.optimizer.parameters, strict=True):
        assert torch.equal(mine.main, theirs.main) and torch.equal(mine.parameter, theirs.parameter)
    assert not lines[0].endswith("max |difference| 0"), "the rounding is said"


def test_K03_averaged_weights_load_with_frozen_ones(saved: TrainingRun, tmp_path: Path, groups: ParallelGroups) -> None:
    other = build_run(config_saving_to(tmp_path, "--seed", "3"), groups)
    load_weights(open_folder(iteration_folder(tmp_path, 1)), other.state.module, averaged=True)
    assert saved.state.average is not None
    averages = saved.state.average.tensors()
    for name, parameter in other.state.module.named_parameters():
        expected = averages.get(name, dict(saved.state.module.named_parameters())[name])
        assert torch.equal(parameter, expected), name


def test_single_file_checkpoint_of_an_older_version_is_refused_with_a_way_out(
    saved: TrainingRun, tmp_path: Path, groups: ParallelGroups
) -> None:
    folder = open_folder(iteration_folder(tmp_path, 1))
    shutil.rmtree(folder.path / "tensors")
    with pytest.raises(ValueError, match="--pretrained-checkpoint"):
        load_checkpoint(folder, saved.state, groups)
