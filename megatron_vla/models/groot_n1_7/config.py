"""GR00T N1.7 dimensions: the `base` variant is the released 3.14 B model (nvidia/GR00T-N1.7-3B)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_vla.models.groot_n1_7.data_options import GrootDataOptions

IMAGE_CHANNELS = 3
# Rotary base of the vision tower; its text tower's own is --rope-theta.
VISION_ROPE_THETA = 10000.0
# Width of the DiT's time code, whatever the model's size.
TIME_CODE_WIDTH = 256


@dataclass(frozen=True, kw_only=True)
class GrootN17Config(GrootDataOptions):
    """GR00T N1.7: Qwen3-VL backbone, vision-language self-attention, per-embodiment encoders, DiT, flow matching"""

    image_size: int = 256
    """Side of the square images after preprocessing, in pixels; a multiple of patch size times merge size."""

    vision_patch_size: int = 16
    """Side of a vision patch in pixels."""

    vision_temporal_patch_size: int = 2
    """Frames of one vision patch; a still image is repeated."""

    vision_spatial_merge_size: int = 2
    """Side of the block of patches that becomes one token."""

    vision_hidden_size: int = 1024
    """Vision tower width."""

    vision_num_layers: int = 24
    """Vision tower layers."""

    vision_num_attention_heads: int = 16
    """Vision tower attention heads."""

    vision_ffn_hidden_size: int = 4096
    """Vision tower MLP width."""

    vision_num_position_embeddings: int = 2304
    """Rows of the vision tower's square position table, which is interpolated to each image's grid."""

    vision_deepstack_layers: tuple[int, ...] = (5, 11, 17)
    """Vision layers (from 0) whose features are added after the first text layers, in this order."""

    num_layers: int = 16
    """Text layers that are kept (the released backbone has 28)."""

    hidden_size: int = 2048
    """Text width, and width of what the action head reads."""

    num_attention_heads: int = 16
    """Text query heads."""

    num_query_groups: int = 8
    """Text key/value heads."""

    kv_channels: int = 128
    """Width of one text attention head."""

    ffn_hidden_size: int = 6144
    """Text gated MLP width."""

    vocab_size: int = 151936
    """Rows of the token embedding table."""

    rope_theta: float = 5_000_000.0
    """Base of the text tower's rotary positions."""

    mrope_sections: tuple[int, ...] = (24, 20, 20)
    """Rotary frequencies that turn with the temporal, row and column position; they add up to half of --kv-channels."""

    norm_epsilon: float = 1e-6
    """Epsilon of every norm of the backbone."""

    image_token: int = 151655
    """Token id whose embedding is replaced by image features."""

    padding_token: int = 151643
    """Token id of padding, on the left."""

    max_prompt_length: int = 512
    """Token slots of a sample: chat markers, image tokens and instruction."""

    vl_num_layers: int = 4
    """Self-attention layers between backbone and DiT; 0 leaves them out."""

    vl_num_attention_heads: int = 32
    """Heads of those layers; --hidden-size over this is their width."""

    vl_ffn_hidden_size: int = 8192
    """MLP width of those layers."""

    dit_num_layers: int = 32
    """DiT blocks: even ones read text or image tokens, odd ones read the state and action tokens."""

    dit_num_attention_heads: int = 32
    """DiT heads."""

    dit_kv_channels: int = 48
    """Width of one DiT head; the DiT's width is heads times this."""

    dit_ffn_hidden_size: int = 6144
    """DiT MLP width."""

    attend_text_every_n_blocks: int = 2
    """Every n-th reading block of the DiT reads text, the others image tokens."""

    head_hidden_size: int = 1024
    """Width of the DiT's output and of the hidden layers of the per-embodiment state encoder and action decoder."""

    embodiment_init: Literal["released", "fan_in"] = "released"
    """First values of the per-embodiment weights. released: deviation 0.02, whatever their inputs. fan_in: 1 / sqrt(inputs);
    narrow models that start from nothing need it, since 0.02 hides the noisy actions behind their positions for long."""

    num_embodiments: int = 32
    """Slots of the per-embodiment weights."""

    max_state_dim: int = 132
    """Width of the state interface; smaller robots are zero-padded."""

    state_history_length: int = 1
    """State rows of a sample, flattened into one token."""

    max_action_dim: int = 132
    """Width of the action interface; smaller robots are zero-padded."""

    action_horizon: int = 40
    """Action steps predicted per sample."""

    num_action_positions: int = 1024
    """Rows of the action position table."""

    flow_draws: int = 1
    """Draws of noise and flow time that each sample of a step is trained on. Images and prompt pass the model once for all of
    them; the loss is their mean. More draws make gradients less noisy for the cost of the DiT's own tokens alone."""

    num_timestep_buckets: int = 1000
    """Integer time steps that the time encoders see."""

    num_inference_steps: int = 4
    """Euler steps when sampling actions."""

    dropout: float = 0.2
    """Dropout of the vision-language self-attention and of the DiT, after projections and inside MLPs."""

    state_dropout_prob: float = 0.2
    """Probability that a training sample's state is hidden."""

    single_state_dropout: bool = False
    """Hide the state once, as features. Off as released: raw state and features are each hidden with the probability."""

    mask_vl_self_attention: bool = False
    """Keep padding out of the vision-language self-attention. Off as released: padding takes part as keys, so results depend
    on how far a batch is padded."""

    mask_padded_action_dims: bool = False
    """Zero the noisy actions in padded dimensions before the network sees them, so that noise there cannot move any output.
    Off as released: the weights were trained with noise in padded dimensions; sampling follows the same choice."""

    decay_biases_and_norms: bool = False
    """Decay every trained parameter. Off as released: biases and norms do not decay (per-embodiment biases do)."""

    tune_llm: bool = False
    """Train the text tower."""

    tune_visual: bool = False
    """Train the vision tower."""

    tune_top_llm_layers: int = 0
    """Train this many of the last kept text layers."""

    tune_projector: bool = True
    """Train state encoder, action encoder, action decoder and action positions."""

    tune_diffusion_model: bool = True
    """Train the DiT."""

    tune_vlln: bool = True
    """Train the norm and the self-attention between backbone and DiT."""

    frozen_dtype: Literal["bf16", "as_model"] = "bf16"
    """Frozen backbone modules: rounded to bf16 once (what autocast does in every step), or kept in the model's own dtype."""

    autocast_bf16: bool = False
    """Released recipe: fp32 parameters, matrix products of trained modules in bf16 by autocast. --bf16 keeps bf16 parameters
    with fp32 main parameters instead, which needs less memory and fewer casts."""

    @property
    def dit_hidden_size(self) -> int:
        """Width of the DiT and its tokens."""
        return self.dit_num_attention_heads * self.dit_kv_channels

    @property
    def patch_row_width(self) -> int:
        """Values of one patch row: channels x frames x rows x columns."""
        return IMAGE_CHANNELS * self.vision_temporal_patch_size * self.vision_patch_size**2

    @property
    def merge_unit(self) -> int:
        """Patches of one image token."""
        return self.vision_spatial_merge_size**2

    @property
    def position_table_side(self) -> int:
        """Rows (and columns) of the vision position table."""
        return round(self.vision_num_position_embeddings**0.5)


VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "base": {},
    "small": {
        "image_size": 128,
        "image_min_pixels": 1024,
        "vision_hidden_size": 384,
        "vision_num_layers": 8,
        "vision_num_attention_heads": 6,
        "vision_ffn_hidden_size": 1536,
        "vision_num_position_embeddings": 256,
        "vision_deepstack_layers": (1, 3, 5),
        "num_layers": 6,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "kv_channels": 64,
        "ffn_hidden_size": 1536,
        "vocab_size": 4096,
        "mrope_sections": (12, 10, 10),
        "image_token": 4095,
        "padding_token": 0,
        "max_prompt_length": 128,
        "vl_num_layers": 2,
        "vl_num_attention_heads": 8,
        "vl_ffn_hidden_size": 2048,
        "dit_num_layers": 12,
        "dit_num_attention_heads": 12,
        "dit_kv_channels": 48,
        "dit_ffn_hidden_size": 2304,
        "head_hidden_size": 512,
        "embodiment_init": "fan_in",
        "num_embodiments": 4,
        "max_state_dim": 32,
        "max_action_dim": 32,
        "action_horizon": 16,
        "num_action_positions": 64,
    },
    "tiny": {
        "image_size": 64,
        "image_min_pixels": 1024,
        "vision_hidden_size": 32,
        "vision_num_layers": 4,
        "vision_num_attention_heads": 2,
        "vision_ffn_hidden_size": 64,
        "vision_num_position_embeddings": 36,
        "vision_deepstack_layers": (0, 1, 2),
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "ffn_hidden_size": 96,
        "vocab_size": 512,
        "mrope_sections": (4, 2, 2),
        "image_token": 511,
        "padding_token": 0,
        "max_prompt_length": 64,
        "vl_num_layers": 2,
        "vl_num_attention_heads": 4,
        "vl_ffn_hidden_size": 128,
        "dit_num_layers": 4,
        "dit_num_attention_heads": 4,
        "dit_kv_channels": 16,
        "dit_ffn_hidden_size": 128,
        "head_hidden_size": 32,
        "num_embodiments": 4,
        "max_state_dim": 12,
        "max_action_dim": 12,
        "action_horizon": 10,
        "num_action_positions": 16,
    },
}
