"""Samples -> GrootN17Batch for the loaders: prompt width, cached metadata with its hit rate, pictures left to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_vla.config.run import RunConfig
from megatron_vla.data.groot.augmentation import GrootAugmentation, PictureBatch
from megatron_vla.data.groot.pictures import PictureSettings
from megatron_vla.data.groot.preprocess import PICTURES
from megatron_vla.data.loader import AUGMENTATION_FIELD, LoadedBatch
from megatron_vla.data.watch import StageTimes
from megatron_vla.findings import CheckError, error
from megatron_vla.models.groot_n1_7.samples import PaddedAssembler, build_assembler


class LoaderAssembler:
    """`assembler(samples)` -> LoadedBatch. Picklable; every worker has caches of its own."""

    def __init__(self, assembler: PaddedAssembler, augmentation: GrootAugmentation | None) -> None:
        self.assembler = assembler
        self.augmentation = augmentation

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> LoadedBatch:
        """One micro-batch."""
        pending = None
        if PICTURES in samples[0]:
            assert self.augmentation is not None, "only samples that wait for augmentation carry pictures"
            pending = PictureBatch.of(self.augmentation, samples, [sample[AUGMENTATION_FIELD] for sample in samples])
            patch = self.augmentation.pictures.patch_size
            # Grids alone make the metadata; the rows come from the device.
            empty = np.empty((0, 3 * patch * patch), dtype=np.uint8)
            samples = [{**sample, "pixels_PC": empty} for sample in samples]
        maker = self.assembler.assembler.maker
        before = _counts(maker)
        batch = self.assembler(samples)
        hits, requests = (now - then for now, then in zip(_counts(maker), before, strict=True))
        return LoadedBatch(batch, StageTimes(num_metadata_hits=hits, num_metadata_requests=requests), pending=pending)


def _counts(maker: Any) -> tuple[int, int]:
    """(hits, requests) of both caches so far."""
    hits = maker.grids.hits + maker.rows.hits
    return hits, hits + maker.grids.misses + maker.rows.misses


def build_loader_assembler(config: RunConfig) -> LoaderAssembler:
    """The assembler of one run."""
    augmentation = build_augmentation(config, ()) if config.data.augmentation != "none" else None
    return LoaderAssembler(build_assembler(config), augmentation)


def build_augmentation(config: RunConfig, views: tuple[str, ...]) -> GrootAugmentation:
    """See SampleRules; every view is changed alike. Raises CheckError for mock data, which has patches and no pictures."""
    if config.data.mock_data:
        raise CheckError([error("--augmentation", "mock samples have no pictures to crop", "drop it, or give a dataset")])
    return GrootAugmentation(config.training.seed, picture_settings(config.family), config.family.color_jitter)


def picture_settings(family: Any) -> PictureSettings:
    """Of a GrootN17Config."""
    return PictureSettings(
        image_filter=family.image_filter,
        edge=family.image_size,
        crop_fraction=family.image_crop_fraction,
        letter_box=family.letter_box,
        patch_size=family.vision_patch_size,
        merge_size=family.vision_spatial_merge_size,
        min_pixels=family.image_min_pixels,
        max_pixels=family.image_max_pixels,
    )
