"""GR00T N1.7's own rules: dimensions that cannot work together, and the checkpoint to start from, before anything is built."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_vla.config.cli import flag_name
from megatron_vla.config.run import RunConfig
from megatron_vla.findings import Finding, error
from megatron_vla.models.common.parallel_check import SplitDimensions, tensor_parallel_findings
from megatron_vla.models.common.pretrained_check import pretrained_findings
from megatron_vla.models.groot_n1_7.config import GrootN17Config
from megatron_vla.models.groot_n1_7.convert import CONVERTER
from megatron_vla.models.groot_n1_7.samples import mock_prompt_tokens, num_image_tokens

# Sizes that may be zero.
_FREE = {"vl_num_layers", "tune_top_llm_layers", "padding_token", "image_token"}

# Where a forward pass draws dropout masks; "*" stands for any of them.
DROPPING_MODULES = ("vl_layers", "dit_layers", "*")


def check(config: RunConfig) -> list[Finding]:
    """Everything wrong with the family's section; reads headers of --pretrained-checkpoint, builds no weights."""
    findings = list(_dimension_findings(config.family))
    if not findings:
        findings += _recipe_findings(config)
        findings += tensor_parallel_findings(config.parallel, split_dimensions(config.family))
        findings += _data_findings(config)
    return [*findings, *pretrained_findings(config, CONVERTER, can_build=not findings)]


