"""Pi0.5 as the rest of the project knows it."""

from __future__ import annotations

from megatron_vla.models.pi05.build import build, pipeline_units, skeleton
from megatron_vla.models.pi05.check import check
from megatron_vla.models.pi05.config import VARIANTS, Pi05Config
from megatron_vla.models.pi05.convert import CONVERTER
from megatron_vla.models.pi05.forward_step import BATCH_FIELDS, METRIC_NAMES, forward_step
from megatron_vla.models.pi05.model import Pi05Model
from megatron_vla.models.registry import ModelFamily

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
    metric_names=METRIC_NAMES,
    pipeline_units=pipeline_units,
    batch_fields=BATCH_FIELDS,
    sample_actions=Pi05Model.sample_actions,
    num_inference_steps=lambda config: config.num_inference_steps,
    inference_methods=("prefill", "cached_velocity"),
)
