"""Compiling before the first step: every prompt width that can occur runs forward and backward once, and changes nothing."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from megatron_vla.config.run import RunConfig
from megatron_vla.data.batch import Batch, TensorFields
from megatron_vla.data.loader import prompt_slots
from megatron_vla.data.packed_batch import PackedBatch
from megatron_vla.models.registry import ModelFamily
from megatron_vla.parallel.data_parallel import DataParallelModel
from megatron_vla.parallel.groups import ParallelGroups
from megatron_vla.parallel.pipeline import Schedule


def prompt_widths(config: RunConfig, longest_prompt: int | None = None) -> list[int]:
    """Prompt slots that a micro-batch of this run may have, ascending.

    Mock samples have a range of lengths, real ones any up to `longest_prompt` (None: the most that fit).
    """
    data, limit = config.data, config.family.max_prompt_length
    first, last = 1, limit if longest_prompt is None else min(longest_prompt, limit)
    if data.mock_data:
        last = min(data.mock_prompt_length, limit)
        first = min(data.mock_min_prompt_length or last, limit)
    lengths = range(first, last + 1)
    return sorted({prompt_slots(length, data.prompt_padding, data.prompt_bucket_size, limit) for length in lengths})


def with_prompt_width(batch: Batch, width: int) -> Batch:
    """`batch` with its prompts cut or padded to `width` slots."""
    missing = width - batch.tokens_BL.shape[1]
    resized = {
        "tokens_BL": F.pad(batch.tokens_BL, (0, missing)),
        "token_is_valid_BL": F.pad(batch.token_is_valid_BL, (0, missing)),
    }
    return dataclasses.replace(batch, **resized)


def warm_up(
    model: DataParallelModel,
    family: ModelFamily,
    groups: ParallelGroups,
    config: RunConfig,
    batch: TensorFields,
    report: Callable[[str], None],
    longest_prompt: int | None = None,
) -> None:
    """Run every width on `batch`, widest first (its memory serves the others); a pack has one form. All ranks call it.

    longest_prompt: tokens that no prompt of the data exceeds. A width takes Pi0.5 `base` 8 to 10 s on an H200.
    Gradients are dropped. The reductions run too: a step that skipped them would leave megatron-core's buckets waiting.
    """
    schedule = Schedule(model, groups, family.metric_names)
    count = schedule.fewest_microbatches
    forms: dict[str, TensorFields]
    if isinstance(batch, PackedBatch):
        forms = {"packs": batch}
    elif not isinstance(batch, Batch):
        # Other widths of such a family compile when they first come.
        forms = {"batches like the first": batch}
    else:
        forms = {f"prompts of {w} slots": with_prompt_width(batch, w) for w in reversed(prompt_widths(config, longest_prompt))}
    for name, form in forms.items():
        started = time.perf_counter()
        model.zero_gradients()
        batches: list[Any] = [form] * count
        # Dropout draws here too, but training must draw what it would without a warm-up.
        with torch.random.fork_rng([groups.device] if groups.device.type == "cuda" else []):
            schedule.run(family.forward_step, iter(batches), count)
        model.finish_gradients()
        model.zero_gradients()
        report(f"compiled for {name} in {time.perf_counter() - started:.1f} s")