def split_dimensions(family: GrootN17Config) -> SplitDimensions:
    """What tensor-parallel ranks share."""
    return SplitDimensions(
        divisible=(
            ("--vision-num-attention-heads", family.vision_num_attention_heads),
            ("--vision-ffn-hidden-size", family.vision_ffn_hidden_size),
            ("--num-attention-heads", family.num_attention_heads),
            ("--ffn-hidden-size", family.ffn_hidden_size),
            ("--vl-num-attention-heads", family.vl_num_attention_heads),
            ("--vl-ffn-hidden-size", family.vl_ffn_hidden_size),
            ("--dit-num-attention-heads", family.dit_num_attention_heads),
            ("--dit-ffn-hidden-size", family.dit_ffn_hidden_size),
        ),
        key_value_heads=(("--num-query-groups", family.num_query_groups),),
        tokens=(
            ("--image-size / --vision-patch-size", (family.image_size // family.vision_patch_size) ** 2),
            ("--action-horizon", family.action_horizon),
        ),
        vocabulary=(("--vocab-size", family.vocab_size),),
    )


def _dimension_findings(family: GrootN17Config) -> Iterator[Finding]:
    numbers = {name: value for name, value in vars(family).items() if isinstance(value, int) and not isinstance(value, bool)}
    bad = [name for name, value in numbers.items() if value < (0 if name in _FREE else 1)]
    for name in bad:
        yield error(flag_name(name), f"{numbers[name]} is not a positive size", f"use {flag_name(name)} 1 or more")
    if bad:
        return
    block = family.vision_patch_size * family.vision_spatial_merge_size
    for flag, size, divisor_flag, divisor in (
        ("--image-size", family.image_size, "--vision-patch-size x --vision-spatial-merge-size", block),
        (
            "--vision-hidden-size",
            family.vision_hidden_size,
            "4 x --vision-num-attention-heads",
            4 * family.vision_num_attention_heads,
        ),
        ("--num-attention-heads", family.num_attention_heads, "--num-query-groups", family.num_query_groups),
        ("--hidden-size", family.hidden_size, "--vl-num-attention-heads", family.vl_num_attention_heads),
        ("--kv-channels", family.kv_channels, "2 (rotary positions turn pairs of channels)", 2),
        ("--dit-num-attention-heads x --dit-kv-channels", family.dit_hidden_size, "2 (time codes are sines and cosines)", 2),
    ):
        if size % divisor:
            yield error(
                flag, f"{size} is not a multiple of {divisor_flag}: {divisor}", f"for example {-(-size // divisor) * divisor}"
            )
    if family.position_table_side**2 != family.vision_num_position_embeddings:
        what = f"{family.vision_num_position_embeddings} rows are no square table"
        yield error("--vision-num-position-embeddings", what, f"for example {family.position_table_side**2}")
    sections = family.mrope_sections
    if len(sections) != 3 or sum(sections) != family.kv_channels // 2:
        what = f"{' '.join(map(str, sections))} are not three numbers that add up to half of --kv-channels {family.kv_channels}"
        yield error("--mrope-sections", what, "the released values are 24 20 20 for --kv-channels 128")
    deepstack = family.vision_deepstack_layers
    if sorted(set(deepstack)) != list(deepstack) or any(not 0 <= layer < family.vision_num_layers for layer in deepstack):
        what = f"{deepstack} are not ascending numbers below --vision-num-layers {family.vision_num_layers}"
        yield error("--vision-deepstack-layers", what, "the released values are 5 11 17 for 24 layers")
    if len(deepstack) > family.num_layers:
        what = f"{len(deepstack)} features for {family.num_layers} text layers, which take one each"
        yield error("--vision-deepstack-layers", what, f"use --num-layers {len(deepstack)} or more")
    for flag, token in (("--image-token", family.image_token), ("--padding-token", family.padding_token)):
        if token >= family.vocab_size:
            yield error(flag, f"{token} is not below --vocab-size {family.vocab_size}", "use the tokenizer's own id")


def _recipe_findings(config: RunConfig) -> Iterator[Finding]:
    family = config.family
    backend = config.optimization.attention_backend
    if backend not in ("auto", "sdpa", "eager"):
        what = f"{backend} describes a sample by its keys alone, but the text tower is causal"
        yield error("--attention-backend", what, "use --attention-backend auto (torch's fused attention) or eager")
    if config.optimization.report_memory:
        what = "measures single samples of micro-batches, which cannot be taken out of groot_n1_7's (images lie end to end)"
        yield error("--report-memory", what, "drop it; the log's peak_memory_gib shows what a few steps with other flags need")
    yield from _captured_dropout_findings(config)
    if family.action_horizon > family.num_action_positions:
        what = f"{family.action_horizon} steps, but {family.num_action_positions} positions (--num-action-positions)"
        yield error("--action-horizon", what, f"use --action-horizon {family.num_action_positions} or less")
    for flag, probability in (("--dropout", family.dropout), ("--state-dropout-prob", family.state_dropout_prob)):
        if not 0 <= probability < 1:
            yield error(flag, f"{probability} is no probability below 1", f"for example {flag} 0.2")
    if family.tune_top_llm_layers > family.num_layers:
        what = f"{family.tune_top_llm_layers} of {family.num_layers} text layers"
        yield error("--tune-top-llm-layers", what, "use --tune-llm to train all of them")
    if family.autocast_bf16 and (config.model.bf16 or config.model.fp64):
        other = "--bf16" if config.model.bf16 else "--fp64"
        what = f"together with {other}: autocast is for fp32 parameters"
        yield error("--autocast-bf16", what, "choose one of them")
    tuned = (family.tune_llm, family.tune_visual, family.tune_top_llm_layers, family.tune_projector)
    if not any((*tuned, family.tune_diffusion_model, family.tune_vlln)):
        yield error("--tune-llm, ...", "nothing is trained", "leave --no-tune-diffusion-model out")


def _captured_dropout_findings(config: RunConfig) -> Iterator[Finding]:
    """Where dropout needs more than torch's own generator, which a captured graph advances with every replay."""
    optimization = config.optimization
    if optimization.runner == "eager" or config.family.dropout == 0:
        return
    fix = "use --dropout 0, or --runner eager"
    if config.parallel.tensor_model_parallel_size > 1:
        what = f"{optimization.runner} with --tensor-model-parallel-size: the host swaps the generators that dropout draws from"
        yield error("--runner", what, fix)
    patterns = optimization.activation_checkpoint_module_patterns
    redrawn = [pattern for pattern in patterns if pattern.split(".")[0] in DROPPING_MODULES]
    if redrawn:
        what = f"{' '.join(redrawn)} with --runner {optimization.runner}: recomputation reads and sets the state of a generator"
        yield error("--activation-checkpoint-module-patterns", what, fix)


def _data_findings(config: RunConfig) -> Iterator[Finding]:
    data, family = config.data, config.family
    if not data.mock_data:
        return
    smallest = mock_prompt_tokens(family, data.mock_num_cameras, 1)
    if smallest > family.max_prompt_length:
        what = (
            f"{data.mock_num_cameras} images of {num_image_tokens(family)} tokens need {smallest} slots, "
            f"--max-prompt-length gives {family.max_prompt_length}"
        )
        yield error("--max-prompt-length", what, f"use --max-prompt-length {smallest} or more, or fewer --mock-num-cameras")
    if data.mock_num_embodiments > family.num_embodiments:
        what = f"{data.mock_num_embodiments} is more than --num-embodiments {family.num_embodiments}"
        yield error("--mock-num-embodiments", what, f"use --mock-num-embodiments {family.num_embodiments} or less")
