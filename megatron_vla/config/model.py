"""Which model family and which named size; the family adds its own section (dimensions, horizon, prompt)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model: which family, which size, where its first weights come from"""

    model_name: str = "pi05"
    """Model family: a key of megatron_vla/models/registry.py."""

    model_variant: str = "base"
    """Named size of the family; every dimension can still be overridden by its own flag."""

    pretrained_checkpoint: str | None = None
    """File or folder with released weights to start from (openpi, LeRobot or this project's layout); strictly loaded."""

    pretrained_reinitialize: tuple[str, ...] = ()
    """Modules that keep their fresh initialisation instead of --pretrained-checkpoint (dotted names, '*' = one segment); listed
    at load. For example action_in_proj action_out_proj when --max-action-dim differs from the released weights."""

    bf16: bool = False
    """Compute in bfloat16 with fp32 main parameters in the optimizer. Off: everything in fp32."""

    fp64: bool = False
    """Everything in float64 (parity tests only)."""
