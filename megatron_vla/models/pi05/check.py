"""Pi0.5's own rules: dimensions that cannot work together, and the checkpoint to start from, before anything is built."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_vla.config.cli import flag_name
from megatron_vla.config.run import RunConfig
from megatron_vla.findings import Finding, error
from megatron_vla.models.common.parallel_check import SplitDimensions, tensor_parallel_findings
from megatron_vla.models.common.pretrained_check import pretrained_findings
from megatron_vla.models.pi05.config import Pi05Config
from megatron_vla.models.pi05.convert import CONVERTER

_POSITIVE = (
    "image_size",
    "patch_size",
    "vision_hidden_size",
    "vision_num_layers",
    "vision_num_attention_heads",
    "vision_ffn_hidden_size",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "expert_hidden_size",
    "expert_ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "max_action_dim",
    "action_horizon",
    "max_prompt_length",
    "num_inference_steps",
    "flow_draws",
)


def check(config: RunConfig) -> list[Finding]:
    """Everything wrong with the family's section; reads headers of --pretrained-checkpoint, builds no weights."""
    findings = list(_dimension_findings(config.family))
    if config.data.packing and config.family.flow_draws > 1:
        what = "packs hold one action chunk a sample"
        findings.append(error("--packing, --flow-draws", what, "use --flow-draws 1, or drop --packing"))
    if not findings:
        findings += tensor_parallel_findings(config.parallel, split_dimensions(config.family))
    return [*findings, *pretrained_findings(config, CONVERTER, can_build=not findings)]


def split_dimensions(family: Pi05Config) -> SplitDimensions:
    """What tensor-parallel ranks share."""
    return SplitDimensions(
        divisible=(
            ("--vision-num-attention-heads", family.vision_num_attention_heads),
            ("--vision-ffn-hidden-size", family.vision_ffn_hidden_size),
            ("--num-attention-heads", family.num_attention_heads),
            ("--ffn-hidden-size", family.ffn_hidden_size),
            ("--expert-ffn-hidden-size", family.expert_ffn_hidden_size),
        ),
        key_value_heads=(("--num-query-groups", family.num_query_groups),),
        tokens=(
            ("--image-size / --patch-size", (family.image_size // family.patch_size) ** 2),
            ("--action-horizon", family.action_horizon),
        ),
        vocabulary=(("--vocab-size", family.vocab_size),),
    )


def _dimension_findings(family: Pi05Config) -> Iterator[Finding]:
    bad = [name for name in _POSITIVE if getattr(family, name) < 1]
    for name in bad:
        yield error(flag_name(name), f"{getattr(family, name)} is not a positive size", f"use {flag_name(name)} 1 or more")
    if bad:
        return
    for flag, size, divisor_flag, divisor in (
        ("--image-size", family.image_size, "--patch-size", family.patch_size),
        ("--vision-hidden-size", family.vision_hidden_size, "--vision-num-attention-heads", family.vision_num_attention_heads),
        ("--num-attention-heads", family.num_attention_heads, "--num-query-groups", family.num_query_groups),
    ):
        if size % divisor:
            working = max(1, round(size / divisor)) * divisor
            yield error(flag, f"{size} is not a multiple of {divisor_flag} {divisor}", f"for example {flag} {working}")
    for flag, size, reason in (
        ("--kv-channels", family.kv_channels, "rotary positions turn pairs of channels"),
        ("--expert-hidden-size", family.expert_hidden_size, "the flow-time embedding is half sines, half cosines"),
    ):
        if size % 2:
            yield error(flag, f"{size} is odd, but {reason}", f"use {flag} {size + 1}")
    if not 0 < family.time_min_period < family.time_max_period:
        yield error(
            "--time-min-period, --time-max-period",
            f"{family.time_min_period} and {family.time_max_period} are not an increasing pair of positive periods",
            "the released values are 0.004 and 4.0",
        )
    for flag, value, released in (
        ("--norm-epsilon", family.norm_epsilon, 1e-6),
        ("--rope-theta", family.rope_theta, 10000.0),
    ):
        if value <= 0:
            yield error(flag, f"{value} is not positive", f"the released value is {released}")
