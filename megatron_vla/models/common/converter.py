"""Checkpoint conversion of one model family: released layouts -> our parameters and back, strict, in the stored dtypes.

A converted ("native") folder holds `model.safetensors` with our names, `extras.safetensors` with released tensors that the
model does not have, and `conversion.json` with the released names, so that converting back to the same layout gives every
tensor byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megatron_vla.data.batch import TensorFields
from megatron_vla.findings import Finding, error, raise_errors
from megatron_vla.models.common.key_map import KeyMap
from megatron_vla.models.common.resolution import REINITIALIZE_FLAG, Resolution, ShapeFlags, resolve
from megatron_vla.models.common.tensor_file import TensorSource, open_tensors, write_tensors
from megatron_vla.parallel.parameter_shard import shard_of
from megatron_vla.parallel.partial_model import PartialModel

EXTRAS_FILE = "extras.safetensors"
RECORD_FILE = "conversion.json"
CONFIG_FILE = "config.json"

Report = Callable[[str], None]
Paths = Path | str | Sequence[Path | str]


@dataclass(frozen=True)
class Layout:
    """One released layout: what precedes every name, and which names of a tied tensor its files hold."""

    name: str
    prefix: str
    tied_names_kept: Callable[[tuple[str, ...]], tuple[str, ...]]


@dataclass(frozen=True)
class Filler:
    """A released tensor that the model does not have but that the layout's strict loaders want: zeros of this shape.

    `shape_from` lists (our parameter, axis) whose sizes make the shape.
    """

    name: str
    shape_from: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class ConversionRecord:
    """What a native folder remembers of its source: layout, header metadata, and each parameter's released names.

    `config` is the family's section, since shapes do not tell everything.
    """

    config: dict[str, Any]
    layout: str
    metadata: dict[str, str]
    names: dict[str, list[str]]


@dataclass(frozen=True, kw_only=True)
class CheckpointConverter:
    """Everything about one family's checkpoints.

    build_module(config): the model, not initialised; initialize(model, seed): its first values; infer_sizes(shapes): what the
    tensors' shapes say about the configuration; shapeless_fields: configuration that changes the mathematics and that shapes
    do not show; fixed_batch(config): the input of forward checks; read_released_config(content): fields of the family's section
    that a released config.json tells.
    """

    key_map: KeyMap
    layouts: tuple[Layout, ...]
    fillers: tuple[Filler, ...]
    shape_flags: tuple[ShapeFlags, ...]
    layer_flags: Mapping[str, str]
    shapeless_fields: tuple[str, ...]
    build_module: Callable[[Any], nn.Module]
    initialize: Callable[[nn.Module, int], None]
    infer_sizes: Callable[[Mapping[str, tuple[int, ...]]], dict[str, int]]
    fixed_batch: Callable[[Any], TensorFields]
    read_released_config: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None

    def described_config(self, path: Path | str) -> dict[str, Any] | None:
        """What files beside a checkpoint say about the family's section: all of it (ours), or what released files tell.

        Raises ValueError for the configuration of another model.
        """
        stored = stored_config(path)
        released = _folder(path) / CONFIG_FILE
        if stored is not None or self.read_released_config is None or not released.is_file():
            return stored
        return self.read_released_config(json.loads(released.read_text()))

    def check_file(self, path: Paths, config: Any, reinitialize: Sequence[str] = ()) -> list[Finding]:
        """What is wrong with loading `path` into a model of `config`; reads headers only, takes a second."""
        with torch.device("meta"):
            module = self.build_module(config)
        try:
            findings = self._resolve(open_tensors(_listed(path)), module, reinitialize, path).findings
        except ValueError as problem:
            return [error("--pretrained-checkpoint", str(problem), "name a released or converted checkpoint")]
        try:
            stored = self.described_config(_listed(path)[0]) or {}
        except ValueError as problem:
            return [error("--pretrained-checkpoint", str(problem), "name a checkpoint of this family and version")]
        for field in self.shapeless_fields:
            value = vars(config)[field]
            if stored.get(field, value) != value:
                flag = "--" + field.replace("_", "-")
                findings.append(error(flag, f"{value} here, {stored[field]} in {_shown(path)}", f"use {flag} {stored[field]}"))
        return findings

    def load(self, path: Paths, model: nn.Module, reinitialize: Sequence[str] = (), report: Report = print) -> None:
        """Copy every parameter of `model` from `path`; raises CheckError unless names and shapes match exactly.

        Parameters under `reinitialize` keep their values and are listed. Sharded parameters take their part.
        """
        source = open_tensors(_listed(path))
        resolution = self._resolve(source, model, reinitialize, path)
        raise_errors(resolution.findings)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            changes = {
                ours: _copy_tensor(parameters[ours], self._read(source, resolution, ours, report))
                for ours in parameters
                if ours in resolution.found
            }
        worst = max(changes, key=lambda name: float(changes[name]), default=None)
        largest = 0.0 if worst is None else float(changes[worst])
        place = f" (in {worst})" if largest else ""
        report(f"loaded {len(changes)}/{len(parameters)} tensors from {_shown(path)}, max |Δ| by rounding {largest:.3g}{place}")
        _report_leftovers(resolution, report)

    def to_native(
        self,
        path: Paths,
        config: Any,
        folder: Path,
        *,
        reinitialized: Mapping[str, Tensor] | None = None,
        averaged: bool = False,
        max_shard_bytes: int | None = None,
        report: Report = print,
    ) -> None:
        """Write `path` (released files, several parts, or a training checkpoint) as a native folder in the stored dtypes.

        averaged: the EMA of a training checkpoint instead of its weights. `reinitialized` holds fresh tensors for parameters
        that the source lacks.
        """
        with torch.device("meta"):
            module = self.build_module(config)
        source = open_tensors(_listed(path), averaged=averaged)
        fresh = dict(reinitialized or {})
        resolution = self._resolve(source, module, tuple(fresh), path)
        raise_errors(resolution.findings)
        tensors, names = dict(fresh), {}
        for ours, found in resolution.found.items():
            tensors[ours] = self._read(source, resolution, ours, report)
            names[ours] = [found.name, *(copy for copy in found.copies if copy not in resolution.extras)]
        write_tensors(folder, tensors, {"format": "pt"}, max_shard_bytes)
        if resolution.extras:
            save_file({name: source.read(name) for name in resolution.extras}, folder / EXTRAS_FILE)
        record = ConversionRecord(asdict(config), self._layout_of(source), dict(source.metadata), names)
        (folder / RECORD_FILE).write_text(json.dumps(asdict(record), indent=1) + "\n")
        report(
            f"converted {len(resolution.found)}/{len(tensors)} tensors from {_shown(path)} ({record.layout} layout) to {folder}"
        )
        _report_leftovers(resolution, report)

    def to_released(
        self,
        path: Path | str,
        layout_name: str,
        folder: Path,
        *,
        averaged: bool = False,
        max_shard_bytes: int | None = None,
        report: Report = print,
    ) -> None:
        """Write a native or training checkpoint in a released layout; byte-equal tensors when it came from that layout.

        averaged: the EMA of a training checkpoint instead of its weights.
        """
        layout = self._layout(layout_name)
        source = open_tensors([path], averaged=averaged)
        folder_of_source = Path(path) if Path(path).is_dir() else Path(path).parent
        record, extras = _read_record(folder_of_source)
        same = record is not None and record.layout == layout.name
        names = record.names if record is not None and same else {}
        released: dict[str, Tensor] = {}
        parts: dict[str, dict[int, Tensor]] = {}
        for ours in source.files:
            located = self.key_map.to_theirs(ours)
            if located is None:
                raise ValueError(f"{path}: {ours} is no parameter of this family; convert from a native checkpoint")
            tensor = located.rename.to_theirs(source.read(ours))
            for name in names.get(ours) or self._released_names(located.ours, layout):
                if located.rename.part is None:
                    released[name] = tensor
                else:
                    parts.setdefault(name, {})[located.rename.part[0]] = tensor
        # Fused tensors: their parts one after the other.
        released.update({name: torch.cat([rows[n] for n in sorted(rows)]) for name, rows in parts.items()})
        if same:
            released.update(extras)
        else:
            released.update(self._carried_extras(extras, layout))
            released.update(self._filled(source, released, layout, report))
        metadata = record.metadata if record is not None and same else {"format": "pt"}
        write_tensors(folder, _unshared(released), metadata, max_shard_bytes)
        report(f"wrote {len(released)} tensors in {layout.name} layout to {folder}")

    def our_shapes(self, path: Paths) -> dict[str, tuple[int, ...]]:
        """Shapes by our names of whatever `path` holds, for inferring dimensions; unknown tensors are left out."""
        source = open_tensors(_listed(path))
        shapes = {}
        for name, shape in source.shapes.items():
            canonical = self.key_map.canonical(name)
            tie = self.key_map.tie_of(canonical)
            if self.key_map.to_theirs(name) is not None:
                shapes[name] = shape
                continue
            for located in self.key_map.all_ours(tie.names[0] if tie else canonical):
                shapes[located.ours] = located.rename.our_shape(shape)
        return shapes

    def _resolve(self, source: TensorSource, module: nn.Module, reinitialize: Sequence[str], path: Paths) -> Resolution:
        expected = {name: shard_of(parameter).global_shape for name, parameter in module.named_parameters()}
        if isinstance(module, PartialModel):
            # Every tensor of the file must belong to some stage, and every stage's parameters must be in the file.
            expected.update(module.absent_shapes)
        where = f"--pretrained-checkpoint {_shown(path)}"
        return resolve(source, expected, self.key_map, self.shape_flags, self.layer_flags, reinitialize, where)

    def _read(self, source: TensorSource, resolution: Resolution, ours: str, report: Report) -> Tensor:
        """One parameter in our layout of axes; a differing tied copy becomes an extra and is reported."""
        found = resolution.found[ours]
        tensor = source.read(found.name)
        for copy in found.copies:
            if not torch.equal(tensor, source.read(copy)):
                resolution.extras[copy] = f"differs from {found.name}, which is the copy that the model reads"
                report(f"note: {copy} differs from {found.name}; the model reads the latter")
        return tensor if found.rename is None else found.rename.to_ours(tensor)

    def _layout(self, name: str) -> Layout:
        for layout in self.layouts:
            if layout.name == name:
                return layout
        raise ValueError(f"layout {name}: unknown; known: {', '.join(layout.name for layout in self.layouts)}")

    def _layout_of(self, source: TensorSource) -> str:
        """Name of the layout whose full prefix every tensor has, or `parts`."""
        for layout in sorted(self.layouts, key=lambda layout: -len(layout.prefix)):
            if all(name.startswith(layout.prefix) for name in source.files):
                return layout.name
        return "parts"

    def _released_names(self, name: str, layout: Layout) -> tuple[str, ...]:
        tie = self.key_map.tie_of(name)
        kept = (name,) if tie is None else layout.tied_names_kept(tie.names)
        return tuple(layout.prefix + k for k in kept)

    def _carried_extras(self, extras: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
        """Extras under this layout's names; a stale tied copy is not carried, the layout's own rule writes those names."""
        canonical = {self.key_map.canonical(name): tensor for name, tensor in extras.items()}
        wanted = {filler.name for filler in self.fillers}
        return {layout.prefix + name: tensor for name, tensor in canonical.items() if name in wanted}

    def _filled(
        self, source: TensorSource, released: Mapping[str, Tensor], layout: Layout, report: Report
    ) -> dict[str, Tensor]:
        filled = {}
        for filler in self.fillers:
            name = layout.prefix + filler.name
            if name not in released:
                shape = [source.shapes[ours][axis] for ours, axis in filler.shape_from]
                dtype = source.read(filler.shape_from[0][0]).dtype
                filled[name] = torch.zeros(shape, dtype=dtype)
                report(f"note: {name} is unused by the model; wrote zeros {shape}, since strict loaders ask for it")
        return filled


def stored_config(path: Path | str) -> dict[str, Any] | None:
    """The family's section stored beside a converted or trained checkpoint, or None (released files have none of ours)."""
    folder = _folder(path)
    for name, key in ((RECORD_FILE, "config"), (CONFIG_FILE, "family")):
        if (folder / name).is_file():
            content = json.loads((folder / name).read_text())
            if key in content:
                return dict(content[key])
    return None


