"""What a checkpoint holds, and how it is loaded: weights, optimizer, EMA, schedule position, random states, preprocessing.

A checkpoint is layout-free (tensors keyed by parameter name, under global shapes: distributed_checkpoint.py), self-contained
(preprocessing, statistics, tokenizer and camera map travel with it) and loaded strictly: every tensor that the model has, and
no other. checkpoint_saving.py writes it.

    tensors/               model.NAME (the model's dtype), exp_avg.NAME, exp_avg_sq.NAME, main.NAME where the fp32 main
                           parameter is not the weight itself, ema.NAME for what the optimizer touches (the rest is its own
                           average)
    rng.safetensors        generator states per rank
    config.json            all flags
    state.json             iteration, consumed samples, schedule, FP8 magnitudes, versions, file sizes
    preprocessor/          preprocessing.json, statistics.json, tokenizer.model
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_vla.findings import CheckError, Finding, error
from megatron_vla.optimizations.fp8_scaling import DelayedScaling
from megatron_vla.parallel.groups import ParallelGroups
from megatron_vla.training import random_state
from megatron_vla.training.checkpoint_folder import CheckpointFolder
from megatron_vla.training.distributed_checkpoint import TENSOR_FOLDER, PartReader, ReadRequest
from megatron_vla.training.ema import ParameterAverage
from megatron_vla.training.optimizer import AdamW, is_decay_only
from megatron_vla.training.schedule import Schedule
from megatron_vla.training.tensor_file import TensorReader
from megatron_vla.training.tensor_parts import StoredTensor, part_of_state, part_of_tensor

FORMAT = 2
RNG_FILE = "rng.safetensors"
MODEL, EMA = "model.", "ema."
MAIN_DTYPES = (torch.float32, torch.float64)
FIX = "load a checkpoint of this model, or set the model flags that it was trained with (its config.json)"


@dataclass
class TrainState:
    """What a checkpoint holds of a run in progress. `module` is the bare model (its names are the stored names).

    empty_slots: places for samples in the packs so far (--packing) that held none; samples of steps since the last log line are
    still counted here.
    """

    module: nn.Module
    optimizer: AdamW
    average: ParameterAverage | None
    schedule: Schedule
    fp8_scaling: DelayedScaling | None = None
    iteration: int = 0
    consumed_samples: int = 0
    empty_slots: int = 0

    @property
    def consumed_slots(self) -> int:
        """Samples that the steps so far had room for: what the learning rate goes by."""
        return self.consumed_samples + self.empty_slots


def model_parts(module: nn.Module) -> list[StoredTensor]:
    """What this rank holds of parameters and persistent buffers; tied ones appear once, under their first name."""
    parts: list[StoredTensor] = []
    seen: set[int] = set()
    # keep_vars: the parameters themselves, which know their shards.
    for name, tensor in module.state_dict(keep_vars=True).items():
        # megatron-core's linears announce an extra state, which is None.
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            parts.append(part_of_tensor(MODEL + name, tensor))
    return parts


@dataclass(frozen=True)
class Contents:
    """This rank's part of every tensor of a checkpoint."""

    weights: Sequence[StoredTensor]
    mains: Sequence[StoredTensor]
    moments: Sequence[StoredTensor]
    averages: Sequence[StoredTensor]

    def all(self) -> list[StoredTensor]:
        """Everything."""
        return [*self.weights, *self.mains, *self.moments, *self.averages]


def contents(state: TrainState) -> Contents:
    """The live tensors of a run, described without its layout."""
    parameters = dict(state.module.named_parameters())
    shards = []
    for shard in state.optimizer.state_shards():
        parameter = parameters[shard.parameter_name]
        # A main parameter in the weight's dtype is the weight itself.
        if shard.kind != "main" or shard.tensor.dtype != parameter.dtype:
            shards.append(part_of_state(shard, parameter))
    averages = () if state.average is None else state.average.state_shards()
    return Contents(
        weights=model_parts(state.module),
        mains=[s for s in shards if s.name.startswith("main.")],
        moments=[s for s in shards if not s.name.startswith("main.")],
        averages=[part_of_state(s, parameters[s.parameter_name]) for s in averages],
    )


def _findings(reader: PartReader, wanted: Sequence[StoredTensor]) -> list[Finding]:
    """Missing and differently shaped tensors, as errors."""
    findings = []
    for tensor in wanted:
        entry = reader.entries.get(tensor.name)
        if entry is None:
            findings.append(error(str(reader.folder), f"tensor {tensor.name} is missing", FIX))
        elif entry.shape != tensor.global_shape:
            what = f"tensor {tensor.name} has shape {entry.shape}, not {tensor.global_shape}"
            findings.append(error(str(reader.folder), what, FIX))
    return findings


def _unexpected(reader: PartReader, names: Collection[str], kinds: Collection[str]) -> list[Finding]:
    """Stored tensors of these kinds that no rank has a place for."""
    extra = [n for n in reader.entries if n.split(".", 1)[0] in kinds and n not in names]
    return [error(str(reader.folder), f"tensor {name} is not in the model", FIX) for name in extra]


def open_parts(folder: CheckpointFolder) -> PartReader:
    """The tensors of a checkpoint. Raises ValueError for the single-file layout of older checkpoints."""
    if not (folder.path / TENSOR_FOLDER).is_dir():
        raise ValueError(
            f"{folder.path}: has no {TENSOR_FOLDER}/ (format {folder.state.get('format')}, this version reads {FORMAT}): "
            "it cannot be resumed; start a new run from its weights with --pretrained-checkpoint"
        )
    return PartReader(folder.path / TENSOR_FOLDER)


