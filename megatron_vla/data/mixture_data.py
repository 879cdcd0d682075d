"""Opens, checks and prepares the datasets of a mixture; every dataset keeps its own cameras, rate, dimensions and statistics.

Nothing is reduced to what the datasets share: views are laid out by name, a dataset without a camera for a view gets an empty,
masked slot there, and states and actions are padded to the model's width.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megatron_vla.config.datasets import DatasetPart
from megatron_vla.config.run import RunConfig
from megatron_vla.data.mixture import quotas
from megatron_vla.data.preprocess import MIXTURE_FILE, STATISTICS_FILE, TOKENIZER_FILE
from megatron_vla.data.robot_data import (
    OpenedData,
    PreparedData,
    SharedLayout,
    statistics_command,
)
from megatron_vla.data.statistics import Statistics, save_statistics_of_datasets
from megatron_vla.findings import CheckError, Finding, error, raise_errors
from megatron_vla.models.registry import ModelFamily

T = TypeVar("T")


class MixturePreprocessor:
    """The preprocessors of a mixture by dataset name, in the order of --data-path."""

    def __init__(self, parts: dict[str, Any], first_rows: Sequence[int]) -> None:
        self.parts = parts
        self.first_rows = np.asarray(first_rows)

    def split(self, sample_index_B: np.ndarray) -> Iterator[tuple[str, Any, np.ndarray]]:
        """(name, preprocessor, places in the batch) of each dataset that has samples in a batch."""
        dataset_B = np.searchsorted(self.first_rows, sample_index_B, side="right") - 1
        for number, (name, preprocessor) in enumerate(self.parts.items()):
            places = np.flatnonzero(dataset_B == number)
            if len(places):
                yield name, preprocessor, places

    def save(self, folder: Path) -> None:
        """A complete folder per dataset for serving; the statistics of all in one file and the tokenizer, for a resume."""
        save_statistics_of_datasets(folder / STATISTICS_FILE, {name: part.statistics for name, part in self.parts.items()})
        (folder / TOKENIZER_FILE).write_bytes(next(iter(self.parts.values())).tokenizer.model_bytes)
        for name, part in self.parts.items():
            (folder / name).mkdir()
            # Complete, tokenizer included: serving one robot needs nothing of the others.
            part.save(folder / name)
        (folder / MIXTURE_FILE).write_text(json.dumps({"datasets": list(self.parts)}, indent=1) + "\n")


def acting_part(preprocessor: Any, dataset: str | None) -> Any:
    """The preprocessor that a policy acts with: of the mixture's `dataset`, or the only one."""
    return preprocessor.parts[str(dataset)] if isinstance(preprocessor, MixturePreprocessor) else preprocessor


@dataclass(frozen=True)
class PreparedMixture:
    """Datasets in the order of --data-path; quota_M: samples of each in a mixture epoch."""

    names: tuple[str, ...]
    parts: tuple[PreparedData, ...]
    quota_M: np.ndarray
    preprocessor: MixturePreprocessor
    findings: list[Finding]
    summary: list[str]
    expected_padded_fraction: float


def prepare_mixture(config: RunConfig, parts: Sequence[DatasetPart], family: ModelFamily) -> PreparedMixture:
    """Raises CheckError with everything found in all datasets."""
    kind = import_module(family.samples.robot_data)
    opened: list[OpenedData] = _collect(parts, lambda part: kind.open_robot_data(_config_of(config, part), family.batch_fields))
    # One file holds the statistics of all datasets, so it is made anew for all of them.
    opened = [dataclasses.replace(data, command=statistics_command(config)) for data in opened]
    layout = _shared_layout(parts, opened, config.data.num_images)
    merged: Sequence[Statistics | None] = [None] * len(parts)
    if config.data.mixture_statistics != "per_dataset":
        merged = _merged(config, parts, opened, kind.statistics_of_streams)
    of_name = {part.name: (data, statistics) for part, data, statistics in zip(parts, opened, merged, strict=True)}
    prepared = _collect(parts, lambda part: kind.finish_robot_data(of_name[part.name][0], layout, of_name[part.name][1]))
    sizes = [data.num_samples for data in prepared]
    # All or none of the parts have one: the flag has a value for each dataset.
    weights = [part.weight for part in parts if part.weight is not None] or None
    try:
        quota_M = quotas(sizes, weights)
    except ValueError as problem:
        raise CheckError([error("--data-weights", str(problem), "raise the weight, or leave the dataset out")]) from problem
    findings = [_named(part.name, finding) for part, data in zip(parts, prepared, strict=True) for finding in data.findings]
    summary = []
    for part, data in zip(parts, prepared, strict=True):
        summary += [f"-- dataset {part.name}", *(line for line in data.summary)]
    rows = np.array([len(data.dataset) for data in prepared])
    preprocessors = {part.name: data.preprocessor for part, data in zip(parts, prepared, strict=True)}
    return PreparedMixture(
        names=tuple(part.name for part in parts),
        parts=tuple(prepared),
        quota_M=quota_M,
        preprocessor=MixturePreprocessor(preprocessors, (np.cumsum(rows) - rows).tolist()),
        findings=findings,
        summary=[*summary, *mixture_table(parts, prepared, quota_M)],
        # Weighted as the samples are drawn, since the report compares it with a batch.
        expected_padded_fraction=float(
            np.average([data.expected_padded_fraction for data in prepared], weights=quota_M.astype(np.float64))
        ),
    )


