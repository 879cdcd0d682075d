"""Cross-section rules. They read the configuration and the file system only: no CUDA, no process group, no model.

Every rule yields a `Finding` that names the flag and a value that works, and all of them are reported at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_vla.config.data import DataConfig
from megatron_vla.config.datasets import DatasetPart, dataset_parts, split_data_path
from megatron_vla.config.run import RunConfig
from megatron_vla.findings import Finding, error, warning


def check(config: RunConfig, family: Any, world_size: int) -> list[Finding]:
    """All findings about the flags of one run on `world_size` ranks, the family's own rules included."""
    rules = (_numbers, _stalls, _precision, _batch, _schedule, _data, _paths, _checkpoints)
    findings = [finding for rule in rules for finding in rule(config)]
    findings += _layout(config, world_size)
    findings += family.check(config)
    return findings


def _layout(config: RunConfig, world_size: int) -> Iterator[Finding]:
    parallel = config.parallel
    for flag, size in (
        ("--tensor-model-parallel-size", parallel.tensor_model_parallel_size),
        ("--pipeline-model-parallel-size", parallel.pipeline_model_parallel_size),
        ("--context-parallel-size", parallel.context_parallel_size),
    ):
        if size != 1:
            yield error(flag, f"{size} is not supported by this version", f"use {flag} 1 (data parallel takes all ranks)")
    if parallel.sequence_parallel:
        yield error("--sequence-parallel", "needs --tensor-model-parallel-size above 1", "drop --sequence-parallel")
    samples_per_pass = config.training.micro_batch_size * world_size
    global_batch_size = config.training.global_batch_size
    if global_batch_size is not None and samples_per_pass > 0 and global_batch_size % samples_per_pass:
        working = max(1, round(global_batch_size / samples_per_pass)) * samples_per_pass
        yield error(
            "--global-batch-size",
            f"{global_batch_size} is not a multiple of --micro-batch-size {config.training.micro_batch_size} x "
            f"{world_size} data-parallel rank(s)",
            f"use --global-batch-size {working}",
        )


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
        ("--prefetch-shards", config.data.prefetch_shards),
        ("--lr-warmup-iters", config.optimizer.lr_warmup_iters),
        ("--clip-grad", config.optimizer.clip_grad),
        ("--weight-decay", config.optimizer.weight_decay),
        ("--lr", config.optimizer.lr),
        ("--min-lr", config.optimizer.min_lr),
        ("--seed", config.training.seed),
    ):
        if value < 0:
            yield error(flag, f"{value} is negative", f"use {flag} 0 or more")
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
    folder = Path(checkpoint.save)
    existing = next((p for p in (folder, *folder.parents) if p.exists()), Path("."))
    if not existing.is_dir():
        yield error("--save", f"{existing} is a file", "name a folder")
    elif not os.access(existing, os.W_OK):
        yield error("--save", f"{existing} is not writable", "name a writable folder")
