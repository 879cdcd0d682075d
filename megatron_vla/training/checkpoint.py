"""Save and load: weights, optimizer, EMA, schedule position, random states, configuration, preprocessing.

A checkpoint is layout-free (tensors keyed by parameter name, whatever the number of ranks), self-contained (preprocessing,
statistics, tokenizer and camera map travel with it) and loaded strictly: every tensor that the model has, and no other.

    model.safetensors      weights in the model's dtype, each stored once
    optimizer.safetensors  exp_avg.NAME, exp_avg_sq.NAME, and main.NAME where the fp32 main parameter is not the weight itself
    ema.safetensors        averaged weights, complete: can be loaded in place of model.safetensors
    rng.safetensors        generator states per rank
    config.json            all flags            state.json   iteration, consumed samples, schedule, versions, file sizes
    preprocessor/          preprocessing.json, statistics.json, tokenizer.model
"""

from __future__ import annotations

import dataclasses
import errno
import json
import platform
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_vla.config.run import RunConfig
from megatron_vla.findings import CheckError, Finding, error
from megatron_vla.parallel.groups import ParallelGroups
from megatron_vla.training import checkpoint_folder, random_state
from megatron_vla.training.checkpoint_folder import CheckpointFolder
from megatron_vla.training.ema import ParameterAverage
from megatron_vla.training.optimizer import AdamW
from megatron_vla.training.schedule import Schedule
from megatron_vla.training.tensor_file import TensorEntry, TensorReader, read_header, write_tensors
from megatron_vla.version import __version__

FORMAT = 1
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
EMA_FILE = "ema.safetensors"
RNG_FILE = "rng.safetensors"