def mixture_table(parts: Sequence[DatasetPart], prepared: Sequence[PreparedData], quota_M: np.ndarray) -> list[str]:
    """Lines for people: what each dataset contributes to an epoch."""
    heads = ("samples", "per epoch", "share", "repeats", "fps", "action", "state")
    lines = [
        f"mixture of {len(parts)} datasets, {int(quota_M.sum())} samples per epoch",
        f"  {'dataset':<24}" + "".join(f" {head:>9}" for head in heads) + "  robot",
    ]
    for part, data, quota in zip(parts, prepared, quota_M.tolist(), strict=True):
        table, settings = data.dataset.table, data.preprocessor.settings
        cells = (
            f"{data.num_samples}",
            f"{quota}",
            f"{quota / quota_M.sum():.1%}",
            f"{quota / data.num_samples:.3g}",
            f"{table.fps:g}",
            f"{settings.action_dim}",
            f"{settings.state_dim}",
        )
        row = "".join(f" {cell:>9}" for cell in cells)
        lines.append(f"  {part.name[:24]:<24}{row}  {table.robot_type or 'not stated'}")
    return lines


def _config_of(config: RunConfig, part: DatasetPart) -> RunConfig:
    return dataclasses.replace(config, data=part.data)


def _named(name: str, finding: Finding) -> Finding:
    return dataclasses.replace(finding, where=f"dataset {name}: {finding.where}")


def _collect(parts: Sequence[DatasetPart], prepare: Callable[[DatasetPart], T]) -> list[T]:
    """`prepare` of every dataset; errors of all of them together."""
    results, findings = [], []
    for part in parts:
        try:
            results.append(prepare(part))
        except CheckError as problems:
            findings += [_named(part.name, finding) for finding in problems.findings]
    raise_errors(findings)
    return results


def _shared_layout(parts: Sequence[DatasetPart], opened: Sequence[OpenedData], num_images: int | None) -> SharedLayout | None:
    """Views of all datasets in the order in which they first appear; None when a camera map is wrong (reported later)."""
    layouts = [data.layout for data in opened]
    known = [layout for layout in layouts if layout is not None]
    if len(known) < len(layouts):
        return None
    # By first appearance: the first dataset decides the order of the model's views.
    views = tuple(dict.fromkeys(view for layout in known for view in layout.views))
    if num_images is not None and num_images < len(views):
        what = f"{num_images} is fewer than the {len(views)} views of all datasets ({', '.join(views)})"
        raise CheckError([error("--num-images", what, f"use --num-images {len(views)} or more")])
    return SharedLayout(views, num_images or len(views), max(layout.state_dim for layout in known))


def statistics_groups(kind: str, robot_types: dict[str, str | None]) -> list[list[str]]:
    """Names of datasets that share statistics. Raises CheckError for a dataset that does not say which robot it is of."""
    if kind == "per_dataset":
        return [[name] for name in robot_types]
    if kind == "merged":
        return [list(robot_types)]
    unknown = [name for name, robot in robot_types.items() if not robot]
    if unknown:
        what = f"per_embodiment, but the metadata of {', '.join(unknown)} states no robot type"
        fix = "add robot_type to its meta/info.json (RLDS: to --rlds-mapping), or use --mixture-statistics per_dataset"
        raise CheckError([error("--mixture-statistics", what, fix)])
    groups: dict[str | None, list[str]] = {}
    for name, robot in robot_types.items():
        groups.setdefault(robot, []).append(name)
    return list(groups.values())


def check_shared_widths(kind: str, group: Sequence[str], widths: dict[str, tuple[int, int]]) -> None:
    """Raises CheckError when datasets that share statistics have other dimensions; widths: (state, action) by name."""
    if len({widths[name] for name in group}) > 1:
        listed = ", ".join(f"{name} state {widths[name][0]} action {widths[name][1]}" for name in group)
        what = f"{kind}, but the datasets have different dimensions: {listed}"
        raise CheckError([error("--mixture-statistics", what, "use --mixture-statistics per_dataset")])


def _merged(
    config: RunConfig,
    parts: Sequence[DatasetPart],
    opened: Sequence[OpenedData],
    statistics_of_streams: Callable[..., list[Statistics]],
) -> list[Statistics | None]:
    """The same statistics for every dataset of a group, of all the group's samples."""
    if config.data.statistics_path is not None:
        # Whoever made that file merged them there: the checkpoint's own, at a resume.
        return [None] * len(parts)
    kind = config.data.mixture_statistics
    of_name = {part.name: data for part, data in zip(parts, opened, strict=True)}
    columns = {name: data.columns.dataset for name, data in of_name.items()}
    groups = statistics_groups(kind, {name: dataset.embodiment for name, dataset in columns.items()})
    for group in groups:
        widths = {name: (dataset.state_ND.shape[-1], dataset.actions_ND.shape[-1]) for name, dataset in columns.items()}
        check_shared_widths(kind, group, widths)
    # Statistics over columns with faults would hide them behind numbers.
    raise_errors([_named(name, finding) for name, data in of_name.items() for finding in data.findings])
    weight_of = {part.name: part.weight for part in parts}
    found: dict[str, Statistics] = {}
    for group in groups:
        streams = [(of_name[n].columns.dataset, of_name[n].transform, of_name[n].columns.samples) for n in group]
        weights = [weight for n in group if (weight := weight_of[n]) is not None] or None
        of_group = statistics_of_streams(streams, config.data.statistics_quantiles, weights=weights)
        found |= dict(zip(group, of_group, strict=True))
    return [found[part.name] for part in parts]
