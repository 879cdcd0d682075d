"""FP8 linear layers (--fp8): chosen layers compute their three products in FP8, everything outside stays bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.kernels import BUILD_COMMAND
from megatron_vla.kernels.fp8_quantize.op import IS_BUILT
from megatron_vla.models.registry import ModelFamily
from megatron_vla.optimizations.fp8_delayed import DelayedBackend
from megatron_vla.optimizations.fp8_linear import Fp8Backend, NativeBackend, accumulation_of, convert, torchao_backend
from megatron_vla.optimizations.fp8_scaling import DelayedScaling
from megatron_vla.optimizations.fp8_selection import select

SMALLEST_CAPABILITY = (8, 9)


def apply(model: nn.Module, config: OptimizationConfig, family: ModelFamily, report: Callable[[str], None]) -> nn.Module:
    """Convert the selected layers in place; parameters, names and checkpoints stay what they are.

    Raises ValueError when a pattern or list does not fit the model, when nothing can be converted, or on a GPU without FP8.
    """
    if config.fp8 is None:
        return model
    device = next(model.parameters()).device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < SMALLEST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"--fp8 {config.fp8}: {name} has no FP8 matrix products (Ada, Hopper or newer needed); leave it out")
    selection = select(model, config, family)
    emulate = device.type != "cuda"
    convert_layers(model, selection.converted, config, emulate=emulate)
    how = " (emulated in fp32: no GPU)" if emulate else ""
    if config.fp8_recipe == "delayed" and not emulate and not IS_BUILT:
        how = f"; kernels/fp8_quantize was not built: PyTorch operations quantise ({BUILD_COMMAND})"
    report(f"fp8 ({config.fp8}, {config.fp8_recipe}){how}: {selection.report()}")
    return model


def convert_layers(model: nn.Module, names: Iterable[str], config: OptimizationConfig, *, emulate: bool) -> None:
    """Convert the named layers with the backend of --fp8."""
    if config.fp8 == "transformer_engine":
        from megatron_vla.optimizations.fp8_transformer_engine import convert_to_transformer_engine

        convert_to_transformer_engine(model, names)
        return
    names = tuple(names)
    accumulation = accumulation_of(config)
    backends: dict[str, Fp8Backend]
    if config.fp8_recipe == "delayed":
        device = next(model.parameters()).device
        scaling = DelayedScaling(names, config.fp8_amax_history_len, device)
        backends = {name: DelayedBackend(scaling, scaling.slots_of(name), accumulation) for name in names}
    else:
        shared = torchao_backend(config, emulate=emulate) if config.fp8 == "torchao" else NativeBackend(accumulation)
        backends = dict.fromkeys(names, shared)
    for name, backend in backends.items():
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        convert(linear, backend)
