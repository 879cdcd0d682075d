"""How GR00T N1.7's samples are made: pictures, language, normalization. The defaults are the released fine-tuning recipe's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class GrootDataOptions:
    """GR00T N1.7 samples: pictures, language, normalization"""

    image_filter: Literal["area", "bicubic"] = "area"
    """Picture pipeline: area = Isaac-GR00T's (aspect ratio kept, shorter side at --image-size), bicubic = LeRobot's (squashed
    to a square)."""

    image_crop_fraction: float = 230 / 256
    """Share of each side that a crop keeps: a random window in training with --augmentation groot, the centre otherwise. The
    crop is resized again."""

    letter_box: bool = False
    """Pad pictures to squares with black bars before anything else."""

    image_min_pixels: int = 65536
    """Smaller pictures are enlarged to at least this many pixels, as the backbone's image processor does."""

    image_max_pixels: int = 16777216
    """Larger pictures are reduced to at most this many pixels."""

    color_jitter: tuple[float, ...] = (0.3, 0.4, 0.5, 0.08)
    """Ranges of brightness, contrast, saturation and hue with --augmentation groot. None: no colour jitter."""

    formalize_language: bool = True
    """Lower-case instructions and drop all punctuation."""

    use_percentiles: bool = True
    """Normalize states and absolute actions by q01 and q99, not by min and max. Relative actions always use min and max per
    step."""

    use_relative_action: bool = True
    """Honour the RELATIVE actions of the modality configuration. Off: all actions as the dataset writes them."""

    sin_cos_state: bool = False
    """Honour the sin_cos_embedding_keys of the modality configuration: sine and cosine in place of an angle."""

    action_steps: int = 16
    """Steps of a trained chunk where no modality configuration says; padding up to --action-horizon follows."""

    exclude_state: bool = False
    """Feed zeros in place of the state."""

    action_loss: Literal["valid", "real_dims", "all"] = "valid"
    """Elements in the loss: valid = the robot's dimensions at the chunk's steps inside the episode (released); real_dims = also
    repeated steps beyond the episode's end; all = padded steps and dimensions too."""
