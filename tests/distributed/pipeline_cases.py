"""What one rank of a pipeline test does: fixed steps of a tiny model that is open in every branch, and what came of them."""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import save_file
from sharded_cases import without_shards
from torch import Tensor
from training_fixtures import build_run, tiny_config

from megatron_vla.config.run import RunConfig
from megatron_vla.findings import CheckError
from megatron_vla.models.common.initialization import initialize_parameters, normal
from megatron_vla.models.pi05.build import build_module
from megatron_vla.models.registry import model_family
from megatron_vla.optimizations.apply import apply_optimizations
from megatron_vla.parallel.data_parallel import gradient_of
from megatron_vla.parallel.groups import ParallelGroups, initialize, shut_down, world_size_from_environment
from megatron_vla.parallel.parameter_shard import shard_of
from megatron_vla.training.loop import TrainingRun, train
from megatron_vla.training.nonfinite import NonFiniteError


@dataclass
class Result:
    """Per step: losses, counts, norms, metrics. Of the first step: gradients by name (of the loss's sum), of fsdp2 whole ones.

    cut_dims: along which dimension tensor-parallel ranks cut a tensor. place: (tp, pp, dp) ranks.
    """

    losses: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    extra: list[dict[str, float]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    cut_dims: dict[str, int] = field(default_factory=dict)
    place: tuple[int, int, int] = (0, 0, 0)


def pipeline_config(*extra: str) -> RunConfig:
    """Four layers, prompts of one length, no EMA."""
    return tiny_config("--num-layers", "4", "--prompt-padding", "max", "--max-prompt-length", "12", *extra)


def build_open_run(config: RunConfig, groups: ParallelGroups) -> TrainingRun:
    """A run whose parameters are all drawn from N(0, 0.2): released initial values close whole branches."""
    family = model_family(config.model.model_name)
    honest = family.build

    def build(*arguments: Any) -> torch.nn.Module:
        module = honest(*arguments)
        initialize_parameters(module, lambda name: normal(0.2), seed=7)
        return apply_optimizations(module, config.optimization, family, lambda line: None)

    object.__setattr__(family, "build", build)
    try:
        return build_run(config, groups)
    finally:
        object.__setattr__(family, "build", honest)


def take_steps(rank: int, flags: list[str], num_steps: int) -> Result:
    """`num_steps` optimizer steps in the layout of `flags`."""
    return take_steps_of(pipeline_config(*flags), num_steps)


def take_steps_of(config: RunConfig, num_steps: int) -> Result:
    """`num_steps` optimizer steps of a run from open first values."""
    groups = initialize(config.parallel, quiet=True)
    run = build_open_run(config, groups)
    result = Result(place=(groups.tensor_model_parallel_rank, groups.pipeline_model_parallel_rank, groups.data_parallel_rank))
    module = run.state.module
    dims = {name: shard_of(p).dim for name, p in module.named_parameters()}
    result.cut_dims = {name: dim for name, dim in dims.items() if dim is not None}
    batches = run.supply.iterator(0, groups.data_parallel_rank, groups.data_parallel_size, num_steps, False)
    optimizer = run.state.optimizer
    honest = optimizer.step

    def record(*arguments: Any) -> None:
        # Before the update, which scales gradients in place.
        if not result.gradients:
            result.gradients = {n: without_shards(gradient_of(p)) for n, p in module.named_parameters() if p.requires_grad}
        honest(*arguments)

    optimizer.step = record  # type: ignore[method-assign]
    for _ in range(num_steps):
        metrics = run.runner.step(batches, run.state.schedule.learning_rate(run.state.consumed_samples))
        run.state.consumed_samples += config.global_batch_size(world_size_from_environment())
        result.losses.append(float(metrics.loss))
        result.counts.append(int(metrics.num_valid))
        result.norms.append(float(metrics.gradient_norm))
        result.extra.append({name: float(value) for name, value in metrics.extra.items()})
    result.parameters = {n: without_shards(p.detach()) for n, p in module.named_parameters()}
    shut_down()
    return result


def train_with_a_fault(rank: int, flags: list[str], layer: str) -> str:
    """The finite check's message after a weight of `layer` became infinite."""
    config = pipeline_config(*flags, "--log-interval", "1")
    groups = initialize(config.parallel, quiet=True)
    run = build_open_run(config, groups)
    name = f"{layer}.suffix.mlp.gate_proj.weight"
    for found, parameter in run.state.module.named_parameters():
        if found == name:
            parameter.detach()[0, 0] = float("inf")
    try:
        train(run)
    except NonFiniteError as problem:
        return str(problem)
    finally:
        shut_down()
    return "no error"


def read_unequal_prompts(rank: int, flags: list[str]) -> str:
    """What a stage says to a second micro-batch with one prompt slot less."""
    config = pipeline_config(*flags)
    groups = initialize(config.parallel, quiet=True)
    run = build_open_run(config, groups)
    batches = list(run.supply.iterator(0, groups.data_parallel_rank, groups.data_parallel_size, 1, False))
    shorter = {"tokens_BL": batches[1].tokens_BL[:, 1:], "token_is_valid_BL": batches[1].token_is_valid_BL[:, 1:]}
    batches[1] = dataclasses.replace(batches[1], **shorter)
    try:
        # Alone, not in a step: the other stage would wait for this one, until a session's failure watch ends it.
        sources, _ = run.runner.schedule._sources(iter(batches), len(batches))
        list(sources[0])
    except ValueError as problem:
        return str(problem)
    finally:
        shut_down()
    return "no error"


def load_released(rank: int, flags: list[str]) -> tuple[bool, str]:
    """(whether this stage's parameters came from the file, what a file without one tensor of stage 0 gives)."""
    config = pipeline_config(*flags, "--fp64")
    groups = initialize(config.parallel, quiet=True)
    family = model_family("pi05")
    source = build_module(config.family).double()
    initialize_parameters(source, lambda name: normal(0.2), seed=3)
    weights = {name: p.detach().contiguous() for name, p in source.named_parameters()}
    stage = family.build(config, groups)
    with tempfile.TemporaryDirectory() as folder:
        save_file(weights, f"{folder}/model.safetensors")
        family.converter.load(folder, stage, (), lambda line: None)
        loaded = all(torch.equal(p, weights[name]) for name, p in stage.named_parameters())
        del weights["layers.0.prefix.input_norm.weight"]
        save_file(weights, f"{folder}/model.safetensors")
        try:
            family.converter.load(folder, stage, (), lambda line: None)
            problem = "no error"
        except CheckError as error:
            problem = str(error)
    shut_down()
    return loaded, problem
