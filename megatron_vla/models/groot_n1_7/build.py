"""Build GR00T N1.7: structure, parameter dtypes, first values, in this order."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from megatron_vla.config.run import RunConfig
from megatron_vla.models.common import initialization as draw
from megatron_vla.models.common.attention_mask import AttentionBackend, resolve_backend
from megatron_vla.models.common.precision import parameter_dtype, set_parameter_dtypes
from megatron_vla.models.groot_n1_7.config import GrootN17Config
from megatron_vla.models.groot_n1_7.flops import model_units
from megatron_vla.models.groot_n1_7.model import GrootN17Model
from megatron_vla.models.groot_n1_7.samples import mock_prompt_tokens, num_image_tokens
from megatron_vla.models.groot_n1_7.stage import GrootN17Stage
from megatron_vla.optimizations.patterns import covers
from megatron_vla.parallel.parameter_shard import mark_not_decayed
from megatron_vla.parallel.stage_plan import ModelUnits, plan_stages
from megatron_vla.parallel.tensor_parallel import NOT_PARALLEL, TensorParallel, tensor_parallel_of

DEEPSTACK = "vision_tower.deepstack_mergers"
# Kept in fp32 in bf16 modules: everything cheap whose rounding error reaches every token or the action interface.
FP32_PATTERNS = (
    "vision_tower.position_embedding",
    "vision_tower.layers.*.layer_norm1",
    "vision_tower.layers.*.layer_norm2",
    "vision_tower.merger.norm",
    f"{DEEPSTACK}.*.norm",
    "text_layers.*.input_norm",
    "text_layers.*.post_attention_norm",
    "text_layers.*.attention.q_norm",
    "text_layers.*.attention.k_norm",
    "text_norm",
    "vl_norm",
    "vl_layers.*.norm1",
    "vl_layers.*.norm2",
    "state_encoder.fc1",
    "action_encoder.fc1",
    "action_decoder.fc2",
    "action_position_embedding",
    "time_mlp_in",
    "time_mlp_out",
)
BACKBONE_PATTERNS = ("vision_tower", "token_embedding", "text_layers", "text_norm")
NORM_PATTERNS = tuple(p for p in FP32_PATTERNS if p.rpartition(".")[2] in ("norm", "q_norm", "k_norm") or "norm" in p)
EMBODIMENT_PATTERNS = ("state_encoder", "action_encoder", "action_decoder")

# Assumed for balancing pipeline stages when no flag names the cameras.
DEFAULT_VIEWS = 2

_EMBODIMENT_INITIALIZERS = {"released": draw.normal(0.02), "fan_in": draw.inverse_sqrt_inputs_normal}
# First match decides; per-embodiment weights come before.
_WEIGHT_RULES: tuple[tuple[str, draw.Initializer], ...] = (
    *((pattern, draw.ones) for pattern in NORM_PATTERNS),
    ("vision_tower", draw.normal(0.02)),
    ("token_embedding", draw.normal(0.02)),
    ("text_layers", draw.normal(0.02)),
    ("action_position_embedding", draw.normal(0.02)),
    # torch's own default for linear layers, which the released head starts from.
    ("vl_layers", draw.inverse_sqrt_fan_in_uniform),
    ("dit_layers", draw.inverse_sqrt_fan_in_uniform),
    ("time_mlp_in", draw.inverse_sqrt_fan_in_uniform),
    ("time_mlp_out", draw.inverse_sqrt_fan_in_uniform),
    ("output_norm", draw.inverse_sqrt_fan_in_uniform),
    ("output_proj", draw.inverse_sqrt_fan_in_uniform),
)


def initialize(model: nn.Module, seed: int) -> None:
    """Draw all first values from `seed`."""
    of_embodiments = _EMBODIMENT_INITIALIZERS[cast(GrootN17Model, model).config.embodiment_init]
    rules = (*((pattern, of_embodiments) for pattern in EMBODIMENT_PATTERNS), *_WEIGHT_RULES)
    draw.initialize_parameters(model, draw.by_pattern(rules), seed)


def build_module(
    config: GrootN17Config,
    *,
    attention_backend: AttentionBackend = "sdpa",
    tensor_parallel: TensorParallel = NOT_PARALLEL,
    kind: type[GrootN17Model] = GrootN17Model,
) -> GrootN17Model:
    """The module structure alone; under `torch.device("meta")` it costs no memory."""
    model = kind(config, attention_backend=attention_backend, tensor_parallel=tensor_parallel)
    if not config.decay_biases_and_norms:
        for name, parameter in model.named_parameters():
            if not is_decayed_by_recipe(name):
                mark_not_decayed(parameter)
    return model


def is_decayed_by_recipe(name: str) -> bool:
    """The released recipe's groups: biases and norms do not decay, but per-embodiment biases do."""
    if any(covers(pattern, name) for pattern in EMBODIMENT_PATTERNS):
        return True
    return not (name.endswith(".bias") or any(covers(pattern, name) for pattern in NORM_PATTERNS))


