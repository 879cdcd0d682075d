"""Which linear layers compute in FP8, and why the others do not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.models.registry import ModelFamily
from megatron_vla.optimizations.fp8_linear import ALIGNMENT
from megatron_vla.optimizations.patterns import covers, nearest_names
from megatron_vla.parallel.partial_model import PartialModel

LIST_FLAG = "--fp8-module-list"
SKIP_FLAG = "--fp8-skip-module-patterns"


@dataclass(frozen=True)
class Selection:
    """Names of the layers to convert, in the model's order, and the reason why each other linear layer is skipped."""

    converted: tuple[str, ...]
    skipped: Mapping[str, str]

    def report(self) -> str:
        """One line with counts."""
        total = len(self.converted) + len(self.skipped)
        reasons = Counter(self.skipped.values()).most_common()
        skipped = f"; skipped: {', '.join(f'{count} {reason}' for reason, count in reasons)}" if reasons else ""
        return f"{len(self.converted)} of {total} linear layers{skipped}"


def select(model: nn.Module, config: OptimizationConfig, family: ModelFamily) -> Selection:
    """Decide for every `nn.Linear` of `model`. Raises ValueError naming the flag for a pattern or list that does not fit.

    Without --fp8-module-list a layer is converted unless the family declares it sensitive, it is not in bf16, the larger of its
    input and output features is below --fp8-min-dim, or one of them is no multiple of 16. A listed layer only needs the second
    and the last; --fp8-skip-module-patterns comes on top of both.
    """
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    absent = model.absent_modules if isinstance(model, PartialModel) else ()
    _check_skip_patterns(config.fp8_skip_module_patterns, linears, absent)
    listed = _listed_names(config.fp8_module_list, linears, absent)
    skipped: dict[str, str] = {}
    for name, linear in linears.items():
        impossible = _impossible(linear)
        if any(covers(pattern, name) for pattern in config.fp8_skip_module_patterns):
            skipped[name] = f"under {SKIP_FLAG}"
        elif listed is not None and name not in listed:
            skipped[name] = f"not in {LIST_FLAG}"
        elif listed is not None and impossible:
            raise ValueError(f"{LIST_FLAG} {config.fp8_module_list}: {name} cannot be converted: {impossible}")
        elif listed is None and any(covers(pattern, name) for pattern in family.fp8_excluded_names):
            skipped[name] = "precision-sensitive"
        elif impossible:
            skipped[name] = impossible
        elif listed is None and max(linear.in_features, linear.out_features) < config.fp8_min_dim:
            skipped[name] = f"below --fp8-min-dim {config.fp8_min_dim}"
    selection = Selection(tuple(name for name in linears if name not in skipped), skipped)
    if not selection.converted and not absent:
        raise ValueError(f"--fp8 {config.fp8} converts {selection.report()}")
    return selection


def _impossible(linear: nn.Linear) -> str | None:
    """Why no kernel could compute this layer in FP8."""
    if linear.weight.dtype != torch.bfloat16:
        return f"not in bf16 but {str(linear.weight.dtype).removeprefix('torch.')}"
    if linear.in_features % ALIGNMENT or linear.out_features % ALIGNMENT:
        return f"features no multiple of {ALIGNMENT}"
    return None


def _check_skip_patterns(patterns: Sequence[str], linears: Mapping[str, nn.Linear], absent: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(covers(pattern, name) for name in (*linears, *absent)):
            near = ", ".join(nearest_names(pattern, (*linears, *absent))) or "none"
            raise ValueError(f"{SKIP_FLAG} {pattern}: covers no linear layer; nearest names: {near}")


def _listed_names(path: str | None, linears: Mapping[str, nn.Linear], absent: Sequence[str]) -> set[str] | None:
    """The "modules" of the file, all of them known names."""
    if path is None:
        return None
    try:
        names = json.loads(Path(path).read_text())["modules"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as problem:
        raise ValueError(f'{LIST_FLAG} {path}: not a JSON object with a list "modules": {problem!r}') from problem
    unknown = [name for name in names if name not in linears and name not in absent]
    if unknown:
        near = ", ".join(nearest_names(unknown[0], linears)) or "none"
        raise ValueError(
            f"{LIST_FLAG} {path}: {len(unknown)} of {len(names)} names are no linear layers of this model, first {unknown[0]}; "
            f"nearest names: {near}; write the list again with tools/select_fp8.py and this run's flags"
        )
    return set(names)
