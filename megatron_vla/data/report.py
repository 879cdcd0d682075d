"""First-batch report: what the model really sees, as text, JSON and a picture.

Shape legend: as data/batch.py; S side of an image.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from megatron_vla.data.batch import Batch
from megatron_vla.data.image import pixels_to_model_range
from megatron_vla.data.mixture_data import MixturePreprocessor
from megatron_vla.findings import Finding, warning

MAX_SAMPLES = 4
CAPTION_HEIGHT = 30
PROMPT_HEIGHT = 64
MIN_TILE = 160
PICTURE_NAME = "first_batch.png"
JSON_NAME = "first_batch.json"


AnyPreprocessor = Any  # a family's preprocessor, a MixturePreprocessor of them, or None for mock data


@dataclass
class ReportFields:
    """What the report shows of a micro-batch on the CPU, whatever family it belongs to.

    images_BVCHW: uint8, or float in [-1, 1]; is_present_BV: bool. views: (slot, camera keys) of each. prompts: of the first
    samples. token_is_valid_BL: bool. step_is_valid_BT: bool, steps of the robot's chunk inside the episode; None when
    --action-loss keeps the others in the loss mask. ranges: rows of the table of dimensions.
    """

    images_BVCHW: Tensor
    is_present_BV: Tensor
    views: list[tuple[str, str]]
    prompts: list[str]
    token_is_valid_BL: Tensor
    step_is_valid_BT: Tensor | None
    ranges: list[dict[str, Any]]


def dataset_parts_of(batch: Any, preprocessor: Any) -> list[tuple[str, Any, np.ndarray]]:
    """(dataset name, its preprocessor, its samples' places in the batch); one nameless part unless it is a mixture."""
    if isinstance(preprocessor, MixturePreprocessor):
        return list(preprocessor.split(batch.sample_index_B.numpy()))
    return [("", preprocessor, np.arange(batch.size))]


def stacked_fields(batch: Batch, preprocessor: AnyPreprocessor) -> ReportFields:
    """Of a Batch."""
    masks_steps = preprocessor is None or dataset_parts_of(batch, preprocessor)[0][1].settings.action_loss == "valid"
    return ReportFields(
        images_BVCHW=batch.images_BVCHW,
        is_present_BV=batch.camera_is_present_BV,
        views=_view_labels(batch, preprocessor),
        prompts=_prompts(batch, preprocessor, min(MAX_SAMPLES, batch.size)),
        token_is_valid_BL=batch.token_is_valid_BL,
        step_is_valid_BT=batch.action_is_valid_BTA[..., 0] if masks_steps else None,
        ranges=[] if preprocessor is None else range_rows(batch, preprocessor),
    )


def _view_labels(batch: Batch, preprocessor: AnyPreprocessor) -> list[tuple[str, str]]:
    """(slot name, camera keys of the datasets) of each view."""
    num_views = batch.images_BVCHW.shape[1]
    if preprocessor is None:
        return [(f"view_{i}", "mock") for i in range(num_views)]
    maps = [part.settings.camera_map for _, part, _ in dataset_parts_of(batch, preprocessor)]
    keys = [
        dict.fromkeys((cameras.keys[view] if view < len(cameras.keys) else "") or "no camera" for cameras in maps)
        for view in range(num_views)
    ]
    return list(zip(maps[0].slot_names(), map(", ".join, keys), strict=True))


def _prompts(batch: Batch, preprocessor: AnyPreprocessor, num_samples: int) -> list[str]:
    prompts = []
    tokenizer = None if preprocessor is None else dataset_parts_of(batch, preprocessor)[0][1].tokenizer
    for tokens_L, is_valid_L in zip(batch.tokens_BL[:num_samples], batch.token_is_valid_BL[:num_samples], strict=True):
        ids = tokens_L[is_valid_L].tolist()
        prompts.append(f"{len(ids)} random tokens" if tokenizer is None else tokenizer.decode(ids))
    return prompts


def dimension_rows(feature: str, names: Sequence[str], before_ND: np.ndarray, after_ND: np.ndarray) -> list[dict[str, Any]]:
    return [
        {
            "feature": feature,
            "dim": dim,
            "name": names[dim],
            "physical_min": float(before_ND[:, dim].min()),
            "physical_max": float(before_ND[:, dim].max()),
            "normalized_min": float(after_ND[:, dim].min()),
            "normalized_max": float(after_ND[:, dim].max()),
        }
        for dim in range(len(names))
    ]


def range_rows(batch: Batch, preprocessor: Any) -> list[dict[str, Any]]:
    """Ranges of every state and action dimension in this batch, before and after normalization, dataset by dataset.

    The physical values come from the normalized ones through the inverse transform, so the table also shows that it works.
    """
    rows = []
    for dataset, part, places in dataset_parts_of(batch, preprocessor):
        settings, prefix = part.settings, f"{dataset}:" if dataset else ""
        state_ND = batch.state_BD.numpy()[places, : settings.state_dim]
        actions_BTA = batch.actions_BTA.numpy()[places]
        actions_BTD = actions_BTA[:, :, : settings.action_dim]
        physical_state_ND = part.state_normalizer.unnormalize(state_ND)
        # Batched: the state broadcasts over the horizon.
        physical_BTD = part.unnormalize_actions(actions_BTA, physical_state_ND)
        rows += dimension_rows("state", [prefix + name for name in settings.state_names], physical_state_ND, state_ND)
        rows += dimension_rows(
            "action",
            [prefix + name for name in settings.action_names],
            physical_BTD.reshape(-1, settings.action_dim),
            actions_BTD.reshape(-1, settings.action_dim),
        )
    return rows


def padding_finding(padded: float, expected: float, num_steps: int) -> Finding | None:
    """Warning when far more action steps are padding than episode lengths and horizon imply.

    Three standard errors of a share are allowed on top of twice the expectation: a batch is a small sample.
    """
    slack = 3.0 * (max(expected, 1e-3) / max(1, num_steps)) ** 0.5
    if padded <= 2.0 * expected + slack:
        return None
    return warning(
        "first batch",
        f"{padded:.1%} of the action steps lie beyond their episode's end; lengths and horizon imply {expected:.1%}",
        "the episode ranges may be wrong: run tools/check_dataset.py",
    )


def summarize(
    batch: Any, fields: ReportFields, order_hash: str, expected_padded_fraction: float
) -> tuple[dict[str, Any], list[Finding]]:
    """(JSON-ready content, warnings) of a batch on the CPU."""
    # In model range whatever the batch carries, so that a wrong range is visible.
    images = pixels_to_model_range(fields.images_BVCHW)
    steps_BT = fields.step_is_valid_BT
    padded = None if steps_BT is None else 1.0 - float(steps_BT.float().mean())
    content: dict[str, Any] = {
        "order_hash": order_hash,
        "sample_index": batch.sample_index_B.tolist(),
        "epoch": batch.epoch_B.tolist(),
        "shapes": {name: [str(t.dtype), *t.shape] for name, t in batch.tensors().items()},
        "image_range": [float(images.min()), float(images.max())],
        "views": [
            {"slot": slot, "camera": key, "present_fraction": float(fields.is_present_BV[:, i].float().mean())}
            for i, (slot, key) in enumerate(fields.views)
        ],
        "prompts": fields.prompts,
        "prompt_valid_fraction": float(fields.token_is_valid_BL.float().mean()),
        "longest_prompt": int(fields.token_is_valid_BL.sum(dim=1).max()),
        "loss_element_fraction": float(batch.action_is_valid_BTA.float().mean()),
        "padded_action_fraction": padded,
        "expected_padded_action_fraction": expected_padded_fraction,
        "flow_time": [float(batch.time_B.min()), float(batch.time_B.max())],
        "ranges": fields.ranges,
    }
    findings = []
    if padded is not None:
        # Steps of one sample are padded together, so samples are what is counted.
        found = padding_finding(padded, expected_padded_fraction, batch.size)
        findings += [found] if found else []
    return content, findings


def format_report(content: dict[str, Any]) -> list[str]:
    """Lines for people."""
    lines = [f"first batch: order {content['order_hash']}, samples {content['sample_index'][:8]}"]
    low, high = content["image_range"]
    lines += [f"  view {v['slot']} <- {v['camera']} (present {v['present_fraction']:.0%})" for v in content["views"]]
    lines += [f"  pixels {low:.3f} ... {high:.3f}; prompt slots used {content['prompt_valid_fraction']:.0%}"]
    lines += [f"  prompt {prompt!r}" for prompt in content["prompts"][:2]]
    padded = content["padded_action_fraction"]
    shown = "not masked" if padded is None else f"{padded:.1%}"
    lines += [
        f"  action steps beyond the episode {shown} (expected {content['expected_padded_action_fraction']:.1%}); "
        f"elements in the loss {content['loss_element_fraction']:.1%}"
    ]
    if content["ranges"]:
        lines.append(f"  {'':<7}{'dimension':<26} {'physical min':>13} {'max':>11} {'normalized min':>15} {'max':>8}")
    for row in content["ranges"]:
        lines.append(
            f"  {row['feature']:<7}{row['dim']:>3} {row['name'][:22]:<22} {row['physical_min']:>13.4f} "
            f"{row['physical_max']:>11.4f} {row['normalized_min']:>15.3f} {row['normalized_max']:>8.3f}"
        )
    return lines


def draw_picture(fields: ReportFields, content: dict[str, Any]) -> Image.Image:
    """Every view of the first samples with its slot, camera and presence, and the decoded prompt below."""
    num_samples = len(content["prompts"])
    pixels = (pixels_to_model_range(fields.images_BVCHW[:num_samples]) + 1.0) * 127.5
    pixels_BVHWC = pixels.round().clamp(0, 255).to(torch.uint8).permute(0, 1, 3, 4, 2).numpy()
    side = max(MIN_TILE, pixels_BVHWC.shape[2])
    num_views = pixels_BVHWC.shape[1]
    row_height = CAPTION_HEIGHT + side + PROMPT_HEIGHT
    picture = Image.new("RGB", (max(2, num_views) * (side + 8), num_samples * row_height), "white")
    draw = ImageDraw.Draw(picture)
    for sample in range(num_samples):
        top = sample * row_height
        for view in range(num_views):
            left = view * (side + 8)
            label = content["views"][view]
            is_present = bool(fields.is_present_BV[sample, view])
            caption = f"{label['slot']}{'' if is_present else ' [MASKED]'}\n{label['camera'][-side // 6 :]}"
            draw.text((left + 2, top + 2), caption, fill="black" if is_present else "red")
            # Nearest: the model's own pixels, not a prettier version of them.
            tile = Image.fromarray(pixels_BVHWC[sample, view]).resize((side, side), Image.Resampling.NEAREST)
            picture.paste(tile, (left, top + CAPTION_HEIGHT))
        words = f"sample {content['sample_index'][sample]}: {content['prompts'][sample]!r}"
        # About six pixels per character in Pillow's built-in font, which knows Latin-1 only.
        text = "\n".join(textwrap.wrap(words, picture.width // 6)[:4])
        draw.text((2, top + CAPTION_HEIGHT + side + 2), text.encode("latin-1", "replace").decode("latin-1"), fill="black")
    return picture


def first_batch_report(
    batch: Any,
    preprocessor: AnyPreprocessor,
    folder: Path | None,
    *,
    order_hash: str,
    expected_padded_fraction: float = 0.0,
    report_fields: Callable[[Any, AnyPreprocessor], ReportFields] = stacked_fields,
) -> list[Finding]:
    """Print the report; write first_batch.png and first_batch.json into `folder` (created) when given. Returns warnings.

    `batch` is on the CPU; `report_fields` is its family's. Call it on one rank.
    """
    fields = report_fields(batch, preprocessor)
    content, findings = summarize(batch, fields, order_hash, expected_padded_fraction)
    lines = format_report(content) + [f"  {finding}" for finding in findings]
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        draw_picture(fields, content).save(folder / PICTURE_NAME)
        (folder / JSON_NAME).write_text(json.dumps(content, indent=1) + "\n")
        lines.append(f"  picture: {folder / PICTURE_NAME}")
    print("\n".join(lines), flush=True)
    return findings
