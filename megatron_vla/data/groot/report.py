"""GR00T micro-batches for the first-batch report: patch rows back to pictures, prompts back to text, ranges by dimension.

Shape legend: as models/groot_n1_7/batch.py; V pictures of the sample with the most.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_vla.data.groot.pictures import pictures_of
from megatron_vla.data.report import MAX_SAMPLES, ReportFields, dataset_parts_of, dimension_rows

MERGE = 2  # for mock data, whose settings nobody knows here


def report_fields(batch: Any, preprocessor: Any) -> ReportFields:
    """See `ReportFields`; a sample without a picture in some slot shows black there."""
    parts = dataset_parts_of(batch, preprocessor)
    pictures = _pictures(batch, MERGE if preprocessor is None else parts[0][1].settings.pictures.merge_size)
    num_views = max(map(len, pictures))
    height, width = (max(p.shape[side] for row in pictures for p in row) for side in (0, 1))
    images_BVCHW = torch.zeros((len(pictures), num_views, 3, height, width), dtype=torch.uint8)
    is_present_BV = torch.zeros((len(pictures), num_views), dtype=torch.bool)
    for sample, row in enumerate(pictures):
        for view, picture in enumerate(row):
            images_BVCHW[sample, view, :, : picture.shape[0], : picture.shape[1]] = picture.permute(2, 0, 1)
            is_present_BV[sample, view] = True
    settings = None if preprocessor is None else parts[0][1].settings
    masks_steps = settings is None or settings.action_loss == "valid"
    return ReportFields(
        images_BVCHW=images_BVCHW,
        is_present_BV=is_present_BV,
        views=[(f"picture_{i}", ", ".join(_camera_names(parts, i))) for i in range(num_views)],
        prompts=_prompts(batch, None if preprocessor is None else parts[0][1].tokenizer),
        token_is_valid_BL=batch.token_is_valid_BS,
        step_is_valid_BT=_steps(batch, parts) if masks_steps else None,
        ranges=[] if preprocessor is None else _ranges(batch, parts),
    )


def _pictures(batch: Any, merge: int) -> list[list[Tensor]]:
    """uint8 [H, W, C] of every picture, sample by sample."""
    offsets, places = batch.image_offset_I.tolist(), batch.patch_place_P2
    patches_left = (batch.image_key_is_valid_BK.sum(dim=1) * merge**2).tolist()
    side = round((batch.pixels_PC.shape[1] / 3) ** 0.5)
    rows: list[list[Tensor]] = [[] for _ in patches_left]
    sample = 0
    for first, last in pairwise(offsets):
        while patches_left[sample] == 0:
            sample += 1
        height, width = (int(places[first:last, axis].max()) + 1 for axis in (0, 1))
        rows[sample].append(pictures_of(batch.pixels_PC[first:last], (1, height, width), side, merge)[0])
        patches_left[sample] -= last - first
    return rows


def _camera_names(parts: list[tuple[str, Any, np.ndarray]], picture: int) -> list[str]:
    if parts[0][1] is None:
        return ["mock"]
    names = []
    for _, part, _ in parts:
        settings = part.settings
        frame, view = divmod(picture, len(settings.views))
        if frame < len(settings.modality.video.delta_indices):
            step = settings.modality.video.delta_indices[frame]
            names.append(settings.camera_keys[view] + (f" at {step}" if step else ""))
    return list(dict.fromkeys(names))


def _prompts(batch: Any, tokenizer: Any) -> list[str]:
    prompts = []
    for tokens_S, is_valid_S in zip(batch.tokens_BS[:MAX_SAMPLES], batch.token_is_valid_BS[:MAX_SAMPLES], strict=True):
        ids = tokens_S[is_valid_S].tolist()
        prompts.append(f"{len(ids)} random tokens" if tokenizer is None else tokenizer.decode(ids))
    return prompts


def _steps(batch: Any, parts: list[tuple[str, Any, np.ndarray]]) -> Tensor:
    """bool [B, T]: validity of the chunks' own steps; those that pad a chunk to the model's horizon count as valid."""
    steps_BT = batch.action_is_valid_BTA[..., 0].clone()
    for _, part, places in parts:
        if part is not None:
            steps_BT[places, part.settings.num_steps :] = True
    return steps_BT


def _ranges(batch: Any, parts: list[tuple[str, Any, np.ndarray]]) -> list[dict[str, Any]]:
    """Normalized ranges, and physical ones of the actions through the inverse transform where they are not relative."""
    rows: list[dict[str, Any]] = []
    for dataset, part, places in parts:
        settings, prefix = part.settings, f"{dataset}:" if dataset else ""
        state_ND = batch.state_BHD.numpy()[places, -1, : part.transform.state_width]
        names = settings.state_names
        if len(names) != part.transform.state_width:
            names = tuple(f"state_{i}" for i in range(part.transform.state_width))
        rows += dimension_rows("state", [prefix + name for name in names], state_ND, state_ND)
        actions_BTD = batch.actions_BTA.numpy()[places][:, : settings.num_steps, : settings.action_dim]
        # Relative keys are shown relative: the physical state is not in the batch.
        physical_BTD = part.transform.unnormalize_relative(actions_BTD)
        flat = [values.reshape(-1, settings.action_dim) for values in (physical_BTD, actions_BTD)]
        rows += dimension_rows("action", [prefix + name for name in settings.action_names], *flat)
    return rows
