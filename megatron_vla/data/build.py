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
from megatron_vla.data.loader import RobotSource
from megatron_vla.data.locator import LocatorIndex, build_shards
from megatron_vla.data.mixture import MixtureOrder, MixtureSource, dataset_order
from megatron_vla.data.shard_order import ShardOrder
from megatron_vla.data.supply import DataSupply
from megatron_vla.findings import CheckError, error, raise_errors

if TYPE_CHECKING:
    from megatron_vla.data.dataset import RobotDataset
    from megatron_vla.data.robot_data import PreparedData
    from megatron_vla.models.registry import SampleRules


def build_data(config: RunConfig, family: Any) -> DataSupply:
    """Check the data and build its supply. Raises CheckError with everything that is wrong; prints on rank 0 only."""
    if config.data.mock_data:
        return _build_mock(config, family.samples)
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
    order, locators = None, None
    if config.data.data_access == "decode_once":
        locators = _locators(config, prepared)
        order = _shard_order(config, prepared.dataset, locators)
    supply = DataSupply(
        config,
        RobotSource(prepared.dataset, prepared.preprocessor, prepared.rows, locators),
        prepared.num_samples,
        prepared.preprocessor,
        prepared.findings,
        prepared.expected_padded_fraction,
        order,
        tuple(prepared.preprocessor.settings.camera_map.slot_names()),
        rules=family.samples,
    )
    if not quiet:
        # The line decodes a sample, so a dataset that cannot be read ends here and not in a worker.
        print("\n".join([*prepared.summary, supply.prefetch_line()]), flush=True)
    return supply


def _locators(config: RunConfig, prepared: PreparedData) -> LocatorIndex:
    folder = config.data.data_cache_path
    return LocatorIndex(prepared.dataset.table.length_E, prepared.rows, None if folder is None else Path(folder))


def _shard_order(config: RunConfig, dataset: RobotDataset, locators: LocatorIndex) -> ShardOrder:
    """Order of --data-access decode_once, from shards of equal decoded bytes."""
    data, features = config.data, dataset.table.features
    frame_bytes = sum(features[camera].size for camera in dataset.cameras)
    shards = build_shards(locators.first_sample_E, frame_bytes, data.shard_bytes, in_storage_order=not data.shuffle)
    # Storage order cannot be read in several lanes at once.
    return ShardOrder(shards, config.training.seed, data.shuffle, data.decode_lanes if data.shuffle else 1)


def _build_mixture(config: RunConfig, parts: list[DatasetPart], family: Any, quiet: bool) -> DataSupply:
    from megatron_vla.data.mixture_data import prepare_mixture

    prepared = prepare_mixture(config, parts, family)
    sizes = [data.num_samples for data in prepared.parts]
    sources = [RobotSource(data.dataset, data.preprocessor, data.rows) for data in prepared.parts]
    seed, shuffle = config.training.seed, config.data.shuffle
    orders = tuple(dataset_order(size, seed, shuffle, number) for number, size in enumerate(sizes))
    if config.data.data_access != "random":
        what = f"decode_once with {len(parts)} datasets: shards of a mixture do not exist"
        raise CheckError([error("--data-access", what, "use --data-access random, or one dataset")])
    supply = DataSupply(
        config,
        MixtureSource(sources, sizes),
        sum(sizes),
        prepared.preprocessor,
        prepared.findings,
        prepared.expected_padded_fraction,
        MixtureOrder(orders, prepared.quota_M, seed, shuffle),
        tuple(prepared.parts[0].preprocessor.settings.camera_map.slot_names()),
        rules=family.samples,
    )
    if not quiet:
        print("\n".join([*prepared.summary, supply.prefetch_line()]), flush=True)
    return supply


def _build_mock(config: RunConfig, rules: SampleRules) -> DataSupply:
    data = config.data
    if data.data_access != "random":
        raise CheckError([error("--data-access", "mock data has no episodes to decode", "use --data-access random")])
    source, views = rules.build_mock_source(config)
    return DataSupply(config, source, data.mock_num_samples, None, [], 0.0, views=views, rules=rules)
