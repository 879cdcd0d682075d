"""What the optimization flags ask for, checked before any process group exists; module names on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from megatron_vla.config.cli import flag_name
from megatron_vla.config.run import RunConfig
from megatron_vla.findings import Finding, error
from megatron_vla.optimizations import activation_checkpoint
from megatron_vla.optimizations.fp8_selection import select
from megatron_vla.optimizations.patterns import select_modules

TRANSFORMER_ENGINE = "--fp8 transformer_engine"
FP8_FIELDS = frozenset(
    {
        *("fp8_recipe", "fp8_amax_history_len", "fp8_min_dim", "fp8_skip_module_patterns", "fp8_module_list"),
        "fp8_fast_accumulation",
    }
)
# Recipes beside tensorwise, and the --fp8 that has them.
RECIPE_OWNERS = {"delayed": "native", "rowwise": "torchao", "rowwise_with_gw_hp": "torchao"}


def module_pattern_findings(config: RunConfig, family: Any) -> Iterator[Finding]:
    """One finding per flag whose patterns describe no module or overlap. The family's dimensions must have been checked."""
    flag, patterns = activation_checkpoint.FLAG, config.optimization.activation_checkpoint_module_patterns
    if not patterns:
        return
    try:
        select_modules(family.skeleton(config), patterns, flag)
    except ValueError as problem:
        yield error(flag, str(problem).removeprefix(flag).lstrip(" :"), "give names of this model's modules")


def fp8_findings(config: RunConfig) -> Iterator[Finding]:
    """Whether --fp8 can work with the other flags and the installed packages."""
    optimization = config.optimization
    if optimization.fp8 is None:
        for name in sorted(set(config.given) & FP8_FIELDS):
            yield error(flag_name(name), "has no effect without --fp8", "add --fp8 torchao, or drop it")
        return
    where = f"--fp8 {optimization.fp8}"
    if not config.model.bf16:
        yield error(where, "layers are converted from bf16, and the model is not in bf16", "add --bf16")
    package = None if optimization.fp8 == "native" else optimization.fp8
    if package is not None and find_spec(package) is None:
        yield error(
            where,
            f"the package {package} is not installed",
            f"pip install {package.replace('_', '-')}, or use --fp8 native, which needs no package",
        )
    if config.parallel.tensor_model_parallel_size > 1:
        yield error(
            where,
            f"with --tensor-model-parallel-size {config.parallel.tensor_model_parallel_size} the linear layers are "
            "megatron-core's, which compute in FP8 only through Transformer Engine's own classes",
            "use --tensor-model-parallel-size 1 (with --data-parallel-strategy fsdp2 when the model does not fit)",
        )
    owner = RECIPE_OWNERS.get(optimization.fp8_recipe, optimization.fp8)
    if optimization.fp8 != owner:
        yield error("--fp8-recipe", f"{optimization.fp8_recipe} needs --fp8 {owner}", "use --fp8-recipe tensorwise")
    if optimization.fp8_recipe != "delayed" and "fp8_amax_history_len" in config.given:
        yield error("--fp8-amax-history-len", "has no effect without --fp8-recipe delayed", "add it, or drop this flag")
    if optimization.fp8_amax_history_len < 1:
        yield error("--fp8-amax-history-len", f"{optimization.fp8_amax_history_len} is below 1", "use 1 or more")
    if optimization.fp8_min_dim < 0:
        yield error("--fp8-min-dim", f"{optimization.fp8_min_dim} is negative", "use --fp8-min-dim 0 or more")
    if optimization.fp8_module_list is not None and "fp8_min_dim" in config.given:
        yield error("--fp8-min-dim", "has no effect: --fp8-module-list names the layers", "drop one of the two")
    if optimization.fp8 == "transformer_engine":
        yield from _transformer_engine(config)


def _transformer_engine(config: RunConfig) -> Iterator[Finding]:
    """What Transformer Engine's layers cannot do."""
    for flag, is_set, reason in (
        ("--compile", config.optimization.compile, "its layers break every graph, and a graph break is an error here"),
        ("--merge-projections", config.optimization.merge_projections, "its layers do not take joined weights"),
    ):
        if is_set:
            yield error(
                flag, f"does not work with {TRANSFORMER_ENGINE}: {reason}", f"drop {flag}, or use --fp8 native or torchao"
            )
    if config.optimization.fp8_fast_accumulation != "forward":
        yield error("--fp8-fast-accumulation", f"is decided by {TRANSFORMER_ENGINE} itself", "leave it out")


def fp8_module_findings(config: RunConfig, family: Any) -> Iterator[Finding]:
    """Whether patterns and list fit the model, and anything is left to convert. The family's dimensions must be checked."""
    if config.optimization.fp8 is None or any(fp8_findings(config)):
        return
    try:
        select(family.skeleton(config), config.optimization, family)
    except ValueError as problem:
        yield error(f"--fp8 {config.optimization.fp8}", str(problem), "change the flag, or leave --fp8 out")
