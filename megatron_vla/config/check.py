"""Cross-section rules. They read the configuration and the file system only: no CUDA, no process group, no weights.

Every rule yields a `Finding` that names the flag and a value that works, and all of them are reported at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_vla.config.check_optimization import optimization_findings
from megatron_vla.config.check_packing import packing_findings
from megatron_vla.config.cli import flag_name
from megatron_vla.config.data import DataConfig
from megatron_vla.config.datasets import DatasetPart, dataset_parts, split_data_path
from megatron_vla.config.evaluation_check import evaluation_findings
from megatron_vla.config.run import RunConfig
from megatron_vla.config.training import LoggingConfig
from megatron_vla.data.mock import FIRST_TOKEN, NUM_PHASES
from megatron_vla.findings import Finding, error, warning
from megatron_vla.optimizations.check import fp8_findings, fp8_module_findings, module_pattern_findings
from megatron_vla.parallel.groups import layout_size_findings
from megatron_vla.parallel.stage_plan import layout_findings
from megatron_vla.runner.check import runner_findings

SMALLEST_MOCK_VOCABULARY = FIRST_TOKEN + NUM_PHASES
MAX_SEED = 2**63 - 1  # torch's generators take a signed 64-bit seed


def check(config: RunConfig, family: Any, world_size: int) -> list[Finding]:
    """All findings about the flags of one run on `world_size` ranks, the family's own rules included."""
    rules = (
        *(_finite, _numbers, _stalls, _precision, _batch, _mock, _schedule, _data, _paths, _checkpoints, _logging),
        evaluation_findings,
        fp8_findings,
    )
    findings = [finding for rule in rules for finding in rule(config)]
    findings += _layout(config)
    findings += packing_findings(config, family)
    findings += optimization_findings(config)
    sizes = layout_size_findings(config.parallel, world_size)
    findings += sizes
    # Sizes that do not fill the world leave no number of data-parallel ranks to judge by.
    if not sizes:
        findings += _global_batch(config, world_size)
        findings += _pipeline(config, family, world_size)
        findings += _data_parallel(config, world_size)
        findings += _gradient_buffers(config, world_size)
        findings += runner_findings(config, world_size)
    findings += _family_flags(config, family)
    own = family.check(config)
    findings += own
    if not any(finding.severity == "error" for finding in own):
        findings += module_pattern_findings(config, family)
        findings += fp8_module_findings(config, family)
    return findings


def _family_flags(config: RunConfig, family: Any) -> Iterator[Finding]:
    """Flags that mean nothing to this family: they would be ignored without a word, or fail hours later."""
    name, rules = config.model.model_name, family.samples
    for field, instead in rules.unused_flags.items():
        if field in config.given:
            yield error(flag_name(field), f"has no effect with --model-name {name}", instead)
    if config.evaluation.eval_interval is not None and family.sample_actions is None:
        yield error("--eval-interval", f"{name} has no sampling for simulators yet", "drop it")
    augmentation = config.data.augmentation
    if augmentation != "none" and augmentation not in rules.augmentations:
        known = ", ".join(("none", *rules.augmentations))
        yield error("--augmentation", f"{augmentation} is not made for {name}", f"known are {known}")


def _layout(config: RunConfig) -> Iterator[Finding]:
    parallel = config.parallel
    if parallel.context_parallel_size != 1:
        yield error(
            "--context-parallel-size",
            f"{parallel.context_parallel_size} is not supported: a robot model's sequence, about a thousand tokens, is too "
            "short to be worth splitting inside attention",
            "use --context-parallel-size 1; --sequence-parallel splits activation memory between the matrices",
        )
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        yield error(
            "--sequence-parallel",
            "splits tokens over tensor-parallel ranks, and there is one",
            "add --tensor-model-parallel-size 2, or drop --sequence-parallel",
        )


def _global_batch(config: RunConfig, world_size: int) -> Iterator[Finding]:
    samples_per_pass = config.training.micro_batch_size * config.data_parallel_size(world_size)
    global_batch_size = config.training.global_batch_size
    if global_batch_size is not None and samples_per_pass > 0 and global_batch_size % samples_per_pass:
        working = max(1, round(global_batch_size / samples_per_pass)) * samples_per_pass
        yield error(
            "--global-batch-size",
            f"{global_batch_size} is not a multiple of --micro-batch-size {config.training.micro_batch_size} x "
            f"{config.data_parallel_size(world_size)} data-parallel rank(s)",
            f"use --global-batch-size {working}",
        )


