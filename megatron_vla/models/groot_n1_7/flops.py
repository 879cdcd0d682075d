"""FLOPs of GR00T N1.7 per sample (2 per multiply-add, dense masks): for utilisation figures and for balancing stages."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_vla.models.groot_n1_7.config import TIME_CODE_WIDTH, GrootN17Config
from megatron_vla.parallel.stage_plan import ModelUnits, Unit


def model_units(
    config: GrootN17Config, *, patches_of_images: Sequence[int], num_tokens: int, action_horizon: int | None = None
) -> ModelUnits:
    """One sample's forward pass by pipeline unit: layers of vision tower, text tower, vision-language part, DiT.

    Units know whether the --tune flags train them: frozen ones have no backward pass.
    """
    horizon = config.action_horizon if action_horizon is None else action_horizon
    image_tokens = sum(patches_of_images) // config.merge_unit
    vision, text = _vision(config, patches_of_images), _text(config, num_tokens)
    first_tuned = config.num_layers - config.tune_top_llm_layers
    layers = [Unit(f"vision_tower.layers.{i}", f, config.tune_visual) for i, f in enumerate(vision)]
    layers += [Unit(f"text_layers.{i}", text, config.tune_llm or i >= first_tuned) for i in range(config.num_layers)]
    layers += [Unit(f"vl_layers.{i}", _vl(config, num_tokens), config.tune_vlln) for i in range(config.vl_num_layers)]
    layers += [
        Unit(
            f"dit_layers.{i}",
            _dit(config, i, horizon + 1, image_tokens, num_tokens - image_tokens),
            config.tune_diffusion_model,
        )
        for i in range(config.dit_num_layers)
    ]
    patches = sum(patches_of_images)
    return ModelUnits(
        first=Unit("patches", 2.0 * patches * config.vision_hidden_size * config.patch_row_width, config.tune_visual),
        layers=tuple(layers),
        last=Unit("encoders, conditions and read-out", _interface(config, horizon), config.tune_projector),
    )


def training_flops(
    config: GrootN17Config, *, patches_of_images: Sequence[int], num_tokens: int, action_horizon: int | None = None
) -> float:
    """FLOPs of forward and backward of one sample: three passes of what is trained, one of what is frozen."""
    units = model_units(config, patches_of_images=patches_of_images, num_tokens=num_tokens, action_horizon=action_horizon)
    return units.cost


def _vision(config: GrootN17Config, patches_of_images: Sequence[int]) -> list[float]:
    """Each layer, with the merger that follows it."""
    width, patches = config.vision_hidden_size, sum(patches_of_images)
    matrices = patches * (4 * width**2 + 2 * width * config.vision_ffn_hidden_size)
    pairs = sum(2 * p * p * width for p in patches_of_images)
    merged = width * config.merge_unit
    merger = patches // config.merge_unit * (merged**2 + merged * config.hidden_size)
    last = config.vision_num_layers - 1
    return [
        2.0 * (matrices + pairs + merger * ((i in config.vision_deepstack_layers) + (i == last)))
        for i in range(config.vision_num_layers)
    ]


def _text(config: GrootN17Config, tokens: int) -> float:
    heads, groups = config.num_attention_heads * config.kv_channels, config.num_query_groups * config.kv_channels
    matrices = config.hidden_size * (2 * heads + 2 * groups + 3 * config.ffn_hidden_size)
    return 2.0 * (tokens * matrices + 2 * tokens * tokens * heads)


def _vl(config: GrootN17Config, tokens: int) -> float:
    width = config.hidden_size
    return 2.0 * (tokens * (4 * width**2 + 2 * width * config.vl_ffn_hidden_size) + 2 * tokens * tokens * width)


def _dit(config: GrootN17Config, index: int, own: int, image_tokens: int, text_tokens: int) -> float:
    """`own`: tokens of one action chunk. Keys and values of what the chunks read are computed once for all draws."""
    width, draws = config.dit_hidden_size, config.flow_draws
    if index % 2:
        read, keys_and_values = own, 2 * draws * own * width**2
    else:
        reads_text = index % (2 * config.attend_text_every_n_blocks) == 0
        read = text_tokens if reads_text else image_tokens
        keys_and_values = 2 * read * config.hidden_size * width
    matrices = own * (2 * width**2 + 2 * width * config.dit_ffn_hidden_size)
    return 2.0 * (keys_and_values + draws * (matrices + 2 * own * read * width + 2 * width**2))


def _interface(config: GrootN17Config, horizon: int) -> float:
    """Per-embodiment encoders and decoder, time MLP, output layers."""
    width, head = config.dit_hidden_size, config.head_hidden_size
    state = config.max_state_dim * config.state_history_length * head + head * width
    action = horizon * (config.max_action_dim * width + 3 * width**2)
    decoder = horizon * (head**2 + head * config.max_action_dim + width * head)
    return 2.0 * (state + config.flow_draws * (action + decoder + TIME_CODE_WIDTH * width + 3 * width**2))
