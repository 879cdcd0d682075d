"""Forward FLOPs of Pi0.5 per sample (2 per multiply-add, dense masks), for model FLOPs utilisation."""

from __future__ import annotations

from megatron_vla.models.pi05.config import Pi05Config


def forward_flops(
    config: Pi05Config, *, num_views: int, prompt_length: int, action_horizon: int | None = None, skip_dead_compute: bool = True
) -> float:
    """FLOPs of one sample's forward pass with these views, prompt slots and horizon.

    The attention of T tokens counts T * T pairs, as model FLOPs are usually counted, although prefix tokens never read actions.
    `skip_dead_compute` leaves out what the last prefix layer computes beyond its keys and values. Training: about 2.9 times.
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
    attention = 2 * tokens * tokens * heads
    joint = config.num_layers * (prefix * prefix_matrices + horizon * suffix_matrices + attention)
    dead = prefix * (prefix_matrices - 2 * groups * width) + 2 * prefix * tokens * heads if skip_dead_compute else 0

    conditioning = (2 * config.num_layers + 1) * 3 * expert**2 + 2 * expert**2
    interface = 2 * horizon * expert * config.max_action_dim
    return 2.0 * (vision + projector + joint - dead + conditioning + interface)
