"""Pi0.5 checkpoints: openpi's PyTorch files, LeRobot's files, separate vision and language parts."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_vla.data.batch import Batch
from megatron_vla.models.common.converter import CheckpointConverter, Filler, Layout
from megatron_vla.models.common.resolution import ShapeFlags
from megatron_vla.models.pi05.build import build_module, initialize
from megatron_vla.models.pi05.config import Pi05Config
from megatron_vla.models.pi05.key_map import EXPERT_LM_HEAD, PI05_KEYS

_QUERIES = "--num-attention-heads x --kv-channels"
_GROUPS = "--num-query-groups x --kv-channels"
_VISION, _PREFIX, _EXPERT = "--vision-hidden-size", "--hidden-size", "--expert-hidden-size"

SHAPE_FLAGS = (
    ShapeFlags("vision_tower.embeddings.patch_embedding.weight", (_VISION, None, "--patch-size", "--patch-size")),
    ShapeFlags("vision_tower.embeddings.position_embedding.weight", ("--image-size", _VISION)),
    ShapeFlags("vision_tower.layers.*.mlp.fc1.weight", ("--vision-ffn-hidden-size", _VISION)),
    ShapeFlags("vision_tower.layers.*.mlp.fc1.bias", ("--vision-ffn-hidden-size",)),
    ShapeFlags("vision_tower.layers.*.mlp.fc2.weight", (_VISION, "--vision-ffn-hidden-size")),
    ShapeFlags("vision_projector.weight", (_PREFIX, _VISION)),
    ShapeFlags("token_embedding.weight", ("--vocab-size", _PREFIX)),
    ShapeFlags("layers.*.prefix.attention.q_proj.weight", (_QUERIES, _PREFIX)),
    ShapeFlags("layers.*.prefix.attention.k_proj.weight", (_GROUPS, _PREFIX)),
    ShapeFlags("layers.*.prefix.attention.v_proj.weight", (_GROUPS, _PREFIX)),
    ShapeFlags("layers.*.prefix.attention.o_proj.weight", (_PREFIX, _QUERIES)),
    ShapeFlags("layers.*.prefix.mlp.gate_proj.weight", ("--ffn-hidden-size", _PREFIX)),
    ShapeFlags("layers.*.prefix.mlp.up_proj.weight", ("--ffn-hidden-size", _PREFIX)),
    ShapeFlags("layers.*.prefix.mlp.down_proj.weight", (_PREFIX, "--ffn-hidden-size")),
    ShapeFlags("layers.*.suffix.attention.q_proj.weight", (_QUERIES, _EXPERT)),
    ShapeFlags("layers.*.suffix.attention.k_proj.weight", (_GROUPS, _EXPERT)),
    ShapeFlags("layers.*.suffix.attention.v_proj.weight", (_GROUPS, _EXPERT)),
    ShapeFlags("layers.*.suffix.attention.o_proj.weight", (_EXPERT, _QUERIES)),
    ShapeFlags("layers.*.suffix.mlp.gate_proj.weight", ("--expert-ffn-hidden-size", _EXPERT)),
    ShapeFlags("layers.*.suffix.mlp.up_proj.weight", ("--expert-ffn-hidden-size", _EXPERT)),
    ShapeFlags("layers.*.suffix.mlp.down_proj.weight", (_EXPERT, "--expert-ffn-hidden-size")),
    ShapeFlags("action_in_proj.weight", (_EXPERT, "--max-action-dim")),
    ShapeFlags("action_out_proj.weight", ("--max-action-dim", _EXPERT)),
    ShapeFlags("action_out_proj.bias", ("--max-action-dim",)),
    ShapeFlags("time_mlp_in.weight", (_EXPERT, _EXPERT)),
)


def infer_sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Pi05Config fields that tensor shapes determine, from shapes by our names; a partial checkpoint gives some of them.

    Head counts are not in the shapes: they keep the configuration's values, and kv_channels follows from one key/value head.
    """
    fields: dict[str, int] = {}
    axes = {
        "vision_hidden_size": ("vision_projector.weight", 1),
        "vision_ffn_hidden_size": ("vision_tower.layers.0.mlp.fc1.weight", 0),
        "patch_size": ("vision_tower.embeddings.patch_embedding.weight", 2),
        "hidden_size": ("token_embedding.weight", 1),
        "vocab_size": ("token_embedding.weight", 0),
        "ffn_hidden_size": ("layers.0.prefix.mlp.gate_proj.weight", 0),
        "kv_channels": ("layers.0.prefix.attention.k_proj.weight", 0),
        "expert_hidden_size": ("action_in_proj.weight", 0),
        "expert_ffn_hidden_size": ("layers.0.suffix.mlp.gate_proj.weight", 0),
        "max_action_dim": ("action_in_proj.weight", 1),
    }
    for field, (name, axis) in axes.items():
        if name in shapes:
            fields[field] = shapes[name][axis]
    queries = shapes.get("layers.0.prefix.attention.q_proj.weight")
    if queries and "kv_channels" in fields:
        fields["num_attention_heads"] = queries[0] // fields["kv_channels"]
    positions = shapes.get("vision_tower.embeddings.position_embedding.weight")
    if positions and "patch_size" in fields:
        fields["image_size"] = round(positions[0] ** 0.5) * fields["patch_size"]
    for field, stack, depth in (("num_layers", "layers.", 1), ("vision_num_layers", "vision_tower.layers.", 2)):
        numbers = {int(name.split(".")[depth]) for name in shapes if name.startswith(stack)}
        if numbers:
            fields[field] = max(numbers) + 1
    return fields


