"""GR00T N1.7 as the rest of the project knows it."""

from __future__ import annotations

from megatron_vla.models.groot_n1_7.build import build, pipeline_units, skeleton
from megatron_vla.models.groot_n1_7.check import check
from megatron_vla.models.groot_n1_7.config import VARIANTS, GrootN17Config
from megatron_vla.models.groot_n1_7.convert import CONVERTER
from megatron_vla.models.groot_n1_7.data import SAMPLES
from megatron_vla.models.groot_n1_7.forward_step import BATCH_FIELDS, METRIC_NAMES, forward_step
from megatron_vla.models.groot_n1_7.sampling import sample_actions
from megatron_vla.models.registry import ModelFamily

# Conditions reach every token of the DiT, and the rest is small; the vision tower's errors reach every token of the backbone.
FP8_EXCLUDED_NAMES = ("vision_tower", "time_mlp_in", "time_mlp_out", "dit_layers.*.norm1", "output_norm", "output_proj")

FAMILY = ModelFamily(
    name="groot_n1_7",
    config_type=GrootN17Config,
    variants=VARIANTS,
    build=build,
    skeleton=skeleton,
    forward_step=forward_step,
    check=check,
    converter=CONVERTER,
    block_names=("vision_tower.layers.*", "text_layers.*", "vl_layers.*", "dit_layers.*"),
    fp8_excluded_names=FP8_EXCLUDED_NAMES,
    backbone_functions=("backbone", "head"),
    group_functions=("vision_tower.embed", "embed", "read_out"),
    metric_names=METRIC_NAMES,
    pipeline_units=pipeline_units,
    batch_fields=BATCH_FIELDS,
    samples=SAMPLES,
    sample_actions=sample_actions,
    num_inference_steps=lambda config: config.num_inference_steps,
    inference_methods=("prefill", "cached_velocity"),
)