def _folder(path: Path | str) -> Path:
    return Path(path) if Path(path).is_dir() else Path(path).parent


def _listed(path: Paths) -> list[Path | str]:
    return [path] if isinstance(path, str | Path) else list(path)


def _shown(path: Paths) -> str:
    return " + ".join(map(str, _listed(path)))


def _copy_tensor(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Copy this rank's part with rounding to the parameter's dtype; returns the largest change (device scalar)."""
    tensor = shard_of(parameter).local_part(tensor)
    parameter.copy_(tensor)
    wide = torch.promote_types(torch.promote_types(parameter.dtype, tensor.dtype), torch.float32)
    if tensor.dtype == parameter.dtype or tensor.numel() == 0:
        return torch.zeros((), dtype=wide)
    return (parameter.to(wide) - tensor.to(parameter.device, wide)).abs().max()


def _report_leftovers(resolution: Resolution, report: Report) -> None:
    for name, reason in resolution.extras.items():
        report(f"not loaded: {name} ({reason})")
    if resolution.reinitialized:
        report(f"{REINITIALIZE_FLAG}: {len(resolution.reinitialized)} fresh: {', '.join(resolution.reinitialized)}")


def _read_record(folder: Path) -> tuple[ConversionRecord | None, dict[str, Tensor]]:
    path = folder / RECORD_FILE
    record = ConversionRecord(**json.loads(path.read_text())) if path.is_file() else None
    extras = load_file(folder / EXTRAS_FILE) if (folder / EXTRAS_FILE).is_file() else {}
    return record, extras


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The file format refuses two names of one storage: copy the second and later ones."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        pointer = tensor.data_ptr()
        result[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return result
