"""Cases of the data-parallel strategies: a few optimizer steps of a tiny Pi0.5, with everything that may differ sent back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from training_fixtures import build_run, tiny_config

from megatron_vla.parallel.data_parallel import wrap
from megatron_vla.parallel.groups import initialize, shut_down
from megatron_vla.parallel.unbuffered import UnbufferedDataParallel
from megatron_vla.training.loop import TrainingRun
from megatron_vla.training.nonfinite import examine
from megatron_vla.training.optimizer import AdamW
from megatron_vla.training.state_shard import StateShard


@dataclass(frozen=True)
class Trained:
    """Curves, and every state tensor put together from all ranks' shards, keyed KIND.NAME (plus weight.NAME)."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]
    owned_fraction: float
    """Share of the moments' elements that this rank holds."""


def shards_of(run: TrainingRun) -> Iterator[StateShard]:
    """Optimizer state and average of this rank."""
    yield from run.state.optimizer.state_shards()
    if run.state.average is not None:
        yield from run.state.average.state_shards()


def assembled(run: TrainingRun) -> tuple[dict[str, Tensor], float]:
    """Whole state tensors from all ranks' shards; fails when elements are missing or copies differ."""
    mine = [(s.kind, s.parameter_name, s.flat_range, s.local_shape, s.tensor.clone().view(-1)) for s in shards_of(run)]
    everybody: list[Any] = [None] * run.groups.world_size
    dist.all_gather_object(everybody, mine)
    state: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for kind, name, (start, stop), shape, tensor in (entry for rank in everybody for entry in rank):
        key = f"{kind}.{name}"
        whole = state.setdefault(key, torch.zeros(shape, dtype=tensor.dtype)).view(-1)
        known = filled.setdefault(key, torch.zeros(whole.numel(), dtype=torch.bool))
        overlap = known[start:stop]
        assert torch.equal(whole[start:stop][overlap], tensor[overlap]), f"ranks disagree on {key}"
        whole[start:stop] = tensor
        known[start:stop] = True
    assert all(bool(known.all()) for known in filled.values()), [k for k, known in filled.items() if not known.all()]
    held = sum(s.tensor.numel() for s in shards_of(run) if s.kind == "exp_avg")
    return state, held / sum(t.numel() for k, t in state.items() if k.startswith("exp_avg."))


def without_shards(tensor: Any) -> Tensor:
    """A copy of the whole tensor; of a sharded one, all ranks call this."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def weights(run: TrainingRun) -> dict[str, Tensor]:
    """The model's own parameters, whole."""
    run.runner.model.gather_parameters()
    return {f"weight.{name}": without_shards(p.detach()) for name, p in run.state.module.named_parameters()}


def steps(run: TrainingRun, count: int, world_size: int) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of `count` more optimizer steps."""
    groups, state = run.groups, run.state
    batches = run.supply.iterator(state.consumed_samples, groups.data_parallel_rank, groups.data_parallel_size, count, False)
    losses, norms = [], []
    for _ in range(count):
        metrics = run.runner.step(batches, state.schedule.learning_rate(state.consumed_samples))
        state.consumed_samples += run.config.global_batch_size(world_size)
        losses.append(float(metrics.loss))
        norms.append(float(metrics.gradient_norm))
    return losses, norms


@contextmanager
def running(flags: list[str]) -> Iterator[TrainingRun]:
    """A run on all ranks of the pool (or this process alone)."""
    config = tiny_config(*flags)
    groups = initialize(config.parallel, quiet=True)
    yield build_run(config, groups)
    shut_down()


def train(rank: int, flags: list[str], count: int) -> Trained:
    """`count` steps from random weights."""
    with running(flags) as run:
        losses, norms = steps(run, count, run.groups.world_size)
        state, fraction = assembled(run)
        return Trained(losses, norms, {**state, **weights(run)}, fraction)


def train_curves(rank: int, flags: list[str], count: int) -> tuple[list[float], list[float]]:
    """Losses and gradient norms alone."""
    with running(flags) as run:
        return steps(run, count, run.groups.world_size)


def train_with_a_resume(rank: int, flags: list[str], count: int, resume_after: int) -> Trained:
    """As `train`; after `resume_after` steps everything moves, shard by shard, into a run built from another seed."""
    with running(flags) as run:
        losses, norms = steps(run, resume_after, run.groups.world_size)
        other = build_run(tiny_config(*flags, "--seed", "99"), run.groups)
        other.supply = run.supply  # samples and noise follow from the seed as well
        saved = {(s.kind, s.parameter_name): s for s in shards_of(run)}
        for shard in shards_of(other):
            source = saved[shard.kind, shard.parameter_name]
            assert source.flat_range == shard.flat_range
            shard.tensor.copy_(source.tensor)
        live = {shard.parameter_name for shard in saved.values()}
        with torch.no_grad():
            for (name, target), source_parameter in zip(
                other.state.module.named_parameters(), run.state.module.parameters(), strict=True
            ):
                if name not in live:
                    target.copy_(source_parameter)
        other.state.optimizer.write_weights()
        other.runner.model.gather_parameters()
        other.state.optimizer.param_groups[0]["step"] = run.state.optimizer.param_groups[0]["step"]
        other.state.consumed_samples = run.state.consumed_samples
        more_losses, more_norms = steps(other, count - resume_after, other.groups.world_size)
        state, fraction = assembled(other)
        return Trained(losses + more_losses, norms + more_norms, {**state, **weights(other)}, fraction)


def train_with_a_bad_step(rank: int, flags: list[str], count: int) -> tuple[list[bool], bool]:
    """Step 2 meets a NaN on rank 1 alone; returns which steps were finite, and whether state stood still from then on."""
    with running(flags) as run:
        groups, finite, states = run.groups, [], []
        batches = run.supply.iterator(0, groups.data_parallel_rank, groups.data_parallel_size, count, False)

        def poisoned() -> Iterator[Any]:
            for number, batch in enumerate(batches):
                if number == run.runner.num_microbatches and rank == 1:
                    batch.actions_BTA[0, 0, 0] = float("nan")
                    batch.action_is_valid_BTA[:] = True
                yield batch

        source = poisoned()
        for _ in range(count):
            finite.append(bool(run.runner.step(source, 1e-3).is_finite))
            # The average goes on towards the parameters, which do not move.
            states.append({k: t for k, t in {**assembled(run)[0], **weights(run)}.items() if not k.startswith("ema.")})
        return finite, all(torch.equal(states[0][k], later[k]) for later in states[1:] for k in later)


def order_of_events(rank: int, flags: list[str]) -> list[str]:
    """What happens during the backward of the second step: `reduce` starts and `last gradient` (of the first parameter)."""
    from unittest import mock

    with running(flags) as run:
        steps(run, 1, run.groups.world_size)
        events: list[str] = []

        def noting(name: str) -> Any:
            honest = getattr(dist, name)

            def call(*arguments: Any, **options: Any) -> Any:
                tensor = arguments[0]
                if isinstance(tensor, Tensor) and tensor.numel() > 100:
                    events.append("reduce async" if options.get("async_op") else "reduce")
                return honest(*arguments, **options)

            return mock.patch.object(dist, name, call)

        honest_finish = run.runner.model.finish_gradients

        def finish() -> None:
            events.append("finish")
            honest_finish()

        run.runner.model.finish_gradients = finish  # type: ignore[method-assign]
        first = next(p for p in run.state.module.parameters() if p.requires_grad)
        first.register_hook(lambda gradient: events.append("last gradient"))
        from megatron.core.distributed import param_and_grad_buffer

        scatter = param_and_grad_buffer.dist_reduce_scatter_func

        def reduce_scatter(*arguments: Any, **options: Any) -> Any:
            events.append("reduce async" if options.get("async_op") else "reduce")
            return scatter(*arguments, **options)

        model: Any = run.runner.model
        if isinstance(model, UnbufferedDataParallel):
            start_next = model._start_next

            def start() -> None:
                events.append("reduce async")
                start_next()

            model._start_next = start  # type: ignore[method-assign]
        with noting("all_reduce"), mock.patch.object(param_and_grad_buffer, "dist_reduce_scatter_func", reduce_scatter):
            steps(run, 1, run.groups.world_size)
        return events


class ReadsFromOutside(torch.nn.Module):
    """Its last layer is never called: the parent reads the weight, as tied embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.second = torch.nn.Linear(64, 64)
        self.read = torch.nn.Linear(64, 64, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(values @ self.read.weight)))


