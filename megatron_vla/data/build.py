"""Data supply of one run: everything is checked and built before any process group exists.

Every rank runs this by itself and comes to the same result: low-dimensional columns are cheap to read, so nobody waits for
rank 0.
"""

from __future__ import annotations

import dataclasses
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_vla.config.datasets import DatasetPart, dataset_parts
from megatron_vla.config.run import RunConfig
from megatron_vla.data.locator import LocatorIndex, build_shards
from megatron_vla.data.mixture import MixtureOrder, MixtureSource, dataset_order, dataset_seed
from megatron_vla.data.mixture_shards import MixtureShardOrder
from megatron_vla.data.pack_setup import pack_limits, preview
from megatron_vla.data.robot_source import RobotSource
from megatron_vla.data.sampler import SampleOrder
from megatron_vla.data.shard_order import ShardOrder
from megatron_vla.data.supply import DataSupply
from megatron_vla.findings import CheckError, error, raise_errors

if TYPE_CHECKING:
    from megatron_vla.data.dataset import RobotDataset
    from megatron_vla.data.robot_data import PreparedData


def build_data(config: RunConfig, family: Any) -> DataSupply:
    """Check the data and build its supply. Raises CheckError with everything that is wrong; prints on rank 0 only."""
    if config.data.mock_data:
        return _build_mock(config, family)
    quiet = int(os.environ.get("RANK", "0")) != 0
    parts, findings = dataset_parts(config.data)
    raise_errors(findings)
    if len(parts) > 1:
        return _build_mixture(config, parts, family, quiet)
    if parts:
        # Names and per-dataset forms of the flags mean something with one dataset too.
        config = dataclasses.replace(config, data=parts[0].data)
    # Only here: mock data must run where no video library is installed.
    kind = import_module(family.samples.robot_data)
    prepared: PreparedData = kind.finish_robot_data(kind.open_robot_data(config, family.batch_fields))
    order: SampleOrder | None = None
    locators = None
    if config.data.data_access == "decode_once":
        locators = _locators(config, prepared)
        order = _shard_order(config, prepared.dataset, locators, config.training.seed)
    supply = DataSupply(
        config,
        RobotSource(prepared.dataset, prepared.preprocessor, prepared.rows, locators),
        prepared.num_samples,
        prepared.preprocessor,
        prepared.findings,
        prepared.expected_padded_fraction,
        order,
        views := tuple(prepared.preprocessor.settings.camera_map.slot_names()),
        pack_limits(config, family, len(views)),
        rules=family.samples,
        longest_prompt=prepared.longest_prompt,
    )
    if not quiet:
        # The lines decode a sample, so a dataset that cannot be read ends here and not in a worker.
        print("\n".join([*prepared.summary, *supply.start_lines()]), flush=True)
    return supply


def _locators(config: RunConfig, prepared: PreparedData) -> LocatorIndex:
    folder = config.data.data_cache_path
    return LocatorIndex(prepared.dataset.table.length_E, prepared.rows, None if folder is None else Path(folder))


def _shard_order(config: RunConfig, dataset: RobotDataset, locators: LocatorIndex, seed: int) -> ShardOrder:
    """Order of --data-access decode_once, from shards of equal decoded bytes."""
    data, features = config.data, dataset.table.features
    frame_bytes = sum(features[camera].size for camera in dataset.cameras)
    shards = build_shards(locators.first_sample_E, frame_bytes, data.shard_bytes, in_storage_order=not data.shuffle)
    # Storage order cannot be read in several lanes at once.
    return ShardOrder(shards, seed, data.shuffle, data.decode_lanes if data.shuffle else 1)


def _build_mixture(config: RunConfig, parts: list[DatasetPart], family: Any, quiet: bool) -> DataSupply:
    from megatron_vla.data.mixture_data import prepare_mixture

    prepared = prepare_mixture(config, parts, family)
    sizes = [data.num_samples for data in prepared.parts]
    seed, shuffle = config.training.seed, config.data.shuffle
    order: SampleOrder
    locators: list[LocatorIndex | None] = [None for _ in parts]
    if config.data.data_access == "decode_once":
        shards = []
        for number, data in enumerate(prepared.parts):
            locators[number] = index = _locators(config, data)
            shards.append(_shard_order(config, data.dataset, index, dataset_seed(seed, number)))
        order = MixtureShardOrder(MixtureOrder(tuple(shards), prepared.quota_M, seed, shuffle), tuple(shards))
    else:
        orders = tuple(dataset_order(size, seed, shuffle, number) for number, size in enumerate(sizes))
        order = MixtureOrder(orders, prepared.quota_M, seed, shuffle)
    sources = [
        RobotSource(data.dataset, data.preprocessor, data.rows, own) for data, own in zip(prepared.parts, locators, strict=True)
    ]
    longest = [data.longest_prompt for data in prepared.parts if data.longest_prompt is not None]
    supply = DataSupply(
        config,
        MixtureSource(sources, sizes),
        sum(sizes),
        prepared.preprocessor,
        prepared.findings,
        prepared.expected_padded_fraction,
        order,
        views := tuple(prepared.parts[0].preprocessor.settings.camera_map.slot_names()),
        pack_limits(config, family, len(views)),
        rules=family.samples,
        longest_prompt=max(longest) if len(longest) == len(parts) else None,
    )
    if not quiet:
        print("\n".join([*prepared.summary, *supply.start_lines()]), flush=True)
    return supply


def _build_mock(config: RunConfig, family: Any) -> DataSupply:
    data, rules = config.data, family.samples
    if data.data_access != "random":
        raise CheckError([error("--data-access", "mock data has no episodes to decode", "use --data-access random")])
    source, views = rules.build_mock_source(config)
    limits = pack_limits(config, family, len(views))
    supply = DataSupply(config, source, data.mock_num_samples, None, [], 0.0, views=views, pack_limits=limits, rules=rules)
    if supply.packing is not None and int(os.environ.get("RANK", "0")) == 0:
        print("\n".join(preview(supply.packing)), flush=True)
    return supply
