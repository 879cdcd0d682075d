"""torch.compile of a family's layers, towers or groups, each one graph: a graph break is an error, not a slow step.

Functions are compiled in place (an instance attribute hides the method), so modules, parameter names and hooks stay. Applied
before activation checkpointing, which wraps forward once more: around a compiled layer it recomputes the whole graph, inside a
compiled function it becomes part of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.models.registry import ModelFamily
from megatron_vla.optimizations.patterns import select_layers
from megatron_vla.parallel.partial_model import PartialModel

# Tests that are not about generated code replace it: "aot_eager" traces and differentiates as inductor does.
BACKEND = "inductor"
# Graphs of one piece of code: a layer has one per prompt width, per kind of layer, and per mode (with gradients or without).
# torch's own limit of 8 is less than the seven widths of a 200-token prompt in buckets of 32, twice.
RECOMPILE_LIMIT = 128


def function_names(model: nn.Module, config: OptimizationConfig, family: ModelFamily) -> tuple[str, ...]:
    """Dotted names of the methods that --compile-scope stands for, in the model's order."""
    if config.compile_scope == "backbone":
        return family.backbone_functions
    blocks = select_layers(model, family.block_names)
    layers = tuple(f"{name}.forward" for name in blocks)
    return layers if config.compile_scope == "per_layer" else (*layers, *family.group_functions)


def apply(model: nn.Module, config: OptimizationConfig, family: ModelFamily, report: Callable[[str], None]) -> nn.Module:
    """Replace the chosen methods by their compiled forms; each compiles when it is first called with new shapes.

    Layers of equal shapes share one graph: parameters are its inputs.
    """
    # Set in both directions, as a process may build several models.
    torch._dynamo.config.optimize_ddp = config.dynamo_optimize_ddp
    if not config.compile:
        return model
    allow_graphs(RECOMPILE_LIMIT)
    names = function_names(model, config, family)
    absent = model.absent_modules if isinstance(model, PartialModel) else frozenset()
    compiled = [name for name in names if name.rpartition(".")[0] not in absent]
    for name in compiled:
        _compile_method(model, name, config.compile_mode)
    kinds = dict.fromkeys(".".join("*" if s.isdigit() else s for s in name.split(".")) for name in compiled)
    report(f"compile ({config.compile_scope}, {config.compile_mode}): {len(compiled)} functions: {', '.join(kinds)}")
    return model


def _compile_method(model: nn.Module, name: str, mode: str) -> None:
    path, _, method = name.rpartition(".")
    owner = model.get_submodule(path)
    setattr(owner, method, compiled_whole(getattr(owner, method), mode))


def allow_graphs(count: int) -> None:
    """Let one piece of code have so many graphs at least, one per shape that it is called with; one more is an error.

    The limit only grows, and from torch 2.13 on it is the calling thread's own: a server's thread has to ask for itself.
    """
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, count)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 8 * count)


def compiled_whole(function: Callable[..., Any], mode: str = "default") -> Callable[..., Any]:
    """`function` as one graph for each shape. What cannot be compiled whole is an error at its first call."""
    options = _inductor_options(mode) if BACKEND == "inductor" else None
    compiled: Callable[..., Any] = torch.compile(function, backend=BACKEND, fullgraph=True, dynamic=False, options=options)
    return compiled


def _inductor_options(mode: str) -> dict[str, Any]:
    """torch.compile takes a mode or options, not both: the mode's own, and ours."""
    # Rows of 4304 numbers (SigLIP's MLP) would be padded to 128 bytes; a product into padded rows cannot add its bias itself,
    # and a copy of the bias for every row comes first: 146 us a layer on an H200, 3.9 ms of Pi0.5's step.
    options: dict[str, Any] = {"comprehensive_padding": False}
    if mode == "tuned":
        # The default block sizes fit powers of two.
        options["coordinate_descent_tuning"] = True
    elif mode != "default":
        options |= torch._inductor.list_mode_options(mode)
    return options