@dataclass
class TrainState:
    """What a checkpoint holds of a run in progress. `module` is the bare model (its names are the stored names)."""

    module: nn.Module
    optimizer: AdamW
    average: ParameterAverage | None
    schedule: Schedule
    iteration: int = 0
    consumed_samples: int = 0


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """State-dict name -> tensor; tied tensors appear once, under their first name."""
    tensors: dict[str, Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in module.state_dict().items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        tensors[name] = tensor
    return tensors


def _versions() -> dict[str, str]:
    return {
        "megatron_vla": __version__,
        "megatron_core": version("megatron-core"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _state_json(state: TrainState, config: RunConfig, world_size: int, order_hash: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "iteration": state.iteration,
        "consumed_samples": state.consumed_samples,
        "optimizer_step": state.optimizer.param_groups[0]["step"],
        "learning_rate_of_next_step": state.schedule.learning_rate(state.consumed_samples),
        "schedule": dataclasses.asdict(state.schedule),
        "global_batch_size": config.global_batch_size(world_size),
        "world_size": world_size,
        "order_hash": order_hash,
        "has_average": state.average is not None,
        "versions": _versions(),
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _write_folder(
    root: Path, state: TrainState, config: RunConfig, groups: ParallelGroups, supply: Any, random_states: dict[str, Tensor]
) -> Path:
    """Rank 0's part of a save: everything up to and including the pointer."""
    temporary = checkpoint_folder.start_temporary(root, state.iteration)
    try:
        weights = model_tensors(state.module)
        write_tensors(temporary / MODEL_FILE, weights)
        write_tensors(temporary / OPTIMIZER_FILE, state.optimizer.state_tensors())
        if state.average is not None:
            write_tensors(temporary / EMA_FILE, {**weights, **state.average.tensors()})
        write_tensors(temporary / RNG_FILE, random_states)
        checkpoint_folder.write_text(temporary / checkpoint_folder.CONFIG_FILE, json.dumps(config.to_dict(), indent=1))
        if supply.preprocessor is not None:
            folder = temporary / checkpoint_folder.PREPROCESSOR_FOLDER
            folder.mkdir()
            supply.preprocessor.save(folder)
        content = _state_json(state, config, groups.world_size, supply.order_hash)
        final = checkpoint_folder.seal(temporary, content)
    except BaseException:
        # A full disk must not stay full because of the half-written folder.
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    checkpoint_folder.point_to(root, state.iteration)
    checkpoint_folder.remove_old(root, config.checkpoint.keep_last, state.iteration)
    return final


def _save_error(root: Path, iteration: int, cause: OSError) -> str:
    advice = "check --save"
    if cause.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(root).free / 2**30 if root.exists() else 0.0
        advice = f"{free:.1f} GiB are free there: make room, use --keep-last, or --save elsewhere"
    intact, _ = checkpoint_folder.find_latest(root)
    last = f"the last checkpoint {intact.path} is intact" if intact else "there is no earlier checkpoint"
    return f"checkpoint of iteration {iteration} could not be written to {root}: {cause}; {last}; {advice}"


def save_checkpoint(state: TrainState, config: RunConfig, groups: ParallelGroups, supply: Any) -> Path:
    """Write SAVE/iter_N atomically from rank 0; every rank returns its path when it is durable.

    Raises RuntimeError on every rank, naming the cause and the last valid checkpoint, when the disk does not take it.
    """
    assert config.checkpoint.save is not None
    root = Path(config.checkpoint.save)
    gathered: list[Any] | None = [None] * groups.world_size if groups.is_main else None
    dist.gather_object(random_state.capture(groups.rank), gathered, dst=0, group=groups.host_group)
    outcome: list[str | None] = [None]
    if gathered is not None:
        random_states = {name: tensor for states in gathered for name, tensor in states.items()}
        try:
            _write_folder(root, state, config, groups, supply, random_states)
        except OSError as exception:
            outcome = [_save_error(root, state.iteration, exception)]
    # Doubles as the barrier: nobody trains on, or exits, before the checkpoint is there.
    dist.broadcast_object_list(outcome, src=0, group=groups.host_group)
    if outcome[0] is not None:
        raise RuntimeError(outcome[0])
    return checkpoint_folder.iteration_folder(root, state.iteration)


def tensor_findings(path: Path, stored: Mapping[str, TensorEntry], wanted: Mapping[str, Tensor]) -> list[Finding]:
    """Missing, unexpected and differently shaped tensors of one file, as errors."""
    fix = "load a checkpoint of this model, or set the model flags that it was trained with (its config.json)"
    findings = [error(str(path), f"tensor {name} is missing", fix) for name in wanted if name not in stored]
    findings += [error(str(path), f"tensor {name} is not in the model", fix) for name in stored if name not in wanted]
    for name, tensor in wanted.items():
        if name in stored and stored[name].shape != tuple(tensor.shape):
            findings.append(error(str(path), f"tensor {name} has shape {stored[name].shape}, not {tuple(tensor.shape)}", fix))
    return findings


def _optimizer_findings(path: Path, stored: Mapping[str, TensorEntry], optimizer: AdamW) -> list[Finding]:
    """As tensor_findings; main parameters may be absent or extra, since a change of precision makes or drops them."""
    moments = {name: tensor for name, tensor in optimizer.state_tensors().items() if not name.startswith("main.")}
    return tensor_findings(path, {n: e for n, e in stored.items() if not n.startswith("main.")}, moments)


def _copy_all(reader: TensorReader, targets: Mapping[str, Tensor]) -> float:
    """Copy by name; returns the largest difference between file and target afterwards (0 unless the dtypes differ)."""
    largest = torch.zeros((), dtype=torch.float64)
    for name, target in targets.items():
        source = reader.read(name)
        target.copy_(source)
        if target.numel() and target.dtype != source.dtype:
            largest = torch.maximum(largest, (target.cpu().double() - source.double()).abs().max())
    return float(largest)


@torch.no_grad()
def load_weights(folder: CheckpointFolder, module: nn.Module, *, averaged: bool = False) -> str:
    """Strictly load weights (or their EMA) into a model; returns the line to print.

    Raises CheckError with every missing, unexpected or misshapen tensor; nothing is loaded then.
    """
    path = folder.path / (EMA_FILE if averaged else MODEL_FILE)
    if not path.is_file():
        raise ValueError(f"{path} does not exist: the run had no --ema-decay; load its weights without EMA")
    targets = model_tensors(module)
    header = read_header(path)
    findings = tensor_findings(path, header, targets)
    if findings:
        raise CheckError(findings)
    with TensorReader(path) as reader:
        largest = _copy_all(reader, targets)
    return f"loaded {len(targets)}/{len(header)} tensors from {path}, max |difference| {largest:.3g}"


def _load_main(optimizer: AdamW, optimizer_reader: TensorReader, model_reader: TensorReader) -> None:
    """Main parameters from the file's main parameters, else from its weights (which were then the main parameters)."""
    for entry in optimizer.parameters:
        name = f"main.{entry.name}"
        if name in optimizer_reader.names:
            entry.main.copy_(optimizer_reader.read(name))
        elif entry.main.dtype != entry.parameter.dtype:
            entry.main.copy_(model_reader.read(entry.name))
        if entry.main.dtype != entry.parameter.dtype:
            entry.parameter.copy_(entry.main)


@torch.no_grad()
def load_checkpoint(folder: CheckpointFolder, state: TrainState, groups: ParallelGroups) -> list[str]:
    """Restore everything into `state`, on any number of ranks; returns lines to print.

    All files are compared with the model before anything is loaded: CheckError lists every difference.
    """
    _agree_on(folder, groups)
    optimizer_path, average_path = folder.path / OPTIMIZER_FILE, folder.path / EMA_FILE
    findings = tensor_findings(folder.path / MODEL_FILE, read_header(folder.path / MODEL_FILE), model_tensors(state.module))
    findings += _optimizer_findings(optimizer_path, read_header(optimizer_path), state.optimizer)
    if findings:
        raise CheckError(findings)
    lines = [load_weights(folder, state.module)]
    moments = {n: t for n, t in state.optimizer.state_tensors().items() if not n.startswith("main.")}
    with TensorReader(optimizer_path) as reader, TensorReader(folder.path / MODEL_FILE) as weights:
        _copy_all(reader, moments)
        _load_main(state.optimizer, reader, weights)
        lines.append(
            f"loaded {len(moments)}/{_count_moments(reader.names)} optimizer tensors, step {folder.state['optimizer_step']}"
        )
    state.optimizer.param_groups[0]["step"] = int(folder.state["optimizer_step"])
    if state.average is not None and average_path.is_file():
        averages = state.average.tensors()
        with TensorReader(average_path) as reader:
            _copy_all(reader, averages)
        lines.append(f"loaded {len(averages)}/{len(averages)} averaged tensors")
    elif state.average is not None:
        # Only reachable with --override-resume-flags: the change of --ema-decay was refused otherwise.
        state.average.restart()
        lines.append("the checkpoint has no averaged weights: the average starts from the loaded weights")
    with TensorReader(folder.path / RNG_FILE) as reader:
        found = random_state.restore({name: reader.read(name) for name in reader.names}, groups.rank)
    if not found:
        lines.append(
            f"rank {groups.rank} has no stored random state (the checkpoint is of {folder.state['world_size']} rank(s))"
        )
    state.iteration = folder.iteration
    state.consumed_samples = folder.consumed_samples
    lines.append(f"resumed at iteration {state.iteration}, {state.consumed_samples} samples consumed")
    return lines


def _count_moments(names: Iterable[str]) -> int:
    return sum(not name.startswith("main.") for name in names)


def _agree_on(folder: CheckpointFolder, groups: ParallelGroups) -> None:
    """All ranks must have found the same checkpoint; a lagging network file system shows here and not as a wrong model."""
    iterations: list[Any] = [None] * groups.world_size
    dist.all_gather_object(iterations, folder.iteration, group=groups.host_group)
    if len(set(iterations)) > 1:
        raise RuntimeError(f"ranks found different checkpoints in --load: iterations {iterations}; use --load-iteration")
