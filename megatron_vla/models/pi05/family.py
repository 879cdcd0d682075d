"""Pi0.5 as the rest of the project knows it."""

from __future__ import annotations

from megatron_vla.data.augmentation import build_augmentation
from megatron_vla.data.draws import FLOW_REQUEST_FIELDS, flow_draw_fields
from megatron_vla.data.mock import build_mock_source
from megatron_vla.data.report import stacked_fields
from megatron_vla.models.pi05.build import build, pipeline_units, skeleton
from megatron_vla.models.pi05.check import check
from megatron_vla.models.pi05.config import VARIANTS, Pi05Config
from megatron_vla.models.pi05.convert import CONVERTER
from megatron_vla.models.pi05.forward_step import BATCH_FIELDS, METRIC_NAMES, forward_step
from megatron_vla.models.pi05.model import Pi05Model, vision_sizes
from megatron_vla.models.registry import ModelFamily, SampleRules

GROOT_FLAGS = ("embodiment_tag", "embodiment_id", "modality_config", "language_key", "mock_num_embodiments")

# Images enter through the tower once and reach every token; the rest is small, and is the action interface or its condition.
FP8_EXCLUDED_NAMES = (
    "vision_tower",
    "vision_projector",
    "action_in_proj",
    "action_out_proj",
    "time_mlp_in",
    "time_mlp_out",
    "layers.*.suffix.input_norm",
    "layers.*.suffix.post_attention_norm",
    "suffix_norm",
)

FAMILY = ModelFamily(
    name="pi05",
    config_type=Pi05Config,
    variants=VARIANTS,
    build=build,
    skeleton=skeleton,
    forward_step=forward_step,
    check=check,
    converter=CONVERTER,
    block_names=("vision_tower.layers.*", "layers.*"),
    fp8_excluded_names=FP8_EXCLUDED_NAMES,
    backbone_functions=("vision_tower.forward", "backbone"),
    group_functions=("vision_tower.embeddings.forward", "embed_suffix", "read_out"),
    metric_names=METRIC_NAMES,
    pipeline_units=pipeline_units,
    batch_fields=BATCH_FIELDS,
    samples=SampleRules(
        draws=flow_draw_fields,
        build_mock_source=build_mock_source,
        build_augmentation=build_augmentation,
        augmentations=("openpi_torch", "openpi_jax"),
        robot_data="megatron_vla.data.robot_data",
        report_fields=stacked_fields,
        request_fields=FLOW_REQUEST_FIELDS,
        unused_flags=dict.fromkeys(GROOT_FLAGS, "it belongs to groot_n1_7"),
    ),
    image_tokens=lambda config: vision_sizes(config).num_patches,
    sample_actions=Pi05Model.sample_actions,
    num_inference_steps=lambda config: config.num_inference_steps,
    inference_methods=("prefill", "cached_velocity"),
)
