"""Pi0.5 dimensions: the `base` variant is the released 3.3 B model (openpi, arXiv:2504.16054)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Pi05Config:
    """Pi0.5: SigLIP tower, PaliGemma-style prefix, adaRMS action expert, flow matching"""

    image_size: int = 224
    """Side of the square input image in pixels."""

    patch_size: int = 14
    """Side of a vision patch in pixels."""

    vision_hidden_size: int = 1152
    """Vision tower width."""

    vision_num_layers: int = 27
    """Vision tower layers."""

    vision_num_attention_heads: int = 16
    """Vision tower attention heads."""

    vision_ffn_hidden_size: int = 4304
    """Vision tower MLP width."""

    num_layers: int = 18
    """Joint layers (prefix layer and action expert layer share each attention)."""

    hidden_size: int = 2048
    """Prefix (language model) width."""

    ffn_hidden_size: int = 16384
    """Prefix gated MLP width."""

    expert_hidden_size: int = 1024
    """Action expert width."""

    expert_ffn_hidden_size: int = 4096
    """Action expert gated MLP width."""

    num_attention_heads: int = 8
    """Query heads of the joint attention (both streams)."""

    num_query_groups: int = 1
    """Key/value heads of the joint attention (both streams)."""

    kv_channels: int = 256
    """Width of one attention head."""

    vocab_size: int = 257152
    """Rows of the token embedding table."""

    rope_theta: float = 10000.0
    """Base of the rotary position embedding."""

    norm_epsilon: float = 1e-6
    """Epsilon of every RMSNorm and LayerNorm."""

    time_min_period: float = 4e-3
    """Shortest period of the flow-time embedding."""

    time_max_period: float = 4.0
    """Longest period of the flow-time embedding."""

    max_action_dim: int = 32
    """Width of the action interface; smaller robots are zero-padded."""

    action_horizon: int = 50
    """Action steps predicted per sample."""

    max_prompt_length: int = 200
    """Prompt token slots."""

    action_loss: Literal["valid", "real_dims", "all"] = "valid"
    """Elements in the loss: valid = the robot's dimensions at steps inside the episode; real_dims = also repeated steps
    beyond the episode's end (LeRobot's recipe); all = padded dimensions too (openpi's recipe)."""

    flow_draws: int = 1
    """Draws of noise and flow time that each sample of a step is trained on. Images and prompt pass the model once for all of
    them; the loss is their mean. More draws make gradients less noisy for the cost of the action expert alone."""

    mask_padded_action_dims: bool = False
    """Zero the noisy actions in padded dimensions before the network sees them, so that noise there cannot move any output.
    Off as in the released weights, which were trained with noise in padded dimensions; sampling follows the same choice."""

    num_inference_steps: int = 10
    """Euler steps when sampling actions."""

    vision_projector_init: Literal["zeros", "fan_in"] = "zeros"
    """First values of the image projector. zeros: the released recipe, made for a tower that is trained already. fan_in: of
    unit size, for models from scratch, which may never look at their images when these start at zero."""


VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "base": {},
    "small": {
        "vision_hidden_size": 384,
        "vision_num_layers": 12,
        "vision_num_attention_heads": 6,
        "vision_ffn_hidden_size": 1536,
        "num_layers": 12,
        "hidden_size": 640,
        "ffn_hidden_size": 2560,
        "expert_hidden_size": 384,
        "expert_ffn_hidden_size": 1536,
        "num_attention_heads": 8,
        "kv_channels": 64,
        "vocab_size": 4096,
        "vision_projector_init": "fan_in",
    },
    "tiny": {
        "image_size": 56,
        "vision_hidden_size": 32,
        "vision_num_layers": 2,
        "vision_num_attention_heads": 2,
        "vision_ffn_hidden_size": 56,
        "num_layers": 3,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "expert_hidden_size": 32,
        "expert_ffn_hidden_size": 64,
        "num_attention_heads": 8,
        "kv_channels": 16,
        "vocab_size": 512,
        "max_action_dim": 12,
        "action_horizon": 10,
        "max_prompt_length": 64,
    },
}
