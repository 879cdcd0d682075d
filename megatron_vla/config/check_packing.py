"""Rules of --packing: what it cannot be combined with, and its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_vla.config.cli import flag_name
from megatron_vla.config.run import RunConfig
from megatron_vla.findings import Finding, error, too_small

FIELDS = ("pack_token_budget", "pack_max_images", "pack_pool_size", "pack_max_wait")


def packing_findings(config: RunConfig, family: Any) -> Iterator[Finding]:
    """Errors; sizes that depend on the dataset's cameras are judged when the data is built."""
    data, parallel = config.data, config.parallel
    if not data.packing:
        for name in FIELDS:
            if name in config.given:
                yield error(flag_name(name), "has no effect without --packing", "add --packing, or drop it")
        return
    yield from too_small(
        (
            ("--pack-token-budget", data.pack_token_budget, 1),
            ("--pack-max-images", data.pack_max_images, 1),
            ("--pack-pool-size", data.pack_pool_size, 1),
            ("--pack-max-wait", data.pack_max_wait, 0),
        )
    )
    if family.image_tokens is None:
        what = f"the model family {config.model.model_name} cannot read packs"
        yield error("--packing", what, "drop it; --prompt-padding bucket trims prompts")
    if parallel.tensor_model_parallel_size > 1:
        yield error(
            "--packing, --tensor-model-parallel-size",
            "a pack is one long sequence, and sequence-parallel row splits and gathers are laid out for samples of one length",
            "use --tensor-model-parallel-size 1 (data-parallel ranks, --use-distributed-optimizer or fsdp2 share the memory)",
        )
    if parallel.pipeline_model_parallel_size > 1:
        yield error(
            "--packing, --pipeline-model-parallel-size",
            "stages exchange the prefix of whole samples, and every stage would need each pack's plan",
            "use --pipeline-model-parallel-size 1 (--use-distributed-optimizer or fsdp2 save memory)",
        )
    if config.optimization.report_memory:
        what = "measures what one sample of a padded batch costs, and a pack is not cut into samples"
        yield error("--report-memory", what, "measure without --packing, with about as many tokens per micro-batch")
    backend = config.optimization.attention_backend
    if "attention_backend" in config.given and backend not in ("auto", "varlen"):
        what = f"{backend} has no kernel for the sequences of different lengths that --packing makes"
        yield error("--attention-backend", what, "leave it out")
