"""What one rank of a GR00T N1.7 test does: the split model beside the whole one, and steps in a layout."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from compile_cases import train as train_compiled
from groot_model_fixtures import gradients, released_loss, tiny_config, tiny_model
from pi05_fixtures import relative_difference
from pipeline_cases import Result, take_steps_of
from tensor_parallel_cases import all_ranks, joined
from training_cases import train

from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.config.run import RunConfig, parse_args
from megatron_vla.models.groot_n1_7.assemble import Assembler
from megatron_vla.models.groot_n1_7.batch import GrootN17Batch
from megatron_vla.models.groot_n1_7.config import GrootN17Config
from megatron_vla.models.groot_n1_7.convert import fixed_batch
from megatron_vla.models.groot_n1_7.samples import GrootMockSource, draws, word_tokens
from megatron_vla.models.groot_n1_7.sampling import sample_actions
from megatron_vla.parallel.groups import initialize, shut_down, world_size_from_environment
from megatron_vla.parallel.parameter_shard import is_tensor_parallel_partial
from megatron_vla.parallel.partial_gradients import sum_gradients
from megatron_vla.parallel.tensor_parallel import TensorParallel

STEP_FLAGS = (
    *("--model-name", "groot_n1_7", "--model-variant", "tiny", "--dropout", "0", "--frozen-dtype", "as_model"),
    *("--mock-data", "--mock-num-samples", "40", "--mock-num-cameras", "2", "--mock-prompt-length", "8"),
    *("--mock-num-embodiments", "3", "--max-prompt-length", "24", "--prompt-padding", "max"),
    *("--global-batch-size", "4", "--train-iters", "20", "--lr-warmup-iters", "4", "--lr", "1e-3"),
    *("--num-workers", "0", "--log-interval", "5", "--no-first-batch-report"),
)

# Laid over the flags of tiny Pi0.5 runs.
TRAIN_FLAGS = (*STEP_FLAGS, "--image-size", "64", "--num-layers", "4", "--vision-num-layers", "4")

__all__ = ["TRAIN_FLAGS", "Difference", "Spec", "compare", "step_config", "take_steps", "train", "train_compiled"]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One comparison. Everything is trained, and token counts are odd, so that rows have to be appended."""

    sequence_parallel: bool = True
    dtype: torch.dtype = torch.float64
    equal_images: bool = False
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> GrootN17Config:
        """A vocabulary that no size divides."""
        odd = {"vocab_size": 67, "tune_llm": True, "tune_visual": True, "num_query_groups": 2, "vision_num_attention_heads": 4}
        return tiny_config(**{**odd, **self.changes})


@dataclass
class Difference:
    """Relative differences from the whole model, and the shapes of this rank's parameters."""

    loss: float
    gradients: dict[str, float]
    actions: float
    shapes: dict[str, tuple[int, ...]]


def batch_of(spec: Spec) -> GrootN17Batch:
    """Images of different sizes, or three samples with two equal images each."""
    config = spec.config
    if not spec.equal_images:
        return fixed_batch(config)
    source = GrootMockSource(
        num_samples=9, family=config, num_cameras=2, prompt_length=4, num_embodiments=2, word_tokens=word_tokens(config), seed=1
    )
    return Assembler(config)([{**source(index, 0), **draws(config, 1, 0, index)} for index in range(3)])


def compare(rank: int, specs: list[Spec]) -> list[Difference]:
    """Differences of all specs, in one group of all processes."""
    size = world_size_from_environment()
    groups = initialize(ParallelConfig(tensor_model_parallel_size=size), quiet=True)
    group = groups.tensor_model_parallel_group
    found = []
    for spec in specs:
        tensor_parallel = TensorParallel(size=size, rank=rank, sequence_parallel=spec.sequence_parallel, group=group)
        whole, split = tiny_model(spec.config, spec.dtype), tiny_model(spec.config, spec.dtype, tensor_parallel=tensor_parallel)
        batch = batch_of(spec)
        expected = gradients(whole, batch)
        loss = released_loss(split, batch)
        loss.backward()
        live = {name: p for name, p in split.named_parameters() if p.grad is not None}
        assert live.keys() == expected.keys()
        marked = sorted(name for name, p in live.items() if is_tensor_parallel_partial(p))
        sum_gradients([live[name].grad for name in marked], group)
        parts = all_ranks({name: p.grad for name, p in live.items()}, group)
        largest = max(float(gradient.abs().max()) for gradient in expected.values())
        differences = {}
        for name, p in live.items():
            gradient = joined([part[name] for part in parts], p)
            # A key bias moves all scores of a query alike: its gradient is zero but for rounding.
            scale = largest if name.endswith("k_proj.bias") else float(expected[name].abs().max())
            differences[name] = float((gradient - expected[name]).abs().max()) / scale
        noise_BTA = batch.noise_BTA[:, : spec.config.action_horizon]
        actions = [sample_actions(model, batch, 2, noise_BTA) for model in (split, whole)]
        shapes = {name: tuple(p.shape) for name, p in split.named_parameters()}
        whole_loss = released_loss(whole, batch).detach()
        found.append(Difference(relative_difference(loss, whole_loss), differences, relative_difference(*actions), shapes))
    shut_down()
    return found


def step_config(flags: list[str]) -> RunConfig:
    """STEP_FLAGS plus `flags` (a repeated flag: the last one counts)."""
    return parse_args([*STEP_FLAGS, *flags])


def take_steps(rank: int, flags: list[str], num_steps: int) -> Result:
    """`num_steps` optimizer steps in the layout of `flags`."""
    result = take_steps_of(step_config(flags), num_steps)
    return dataclasses.replace(result)
