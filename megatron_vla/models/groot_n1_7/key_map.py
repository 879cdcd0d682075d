"""Names of released GR00T N1.7 tensors."""

from __future__ import annotations

from megatron_vla.models.common.key_map import Foreign, KeyMap, Rename, Tie

_VISUAL = "backbone.model.model.visual"
_LANGUAGE = "backbone.model.model.language_model"
_DIT = "action_head.model"

EMBED_TOKENS = f"{_LANGUAGE}.embed_tokens.weight"
LM_HEAD = "backbone.model.lm_head.weight"

_OLDER = (
    "this is a GR00T N1.5 or N1.6 checkpoint (Eagle backbone): only N1.7, with its Qwen3-VL backbone, is built; its weights do "
    "not fit"
)


def _merger(theirs: str, ours: str) -> tuple[Rename, ...]:
    return (
        Rename(f"{theirs}.norm", f"{ours}.norm"),
        Rename(f"{theirs}.linear_fc1", f"{ours}.mlp.fc1"),
        Rename(f"{theirs}.linear_fc2", f"{ours}.mlp.fc2"),
    )


def _attention(theirs: str, ours: str) -> tuple[Rename, ...]:
    projections = (("to_q", "q_proj"), ("to_k", "k_proj"), ("to_v", "v_proj"), ("to_out.0", "out_proj"))
    return tuple(Rename(f"{theirs}.{a}", f"{ours}.{b}") for a, b in projections)


def _category(theirs: str, ours: str) -> tuple[Rename, ...]:
    return (Rename(f"{theirs}.W", f"{ours}.weight"), Rename(f"{theirs}.b", f"{ours}.bias"))


GROOT_N1_7_KEYS = KeyMap(
    renames=(
        Rename(f"{_VISUAL}.patch_embed.proj", "vision_tower.patch_embedding"),
        Rename(f"{_VISUAL}.pos_embed", "vision_tower.position_embedding"),
        Rename(f"{_VISUAL}.blocks.*.norm1", "vision_tower.layers.*.layer_norm1"),
        *(
            Rename(f"{_VISUAL}.blocks.*.attn.qkv", f"vision_tower.layers.*.self_attn.{name}_proj", part=(number, 3))
            for number, name in enumerate("qkv")
        ),
        Rename(f"{_VISUAL}.blocks.*.attn.proj", "vision_tower.layers.*.self_attn.out_proj"),
        Rename(f"{_VISUAL}.blocks.*.norm2", "vision_tower.layers.*.layer_norm2"),
        Rename(f"{_VISUAL}.blocks.*.mlp.linear_fc1", "vision_tower.layers.*.mlp.fc1"),
        Rename(f"{_VISUAL}.blocks.*.mlp.linear_fc2", "vision_tower.layers.*.mlp.fc2"),
        *_merger(f"{_VISUAL}.merger", "vision_tower.merger"),
        *_merger(f"{_VISUAL}.deepstack_merger_list.*", "vision_tower.deepstack_mergers.*"),
        Rename(f"{_LANGUAGE}.embed_tokens", "token_embedding"),
        Rename(f"{_LANGUAGE}.layers.*.input_layernorm", "text_layers.*.input_norm"),
        Rename(f"{_LANGUAGE}.layers.*.self_attn", "text_layers.*.attention"),
        Rename(f"{_LANGUAGE}.layers.*.post_attention_layernorm", "text_layers.*.post_attention_norm"),
        Rename(f"{_LANGUAGE}.layers.*.mlp", "text_layers.*.mlp"),
        Rename(f"{_LANGUAGE}.norm", "text_norm"),
        Rename("action_head.vlln", "vl_norm"),
        Rename("action_head.vl_self_attention.transformer_blocks.*.norm1", "vl_layers.*.norm1"),
        *_attention("action_head.vl_self_attention.transformer_blocks.*.attn1", "vl_layers.*.attention"),
        Rename("action_head.vl_self_attention.transformer_blocks.*.norm3", "vl_layers.*.norm2"),
        Rename("action_head.vl_self_attention.transformer_blocks.*.ff.net.0.proj", "vl_layers.*.mlp.fc1"),
        Rename("action_head.vl_self_attention.transformer_blocks.*.ff.net.2", "vl_layers.*.mlp.fc2"),
        *_category("action_head.state_encoder.layer1", "state_encoder.fc1"),
        *_category("action_head.state_encoder.layer2", "state_encoder.fc2"),
        *_category("action_head.action_encoder.W1", "action_encoder.fc1"),
        *_category("action_head.action_encoder.W2", "action_encoder.fc2"),
        *_category("action_head.action_encoder.W3", "action_encoder.fc3"),
        *_category("action_head.action_decoder.layer1", "action_decoder.fc1"),
        *_category("action_head.action_decoder.layer2", "action_decoder.fc2"),
        Rename("action_head.position_embedding", "action_position_embedding"),
        Rename(f"{_DIT}.timestep_encoder.timestep_embedder.linear_1", "time_mlp_in"),
        Rename(f"{_DIT}.timestep_encoder.timestep_embedder.linear_2", "time_mlp_out"),
        Rename(f"{_DIT}.transformer_blocks.*.norm1.linear", "dit_layers.*.norm1.dense"),
        *_attention(f"{_DIT}.transformer_blocks.*.attn1", "dit_layers.*.attention"),
        Rename(f"{_DIT}.transformer_blocks.*.ff.net.0.proj", "dit_layers.*.mlp.fc1"),
        Rename(f"{_DIT}.transformer_blocks.*.ff.net.2", "dit_layers.*.mlp.fc2"),
        Rename(f"{_DIT}.proj_out_1", "output_norm.dense"),
        Rename(f"{_DIT}.proj_out_2", "output_proj"),
    ),
    ties=(Tie((EMBED_TOKENS, LM_HEAD)),),
    foreign=(
        Foreign(r"^backbone\.eagle_|^backbone\.model\.(vision_model|mlp1|language_model)\.", _OLDER),
        Foreign(r"^action_head\.future_tokens\.", _OLDER),
    ),
)
