"""RunConfig: all sections of one run, parsed once and never changed."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_vla.config.cli import StrictParser, add_section, build_section
from megatron_vla.config.data import DataConfig
from megatron_vla.config.evaluation import EvaluationConfig
from megatron_vla.config.model import ModelConfig
from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.config.training import CheckpointConfig, LoggingConfig, OptimizerConfig, TrainingConfig

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "optimizer": OptimizerConfig,
    "parallel": ParallelConfig,
    "optimization": OptimizationConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
    "evaluation": EvaluationConfig,
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that one run is told. `family` is the model family's own section (Pi05Config, ...).

    `given` holds the names of the fields that the user set; the rest came from the variant or from a default.
    """

    model: ModelConfig
    family: Any
    data: DataConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig
    optimization: OptimizationConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    evaluation: EvaluationConfig
    given: tuple[str, ...] = ()

    def data_parallel_size(self, world_size: int) -> int:
        """Ranks that see different samples."""
        parallel = self.parallel
        model_parallel = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
        return world_size // model_parallel

    def global_batch_size(self, world_size: int) -> int:
        """Samples per optimizer step."""
        if self.training.global_batch_size is not None:
            return self.training.global_batch_size
        return self.training.micro_batch_size * self.data_parallel_size(world_size)

    def num_microbatches(self, world_size: int) -> int:
        """Forward passes per rank and optimizer step."""
        samples_per_pass = self.training.micro_batch_size * self.data_parallel_size(world_size)
        return self.global_batch_size(world_size) // samples_per_pass

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dict, JSON-ready; `from_dict` is its inverse."""
        sections = {name: dataclasses.asdict(getattr(self, name)) for name in (*SECTIONS, "family")}
        return {**sections, "given": list(self.given)}


# Flags of earlier versions that checkpoints still name. None of them changed what is computed.
RETIRED_FIELDS = frozenset({"expert_stream"})


def from_dict(values: dict[str, Any]) -> RunConfig:
    """RunConfig from `RunConfig.to_dict` output (as stored in a checkpoint); an unknown field is an error."""
    from megatron_vla.models.registry import model_family

    def section(kind: type, content: dict[str, Any]) -> Any:
        return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in content.items() if k not in RETIRED_FIELDS})

    family = model_family(values["model"]["model_name"])
    # Checkpoints from before a section existed have its defaults, as they have those of single fields.
    sections = {name: section(kind, values.get(name, {})) for name, kind in SECTIONS.items()}
    given = tuple(name for name in values["given"] if name not in RETIRED_FIELDS)
    return RunConfig(**sections, family=section(family.config_type, values["family"]), given=given)


def build_parser(family_section: type | None) -> StrictParser:
    """Parser of all sections; `family_section` adds the flags that only matter for the chosen family."""
    parser = StrictParser(prog="pretrain_vla.py", description="Train a Vision-Language-Action model.")
    for section in (*SECTIONS.values(), *([family_section] if family_section else [])):
        add_section(parser, section)
    return parser


def parse_args(arguments: Sequence[str] | None = None) -> RunConfig:
    """Flags -> RunConfig. Exits with status 2 and a usage line on a bad flag."""
    from megatron_vla.models.registry import MODEL_FAMILIES, model_family

    words = list(sys.argv[1:] if arguments is None else arguments)
    first_look = StrictParser(add_help=False)
    add_section(first_look, ModelConfig)
    known, _ = first_look.parse_known_args(words)
    model = build_section(ModelConfig, vars(known))
    if model.model_name not in MODEL_FAMILIES:
        first_look.error(f"--model-name {model.model_name}: no such family; known: {', '.join(MODEL_FAMILIES)}")
    family = model_family(model.model_name)
    if model.model_variant not in family.variants:
        first_look.error(f"--model-variant {model.model_variant}: {model.model_name} has {', '.join(family.variants)}")
    given = build_parser(family.config_type).parse_flags(words)
    sections = {name: build_section(kind, given) for name, kind in SECTIONS.items()}
    return RunConfig(
        **sections,
        family=build_section(family.config_type, given, family.variants[model.model_variant]),
        given=tuple(sorted(given)),
    )
