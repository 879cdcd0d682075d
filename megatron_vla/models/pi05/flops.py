"""Forward FLOPs of Pi0.5 per sample (2 per multiply-add, dense masks): for utilisation figures and for balancing stages."""

from __future__ import annotations

from megatron_vla.models.pi05.config import Pi05Config
from megatron_vla.parallel.stage_plan import ModelUnits, Unit


def model_units(
    config: Pi05Config, *, num_views: int, prompt_length: int, action_horizon: int | None = None, skip_dead_compute: bool = True
) -> ModelUnits:
    """One training sample's forward pass with these views, prompt slots and horizon, by pipeline unit.

    The attention of T tokens counts T * T pairs, as model FLOPs are usually counted, although prefix tokens never read actions.
    `skip_dead_compute` leaves out what the last prefix layer computes beyond its keys and values.
    """
    vision_width, patches_per_view = config.vision_hidden_size, (config.image_size // config.patch_size) ** 2
    patches = patches_per_view * num_views
    vision_matrices = 4 * vision_width**2 + 2 * vision_width * config.vision_ffn_hidden_size
    vision_pairs = 2 * patches_per_view * vision_width  # per token: its products with every key, and with every value
    vision = patches * config.vision_num_layers * (vision_matrices + vision_pairs)
    projector = patches * vision_width * (3 * config.patch_size**2 + config.hidden_size)

    horizon = config.action_horizon if action_horizon is None else action_horizon
    prefix = patches + prompt_length
    tokens = prefix + horizon
    heads, groups = config.num_attention_heads * config.kv_channels, config.num_query_groups * config.kv_channels
    width, expert = config.hidden_size, config.expert_hidden_size
    prefix_matrices = width * (2 * heads + 2 * groups + 3 * config.ffn_hidden_size)
    suffix_matrices = expert * (2 * heads + 2 * groups + 3 * config.expert_ffn_hidden_size)
    draws = config.flow_draws
    actions = draws * horizon
    attention = 2 * (prefix + actions) * tokens * heads
    norm_condition = 3 * expert**2 * draws
    layer = prefix * prefix_matrices + actions * suffix_matrices + attention + 2 * norm_condition
    dead = prefix * (prefix_matrices - 2 * groups * width) + 2 * prefix * tokens * heads if skip_dead_compute else 0

    interface = actions * expert * config.max_action_dim
    last_layer = config.num_layers - 1
    return ModelUnits(
        first=Unit("vision tower and embeddings", 2.0 * (vision + projector + interface + 2 * expert**2 * draws)),
        layers=tuple(
            Unit(f"layers.{index}", 2.0 * (layer - (dead if index == last_layer else 0))) for index in range(config.num_layers)
        ),
        last=Unit("read-out", 2.0 * (interface + norm_condition)),
    )
