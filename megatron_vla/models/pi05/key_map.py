"""Names of released Pi0.5 tensors (openpi's PyTorch converter, LeRobot) and of the parts that they are made of."""

from __future__ import annotations

from megatron_vla.models.common.key_map import Ignored, KeyMap, Rename, Spelling, Tie

_PALIGEMMA = "paligemma_with_expert.paligemma"
_VISION = f"{_PALIGEMMA}.model.vision_tower.vision_model"
_LANGUAGE = f"{_PALIGEMMA}.model.language_model"
_EXPERT = "paligemma_with_expert.gemma_expert"

EMBED_TOKENS = f"{_LANGUAGE}.embed_tokens.weight"
LM_HEAD = f"{_PALIGEMMA}.lm_head.weight"
EXPERT_LM_HEAD = f"{_EXPERT}.lm_head.weight"

PI05_KEYS = KeyMap(
    renames=(
        Rename(f"{_VISION}.embeddings", "vision_tower.embeddings"),
        Rename(f"{_VISION}.encoder.layers", "vision_tower.layers"),
        Rename(f"{_VISION}.post_layernorm", "vision_tower.post_layernorm"),
        Rename(f"{_PALIGEMMA}.model.multi_modal_projector.linear", "vision_projector"),
        Rename(f"{_LANGUAGE}.embed_tokens", "token_embedding"),
        Rename(f"{_LANGUAGE}.layers.*.input_layernorm", "layers.*.prefix.input_norm"),
        Rename(f"{_LANGUAGE}.layers.*.self_attn", "layers.*.prefix.attention"),
        Rename(f"{_LANGUAGE}.layers.*.post_attention_layernorm", "layers.*.prefix.post_attention_norm"),
        Rename(f"{_LANGUAGE}.layers.*.mlp", "layers.*.prefix.mlp"),
        Rename(f"{_LANGUAGE}.norm", "prefix_norm"),
        Rename(f"{_EXPERT}.model.layers.*.input_layernorm", "layers.*.suffix.input_norm"),
        Rename(f"{_EXPERT}.model.layers.*.self_attn", "layers.*.suffix.attention"),
        Rename(f"{_EXPERT}.model.layers.*.post_attention_layernorm", "layers.*.suffix.post_attention_norm"),
        Rename(f"{_EXPERT}.model.layers.*.mlp", "layers.*.suffix.mlp"),
        Rename(f"{_EXPERT}.model.norm", "suffix_norm"),
        Rename("action_in_proj", "action_in_proj"),
        Rename("action_out_proj", "action_out_proj"),
        Rename("time_mlp_in", "time_mlp_in"),
        Rename("time_mlp_out", "time_mlp_out"),
    ),
    ties=(Tie((EMBED_TOKENS, LM_HEAD)),),
    ignored=(
        Ignored(EXPERT_LM_HEAD, "the action expert has no vocabulary; released files hold random numbers here"),
        Ignored("paligemma_with_expert.vision_head", "SigLIP's pooling head; the prefix reads patch features"),
        Ignored("paligemma_with_expert.siglip_text", "SigLIP's text side; not part of this model"),
    ),
    spellings=(
        # LeRobot wraps the model once more.
        Spelling(r"^model\.(?=paligemma_with_expert\.|action_|time_mlp_)", ""),
        # A SigLIP file on its own: vision side, pooling head, text side with the contrastive scale.
        Spelling(r"^vision_model\.head\.", "paligemma_with_expert.vision_head."),
        Spelling(r"^vision_model\.", f"{_VISION}."),
        Spelling(r"^(text_model\.|logit_scale$|logit_bias$)", r"paligemma_with_expert.siglip_text.\1"),
        # A PaliGemma file on its own, before and after transformers 4.52.
        Spelling(r"^(language_model|vision_tower|multi_modal_projector)\.", rf"{_PALIGEMMA}.\1."),
        Spelling(r"^model\.(language_model|vision_tower|multi_modal_projector)\.", rf"{_PALIGEMMA}.model.\1."),
        Spelling(r"^lm_head\.", f"{_PALIGEMMA}.lm_head."),
        # Full files from before transformers 4.52 nest the language model the other way round.
        Spelling(rf"^{_PALIGEMMA}\.language_model\.model\.", f"{_LANGUAGE}."),
        Spelling(rf"^{_PALIGEMMA}\.language_model\.lm_head\.", f"{_PALIGEMMA}.lm_head."),
        Spelling(rf"^{_PALIGEMMA}\.(vision_tower|multi_modal_projector)\.", rf"{_PALIGEMMA}.model.\1."),
        # transformers from about 5.6 on drop the level `vision_model`.
        Spelling(rf"^{_PALIGEMMA}\.model\.vision_tower\.(?!vision_model\.)", f"{_VISION}."),
        # Pi0's name of the time MLP, found in early conversions.
        Spelling(r"^action_time_mlp_(in|out)\.", r"time_mlp_\1."),
    ),
)
