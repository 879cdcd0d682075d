"""Activation checkpointing by module pattern: a chosen module's activations are recomputed in backward, not stored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.models.registry import ModelFamily
from megatron_vla.optimizations.patterns import select_modules

FLAG = "--activation-checkpoint-module-patterns"


def apply(model: nn.Module, config: OptimizationConfig, family: ModelFamily, report: Callable[[str], None]) -> nn.Module:
    """Checkpoint the modules that the flag describes. Raises ValueError for a pattern that describes nothing or overlaps."""
    if not config.activation_checkpoint_module_patterns:
        return model
    selected = select_modules(model, config.activation_checkpoint_module_patterns, FLAG)
    for module in selected.values():
        # Replacing the bound forward, not the module, keeps parameter names and hooks. Non-reentrant: parameters without a
        # gradient stay without one. No random numbers are drawn in forward, so their state needs no saving (it would sync).
        module.forward = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)  # type: ignore[method-assign]
    covered = {id(p) for module in selected.values() for p in module.parameters()}
    everything = list(model.parameters())
    share = sum(p.numel() for p in everything if id(p) in covered) / max(1, sum(p.numel() for p in everything))
    report(f"activation checkpoint: {len(selected)} modules recompute in backward, holding {share:.0%} of the parameters")
    return model
