"""What one rank of a tensor-parallel test does: the split model beside the whole one, on the same weights and batch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pi05_fixtures import gradients, mean_loss, relative_difference, tiny_batch, tiny_config, tiny_model
from torch import Tensor, nn

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.config.run import parse_args
from megatron_vla.data.batch import Batch
from megatron_vla.models.pi05.build import build
from megatron_vla.models.pi05.config import Pi05Config
from megatron_vla.models.pi05.convert import CONVERTER
from megatron_vla.models.pi05.family import FAMILY
from megatron_vla.models.pi05.model import Pi05Model
from megatron_vla.optimizations.activation_checkpoint import apply as checkpoint_activations
from megatron_vla.parallel.groups import initialize, shut_down, world_size_from_environment
from megatron_vla.parallel.parameter_shard import is_tensor_parallel_partial, shard_of
from megatron_vla.parallel.partial_gradients import sum_gradients
from megatron_vla.parallel.tensor_parallel import TensorParallel

NUM_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One comparison. Token counts are odd by default, so that rows have to be appended."""

    sequence_parallel: bool = True
    dtype: torch.dtype = torch.float64
    num_samples: int = 3
    attention_backend: str = "sdpa"
    skip_dead_compute: bool = True
    checkpoint: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Pi05Config:
        """Nine patches per view, a vocabulary that no size divides."""
        odd = {"image_size": 42, "vocab_size": 67, "max_prompt_length": 7, "action_horizon": 5, "vision_num_attention_heads": 4}
        return tiny_config(**{**odd, **self.changes})

    @property
    def options(self) -> dict[str, Any]:
        """Options of build_module."""
        return {"attention_backend": self.attention_backend, "skip_dead_compute": self.skip_dead_compute}


@dataclass
class Difference:
    """Relative differences from the whole model. `unsummed`: largest one before partial gradients are summed."""

    loss: float
    gradients: dict[str, float]
    unsummed: float
    actions: float
    shapes: dict[str, tuple[int, ...]]
    partial: frozenset[str]


def odd_batch(config: Pi05Config, num_samples: int) -> Batch:
    """The two samples of `tiny_batch` and mirrored ones: absent views, short prompts, padding tokens."""
    first = tiny_batch(config)
    second = dataclasses.replace(
        first,
        images_BVCHW=first.images_BVCHW.flip(-1),
        camera_is_present_BV=first.camera_is_present_BV.flip(1),
        noise_BTA=first.noise_BTA.flip(1),
        time_B=first.time_B.flip(0) * 0.7,
    )
    names = {f.name for f in dataclasses.fields(Batch)}
    tensors = {n: torch.cat((getattr(first, n), getattr(second, n)))[:num_samples] for n in names}
    return Batch(**tensors)


def all_ranks(tensors: dict[str, Tensor], group: Any) -> list[dict[str, Tensor]]:
    """Every rank's tensors, in one exchange."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, tensors, group=group)
    return found


def joined(parts: list[Tensor], parameter: nn.Parameter) -> Tensor:
    """The whole tensor of all ranks' parts. Of a whole parameter all ranks' must be equal."""
    shard = shard_of(parameter)
    if shard.dim is not None:
        return torch.cat(parts, dim=shard.dim)
    for part in parts[1:]:
        torch.testing.assert_close(part, parts[0], rtol=1e-12 if part.dtype == torch.float64 else 1e-5, atol=1e-12)
    return parts[0]


def compare(rank: int, specs: list[Spec]) -> list[Difference]:
    """Differences of all specs, in one group of all processes."""
    size = world_size_from_environment()
    groups = initialize(ParallelConfig(tensor_model_parallel_size=size), quiet=True)
    found = []
    for spec in specs:
        tensor_parallel = TensorParallel(
            size=size, rank=rank, sequence_parallel=spec.sequence_parallel, group=groups.tensor_model_parallel_group
        )
        whole = tiny_model(spec.config, spec.dtype, **spec.options)
        split = tiny_model(spec.config, spec.dtype, tensor_parallel=tensor_parallel, **spec.options)
        found.append(_difference(spec, whole, split, tensor_parallel.group))
    shut_down()
    return found


def _difference(spec: Spec, whole: Pi05Model, split: Pi05Model, group: Any) -> Difference:
    batch = odd_batch(spec.config, spec.num_samples)
    expected = gradients(whole, batch)
    recompute = OptimizationConfig(activation_checkpoint_module_patterns=spec.checkpoint)
    checkpoint_activations(split, recompute, FAMILY, lambda line: None)
    loss = mean_loss(split, batch)
    loss.backward()
    parameters = dict(split.named_parameters())
    assert parameters.keys() == dict(whole.named_parameters()).keys()
    live = {n: p for n, p in parameters.items() if p.grad is not None}
    assert live.keys() == expected.keys()
    marked = {n for n, p in live.items() if is_tensor_parallel_partial(p)}
    unsummed = max((relative_difference(live[n].grad, expected[n]) for n in marked), default=0.0)
    sum_gradients([live[n].grad for n in sorted(marked)], group)
    gradient_parts = all_ranks({n: p.grad for n, p in live.items()}, group)
    noise_BTA = batch.noise_BTA
    return Difference(
        loss=relative_difference(loss, mean_loss(whole, batch)),
        gradients={n: _gradient_difference(n, joined([g[n] for g in gradient_parts], p), expected) for n, p in live.items()},
        unsummed=unsummed,
        actions=relative_difference(
            split.sample_actions(batch, NUM_STEPS, noise_BTA), whole.sample_actions(batch, NUM_STEPS, noise_BTA)
        ),
        shapes={n: tuple(p.shape) for n, p in parameters.items()},
        partial=frozenset(marked),
    )


def _gradient_difference(name: str, gradient: Tensor, expected: dict[str, Tensor]) -> float:
    # A bias on all keys moves every logit of a query alike: softmax ignores it, and its gradient is rounding alone.
    is_rounding = name.startswith("vision_tower.") and name.endswith("k_proj.bias")
    scale_of = name.replace("k_proj", "q_proj") if is_rounding else name
    difference = (gradient.double() - expected[name].double()).abs().max()
    return float(difference / expected[scale_of].double().abs().max())


def build_and_load(rank: int, flags: list[str], checkpoint: Path) -> dict[str, int]:
    """First values and a loaded checkpoint on shards, against the whole model's; counts of what was compared."""
    config = parse_args(["--model-variant", "tiny", "--mock-data", "--vocab-size", "67", *flags])
    groups = initialize(config.parallel, quiet=True)
    split, whole = build(config, groups), _alone(config)
    counts = {"sharded": 0, "whole": 0, "partial": 0, "decay_only": 0}
    for reinitialized in (False, True):
        if reinitialized:
            CONVERTER.load(checkpoint, split, report=lambda line: None)
            CONVERTER.load(checkpoint, whole, report=lambda line: None)
        for (name, part), complete in zip(split.named_parameters(), whole.parameters(), strict=True):
            assert torch.equal(part, shard_of(part).local_part(complete.detach())), name
            assert part.dtype == complete.dtype and part.requires_grad == complete.requires_grad, name
    for _, part in split.named_parameters():
        counts["whole" if shard_of(part).dim is None else "sharded"] += 1
        counts["partial"] += is_tensor_parallel_partial(part)
        counts["decay_only"] += "decay_only" in vars(part)
    shut_down()
    return counts


def _alone(config: Any) -> Pi05Model:
    alone = dataclasses.replace(config.parallel, tensor_model_parallel_size=1, sequence_parallel=False)
    return build(dataclasses.replace(config, parallel=alone))
