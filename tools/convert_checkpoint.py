"""Convert checkpoints: released files <-> this project's layout; training checkpoints of any layout -> either.

    python tools/convert_checkpoint.py --input pi05_base/model.safetensors --output pi05_base_native
    python tools/convert_checkpoint.py --input checkpoints/iter_0030000 --to lerobot --output export
    python tools/convert_checkpoint.py --input checkpoints/iter_0030000 --averaged --output one_file

A training checkpoint may come from any number of ranks; one process without a launcher reads it, weights only, tensor by tensor
in the stored dtypes (never the optimizer state). Both kinds of output start a new run with --pretrained-checkpoint.

Converting to `native` checks names and shapes, builds the model, runs it on a fixed input and stores that input with its
output; converting back runs the same input again. Dimensions are read from the tensors; what shapes cannot tell (head counts)
comes from the configuration stored beside the input, else from the variant, and from the family's own flags (see --help).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_vla.config.cli import StrictParser, add_section, build_section, flag_name
from megatron_vla.models.common.forward_check import REFERENCE_FILE, check_forward, write_reference
from megatron_vla.models.registry import MODEL_FAMILIES, ModelFamily, model_family
from megatron_vla.optimizations.patterns import covers


def parser_of(family: ModelFamily) -> StrictParser:
    """Flags of the tool, and the family's dimensions."""
    layouts = [layout.name for layout in family.converter.layouts]
    parser = StrictParser(prog="convert_checkpoint.py", description="Convert checkpoints: released files <-> native layout.")
    parser.add_argument("--model-name", default=family.name, choices=list(MODEL_FAMILIES), help="model family")
    parser.add_argument("--model-variant", default="base", choices=list(family.variants), help="where head counts come from")
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        type=Path,
        help="file, shard index or folder; several parts (vision, language) are joined",
    )
    parser.add_argument("--output", required=True, type=Path, help="folder to write; must not exist or be empty")
    parser.add_argument("--averaged", action="store_true", help="take the EMA of a training checkpoint, not its weights")
    parser.add_argument("--to", default="native", choices=["native", *layouts], help="layout to write")
    parser.add_argument(
        "--random-modules", nargs="*", default=[], help="modules that the input lacks and that start afresh (dotted, '*')"
    )
    parser.add_argument("--seed", type=int, default=1234, help="seed of --random-modules")
    parser.add_argument("--reference", type=Path, help="forward reference to compare with (default: the input folder's own)")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="allowed difference from the reference, of its maximum")
    parser.add_argument("--max-shard-size-gb", type=float, help="write shards with an index above this size")
    add_section(parser, family.config_type)
    return parser


def config_of(family: ModelFamily, options: argparse.Namespace) -> Any:
    """The family's section: stored configuration or variant, then what the tensors' shapes say, then the flags given here."""
    stored = family.converter.described_config(options.input[0])
    base: Mapping[str, Any] = {**family.variants[options.model_variant], **(stored or {})}
    inferred = family.converter.infer_sizes(family.converter.our_shapes(options.input))
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(family.config_type) if f.name in options}
    if "num_query_groups" in given and "kv_channels" not in given and "kv_channels" in inferred:
        # Shapes only give the products; one key/value head was assumed.
        inferred["num_attention_heads"] *= given["num_query_groups"]
        inferred["kv_channels"] //= given["num_query_groups"]
    config = build_section(family.config_type, {**inferred, **given}, base)
    unseen = [f for f in family.converter.shapeless_fields if not any(f in known for known in (given, inferred, stored or {}))]
    if unseen:
        values = " ".join(f"{flag_name(f)} {vars(config)[f]}" for f in unseen)
        print(f"not in the tensors, taken from --model-variant {options.model_variant}: {values}")
    return config


def _fresh_model(family: ModelFamily, config: Any, seed: int) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = family.converter.build_module(config)
    model = model.to_empty(device="cpu")
    family.converter.initialize(model, seed)
    return model


def _fresh_parameters(family: ModelFamily, config: Any, options: argparse.Namespace) -> dict[str, Tensor]:
    """First values of the parameters that --random-modules names."""
    if not options.random_modules:
        return {}
    model = _fresh_model(family, config, options.seed)
    return {n: p.detach() for n, p in model.named_parameters() if any(covers(r, n) for r in options.random_modules)}


def convert(family: ModelFamily, options: argparse.Namespace) -> None:
    """Convert, then prove that the result loads and computes. Raises ValueError with what is wrong."""
    converter = family.converter
    if options.output.exists() and any(options.output.iterdir()):
        raise ValueError(f"--output {options.output}: not empty; name a new folder")
    config = config_of(family, options)
    limit = None if options.max_shard_size_gb is None else int(options.max_shard_size_gb * 1e9)
    if options.to == "native":
        fresh = _fresh_parameters(family, config, options)
        converter.to_native(
            options.input, config, options.output, reinitialized=fresh, averaged=options.averaged, max_shard_bytes=limit
        )
    else:
        if len(options.input) != 1:
            raise ValueError(
                "--input: a released layout is written from one native checkpoint; convert the parts to native first"
            )
        converter.to_released(options.input[0], options.to, options.output, averaged=options.averaged, max_shard_bytes=limit)
    if family.samples.carry_files is not None:
        print("\n".join(family.samples.carry_files(options.input[0], options.output)))
    # Made last: the tensors of a conversion and a second copy of the model need not be in memory together.
    model = _fresh_model(family, config, options.seed)
    converter.load(options.output, model)
    own = options.input[0] / REFERENCE_FILE
    reference = options.reference or (own if own.is_file() else None)
    batch = converter.fixed_batch(config)
    outcome = check_forward(model, batch, reference, options.tolerance)
    compared = "no reference to compare with" if outcome.difference is None else f"differs by {outcome.difference:.3g}"
    print(f"forward pass on a fixed input: finite, mean loss element {outcome.mean:.6f}, {compared}")
    if options.to == "native":
        write_reference(model, batch, options.output / REFERENCE_FILE)


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0, or 1 with the reason on stderr."""
    words = sys.argv[1:] if arguments is None else arguments
    first_look = StrictParser(add_help=False)
    first_look.add_argument("--model-name", default="pi05", choices=list(MODEL_FAMILIES))
    known, _ = first_look.parse_known_args(words)
    family = model_family(known.model_name)
    try:
        convert(family, argparse.Namespace(**parser_of(family).parse_flags(words)))
    except ValueError as problem:
        print(f"convert_checkpoint: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
