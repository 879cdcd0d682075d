"""Build Pi0.5: structure, parameter dtypes, first values (the JAX recipe of openpi), in this order."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from megatron_vla.config.run import RunConfig
from megatron_vla.models.common import initialization as draw
from megatron_vla.models.common.attention_mask import AttentionBackend, resolve_backend
from megatron_vla.models.common.precision import parameter_dtype, set_parameter_dtypes
from megatron_vla.models.pi05.config import Pi05Config
from megatron_vla.models.pi05.flops import model_units
from megatron_vla.models.pi05.model import Pi05Model
from megatron_vla.models.pi05.stage import Pi05Stage
from megatron_vla.parallel.stage_plan import ModelUnits, plan_stages
from megatron_vla.parallel.tensor_parallel import NOT_PARALLEL, TensorParallel, tensor_parallel_of

# Kept in fp32 when the model is bf16: everything cheap whose rounding error reaches every token or the action interface.
FP32_PATTERNS = (
    "vision_tower.embeddings",
    "vision_tower.layers.*.layer_norm1",
    "vision_tower.layers.*.layer_norm2",
    "vision_tower.post_layernorm",
    "layers.*.prefix.input_norm",
    "layers.*.prefix.post_attention_norm",
    "layers.*.suffix.input_norm",
    "layers.*.suffix.post_attention_norm",
    "prefix_norm",
    "suffix_norm",
    "action_in_proj",
    "action_out_proj",
    "time_mlp_in",
    "time_mlp_out",
)

# Assumed for balancing pipeline stages when no flag names the cameras.
DEFAULT_VIEWS = 2

# First match decides. adaRMS starts at zero, which closes every expert branch.
_WEIGHT_RULES: tuple[tuple[str, draw.Initializer], ...] = (
    ("vision_tower.embeddings.patch_embedding", draw.lecun_normal),
    ("vision_tower.embeddings.position_embedding", draw.inverse_sqrt_width_normal),
    ("vision_tower.layers.*.layer_norm1", draw.ones),
    ("vision_tower.layers.*.layer_norm2", draw.ones),
    ("vision_tower.layers.*", draw.xavier_uniform),
    ("vision_tower.post_layernorm", draw.ones),
    ("token_embedding", draw.normal(0.01)),
    ("layers.*.*.input_norm", draw.zeros),
    ("layers.*.*.post_attention_norm", draw.zeros),
    ("prefix_norm", draw.zeros),
    ("suffix_norm", draw.zeros),
    ("layers.*", draw.lecun_normal),
    ("action_in_proj", draw.lecun_normal),
    ("action_out_proj", draw.lecun_normal),
    ("time_mlp_in", draw.lecun_normal),
    ("time_mlp_out", draw.lecun_normal),
)

_PROJECTOR_INITIALIZERS = {"zeros": draw.zeros, "fan_in": draw.lecun_normal}


def initialize(model: nn.Module, seed: int) -> None:
    """Draw all first values from `seed`."""
    projector = _PROJECTOR_INITIALIZERS[cast(Pi05Model, model).config.vision_projector_init]
    rules = (("vision_projector", projector), *_WEIGHT_RULES)
    draw.initialize_parameters(model, draw.by_pattern(rules), seed)


def build_module(
    config: Pi05Config,
    *,
    attention_backend: AttentionBackend = "sdpa",
    skip_dead_compute: bool = True,
    tensor_parallel: TensorParallel = NOT_PARALLEL,
    kind: type[Pi05Model] = Pi05Model,
) -> Pi05Model:
    """The module structure alone; under `torch.device("meta")` it costs no memory."""
    return kind(
        config,
        attention_backend=attention_backend,
        skip_dead_compute=skip_dead_compute,
        tensor_parallel=tensor_parallel,
    )


def skeleton(config: RunConfig) -> Pi05Model:
    """The whole model of these flags on the meta device."""
    with torch.device("meta"):
        model = build_module(config.family, skip_dead_compute=config.optimization.skip_dead_compute)
    set_parameter_dtypes(model, parameter_dtype(config.model), FP32_PATTERNS)
    return model


def build(config: RunConfig, groups: Any = None) -> Pi05Model:
    """Pi0.5 on this rank's device (`groups.device`; CPU without groups), drawn from --seed whatever the rank.

    With pipeline stages: this rank's part of it.
    """
    is_pipeline = config.parallel.pipeline_model_parallel_size > 1
    with torch.device("meta"):
        model = build_module(
            config.family,
            attention_backend=resolve_backend(config.optimization.attention_backend),
            skip_dead_compute=config.optimization.skip_dead_compute,
            tensor_parallel=tensor_parallel_of(config.parallel, groups),
            kind=Pi05Stage if is_pipeline else Pi05Model,
        )
    set_parameter_dtypes(model, parameter_dtype(config.model), FP32_PATTERNS)
    if isinstance(model, Pi05Stage):
        plan = plan_stages(pipeline_units(config), config.parallel)
        model.keep(plan.of_stage(groups.pipeline_model_parallel_rank))
    draw.materialize(model, groups.device if groups is not None else torch.device("cpu"))
    initialize(model, config.training.seed)
    return model


def pipeline_units(config: RunConfig) -> ModelUnits:
    """The model's parts with their FLOPs. Cameras that no flag names (found in the data) only shift the balance."""
    data = config.data
    views = data.num_images or (data.mock_num_cameras if data.mock_data else len(data.camera_map)) or DEFAULT_VIEWS
    return model_units(
        config.family,
        num_views=views,
        prompt_length=config.family.max_prompt_length,
        skip_dead_compute=config.optimization.skip_dead_compute,
    )
