"""Dotted module patterns: '*' stands for one segment, as in `layers.*` or `vision_tower.layers.*.mlp`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from torch import nn

from megatron_vla.parallel.partial_model import PartialModel


def _segments_match(pattern: Sequence[str], name: Sequence[str]) -> bool:
    return all(p in ("*", n) for p, n in zip(pattern, name, strict=True))


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` describes exactly `name`."""
    wanted, found = pattern.split("."), name.split(".")
    return len(wanted) == len(found) and _segments_match(wanted, found)


def covers(pattern: str, name: str) -> bool:
    """Whether `pattern` describes `name` or a module that contains it."""
    wanted, found = pattern.split("."), name.split(".")
    return len(wanted) <= len(found) and _segments_match(wanted, found[: len(wanted)])


def nearest_names(pattern: str, names: Iterable[str], count: int = 5) -> list[str]:
    """The names most like `pattern`, with digits shown as '*' so that 27 layers count as one suggestion."""
    general = dict.fromkeys(".".join("*" if s.isdigit() else s for s in name.split(".")) for name in names if name)
    return difflib.get_close_matches(pattern, list(general), n=count, cutoff=0.3)


def select_modules(model: nn.Module, patterns: Sequence[str], flag: str) -> dict[str, nn.Module]:
    """Modules described by `patterns`, by name, in the model's order.

    Raises ValueError naming `flag` when a pattern describes no module (with the nearest names) or when one described module
    lies inside another (its activations would be handled twice). What another pipeline stage holds counts as described.
    """
    elsewhere = model.absent_modules if isinstance(model, PartialModel) else ()
    modules = {name: module for name, module in model.named_modules() if name}
    selected: dict[str, nn.Module] = {}
    for pattern in patterns:
        found = [name for name in modules if matches(pattern, name)]
        if not found and not any(matches(pattern, name) for name in elsewhere):
            near = ", ".join(nearest_names(pattern, [*modules, *elsewhere])) or "none"
            raise ValueError(f"{flag} {pattern}: no module has this name; nearest names: {near}")
        selected.update((name, modules[name]) for name in found)
    for name in selected:
        parents = [other for other in selected if name.startswith(other + ".")]
        if parents:
            raise ValueError(f"{flag}: {name} lies inside {parents[0]}; give one of the two patterns")
    return {name: modules[name] for name in modules if name in selected}


def select_layers(model: nn.Module, block_names: Sequence[str]) -> dict[str, nn.Module]:
    """`select_modules` of a family's layers, of which a configuration may have none of a kind."""
    modules = dict(model.named_modules())
    stacks = {pattern: modules.get(pattern.removesuffix(".*")) for pattern in block_names}
    empty = [p for p, stack in stacks.items() if isinstance(stack, nn.ModuleList | nn.ModuleDict) and not len(stack)]
    return select_modules(model, [p for p in block_names if p not in empty], "block_names of the model family")
