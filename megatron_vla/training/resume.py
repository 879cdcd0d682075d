"""Which changed flags a resume may have.

A flag that alters the mathematics or the order of samples makes the continued run another experiment: refused, with the
difference, unless --override-resume-flags. Everything else is printed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vla.config.cli import flag_name
from megatron_vla.config.run import SECTIONS, RunConfig
from megatron_vla.config.training import CheckpointConfig
from megatron_vla.data.preprocess import STATISTICS_FILE, TOKENIZER_FILE
from megatron_vla.findings import Finding, error, warning
from megatron_vla.training.checkpoint_folder import CheckpointFolder, find_latest, iteration_folder, open_folder

# Sections (all fields) and fields whose change is harmless: they move work or output around, or only round differently.
HARMLESS_SECTIONS = frozenset({"parallel", "optimization", "checkpoint", "logging", "evaluation"})
HARMLESS_FIELDS = frozenset(
    {
        "model.model_variant",  # a name; the dimensions themselves are compared in the family section
        "model.pretrained_checkpoint",  # only read when nothing is resumed
        "training.micro_batch_size",  # the order is a function of the global batch, which is compared by its effective size
        "training.global_batch_size",
        "training.train_iters",
        "training.exit_interval",
        "training.check_for_nan_in_loss_and_grad",
        "optimizer.fused_adam",  # rounds differently, as other kernels do
        "family.num_inference_steps",
        "family.vision_projector_init",  # these two are only read when nothing is resumed
        "family.embodiment_init",
        "data.prompt_padding",  # moves no loss, and pipelines need one length; --max-prompt-length, which cuts, is compared
        "data.data_path",  # a moved dataset is the same one: the statistics' fingerprint and the order hash prove it
        "data.num_workers",
        "data.prefetch_factor",
        "data.video_backend",  # every backend delivers the same frame by index
        "data.video_decoder_cache_size",
        "data.data_cache_path",
        "data.prefetch_shards",
        "data.shard_cache_bytes",
        "data.data_stall_timeout_seconds",
        "data.augmentation_device",
        "data.statistics_path",  # statistics and tokenizer of a resume come from the checkpoint
        "data.tokenizer_model",
        "data.statistics_quantiles",
        "data.allow_foreign_statistics",
        "data.max_out_of_range_fraction",
    }
)
# Where a run reads and writes is expected to change and not worth a line.
SILENT_FIELDS = frozenset(
    {"checkpoint.load", "checkpoint.save", "checkpoint.load_iteration", "checkpoint.override_resume_flags"}
)


@dataclass(frozen=True)
class ChangedFlag:
    """One field that differs from the checkpoint's configuration."""

    field: str
    before: Any
    now: Any
    changes_packs: bool = False

    @property
    def is_harmless(self) -> bool:
        """Whether the change leaves mathematics and order alone."""
        if self.changes_packs:
            return False
        return self.field.split(".")[0] in HARMLESS_SECTIONS or self.field in HARMLESS_FIELDS

    def __str__(self) -> str:
        return f"{flag_name(self.field.split('.')[1])}: {_shown(self.before)} -> {_shown(self.now)}"


def _shown(value: Any) -> str:
    return "not set" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def changed_flags(stored: dict[str, Any], current: RunConfig) -> Iterator[ChangedFlag]:
    """Fields of `current` that differ in `stored`; a field that the stored version did not have yet had its default."""
    for section, kind in {**SECTIONS, "family": type(current.family)}.items():
        before = {**dataclasses.asdict(kind()), **stored.get(section, {})}
        for name, value in dataclasses.asdict(getattr(current, section)).items():
            field = f"{section}.{name}"
            if _plain(before[name]) != _plain(value) and field not in SILENT_FIELDS:
                yield ChangedFlag(field, _plain(before[name]), _plain(value))


