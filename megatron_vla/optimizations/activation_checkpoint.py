"""Activation checkpointing by module pattern: a chosen module's activations are recomputed in backward, not stored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.models.common.dropout import draws_in_forward
from megatron_vla.models.registry import ModelFamily
from megatron_vla.optimizations.patterns import select_modules

FLAG = "--activation-checkpoint-module-patterns"


def apply(model: nn.Module, config: OptimizationConfig, family: ModelFamily, report: Callable[[str], None]) -> nn.Module:
    """Checkpoint the modules that the flag describes. Raises ValueError for a pattern that describes nothing or overlaps."""
    if not config.activation_checkpoint_module_patterns:
        return model
    selected = select_modules(model, config.activation_checkpoint_module_patterns, FLAG)
    for module in selected.values():
        # Replacing the bound forward, not the module, keeps parameter names and hooks.
        module.forward = _recomputed(module)  # type: ignore[method-assign]
    covered = {id(p) for module in selected.values() for p in module.parameters()}
    everything = list(model.parameters())
    share = sum(p.numel() for p in everything if id(p) in covered) / max(1, sum(p.numel() for p in everything))
    report(f"activation checkpoint: {len(selected)} modules recompute in backward, holding {share:.0%} of the parameters")
    return model


def _recomputed(module: nn.Module) -> Any:
    """The forward of `module`, checkpointed."""
    # The generators' state is only needed (and saved, which a captured graph cannot) where dropout must draw the same mask
    # again.
    preserve = draws_in_forward(module)
    if "forward" in vars(module):
        return partial(_checkpoint, module.forward, preserve)
    # One function for all modules: torch.compile takes layers that hold different ones for different code, and makes a graph
    # for every layer (Pi0.5 base: 27 of one kind).
    return MethodType(_forward_drawing_again if preserve else _forward, module)


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _checkpoint(type(module).forward, False, module, *args, **kwargs)


def _forward_drawing_again(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _checkpoint(type(module).forward, True, module, *args, **kwargs)


def _checkpoint(forward: Any, preserve_rng_state: bool, /, *args: Any, **kwargs: Any) -> Any:
    # Non-reentrant: parameters without a gradient stay without one.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs)
