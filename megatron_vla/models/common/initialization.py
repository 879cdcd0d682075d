"""First values of parameters: each parameter has its own random stream, a pure function of (seed, parameter name).

So weights do not depend on rank, on the order of construction or on which other parameters exist. Draws happen in fp32 on the
parameter's device and are rounded to its dtype: bf16, fp32 and fp64 models of one seed start from the same numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megatron_vla.optimizations.patterns import covers
from megatron_vla.parallel.parameter_shard import copy_marks, shard_of

Initializer = Callable[[Tensor, torch.Generator], None]


def zeros(values: Tensor, generator: torch.Generator) -> None:
    """All 0."""
    del generator
    values.zero_()


def ones(values: Tensor, generator: torch.Generator) -> None:
    """All 1."""
    del generator
    values.fill_(1.0)


def lecun_normal(values: Tensor, generator: torch.Generator) -> None:
    """Normal cut at two standard deviations with variance 1 / fan_in after the cut (flax's `lecun_normal`)."""
    fan_in = values[0].numel()
    deviation = math.sqrt(1.0 / fan_in) / 0.87962566103423978  # standard deviation of a unit normal cut at +-2
    nn.init.trunc_normal_(values, std=deviation, a=-2 * deviation, b=2 * deviation, generator=generator)


def xavier_uniform(values: Tensor, generator: torch.Generator) -> None:
    """Uniform with variance 2 / (fan_in + fan_out)."""
    nn.init.xavier_uniform_(values, generator=generator)


def inverse_sqrt_fan_in_uniform(values: Tensor, generator: torch.Generator) -> None:
    """Uniform in +-1 / sqrt(fan_in): the default of torch's linear layers."""
    bound = values[0].numel() ** -0.5
    values.uniform_(-bound, bound, generator=generator)


def inverse_sqrt_inputs_normal(values: Tensor, generator: torch.Generator) -> None:
    """Normal with standard deviation 1 / sqrt(inputs) of weights [..., inputs, outputs]."""
    values.normal_(0.0, values.shape[-2] ** -0.5, generator=generator)


def normal(deviation: float) -> Initializer:
    """Normal with this standard deviation."""

    def draw(values: Tensor, generator: torch.Generator) -> None:
        values.normal_(0.0, deviation, generator=generator)

    return draw


def inverse_sqrt_width_normal(values: Tensor, generator: torch.Generator) -> None:
    """Normal with standard deviation 1 / sqrt(last dimension): position tables."""
    values.normal_(0.0, values.shape[-1] ** -0.5, generator=generator)


def parameter_seed(seed: int, name: str) -> int:
    """63-bit seed of one parameter's stream (Python's own `hash` is salted per process)."""
    digest = hashlib.blake2b(f"weights/{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give a model that was built on the meta device memory on `device`, with undefined values.

    torch makes new Parameter objects for this; the marks of the old ones (shards, dead parameters) are carried over.
    """
    marked = dict(model.named_parameters())
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        copy_marks(marked[name], parameter)


def by_pattern(weight_rules: Sequence[tuple[str, Initializer]]) -> Callable[[str], Initializer]:
    """Distribution by parameter name: the first rule whose module pattern covers it decides; all biases start at zero."""

    def initializer_of(name: str) -> Initializer:
        if name.endswith(".bias"):
            return zeros
        return next(initializer for pattern, initializer in weight_rules if covers(pattern, name))

    return initializer_of


@torch.no_grad()
def initialize_parameters(model: nn.Module, initializer_of: Callable[[str], Initializer], seed: int) -> None:
    """Draw every parameter of `model` anew; `initializer_of` maps a parameter's name to its distribution.

    Each rank draws whole tensors and keeps its shard, so the values do not depend on the layout; one tensor at a time.
    """
    for name, parameter in model.named_parameters():
        generator = torch.Generator(device=parameter.device).manual_seed(parameter_seed(seed, name))
        shard = shard_of(parameter)
        values = torch.empty(shard.global_shape, dtype=torch.float32, device=parameter.device)
        initializer_of(name)(values, generator)
        parameter.copy_(shard.local_part(values))
