"""GR00T N1.7's samples as the rest of the project knows them."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_vla.data.groot.assembly import build_augmentation, build_loader_assembler
from megatron_vla.data.groot.processor_files import carry_processor_files
from megatron_vla.data.groot.report import report_fields
from megatron_vla.models.groot_n1_7.config import GrootN17Config
from megatron_vla.models.groot_n1_7.samples import (
    RAW_STATE_STREAM,
    REQUEST_FIELDS,
    build_mock_source,
    draws,
    own_width,
    state_is_dropped,
)
from megatron_vla.models.registry import SampleRules

UNUSED_FLAGS = {
    "normalization": "--use-percentiles and the modality configuration decide",
    "normalization_variant": "--use-percentiles and the modality configuration decide",
    "image_resize": "use --image-filter",
    "num_images": "there are no empty picture slots: every sample has its own pictures",
    "mock_camera_counts": "mock samples have --mock-num-cameras pictures",
    "mock_min_prompt_length": "mock prompts have --mock-prompt-length words",
    "prompt_state": "the state is an input of its own; see --exclude-state",
}


def hide_state(family: GrootN17Config, arrays: dict[str, Any], seed: int, epoch: int) -> dict[str, Any]:
    """The data side's state dropout: the whole raw state zero, independently of the model's dropout of the feature."""
    if not state_is_dropped(family, RAW_STATE_STREAM, seed, epoch, int(arrays["sample_index_B"])):
        return arrays
    return {**arrays, "state_BHD": np.zeros_like(arrays["state_BHD"])}


SAMPLES = SampleRules(
    draws=draws,
    build_mock_source=build_mock_source,
    build_assembler=build_loader_assembler,
    change_sample=hide_state,
    carry_files=carry_processor_files,
    build_augmentation=build_augmentation,
    augmentations=("groot",),
    robot_data="megatron_vla.data.groot.robot_data",
    report_fields=report_fields,
    request_fields=REQUEST_FIELDS,
    batch_key=own_width,
    unused_flags=UNUSED_FLAGS,
)