def fixed_batch(config: Pi05Config) -> Batch:
    """Two samples that a forward check always uses: two views, one of them absent once; a full and a short prompt."""
    generator = torch.Generator().manual_seed(20250101)
    horizon, width, slots = config.action_horizon, config.max_action_dim, config.max_prompt_length
    shape = (2, 2, 3, config.image_size, config.image_size)
    is_valid_BL = torch.arange(slots) < torch.tensor([[slots], [max(1, slots // 3)]])
    normal = torch.randn(2, 2, horizon, width, generator=generator)
    noise_BTA, time_B = normal[1], torch.tensor([0.25, 0.9])
    if (more := config.flow_draws - 1) > 0:
        later = torch.Generator().manual_seed(20250102)
        noise_BTA = torch.cat((noise_BTA, torch.randn(2, more * horizon, width, generator=later)), dim=1)
        time_B = torch.cat((time_B[:, None], torch.rand(2, more, generator=later)), dim=1)
    return Batch(
        images_BVCHW=torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8),
        camera_is_present_BV=torch.tensor([[True, True], [True, False]]),
        tokens_BL=torch.randint(1, config.vocab_size, (2, slots), generator=generator) * is_valid_BL,
        token_is_valid_BL=is_valid_BL,
        actions_BTA=normal[0].clamp(-1, 1),
        action_is_valid_BTA=torch.ones(2, horizon, width, dtype=torch.bool),
        action_dim_is_valid_BA=torch.ones(2, width, dtype=torch.bool),
        noise_BTA=noise_BTA,
        time_B=time_B,
        state_BD=torch.zeros(2, width),
        sample_index_B=torch.arange(2),
        epoch_B=torch.zeros(2, dtype=torch.int64),
    )


def _first_sorted(names: tuple[str, ...]) -> tuple[str, ...]:
    """safetensors' `save_model` keeps the alphabetically first name of shared tensors."""
    return (min(names),)


def _all(names: tuple[str, ...]) -> tuple[str, ...]:
    return names


CONVERTER = CheckpointConverter(
    key_map=PI05_KEYS,
    layouts=(Layout("openpi", "", _first_sorted), Layout("lerobot", "model.", _all)),
    fillers=(Filler(EXPERT_LM_HEAD, (("token_embedding.weight", 0), ("action_in_proj.weight", 0))),),
    shape_flags=SHAPE_FLAGS,
    layer_flags={"vision_tower.layers.*": "--vision-num-layers", "layers.*": "--num-layers"},
    shapeless_fields=(
        "vision_num_attention_heads",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "rope_theta",
        "norm_epsilon",
        "time_min_period",
        "time_max_period",
        "mask_padded_action_dims",
    ),
    build_module=build_module,
    initialize=initialize,
    infer_sizes=infer_sizes,
    fixed_batch=fixed_batch,
)
