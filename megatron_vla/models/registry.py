"""One dict: family name -> ModelFamily, lazily imported. No decorators, no entry points."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SampleRules:
    """How a family's samples are made and put together.

    draws(family config, seed, epoch, sample index) -> arrays that are added to a training sample: noise, flow time.
    build_mock_source(config: RunConfig) -> (source of synthetic samples, names of its views).
    build_assembler(config: RunConfig) -> (samples -> micro-batch), picklable. None: arrays are stacked into a Batch.
    request_fields: what a request for actions has in place of a training sample's random draws, beside its noise.
    batch_key(config: RunConfig, arrays) -> hashable: requests for actions share a batch only when their keys are equal. None:
        any may, because nothing of one sample shows in another's actions.
    change_sample(family config, arrays, seed, epoch) -> arrays: a last random change of a training sample, after the draws.
    build_augmentation(config: RunConfig, views) -> SampleAugmentation of data/loader.py, for --augmentation.
    augmentations: values of --augmentation that it knows, besides "none".
    robot_data: module with what differs between families in opening a robot dataset (see data/build.py); imported late, because
        mock data must run where no video library is installed.
    unused_flags: data flags that mean nothing to this family; giving one is an error that tells what to use instead.
    carry_files(input, output folder) -> lines: companions of weights (processor settings, statistics) that a conversion takes
        along. None: there are none.
    report_fields(batch, preprocessor) -> data/report.py's ReportFields of a batch on the CPU.
    """

    draws: Callable[..., dict[str, Any]]
    build_mock_source: Callable[..., tuple[Any, tuple[str, ...]]]
    build_augmentation: Callable[..., Any]
    augmentations: tuple[str, ...]
    robot_data: str
    report_fields: Callable[..., Any]
    request_fields: Mapping[str, Any]
    batch_key: Callable[..., Any] | None = None
    build_assembler: Callable[..., Any] | None = None
    change_sample: Callable[..., dict[str, Any]] | None = None
    carry_files: Callable[..., list[str]] | None = None
    unused_flags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """What the rest of the project needs to know of a model family, and all it may know.

    build(config: RunConfig, groups: ParallelGroups) -> nn.Module, randomly initialised from config.training.seed.
    skeleton(config: RunConfig) -> nn.Module: the whole model on the meta device in the run's dtypes, which costs no memory; its
        module names are those of every layout.
    forward_step(data_iterator, model) -> (output, loss_func): Megatron's contract; loss_func(output) returns
        (loss_sum, num_valid_elements, metrics), device tensors of shape [] each.
    check(config) -> list[Finding]: the family's own rules, before anything is built.
    converter: released layouts <-> this project's parameter names.
    block_names: dotted patterns ('*' = one segment) of what "a layer" is, for compile, checkpointing, FP8 and graphs.
    fp8_excluded_names: dotted patterns of modules that --fp8 leaves in bf16 with everything inside them, because their rounding
        errors matter more than their time: --fp8-module-list overrides it.
    backbone_functions: dotted names of methods of fixed-shape tensors that are one graph each under --compile-scope backbone
        ("backbone", "vision_tower.forward"); between them they call every layer.
    group_functions: methods of what lies around the layers, which --compile-scope multi_group compiles beside each layer.
    metric_names: names of the metrics that loss_func returns; stages without a loss need to know how many there are.
    pipeline_units(config: RunConfig) -> ModelUnits: the model's parts with their FLOPs, for the stage plan.
    batch_fields: names of the Batch tensors that forward_step reads.
    samples: how its samples become micro-batches.
    image_tokens(config.family) -> prefix tokens of one image in a pack; None: the family cannot read packs (--packing).
    sample_actions(model, batch, num_steps, noise_BTA) -> normalised actions [B, T, A], without drawing anything; None: the
        family cannot act yet.
    num_inference_steps(family_config) -> int: denoising steps unless a flag says otherwise.
    inference_methods: methods of the model that `sample_actions` spends its time in; serving compiles each of them whole.
    """

    name: str
    config_type: type
    variants: Mapping[str, Mapping[str, Any]]
    build: Callable[..., Any]
    skeleton: Callable[..., Any]
    forward_step: Callable[..., Any]
    check: Callable[..., Any]
    converter: Any
    block_names: tuple[str, ...]
    backbone_functions: tuple[str, ...]
    group_functions: tuple[str, ...]
    fp8_excluded_names: tuple[str, ...] = ()
    metric_names: tuple[str, ...]
    pipeline_units: Callable[..., Any]
    batch_fields: frozenset[str]
    samples: SampleRules
    image_tokens: Callable[[Any], int] | None = None
    sample_actions: Callable[..., Any] | None = None
    num_inference_steps: Callable[[Any], int] | None = None
    inference_methods: tuple[str, ...] = ()


MODEL_FAMILIES: dict[str, str] = {
    "pi05": "megatron_vla.models.pi05.family",
    "groot_n1_7": "megatron_vla.models.groot_n1_7.family",
}


def model_family(name: str) -> ModelFamily:
    """The family called `name`. Raises ValueError naming the known ones."""
    if name not in MODEL_FAMILIES:
        raise ValueError(f"--model-name {name}: no such family; known: {', '.join(MODEL_FAMILIES)}")
    family: ModelFamily = import_module(MODEL_FAMILIES[name]).FAMILY
    return family