def find_resume(checkpoint: CheckpointConfig) -> tuple[CheckpointFolder | None, list[str]]:
    """The checkpoint that --load means, or None to start afresh; with lines to print. Raises ValueError for a bad choice."""
    if checkpoint.load is None:
        return None, []
    root = Path(checkpoint.load)
    if checkpoint.load_iteration is not None:
        return open_folder(iteration_folder(root, checkpoint.load_iteration)), []
    found, remarks = find_latest(root)
    if found is None:
        if remarks:
            # Folders are there but none is whole: starting afresh would overwrite what might be rescued.
            raise ValueError(f"--load {root}: no complete checkpoint: {'; '.join(remarks)}")
        return None, [f"--load {root} holds no checkpoint: starting afresh"]
    return found, remarks


def _decay_follows_train_iters(config: RunConfig) -> bool:
    optimizer = config.optimizer
    return optimizer.lr_decay_style == "lerobot_cosine" or (
        optimizer.lr_decay_style == "cosine" and optimizer.lr_decay_iters is None
    )


def resume_findings(found: CheckpointFolder | None, config: RunConfig, world_size: int) -> tuple[list[Finding], list[str]]:
    """Errors for dangerous differences, and lines to print for harmless ones (all of them with --override-resume-flags)."""
    if found is None:
        return [], []
    changes = list(changed_flags(found.config(), config))
    if config.data.packing:
        # The size of a pack: it decides which samples are in a global batch, even where their number of slots stays.
        changes = [dataclasses.replace(c, changes_packs=True) if c.field == "training.micro_batch_size" else c for c in changes]
    stored_batch = int(found.state["global_batch_size"])
    batch = config.global_batch_size(world_size)
    if stored_batch != batch:
        changes.append(ChangedFlag("effective.global_batch_size", stored_batch, batch))
    override = config.checkpoint.override_resume_flags
    lines = [f"resume with changed flag {c}" for c in changes if c.is_harmless]
    if any(c.field == "training.train_iters" for c in changes) and _decay_follows_train_iters(config):
        before = found.config()["training"]["train_iters"]
        lines.append(
            f"the learning-rate decay now ends with the new --train-iters; keep the old curve with --lr-decay-iters {before}"
        )
    findings: list[Finding] = []
    for change in changes:
        if change.is_harmless:
            continue
        what = f"changed since the checkpoint {found.path}: {_shown(change.before)} -> {_shown(change.now)}"
        where = flag_name(change.field.split(".")[1])
        if override:
            findings.append(warning(where, what, "allowed by --override-resume-flags"))
        else:
            findings.append(
                error(where, what, f"use {where} {_shown(change.before)} again, or accept it with --override-resume-flags")
            )
    if found.iteration >= config.training.train_iters:
        findings.append(
            warning(
                "--train-iters",
                f"{config.training.train_iters} iterations are done already (checkpoint at {found.iteration})",
                "raise --train-iters to train on",
            )
        )
    return findings, lines


def with_stored_preprocessing(config: RunConfig, found: CheckpointFolder | None) -> RunConfig:
    """The configuration to build the data with: a resume takes statistics and tokenizer from the checkpoint.

    New statistics would shift every input and target under a model that was trained on the old ones.
    """
    if found is None or found.preprocessor is None:
        return config
    stored = found.preprocessor
    data = dataclasses.replace(
        config.data, statistics_path=str(stored / STATISTICS_FILE), tokenizer_model=str(stored / TOKENIZER_FILE)
    )
    return dataclasses.replace(config, data=data)


def order_findings(found: CheckpointFolder | None, order_hash: str, config: RunConfig) -> list[Finding]:
    """Error (or warning, with the override) when the data now gives another sample order than the checkpoint's run had."""
    if found is None:
        return []
    stored = str(found.state["order_hash"])
    if stored == order_hash:
        return []
    what = f"sample order {order_hash} differs from the checkpoint's {stored}: samples were added, removed or excluded"
    if config.checkpoint.override_resume_flags:
        return [warning("--data-path", what, "allowed by --override-resume-flags")]
    return [error("--data-path", what, "restore the dataset, or accept the new order with --override-resume-flags")]
