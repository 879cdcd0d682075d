"""Which released tensor becomes which parameter: resolved from names and shapes alone, before any data is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_vla.findings import Finding, error
from megatron_vla.models.common.key_map import KeyMap, Rename
from megatron_vla.models.common.tensor_file import TensorSource
from megatron_vla.optimizations.patterns import covers, matches, nearest_names

_LISTED = 6  # names shown of a longer list

REINITIALIZE_FLAG = "--pretrained-reinitialize"


@dataclass(frozen=True)
class ShapeFlags:
    """Which flag sets each axis of the parameters that `pattern` describes (None: fixed)."""

    pattern: str
    flags: tuple[str | None, ...]


@dataclass
class Found:
    """A parameter's tensor in the source, and further names under which the source holds the same tensor (ties)."""

    name: str
    rename: Rename | None
    copies: list[str] = field(default_factory=list)


@dataclass
class Resolution:
    """Outcome of matching a source with a model."""

    found: dict[str, Found] = field(default_factory=dict)
    extras: dict[str, str] = field(default_factory=dict)
    reinitialized: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def resolve(
    source: TensorSource,
    expected: Mapping[str, tuple[int, ...]],
    key_map: KeyMap,
    shape_flags: Sequence[ShapeFlags],
    layer_flags: Mapping[str, str],
    reinitialize: Sequence[str],
    where: str,
) -> Resolution:
    """Match every tensor of `source` with the parameters `expected` (name -> shape); everything wrong becomes a finding."""
    resolution = Resolution()
    foreign = key_map.foreign_because(source.files)
    if foreign is not None:
        resolution.findings.append(error(where, foreign, "use a checkpoint of this family and version"))
        return resolution
    unexpected = _match_names(source, expected, key_map, resolution)
    for pattern in reinitialize:
        names = [name for name in expected if covers(pattern, name)]
        if not names:
            near = ", ".join(nearest_names(pattern, expected)) or "none"
            resolution.findings.append(
                error(f"{REINITIALIZE_FLAG} {pattern}", "describes no parameter", f"nearest names: {near}")
            )
        for name in names:
            resolution.found.pop(name, None)
            resolution.reinitialized.append(name)
    missing = [name for name in expected if name not in resolution.found and name not in resolution.reinitialized]
    layers = _layer_hint(missing, list(unexpected.values()), expected, layer_flags)
    if missing:
        near = ", ".join(nearest_names(missing[0], unexpected, 2))
        near = f"; the unexpected names include {near}" if near else ""
        fix = layers or f"use the complete checkpoint{near}, or name the modules in {REINITIALIZE_FLAG}"
        resolution.findings.append(error(where, f"{len(missing)} parameter(s) are not in it: {_listed(missing)}", fix))
    if unexpected:
        fix = layers or "this is not a checkpoint of this model family and version; use the right --model-name"
        resolution.findings.append(error(where, f"{len(unexpected)} unknown tensor(s): {_listed(list(unexpected))}", fix))
    resolution.findings += _shape_findings(source, expected, resolution, shape_flags, where)
    return resolution


def _match_names(
    source: TensorSource, expected: Mapping[str, tuple[int, ...]], key_map: KeyMap, resolution: Resolution
) -> dict[str, str]:
    """Fill `resolution.found` and `.extras`; returns the names that nothing expects, with their names here where known."""
    unexpected: dict[str, str] = {}
    for name in source.files:
        if key_map.to_theirs(name) is not None:  # already our name
            _add(resolution, unexpected, expected, key_map, Found(name, None), name, name)
            continue
        canonical = key_map.canonical(name)
        reason = key_map.ignored_because(canonical)
        if reason is not None:
            resolution.extras[name] = reason
            continue
        tie = key_map.tie_of(canonical)
        all_located = key_map.all_ours(tie.names[0] if tie else canonical)
        if not all_located:
            unexpected[name] = name
        for located in all_located:
            _add(resolution, unexpected, expected, key_map, Found(name, located.rename), located.ours, canonical)
    return unexpected


def _add(
    resolution: Resolution,
    unexpected: dict[str, str],
    expected: Mapping[str, tuple[int, ...]],
    key_map: KeyMap,
    found: Found,
    ours: str,
    canonical: str,
) -> None:
    """Note that the source's `found` is our parameter `ours`."""
    if ours not in expected:
        unexpected[found.name] = ours
    elif ours in resolution.found:
        _add_copy(resolution.found[ours], found.name, canonical, key_map)
    else:
        resolution.found[ours] = found


def _add_copy(found: Found, name: str, canonical: str, key_map: KeyMap) -> None:
    """A second name of one tensor: the tie's first name is the one that the model reads."""
    tie = key_map.tie_of(canonical)
    if tie is None or key_map.canonical(found.name) == canonical:
        raise ValueError(f"{found.name} and {name} are two spellings of one tensor; remove one of them from the checkpoint")
    if canonical == tie.names[0]:
        found.copies.append(found.name)
        found.name = name
    else:
        found.copies.append(name)


def _shape_findings(
    source: TensorSource,
    expected: Mapping[str, tuple[int, ...]],
    resolution: Resolution,
    shape_flags: Sequence[ShapeFlags],
    where: str,
) -> list[Finding]:
    """One finding per flag that explains differing shapes, and one for each shape that no flag explains."""
    by_flag: dict[str, list[str]] = {}
    unexplained = []
    for ours, found in resolution.found.items():
        for name in (found.name, *found.copies):
            shape = source.shapes[name]
            shape = shape if found.rename is None else found.rename.our_shape(shape)
            if shape == expected[ours]:
                continue
            flag = _flag_of(ours, shape, expected[ours], shape_flags)
            text = f"{ours} is {list(shape)} there, {list(expected[ours])} in the model"
            if flag is None:
                unexplained.append((ours, text))
            else:
                by_flag.setdefault(flag, []).append(text)
    findings = []
    for flag, texts in by_flag.items():
        more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
        fix = f"set {flag} to the checkpoint's value, or name the module in {REINITIALIZE_FLAG} to start it afresh"
        findings.append(error(f"{where}, {flag}", texts[0] + more, fix))
    if unexplained and not by_flag:
        fix = "use the checkpoint's own --model-variant and dimensions"
        findings.append(error(where, "; ".join(text for _, text in unexplained[:_LISTED]), fix))
    return findings


def _flag_of(name: str, shape: tuple[int, ...], expected: tuple[int, ...], shape_flags: Sequence[ShapeFlags]) -> str | None:
    """The flag of the first axis that differs."""
    for rule in shape_flags:
        if matches(rule.pattern, name):
            if len(shape) != len(expected):
                return None
            return next((flag for flag, a, b in zip(rule.flags, shape, expected, strict=True) if a != b), None)
    return None


def _layer_hint(
    missing: Sequence[str], unexpected: Sequence[str], expected: Mapping[str, tuple[int, ...]], layer_flags: Mapping[str, str]
) -> str | None:
    """The flag that counts layers (`layer_flags`: pattern -> flag), when exactly whole layers are missing or too many."""
    odd = {*missing, *unexpected}
    for pattern, flag in layer_flags.items():
        depth = len(pattern.split("."))
        layers = {".".join(name.split(".")[:depth]) for name in odd if covers(pattern, name)}
        whole = {name for name in expected if any(covers(layer, name) for layer in layers)}
        if layers and all(covers(pattern, name) for name in odd) and whole <= odd:
            return f"set {flag} to the checkpoint's number of layers"
    return None


def _listed(names: Sequence[str]) -> str:
    more = f", ... ({len(names) - _LISTED} more)" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
