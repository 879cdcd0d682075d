"""Compute statistics.json of a robot dataset, or of all datasets of a mixture: what --statistics-path reads.

    python tools/compute_norm_stats.py --data-path DATASET --model-variant base --output statistics.json

Takes the data, model and model-family flags of pretrain_vla.py, so that the transformed stream is the one that training sees.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from megatron_vla.config.cli import StrictParser, add_section, build_section
from megatron_vla.config.data import DataConfig
from megatron_vla.config.datasets import dataset_parts
from megatron_vla.config.model import ModelConfig
from megatron_vla.config.run import SECTIONS, RunConfig
from megatron_vla.data.dataset import open_table
from megatron_vla.data.mixture_data import check_shared_widths, statistics_groups
from megatron_vla.data.robot_data import OpenedColumns, open_columns, stream_transform
from megatron_vla.data.statistics import FeatureStatistics, Statistics, save_statistics_of_datasets
from megatron_vla.data.statistics_pass import StreamTransform, merged_statistics
from megatron_vla.findings import CheckError, error, raise_errors
from megatron_vla.models.registry import model_family


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Output: where the statistics go"""

    output: str = "statistics.json"
    """File to write."""

    overwrite: bool = False
    """Replace the file when it exists."""


def parse(arguments: Sequence[str]) -> tuple[RunConfig, OutputConfig]:
    """Flags -> (run configuration with only data and model set, output)."""
    first_look = StrictParser(add_help=False)
    add_section(first_look, ModelConfig)
    model = build_section(ModelConfig, vars(first_look.parse_known_args(list(arguments))[0]))
    family = model_family(model.model_name)
    parser = StrictParser(prog="tools/compute_norm_stats.py", description=__doc__)
    for section in (ModelConfig, DataConfig, family.config_type, OutputConfig):
        add_section(parser, section)
    given = parser.parse_flags(list(arguments))
    if model.model_variant not in family.variants:
        parser.error(f"--model-variant {model.model_variant}: {model.model_name} has {', '.join(family.variants)}")
    sections = {name: build_section(kind, given) for name, kind in SECTIONS.items()}
    config = RunConfig(**sections, family=build_section(family.config_type, given, family.variants[model.model_variant]))
    return config, build_section(OutputConfig, given)


def format_statistics(name: str, dimension_names: Sequence[str], feature: FeatureStatistics) -> list[str]:
    """Table of one feature."""
    columns = ("min", "q01", "mean", "q99", "max", "std")
    lines = [f"{name:<10} {'dimension':<24}" + "".join(f"{column:>12}" for column in columns)]
    for dim, label in enumerate(dimension_names):
        lines.append(f"{'':<10} {dim:>3} {label[:20]:<20}" + "".join(f"{feature.values[c][dim]:>12.5g}" for c in columns))
    return lines


def opened_parts(config: RunConfig) -> dict[str, tuple[OpenedColumns, StreamTransform]]:
    """Columns and stream of each dataset by name. Raises CheckError with the errors of all of them; prints warnings."""
    parts, findings = dataset_parts(config.data)
    raise_errors(findings)
    if not parts:
        raise CheckError([error("--data-path", "no dataset given", "name a dataset folder")])
    opened: dict[str, tuple[OpenedColumns, StreamTransform]] = {}
    for part in parts:
        own = dataclasses.replace(config, data=part.data)
        try:
            table = open_table(part.data)
            columns = open_columns(own, table, ())
            transform = stream_transform(own, table[0].fps)
        except CheckError as problems:
            findings += [dataclasses.replace(f, where=f"dataset {part.name}: {f.where}") for f in problems.findings]
            continue
        opened[part.name] = columns, transform
        findings += [dataclasses.replace(f, where=f"dataset {part.name}: {f.where}") for f in columns.findings]
    raise_errors(findings)
    for finding in findings:
        print(finding)
    return opened


def shared_groups(config: RunConfig, opened: Mapping[str, tuple[OpenedColumns, StreamTransform]]) -> list[list[str]]:
    """Names of datasets that share statistics. Raises CheckError when --mixture-statistics cannot have them share."""
    kind = config.data.mixture_statistics
    columns = {name: one.dataset for name, (one, _) in opened.items()}
    groups = statistics_groups(kind, {name: dataset.embodiment for name, dataset in columns.items()})
    widths = {name: (dataset.state_ND.shape[-1], dataset.actions_ND.shape[-1]) for name, dataset in columns.items()}
    for group in groups:
        check_shared_widths(kind, group, widths)
    return groups


def print_statistics(statistics: Statistics, names: Mapping[str, Sequence[str]]) -> None:
    """Tables, and a note on dimensions that make trouble."""
    for name, feature in statistics.features.items():
        print("\n".join(format_statistics(name, names[name], feature)))
    constant = {n: np.flatnonzero(f.values["q99"] - f.values["q01"] < 1e-3).tolist() for n, f in statistics.features.items()}
    for name, dims in constant.items():
        if dims:
            print(
                f"note: {name} dimension(s) {dims} hardly move (q99 - q01 < 0.001): rare values there normalize to huge numbers"
            )


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0, or 1 with the findings printed."""
    config, output = parse(arguments)
    path = Path(output.output)
    if path.exists() and not output.overwrite:
        print(f"--output {path} exists; add --overwrite to replace it", file=sys.stderr)
        return 1
    try:
        opened = opened_parts(config)
        groups = shared_groups(config, opened)
    except CheckError as problems:
        print(problems, file=sys.stderr)
        return 1
    streams = [(columns.dataset, transform, columns.samples) for columns, transform in opened.values()]
    num_samples = sum(len(samples) for _, _, samples in streams)
    found: dict[str, Statistics] = {}
    stream_of = dict(zip(opened, streams, strict=True))
    with tqdm(total=num_samples, unit="sample", disable=None) as bar:
        for group in groups:
            of_group = merged_statistics([stream_of[n] for n in group], config.data.statistics_quantiles, bar.update)
            found |= dict(zip(group, of_group, strict=True))
    computed = [found[name] for name in opened]
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(opened) == 1:
        computed[0].save(path)
    else:
        save_statistics_of_datasets(path, dict(zip(opened, computed, strict=True)))
    for statistics, (name, (columns, _)) in zip(computed, opened.items(), strict=True):
        if len(opened) > 1:
            others = [other for group in groups if name in group for other in group if other != name]
            print(f"-- dataset {name}" + (f" (together with {', '.join(others)})" if others else ""))
        print_statistics(statistics, columns.names)
    print(f"wrote {path} ({num_samples} samples, {computed[0].quantiles} quantiles)")
    print(f"use it with --statistics-path {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