def set_dtypes(model: GrootN17Model, dtype: torch.dtype) -> None:
    """Give trained modules `dtype` (with fp32 exceptions in bf16) and frozen backbone modules --frozen-dtype."""
    config = model.config
    # Releases differ in these two: there may be none.
    absent = (() if config.vl_num_layers else ("vl_layers",)) + (() if config.vision_deepstack_layers else (DEEPSTACK,))
    set_parameter_dtypes(model, dtype, [p for p in FP32_PATTERNS if not any(covers(part, p) for part in absent)])
    if config.frozen_dtype == "as_model" or dtype == torch.float64:
        return
    for name, parameter in model.named_parameters():
        is_backbone = any(covers(pattern, name) for pattern in BACKBONE_PATTERNS)
        if is_backbone and not parameter.requires_grad and not any(covers(pattern, name) for pattern in FP32_PATTERNS):
            parameter.data = parameter.data.to(torch.bfloat16)


def skeleton(config: RunConfig) -> GrootN17Model:
    """The whole model of these flags on the meta device."""
    with torch.device("meta"):
        model = build_module(config.family)
    set_dtypes(model, parameter_dtype(config.model))
    return model


def build(config: RunConfig, groups: Any = None) -> GrootN17Model:
    """GR00T N1.7 on this rank's device (`groups.device`; CPU without groups), drawn from --seed whatever the rank.

    With pipeline stages: this rank's part of it.
    """
    with torch.device("meta"):
        model = build_module(
            config.family,
            attention_backend=resolve_backend(config.optimization.attention_backend),
            tensor_parallel=tensor_parallel_of(config.parallel, groups),
            kind=GrootN17Stage if config.parallel.pipeline_model_parallel_size > 1 else GrootN17Model,
        )
    model.merges_over_blocks = config.parallel.data_parallel_strategy != "fsdp2"
    set_dtypes(model, parameter_dtype(config.model))
    if isinstance(model, GrootN17Stage):
        model.keep(plan_stages(pipeline_units(config), config.parallel), groups.pipeline_model_parallel_rank)
    draw.materialize(model, groups.device if groups is not None else torch.device("cpu"))
    initialize(model, config.training.seed)
    return model


def pipeline_units(config: RunConfig) -> ModelUnits:
    """The model's parts with their FLOPs. Cameras that no flag names (found in the data) only shift the balance."""
    data, family = config.data, config.family
    views = data.num_images or (data.mock_num_cameras if data.mock_data else len(data.camera_map)) or DEFAULT_VIEWS
    tokens = family.max_prompt_length
    if data.mock_data:
        tokens = min(tokens, mock_prompt_tokens(family, views, data.mock_prompt_length))
    image_tokens = views * num_image_tokens(family)
    return model_units(
        family,
        patches_of_images=[family.merge_unit * num_image_tokens(family)] * views,
        num_tokens=max(tokens, image_tokens),
    )
