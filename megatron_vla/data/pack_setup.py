"""Capacity of this run's packs, and what to expect of it, before the run starts."""

from __future__ import annotations

import itertools
from typing import Any

from megatron_vla.config.run import RunConfig
from megatron_vla.data.pack_sampler import Packing, PackWindow
from megatron_vla.data.packing import Pack, PackLimits
from megatron_vla.findings import CheckError, error

PREVIEW_PACKS = 32
GOOD_SHARE = 0.95


def pack_limits(config: RunConfig, family: Any, num_images: int) -> PackLimits | None:
    """What --packing asks for, None without it. `num_images`: image slots of a sample. Raises CheckError if nothing fits."""
    data = config.data
    if not data.packing:
        return None
    image_tokens = family.image_tokens(config.family)
    limits = PackLimits(
        tokens=data.pack_token_budget,
        images=data.pack_token_budget // image_tokens if data.pack_max_images is None else data.pack_max_images,
        samples=config.training.micro_batch_size,
        image_tokens=image_tokens,
        most_images=num_images,
        most_prompt_tokens=config.family.max_prompt_length,
        pool_size=data.pack_pool_size,
        max_wait=data.pack_max_wait,
    )
    if limits.tokens < limits.longest_prefix:
        what = (
            f"{limits.tokens} is less than one sample can have: {num_images} images of {image_tokens} tokens and "
            f"{limits.most_prompt_tokens} prompt tokens = {limits.longest_prefix}"
        )
        raise CheckError([error("--pack-token-budget", what, f"use --pack-token-budget {8 * limits.longest_prefix} or so")])
    if limits.images < num_images:
        what = f"{limits.images} is less than the {num_images} images of one sample"
        raise CheckError([error("--pack-max-images", what, "leave it out, or raise it")])
    if limits.max_wait < limits.shortest_max_wait:
        what = (
            f"{limits.max_wait} cannot be kept: a pool of {limits.pool_size} samples that all are overdue fills "
            f"{limits.shortest_max_wait} packs"
        )
        fix = f"use --pack-max-wait {limits.shortest_max_wait} or more, or a smaller --pack-pool-size"
        raise CheckError([error("--pack-max-wait", what, fix)])
    return limits


def preview(packing: Packing) -> list[str]:
    """Lines for the log: capacity, how full the first packs are, and which flag stands in the way."""
    limits = packing.limits
    packs = list(itertools.islice(packing.stream(0, -1, 0), PREVIEW_PACKS))
    window = PackWindow.of(packs, limits)
    shares = window.metrics()
    useful, images = shares["pack_useful_token_share"], shares["pack_image_slot_share"]
    line = (
        f"packing: {packing.num_streams} packs per step of {limits.tokens} prefix tokens, {limits.images} image slots and "
        f"{limits.samples} sample slots; the first {len(packs)} packs of one stream: {shares['samples_per_pack']:.1f} samples, "
        f"{useful:.1%} useful tokens, {images:.1%} of the image slots"
    )
    return [line, *_hints(packs, limits, useful, images)]


def _hints(packs: list[Pack], limits: PackLimits, useful: float, images: float) -> list[str]:
    full_samples = sum(len(pack.places) == limits.samples for pack in packs) / len(packs)
    most_images = max(pack.num_images for pack in packs)
    if useful < GOOD_SHARE and full_samples > 0.5:
        return [f"hint: packs run out of sample slots: raise --micro-batch-size (now {limits.samples})"]
    # An image slot that stays empty costs an image in the vision tower.
    if images < GOOD_SHARE and most_images < limits.images:
        return [f"hint: no pack has more than {most_images} images: --pack-max-images {most_images} saves vision compute"]
    if useful >= GOOD_SHARE:
        return []
    if most_images == limits.images:
        return [f"hint: packs run out of image slots: raise --pack-max-images (now {limits.images})"]
    return [f"hint: raise --pack-token-budget (now {limits.tokens}) or --pack-pool-size (now {limits.pool_size})"]
