"""GR00T N1.7 checkpoints: the released layout."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from megatron_vla.data.draws import fields_of_draws
from megatron_vla.models.common.converter import CheckpointConverter, Layout
from megatron_vla.models.common.resolution import ShapeFlags
from megatron_vla.models.groot_n1_7.assemble import Assembler
from megatron_vla.models.groot_n1_7.batch import GrootN17Batch
from megatron_vla.models.groot_n1_7.build import build_module, initialize
from megatron_vla.models.groot_n1_7.config import IMAGE_CHANNELS, GrootN17Config
from megatron_vla.models.groot_n1_7.key_map import EMBED_TOKENS, GROOT_N1_7_KEYS
from megatron_vla.models.groot_n1_7.released_config import read_released_config

_VISION, _VISION_FFN = "--vision-hidden-size", "--vision-ffn-hidden-size"
_TEXT, _TEXT_FFN, _VL_FFN = "--hidden-size", "--ffn-hidden-size", "--vl-ffn-hidden-size"
_QUERIES, _GROUPS = "--num-attention-heads x --kv-channels", "--num-query-groups x --kv-channels"
_DIT, _DIT_FFN, _HEAD = "--dit-num-attention-heads x --dit-kv-channels", "--dit-ffn-hidden-size", "--head-hidden-size"
_EMBODIMENTS, _ACTION = "--num-embodiments", "--max-action-dim"

SHAPE_FLAGS = (
    ShapeFlags(
        "vision_tower.patch_embedding.weight",
        (_VISION, None, "--vision-temporal-patch-size", "--vision-patch-size", "--vision-patch-size"),
    ),
    ShapeFlags("vision_tower.position_embedding.weight", ("--vision-num-position-embeddings", _VISION)),
    ShapeFlags("vision_tower.layers.*.mlp.fc1.weight", (_VISION_FFN, _VISION)),
    ShapeFlags("vision_tower.layers.*.mlp.fc2.weight", (_VISION, _VISION_FFN)),
    ShapeFlags("token_embedding.weight", ("--vocab-size", _TEXT)),
    ShapeFlags("text_layers.*.attention.q_proj.weight", (_QUERIES, _TEXT)),
    ShapeFlags("text_layers.*.attention.k_proj.weight", (_GROUPS, _TEXT)),
    ShapeFlags("text_layers.*.attention.v_proj.weight", (_GROUPS, _TEXT)),
    ShapeFlags("text_layers.*.mlp.gate_proj.weight", (_TEXT_FFN, _TEXT)),
    ShapeFlags("text_layers.*.mlp.up_proj.weight", (_TEXT_FFN, _TEXT)),
    ShapeFlags("text_layers.*.mlp.down_proj.weight", (_TEXT, _TEXT_FFN)),
    ShapeFlags("vl_layers.*.mlp.fc1.weight", (_VL_FFN, _TEXT)),
    ShapeFlags("vl_layers.*.mlp.fc2.weight", (_TEXT, _VL_FFN)),
    ShapeFlags("state_encoder.fc1.weight", (_EMBODIMENTS, "--max-state-dim x --state-history-length", _HEAD)),
    ShapeFlags("action_encoder.fc1.weight", (_EMBODIMENTS, _ACTION, _DIT)),
    ShapeFlags("action_decoder.fc2.weight", (_EMBODIMENTS, _HEAD, _ACTION)),
    ShapeFlags("action_decoder.fc2.bias", (_EMBODIMENTS, _ACTION)),
    ShapeFlags("action_position_embedding.weight", ("--num-action-positions", _DIT)),
    ShapeFlags("dit_layers.*.attention.q_proj.weight", (_DIT, _DIT)),
    ShapeFlags("dit_layers.*.mlp.fc1.weight", (_DIT_FFN, _DIT)),
    ShapeFlags("dit_layers.*.mlp.fc2.weight", (_DIT, _DIT_FFN)),
    ShapeFlags("output_proj.weight", (_HEAD, _DIT)),
)

_AXES = {
    "vision_hidden_size": ("vision_tower.patch_embedding.weight", 0),
    "vision_temporal_patch_size": ("vision_tower.patch_embedding.weight", 2),
    "vision_patch_size": ("vision_tower.patch_embedding.weight", 3),
    "vision_num_position_embeddings": ("vision_tower.position_embedding.weight", 0),
    "vision_ffn_hidden_size": ("vision_tower.layers.0.mlp.fc1.weight", 0),
    "vocab_size": ("token_embedding.weight", 0),
    "hidden_size": ("token_embedding.weight", 1),
    "ffn_hidden_size": ("text_layers.0.mlp.gate_proj.weight", 0),
    "kv_channels": ("text_layers.0.attention.q_norm.weight", 0),
    "vl_ffn_hidden_size": ("vl_layers.0.mlp.fc1.weight", 0),
    "dit_ffn_hidden_size": ("dit_layers.0.mlp.fc1.weight", 0),
    "head_hidden_size": ("output_proj.weight", 0),
    "num_embodiments": ("action_encoder.fc1.weight", 0),
    "max_action_dim": ("action_encoder.fc1.weight", 1),
    "num_action_positions": ("action_position_embedding.weight", 0),
}
_STACKS = {
    "vision_num_layers": "vision_tower.layers.",
    "num_layers": "text_layers.",
    "vl_num_layers": "vl_layers.",
    "dit_num_layers": "dit_layers.",
}


def infer_sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """GrootN17Config fields that tensor shapes determine, from shapes by our names; a partial checkpoint gives some of them."""
    fields = {field: shapes[name][axis] for field, (name, axis) in _AXES.items() if name in shapes}
    if "kv_channels" in fields:
        width = fields["kv_channels"]
        fields["num_attention_heads"] = shapes["text_layers.0.attention.q_proj.weight"][0] // width
        fields["num_query_groups"] = shapes["text_layers.0.attention.k_proj.weight"][0] // width
    for field, prefix in _STACKS.items():
        numbers = {int(name.removeprefix(prefix).split(".")[0]) for name in shapes if name.startswith(prefix)}
        # A complete checkpoint without such layers says so; a part of one does not.
        if numbers or "action_encoder.fc1.weight" in shapes:
            fields[field] = max(numbers, default=-1) + 1
    return fields


def fixed_batch(config: GrootN17Config) -> GrootN17Batch:
    """Two samples that a forward check always uses: images of two sizes, a short and a long prompt, two embodiments."""
    generator = np.random.default_rng(20250101)
    merge, horizon, width = config.vision_spatial_merge_size, config.action_horizon, config.max_action_dim
    grids = ([(1, 2 * merge, 2 * merge)], [(1, merge, 2 * merge), (1, 2 * merge, 2 * merge)])
    words = min(config.image_token, config.padding_token or config.image_token) - 1
    draws = config.flow_draws
    samples = []
    for number, of_sample in enumerate(grids):
        image_tokens = [config.image_token] * sum(h * w // config.merge_unit for _, h, w in of_sample)
        tokens = [*image_tokens, *generator.integers(1, words, 3 + number).tolist()]
        tokens_S = np.full(16, config.padding_token, dtype=np.int64)
        tokens_S[16 - len(tokens) :] = tokens
        pixels = (sum(h * w for _, h, w in of_sample), IMAGE_CHANNELS * config.vision_patch_size**2)
        samples.append(
            {
                "tokens_BS": tokens_S,
                "token_is_valid_BS": np.arange(16) >= 16 - len(tokens),
                "pixels_PC": generator.integers(0, 256, pixels, dtype=np.uint8),
                "image_grid_I3": np.array(of_sample),
                "state_BHD": generator.uniform(-1, 1, (config.state_history_length, config.max_state_dim)).astype(np.float32),
                "state_is_dropped_B": np.bool_(False),
                "embodiment_B": np.int64(number % config.num_embodiments),
                "actions_BTA": generator.uniform(-1, 1, (horizon, width)).astype(np.float32),
                "action_is_valid_BTA": np.ones((horizon, width), dtype=bool),
                "action_dim_is_valid_BA": np.ones(width, dtype=bool),
                **fields_of_draws(
                    generator.standard_normal((draws * horizon, width), dtype=np.float32),
                    np.linspace((0.25, 0.9)[number], 0.5, draws, dtype=np.float32),
                ),
                "sample_index_B": np.int64(number),
                "epoch_B": np.int64(0),
            }
        )
    return Assembler(config)(samples)


def build_for_check(config: GrootN17Config) -> torch.nn.Module:
    """The module as converters build it: forward checks must not draw dropout masks."""
    return build_module(config).eval()


CONVERTER = CheckpointConverter(
    key_map=GROOT_N1_7_KEYS,
    # Released files leave the tied head out.
    layouts=(Layout("released", "", lambda names: tuple(n for n in names if n == EMBED_TOKENS)),),
    fillers=(),
    shape_flags=SHAPE_FLAGS,
    layer_flags={
        "vision_tower.layers.*": "--vision-num-layers",
        "text_layers.*": "--num-layers",
        "vl_layers.*": "--vl-num-layers",
        "dit_layers.*": "--dit-num-layers",
    },
    shapeless_fields=(
        "vision_num_attention_heads",
        "vision_deepstack_layers",
        "num_attention_heads",
        "num_query_groups",
        "rope_theta",
        "mrope_sections",
        "norm_epsilon",
        "vl_num_attention_heads",
        "dit_num_attention_heads",
        "dit_kv_channels",
        "attend_text_every_n_blocks",
        "num_timestep_buckets",
        "image_token",
        "padding_token",
        "mask_vl_self_attention",
        "mask_padded_action_dims",
    ),
    build_module=build_for_check,
    initialize=initialize,
    infer_sizes=infer_sizes,
    fixed_batch=fixed_batch,
    read_released_config=read_released_config,
)