def _pipeline(config: RunConfig, family: Any, world_size: int) -> Iterator[Finding]:
    """Rules of pipeline stages. Others report sizes that do not fit together, so those are not judged here."""
    parallel = config.parallel
    stages, flag = parallel.pipeline_model_parallel_size, "--pipeline-model-parallel-size"
    layout = list(layout_findings(len(family.pipeline_units(config).layers), parallel))
    yield from layout
    if stages == 1 or layout:
        return
    if config.data.prompt_padding != "max":
        yield error(
            "--prompt-padding",
            f"{config.data.prompt_padding} gives micro-batches of different lengths, but stages exchange tensors of one shape",
            "use --prompt-padding max (a smaller --max-prompt-length makes it cheaper)",
        )
    if parallel.data_parallel_strategy != "megatron_ddp":
        yield error(
            "--data-parallel-strategy",
            f"{parallel.data_parallel_strategy} expects backward right after forward, unlike {flag} {stages}",
            "use --data-parallel-strategy megatron_ddp",
        )
    model_parallel = parallel.tensor_model_parallel_size * stages
    passes = config.training.micro_batch_size * (world_size // max(1, model_parallel))
    if passes < 1 or config.global_batch_size(world_size) % passes:
        return
    num_microbatches = config.num_microbatches(world_size)
    samples = passes * -(-num_microbatches // stages) * stages
    if parallel.virtual_pipeline_model_parallel_size is not None and num_microbatches % stages:
        yield error(
            "--global-batch-size",
            f"gives {num_microbatches} micro-batch(es) per step; the interleaved schedule needs a multiple of {flag} {stages}",
            f"use --global-batch-size {samples}, or leave --virtual-pipeline-model-parallel-size out",
        )
    elif num_microbatches < stages:
        yield warning(
            "--global-batch-size",
            f"gives {num_microbatches} micro-batch(es) per step for {stages} stages: most of them wait for the others",
            f"use --global-batch-size {4 * samples} or more, or a smaller --micro-batch-size",
        )


def _gradient_buffers(config: RunConfig, world_size: int) -> Iterator[Finding]:
    """What --no-gradient-buffers cannot be combined with."""
    parallel = config.parallel
    if parallel.gradient_buffers:
        return
    samples_per_pass = config.training.micro_batch_size * config.data_parallel_size(world_size)
    strategy = parallel.data_parallel_strategy
    for what, is_set, way_out in (
        (strategy, strategy != "megatron_ddp", "--data-parallel-strategy megatron_ddp"),
        ("--use-distributed-optimizer", parallel.use_distributed_optimizer, "--no-use-distributed-optimizer"),
        ("pipeline stages", parallel.pipeline_model_parallel_size > 1, "--pipeline-model-parallel-size 1"),
        (
            "fp32 sums of a bf16 model's gradients",
            config.model.bf16 and parallel.accumulate_allreduce_grads_in_fp32,
            "--no-accumulate-allreduce-grads-in-fp32",
        ),
        # Sums over one sample are views: what is reduced in place could be a gradient that backward goes on with.
        ("one sample per micro-batch", config.training.micro_batch_size == 1, "--micro-batch-size 2"),
        (
            "several micro-batches per step",
            samples_per_pass >= 1 and config.global_batch_size(world_size) > samples_per_pass,
            f"--global-batch-size {samples_per_pass}",
        ),
    ):
        if is_set:
            yield error("--no-gradient-buffers", f"does not work with {what}", f"use {way_out}, or drop it")


def _data_parallel(config: RunConfig, world_size: int) -> Iterator[Finding]:
    """Rules of the data-parallel strategies."""
    parallel = config.parallel
    strategy = parallel.data_parallel_strategy
    if parallel.use_distributed_optimizer and strategy != "megatron_ddp":
        instead = "leave it out: fsdp2 cuts the optimizer's state anyway" if strategy == "fsdp2" else "use megatron_ddp"
        yield error("--use-distributed-optimizer", f"needs --data-parallel-strategy megatron_ddp, not {strategy}", instead)
    if parallel.overlap_param_gather and not (parallel.use_distributed_optimizer and parallel.overlap_grad_reduce):
        yield error(
            "--overlap-param-gather",
            "gathers the buckets of the sharded optimizer, and only an overlapped reduction has several",
            "add --use-distributed-optimizer --overlap-grad-reduce, or drop it",
        )
    if parallel.ddp_bucket_size is not None and not (parallel.overlap_grad_reduce and strategy != "fsdp2"):
        yield error(
            "--ddp-bucket-size",
            f"has no effect with --data-parallel-strategy {strategy} "
            f"--{'' if parallel.overlap_grad_reduce else 'no-'}overlap-grad-reduce",
            "add --overlap-grad-reduce (megatron_ddp or torch_ddp), or drop it",
        )
    sms = parallel.data_parallel_sms
    if sms is not None and not (parallel.overlap_grad_reduce and strategy == "megatron_ddp"):
        yield error(
            "--data-parallel-sms",
            "is about reductions beside backward, which --overlap-grad-reduce with megatron_ddp starts",
            "add --overlap-grad-reduce, or drop it",
        )
    elif sms is not None and not 1 <= sms <= 32:
        yield error("--data-parallel-sms", f"{sms} is not 1 ... 32, the blocks that NCCL can use", "use --data-parallel-sms 4")
    replicas, ranks = parallel.fsdp_replicate_size, config.data_parallel_size(world_size)
    if replicas is not None and strategy != "fsdp2":
        yield error("--fsdp-replicate-size", f"has no effect with --data-parallel-strategy {strategy}", "drop it, or use fsdp2")
    elif replicas is not None and (replicas < 1 or ranks % replicas):
        yield error("--fsdp-replicate-size", f"{replicas} does not divide the {ranks} data-parallel rank(s)", "use 1")
    if strategy == "torch_ddp" and config.model.bf16 and parallel.accumulate_allreduce_grads_in_fp32:
        yield error(
            "--data-parallel-strategy",
            "torch_ddp accumulates and reduces bf16 gradients in bf16",
            "say so with --no-accumulate-allreduce-grads-in-fp32, or use --data-parallel-strategy megatron_ddp",
        )


def _finite(config: RunConfig) -> Iterator[Finding]:
    """NaN compares false with everything, so it would pass every limit below."""
    sections = {name: fields for name, fields in config.to_dict().items() if name != "given"}
    for fields in sections.values():
        for name, value in fields.items():
            if isinstance(value, float) and not math.isfinite(value):
                yield error(flag_name(name), f"{value} is not a finite number", "give a finite value, or leave the flag out")


def _numbers(config: RunConfig) -> Iterator[Finding]:
    positive = (
        ("--micro-batch-size", config.training.micro_batch_size, 1),
        ("--train-iters", config.training.train_iters, 100),
        ("--log-interval", config.logging.log_interval, 10),
        ("--prompt-bucket-size", config.data.prompt_bucket_size, 32),
        ("--video-decoder-cache-size", config.data.video_decoder_cache_size, 8),
        ("--prefetch-factor", config.data.prefetch_factor, 2),
        ("--shard-bytes", config.data.shard_bytes, 128 << 20),
        ("--shard-cache-bytes", config.data.shard_cache_bytes, 4 << 30),
        ("--decode-lanes", config.data.decode_lanes, 8),
        ("--data-stall-timeout-seconds", config.data.data_stall_timeout_seconds, 300),
        ("--distributed-timeout-minutes", config.parallel.distributed_timeout_minutes, 10),
        ("--distributed-startup-timeout-minutes", config.parallel.distributed_startup_timeout_minutes, 60),
    )
    optional = (
        ("--global-batch-size", config.training.global_batch_size, 32),
        ("--save-interval", config.checkpoint.save_interval, 1000),
        ("--ddp-bucket-size", config.parallel.ddp_bucket_size, 40_000_000),
        ("--keep-last", config.checkpoint.keep_last, 3),
        ("--exit-interval", config.training.exit_interval, 1000),
        ("--num-images", config.data.num_images, 2),
        ("--lr-decay-iters", config.optimizer.lr_decay_iters, 30000),
    )
    for flag, value, working in (*positive, *((f, v, w) for f, v, w in optional if v is not None)):
        if value <= 0:
            yield error(flag, f"{value} is not positive", f"for example {flag} {working}")
    for flag, value in (
        ("--num-workers", config.data.num_workers),
        ("--prefetch-shards", config.data.prefetch_shards or 0),
        ("--lr-warmup-iters", config.optimizer.lr_warmup_iters),
        ("--clip-grad", config.optimizer.clip_grad),
        ("--weight-decay", config.optimizer.weight_decay),
        ("--lr", config.optimizer.lr),
        ("--min-lr", config.optimizer.min_lr),
        ("--seed", config.training.seed),
    ):
        if value < 0:
            yield error(flag, f"{value} is negative", f"use {flag} 0 or more")
    if config.optimizer.adam_eps <= 0:
        yield error("--adam-eps", f"{config.optimizer.adam_eps} is not positive", "for example --adam-eps 1e-8")
    if config.training.seed > MAX_SEED:
        yield error("--seed", f"{config.training.seed} does not fit into 63 bits", f"use --seed {MAX_SEED} or less")
    for flag, value in (("--adam-beta1", config.optimizer.adam_beta1), ("--adam-beta2", config.optimizer.adam_beta2)):
        if not 0 <= value < 1:
            yield error(flag, f"{value} is outside [0, 1)", f"for example {flag} 0.9")
    ema = config.optimizer.ema_decay
    if ema is not None and not 0 < ema < 1:
        yield error("--ema-decay", f"{ema} is outside (0, 1)", "for example --ema-decay 0.999, or leave it out")


def _stalls(config: RunConfig) -> Iterator[Finding]:
    seconds, timeout = config.data.data_stall_timeout_seconds, 60 * config.parallel.distributed_timeout_minutes
    if seconds >= timeout:
        what = (
            f"{seconds:g} is not below the {timeout:g} s of --distributed-timeout-minutes: the collective would time out first "
            "and name no file"
        )
        yield error("--data-stall-timeout-seconds", what, f"use --data-stall-timeout-seconds {timeout / 2:g} or less")


def _precision(config: RunConfig) -> Iterator[Finding]:
    if config.model.bf16 and config.model.fp64:
        yield error("--bf16, --fp64", "both are set", "choose one")


def _batch(config: RunConfig) -> Iterator[Finding]:
    data = config.data
    if data.mock_data and data.data_path:
        yield error("--mock-data, --data-path", "both are set", "drop one of them")
    if not data.mock_data and not data.data_path:
        yield error("--data-path", "no dataset given", "name a LeRobot or RLDS dataset folder, or use --mock-data")


def _mock(config: RunConfig) -> Iterator[Finding]:
    data, family = config.data, config.family
    if not data.mock_data:
        return
    for flag, value in (
        ("--mock-num-samples", data.mock_num_samples),
        ("--mock-num-cameras", data.mock_num_cameras),
        *(("--mock-camera-counts", count) for count in data.mock_camera_counts),
        ("--mock-prompt-length", data.mock_prompt_length),
    ):
        if value <= 0:
            yield error(flag, f"{value} is not positive", f"use {flag} 1 or more")
    shortest = data.mock_min_prompt_length
    if shortest is not None and not 1 <= shortest <= min(data.mock_prompt_length, family.max_prompt_length):
        what = f"{shortest} is not between 1 and --mock-prompt-length {data.mock_prompt_length} (or --max-prompt-length)"
        yield error("--mock-min-prompt-length", what, "use a smaller one")
    if "mock_prompt_length" in config.given and data.mock_prompt_length > family.max_prompt_length:
        what = f"{data.mock_prompt_length} is more than --max-prompt-length {family.max_prompt_length}"
        yield error("--mock-prompt-length", what, f"use --mock-prompt-length {family.max_prompt_length} or less")
    if family.vocab_size < SMALLEST_MOCK_VOCABULARY:
        what = f"{family.vocab_size} is too small for the {SMALLEST_MOCK_VOCABULARY} token ids of mock samples"
        yield error("--vocab-size", what, f"use --vocab-size {SMALLEST_MOCK_VOCABULARY} or more")


def _schedule(config: RunConfig) -> Iterator[Finding]:
    optimizer = config.optimizer
    decay_iters = optimizer.lr_decay_iters or config.training.train_iters
    if optimizer.lr_decay_style == "cosine" and 0 < decay_iters <= optimizer.lr_warmup_iters:
        yield error(
            "--lr-warmup-iters",
            f"{optimizer.lr_warmup_iters} leaves nothing of the {decay_iters} decay iterations",
            f"use --lr-warmup-iters {max(0, decay_iters // 10)} or --lr-decay-iters above the warm-up",
        )
    if optimizer.min_lr > optimizer.lr:
        yield error("--min-lr", f"{optimizer.min_lr} is above --lr {optimizer.lr}", f"use --min-lr {optimizer.lr / 10:g}")


def _data(config: RunConfig) -> Iterator[Finding]:
    parts, findings = dataset_parts(config.data)
    yield from findings
    for part in parts or [DatasetPart("", config.data, None)]:
        for finding in _data_of_one(part.data):
            yield finding if len(parts) < 2 else replace(finding, where=f"dataset {part.name}: {finding.where}")


def _data_of_one(data: DataConfig) -> Iterator[Finding]:
    if data.model_action_representation == "delta":
        if data.dataset_action_representation == "delta":
            yield error(
                "--model-action-representation",
                "the dataset's actions are already deltas: subtracting the state again trains on nonsense",
                "use --model-action-representation as_dataset",
            )
        if not data.delta_action_dims:
            yield error(
                "--delta-action-dims",
                "delta actions need the dimensions to make relative",
                "list them, grippers left out: for example --delta-action-dims 0 1 2 3 4 5",
            )
    elif data.delta_action_dims:
        yield error(
            "--delta-action-dims",
            f"has no effect with --model-action-representation {data.model_action_representation}",
            "add --model-action-representation delta, or drop it",
        )
    if not 0 <= data.max_out_of_range_fraction <= 1:
        yield error("--max-out-of-range-fraction", f"{data.max_out_of_range_fraction} is no share", "use a value in [0, 1]")


def _paths(config: RunConfig) -> Iterator[Finding]:
    for flag, path in (
        ("--statistics-path", config.data.statistics_path),
        ("--tokenizer-model", config.data.tokenizer_model),
        ("--exclude-episodes-file", config.data.exclude_episodes_file),
        ("--pretrained-checkpoint", config.model.pretrained_checkpoint),
        *(("--data-path", split_data_path(path)[1]) for path in config.data.data_path),
    ):
        if path is not None and not Path(path).exists():
            yield error(flag, f"{path} does not exist", "give an existing local path (nothing is downloaded)")


def _checkpoints(config: RunConfig) -> Iterator[Finding]:
    checkpoint = config.checkpoint
    if checkpoint.save_interval is not None and checkpoint.save is None:
        yield error("--save-interval", "there is no folder to save to", "add --save FOLDER")
    if checkpoint.load_iteration is not None and checkpoint.load is None:
        yield error("--load-iteration", "there is no folder to load from", "add --load FOLDER")
    if checkpoint.save is None:
        yield warning("--save", "no checkpoint will be written", "add --save FOLDER to keep the trained model")
        return
    yield from _writable("--save", checkpoint.save)


def _writable(flag: str, path: str) -> Iterator[Finding]:
    """Whether a folder can be made at `path`."""
    folder = Path(path)
    existing = next((p for p in (folder, *folder.parents) if p.exists()), Path("."))
    if not existing.is_dir():
        yield error(flag, f"{existing} is a file", "name a folder")
    elif not os.access(existing, os.W_OK):
        yield error(flag, f"{existing} is not writable", "name a writable folder")


def _logging(config: RunConfig) -> Iterator[Finding]:
    logging = config.logging
    if logging.log_dir is not None:
        yield from _writable("--log-dir", logging.log_dir)
    if logging.tensorboard and logging.log_dir is None and config.checkpoint.save is None:
        yield error("--tensorboard", "there is no folder to write to", "add --log-dir FOLDER or --save FOLDER")
    if logging.wandb_name is not None and logging.wandb_project is None:
        yield error("--wandb-name", "has no effect without --wandb-project", "add --wandb-project PROJECT, or drop it")
    yield from _optional_loggers(logging)


def _optional_loggers(logging: LoggingConfig) -> Iterator[Finding]:
    """Packages and credentials of loggers that are asked for: without them they fail on rank 0 after everybody has met."""
    for flag, wanted, package in (
        ("--tensorboard", logging.tensorboard, "tensorboard"),
        ("--wandb-project", logging.wandb_project is not None, "wandb"),
    ):
        if wanted and find_spec(package) is None:
            yield error(flag, f"the package {package} is not installed", "pip install 'megatron-vla[log]', or drop the flag")
    online = os.environ.get("WANDB_MODE", "online") == "online"
    has_key = "WANDB_API_KEY" in os.environ or any((Path.home() / name).is_file() for name in (".netrc", "_netrc"))
    if logging.wandb_project is not None and online and not has_key:
        what = "no credentials: WANDB_API_KEY is not set and there is no .netrc"
        yield error("--wandb-project", what, "run `wandb login`, or set WANDB_MODE=offline")
