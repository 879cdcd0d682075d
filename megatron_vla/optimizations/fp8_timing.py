"""How long the linear layers of a `LinearUse` take in bf16 and in FP8: measured on this GPU, or estimated without one.

Both include everything that FP8 adds to a pass: finding the scales and quantising inputs, weights and gradients. Not the new
factors of delayed scaling: they are made once per step for all layers together, by kernels whose number no layer adds to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.kernels.timing import sustained_ms
from megatron_vla.models.common.merged_linear import merged_linear
from megatron_vla.optimizations.fp8 import convert_layers
from megatron_vla.optimizations.fp8_linear import delayed_scaling_of
from megatron_vla.optimizations.fp8_trace import LinearUse

# One H200: rates of large products (FLOP/s), memory (bytes/s), and what a kernel costs however small it is (s).
BF16_RATE, FP8_RATE, BANDWIDTH, KERNEL_SECONDS = 790e12, 1400e12, 4.3e12, 4e-6


@dataclass(frozen=True)
class PassTimes:
    """Milliseconds of one forward and of one backward pass."""

    forward_ms: float
    backward_ms: float

    def of_micro_batch(self, use: LinearUse) -> float:
        """All passes of a micro-batch, recomputation included."""
        has_backward = use.input_gradient or use.weight_gradient
        return self.forward_ms * use.forward_calls + (self.backward_ms if has_backward else 0.0)


Timer = Callable[[LinearUse, bool], PassTimes]  # (use, in FP8?)


class _Layers(nn.Module):
    """The layers of a use, computed as the model computes them."""

    def __init__(self, use: LinearUse):
        super().__init__()
        layers = (nn.Linear(use.in_features, n, bias=use.has_bias, dtype=torch.bfloat16) for n in use.outputs)
        self.linears = nn.ModuleList(layers).requires_grad_(use.weight_gradient)

    def forward(self, hidden_MK: Tensor) -> tuple[Tensor, ...]:
        """Output of each layer."""
        return merged_linear(hidden_MK, list(self.linears), len(self.linears) > 1)


def measured_timer(
    config: OptimizationConfig,
    *,
    compiled: bool,
    clock: Callable[[Callable[[], Any]], float] = sustained_ms,
    device: str = "cuda",
) -> Timer:
    """Device times on this GPU with the backend and recipe of `config`. `clock` gives the milliseconds of one call.

    Not the time of calls from the host: Python and autograd need a millisecond for products that take microseconds, and in a
    step, or in a captured graph, the GPU does not wait for them.
    """

    def measure(use: LinearUse, in_fp8: bool) -> PassTimes:
        forward, whole = passes_of(use, config if in_fp8 else None, compiled=compiled, device=device)
        try:
            forward_ms = clock(forward)
            return PassTimes(forward_ms, clock(whole) - forward_ms)
        except RuntimeError as error:
            how = f"FP8 ({config.fp8}, {config.fp8_recipe})" if in_fp8 else "bf16"
            error.add_note(f"while timing {', '.join(use.names)} in {how}, {'compiled' if compiled else 'not compiled'}")
            raise

    return measure


def passes_of(
    use: LinearUse, config: OptimizationConfig | None, *, compiled: bool, device: str = "cuda"
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(forward, forward and backward) of the layers of `use`, as a step runs them from its second time on.

    config: FP8's; None: bf16.
    """
    with torch.device(device):
        layers = _Layers(use)
        hidden_MK = torch.randn(use.rows, use.in_features, dtype=torch.bfloat16).requires_grad_(use.input_gradient)
        gradients = [torch.randn(use.rows, n, dtype=torch.bfloat16) for n in use.outputs]
    if config is not None:
        convert_layers(layers, [f"linears.{i}" for i in range(len(use.outputs))], config, emulate=device == "cpu")
    run: Any = layers
    if compiled:
        # All uses share one forward function, and dynamo refuses to compile a function for a ninth set of shapes.
        torch.compiler.reset()
        run = torch.compile(layers, fullgraph=True, dynamic=False)
    wanted = [t for t in (hidden_MK, *layers.parameters()) if t.requires_grad]

    def forward() -> Any:
        return run(hidden_MK)

    def whole() -> Any:
        outputs = forward()
        return torch.autograd.grad(outputs, wanted, gradients) if wanted else outputs

    whole()
    scaling = delayed_scaling_of(layers)
    if scaling is not None:
        # Its factors came from the data of this first pass. From here on the passes are those of a later step.
        scaling.roll(None)
    return forward, whole


def estimated_times(use: LinearUse, in_fp8: bool) -> PassTimes:
    """Times from rates alone (a Timer): a stand-in where there is no GPU, not a measurement."""
    rows, inputs, outputs = use.rows, use.in_features, use.out_features
    hidden, weight, gradient = rows * inputs, inputs * outputs, rows * outputs

    def product(read: int, written: int) -> float:
        flops = 2.0 * rows * inputs * outputs
        size = 1 if in_fp8 else 2
        return max(flops / (FP8_RATE if in_fp8 else BF16_RATE), (size * read + 2 * written) / BANDWIDTH) + KERNEL_SECONDS

    def quantise(elements: int, bytes_moved: int) -> float:
        return (elements * bytes_moved / BANDWIDTH + 2 * KERNEL_SECONDS) if in_fp8 else 0.0

    # Read twice in bf16 (scale, cast), written once per layout that a product wants.
    forward = product(hidden + weight, gradient) + quantise(hidden, 5) + quantise(weight, 5)
    backward = quantise(gradient, 4 + use.input_gradient + use.weight_gradient)
    if use.input_gradient:
        backward += product(gradient + weight, hidden) + quantise(weight, 3)
    if use.weight_gradient:
        backward += product(gradient + hidden, weight) + quantise(hidden, 2)
    return PassTimes(1e3 * forward, 1e3 * backward)
