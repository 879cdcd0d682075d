"""What the optimization flags say about module names, checked on the meta device before any process group exists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_vla.config.run import RunConfig
from megatron_vla.findings import Finding, error
from megatron_vla.optimizations import activation_checkpoint
from megatron_vla.optimizations.patterns import select_modules


def module_pattern_findings(config: RunConfig, family: Any) -> Iterator[Finding]:
    """One finding per flag whose patterns describe no module or overlap. The family's dimensions must have been checked."""
    flag, patterns = activation_checkpoint.FLAG, config.optimization.activation_checkpoint_module_patterns
    if not patterns:
        return
    try:
        select_modules(family.skeleton(config), patterns, flag)
    except ValueError as problem:
        yield error(flag, str(problem).removeprefix(flag).lstrip(" :"), "give names of this model's modules")