def load_weights(folder: CheckpointFolder, module: nn.Module, *, averaged: bool = False) -> str:
    """Strictly load weights (or their EMA) into a model of this process; returns the line to print. Not collective.

    Raises CheckError with every missing, unexpected or misshapen tensor; nothing is loaded then.
    """
    if averaged and not folder.state["has_average"]:
        raise ValueError(f"{folder.path}: the run had no --ema-decay; load its weights without EMA")
    reader = open_parts(folder)
    wanted = model_parts(module)
    sources = [t.name for t in wanted]
    if averaged:
        trained = {n for n, p in module.named_parameters() if p.requires_grad or is_decay_only(p)}
        # Frozen weights and buffers are their own average and are stored once.
        sources = [ema if (ema := EMA + n) in reader.entries or n in trained else MODEL + n for n in map(_bare, sources)]
        wanted = [replace(t, name=s) for t, s in zip(wanted, sources, strict=True)]
    findings = _findings(reader, wanted)
    # The names of the weights tell which model it was, whichever of the two is loaded.
    findings += _unexpected(reader, {MODEL + _bare(s) for s in sources}, {"model"})
    if averaged:
        findings += _unexpected(reader, set(sources), {"ema"})
    if findings:
        raise CheckError(findings)
    largest = reader.load([ReadRequest(t.name, t) for t in wanted])
    return f"loaded {len(wanted)}/{len(wanted)} tensors from {reader.folder}, max |difference| {largest:.3g}"


def _bare(name: str) -> str:
    """Parameter name of a stored name."""
    return name.split(".", 1)[1]


def _gathered(mine: Any, groups: ParallelGroups) -> list[Any]:
    everyone: list[Any] = [None] * groups.world_size
    dist.all_gather_object(everyone, mine, group=groups.host_group)
    return everyone


def _requests(reader: PartReader, parts: Contents) -> list[ReadRequest]:
    """What to read where. A change of precision makes or drops fp32 main parameters: the best stored values are taken."""
    requests = [ReadRequest(t.name, t) for t in (*parts.moments, *parts.averages)]
    have_main = {_bare(t.name) for t in parts.mains}
    for tensor in parts.mains:
        # Without stored main parameters the weights were the main parameters.
        requests.append(ReadRequest(tensor.name if tensor.name in reader.entries else MODEL + _bare(tensor.name), tensor))
    for tensor in parts.weights:
        main = f"main.{_bare(tensor.name)}"
        use_main = main in reader.entries and _bare(tensor.name) not in have_main and tensor.dtype in MAIN_DTYPES
        requests.append(ReadRequest(main if use_main else tensor.name, tensor))
    return requests


@torch.no_grad()
def load_checkpoint(folder: CheckpointFolder, state: TrainState, groups: ParallelGroups) -> list[str]:
    """Restore everything into `state`, on any layout; returns lines to print. Collective.

    Names and shapes are compared with the whole model before anything is loaded: CheckError lists every difference, on
    every rank.
    """
    if len(set(iterations := _gathered(folder.iteration, groups))) > 1:
        # A lagging network file system shows here and not as a wrong model.
        raise RuntimeError(f"ranks found different checkpoints in --load: iterations {iterations}; use --load-iteration")
    reader = open_parts(folder)
    parts = contents(state)
    restart_average = state.average is not None and not folder.state["has_average"]
    if restart_average:
        parts = replace(parts, averages=())
    wanted = (*parts.weights, *parts.moments, *parts.averages)
    gathered = _gathered((_findings(reader, wanted), [t.name for t in wanted]), groups)
    names = {name for _, one in gathered for name in one}
    kinds = {"model", "exp_avg", "exp_avg_sq", *(("ema",) if state.average is not None else ())}
    findings = {str(f): f for found, _ in gathered for f in found}
    findings |= {str(f): f for f in _unexpected(reader, names, kinds)}
    if findings:
        raise CheckError(list(findings.values()))
    largest = max(_gathered(reader.load(_requests(reader, parts)), groups))
    state.optimizer.param_groups[0]["step"] = int(folder.state["optimizer_step"])
    count = {kind: sum(name.startswith(kind) for name in names) for kind in (MODEL, "exp_avg", EMA)}
    stored = {kind: sum(name.startswith(kind) for name in reader.entries) for kind in count}
    lines = [
        f"loaded {count[MODEL]}/{stored[MODEL]} tensors from {reader.folder}, max |difference| {largest:.3g}",
        f"loaded {count['exp_avg']}/{stored['exp_avg']} optimizer tensors, step {folder.state['optimizer_step']}",
    ]
    if state.average is not None and restart_average:
        # Only reachable with --override-resume-flags: the change of --ema-decay was refused otherwise.
        state.average.restart()
        lines.append("the checkpoint has no averaged weights: the average starts from the loaded weights")
    elif state.average is not None:
        lines.append(f"loaded {count[EMA]}/{stored[EMA]} averaged tensors")
    if state.fp8_scaling is not None:
        lines.append(state.fp8_scaling.load(folder.state.get("fp8_magnitudes") or {}))
    with TensorReader(folder.path / RNG_FILE) as random_states:
        found = random_state.restore({name: random_states.read(name) for name in random_states.names}, groups.rank)
    if not found:
        lines.append(
            f"rank {groups.rank} has no stored random state (the checkpoint is of {folder.state['world_size']} rank(s))"
        )
    state.iteration = folder.iteration
    state.consumed_samples = folder.consumed_samples
    state.empty_slots = int(folder.state.get("empty_slots", 0))
    lines.append(f"resumed at iteration {state.iteration}, {state.consumed_samples} samples consumed")
    return lines