def train_reading_a_weight_from_outside(rank: int, overlap: bool) -> list[float]:
    """Losses of a module whose buckets are one parameter each, without the rest of the project."""
    flags = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--ddp-bucket-size", "100"]
    config = tiny_config(*flags, *(["--overlap-param-gather"] if overlap else []))
    groups = initialize(config.parallel, quiet=True)
    torch.manual_seed(0)
    model = wrap(ReadsFromOutside(), config.parallel, groups)
    optimizer = AdamW(model.module.named_parameters(), config.optimizer, model.owned_part)
    losses = []
    for step in range(4):
        values = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        model.zero_gradients()
        loss = model.forward_module(values).square().sum()
        loss.backward()
        model.finish_gradients()
        optimizer.advance(1e-2)
        optimizer.step(optimizer.gradients(), torch.tensor(1.0))
        model.publish_parameters()
        losses.append(float(loss.detach()))
    shut_down()
    return losses


def reduce_what_ranks_reach_differently(rank: int) -> dict[str, list[float]]:
    """The first element of every layer's summed gradient, in two steps."""
    config = tiny_config("--no-gradient-buffers", "--overlap-grad-reduce", "--ddp-bucket-size", "1")
    groups = initialize(config.parallel, quiet=True)
    layers = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1, bias=False) for name in ("first", "second", "third")})
    model = wrap(layers, config.parallel, groups, num_microbatches=1)
    found: dict[str, list[float]] = {name: [] for name in layers}
    forwards, backwards = ["first", "second", "third"], ["third", "second", "first"]
    # Orders of this rank and factors of its gradients, which are 1, 10 and 100 otherwise.
    for order, factor in ((backwards if rank else forwards, rank + 1), (["second", "first"] if rank else forwards, 1)):
        model.zero_gradients()
        for name in order:
            scale = factor * 10.0 ** forwards.index(name)
            (layers[name].weight.sum() * scale).backward()
        model.finish_gradients()
        for name, layer in layers.items():
            found[name].append(float(layer.weight.grad))
    shut_down()
    return found


def search_for_a_nan_of_rank_1(rank: int, flags: list[str]) -> tuple[list[str], int]:
    """What the diagnosis finds on this rank, and how many reductions it has started."""
    with running(flags) as run:
        groups = run.groups
        steps(run, 1, groups.world_size)
        batch = next(run.supply.iterator(8, groups.data_parallel_rank, groups.data_parallel_size, 1, False))
        if rank == 1:
            batch.actions_BTA[0, 0, 0] = float("nan")
            batch.action_is_valid_BTA[:] = True
        model: Any = run.runner.model
        model.zero_gradients()
        found = examine(run.runner.schedule, run.runner.family.forward_step, batch)
        return found, model._num_started
