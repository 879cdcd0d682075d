"""Released config.json of GR00T N1.7 -> fields of this family's section (releases and code defaults differ: never assumed)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Released name -> our field, of values that mean the same.
_SAME = {
    "select_layer": "num_layers",
    "backbone_embedding_dim": "hidden_size",
    "hidden_size": "head_hidden_size",
    "max_state_dim": "max_state_dim",
    "max_action_dim": "max_action_dim",
    "action_horizon": "action_horizon",
    "max_num_embodiments": "num_embodiments",
    "max_seq_len": "num_action_positions",
    "state_history_length": "state_history_length",
    "num_timestep_buckets": "num_timestep_buckets",
    "num_inference_timesteps": "num_inference_steps",
    "attend_text_every_n_blocks": "attend_text_every_n_blocks",
    "state_dropout_prob": "state_dropout_prob",
}
_DIT = {
    "num_layers": "dit_num_layers",
    "num_attention_heads": "dit_num_attention_heads",
    "attention_head_dim": "dit_kv_channels",
}
_VL = {"num_layers": "vl_num_layers", "num_attention_heads": "vl_num_attention_heads"}
# Values that this family has built in; anything else is another model.
_BUILT_IN: Mapping[str, Any] = {
    "reproject_vision": False,
    "use_alternate_vl_dit": True,
    "add_pos_embed": True,
    "use_vlln": True,
    "noise_s": 0.999,
    "noise_beta_alpha": 1.5,
    "noise_beta_beta": 1.0,
}
_BUILT_IN_DIT: Mapping[str, Any] = {"norm_type": "ada_norm", "interleave_self_attention": True, "positional_embeddings": None}
# As names of N1.5 and N1.6 in `architectures` or `model_type`, lower case, without separators.
_OLDER = ("n15", "n16", "n1d5", "n1d6")


def read_released_config(content: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of GrootN17Config that the file tells; the others keep the variant's values.

    Raises ValueError for N1.5 and N1.6, and for values that this model does not have.
    """
    names = "".join(filter(str.isalnum, f"{content.get('model_type', '')} {content.get('architectures', '')}".lower()))
    if any(older in names for older in _OLDER):
        raise ValueError(
            f"config.json describes {content.get('model_type') or content.get('architectures')}: GR00T N1.5 and N1.6 have "
            "another backbone and another head, only N1.7 is built"
        )
    _refuse_other(content, _BUILT_IN, "")
    fields = {ours: content[theirs] for theirs, ours in _SAME.items() if theirs in content}
    dit = _section(content, "diffusion_model")
    _refuse_other(dit, _BUILT_IN_DIT, "diffusion_model_cfg.")
    fields.update({ours: dit[theirs] for theirs, ours in _DIT.items() if theirs in dit})
    fields.update({"dropout": dit["dropout"]} if "dropout" in dit else {})
    vision_language = _section(content, "vl_self_attention")
    fields.update({ours: vision_language[theirs] for theirs, ours in _VL.items() if theirs in vision_language})
    if content and not vision_language:
        # Configurations without such a section have no such layers.
        fields["vl_num_layers"] = 0
    return fields


def _section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A nested section, under the name of the released files or of older code."""
    return content.get(f"{name}_cfg") or content.get(name) or {}


def _refuse_other(content: Mapping[str, Any], built_in: Mapping[str, Any], prefix: str) -> None:
    for name, value in built_in.items():
        if content.get(name, value) != value:
            raise ValueError(f"config.json: {prefix}{name} is {content[name]}, this model has {value} built in")
