"""Flags that a captured step cannot be combined with; each is refused with the reason."""

from __future__ import annotations

import os
from collections.abc import Iterator

from megatron_vla.config.run import RunConfig
from megatron_vla.findings import Finding, error, warning

NCCL_REGISTER = "NCCL_GRAPH_REGISTER"
FLAG = "--runner full_iteration_graph"
# Fields that mean something with a graph runner only, and a value that works.
GRAPH_FIELDS = {"cuda_graph_warmup_steps": 3, "cuda_graph_max_buckets": 4}


def runner_findings(config: RunConfig, world_size: int) -> Iterator[Finding]:
    """All findings about --runner and its flags."""
    optimization, parallel = config.optimization, config.parallel
    if optimization.runner == "eager":
        for name in GRAPH_FIELDS:
            if name in config.given:
                yield error(f"--{name.replace('_', '-')}", "has no effect with --runner eager", f"add {FLAG}, or drop it")
        return
    for name, working in GRAPH_FIELDS.items():
        value = vars(optimization)[name]
        if value < 1:
            # One eager step at least: it makes communicators and library handles, and shows which gradients come when.
            yield error(f"--{name.replace('_', '-')}", f"{value} is not positive", f"for example {working}")
    if parallel.pipeline_model_parallel_size > 1:
        yield error(
            "--runner",
            f"full_iteration_graph with --pipeline-model-parallel-size {parallel.pipeline_model_parallel_size}: stages send to "
            "each other in the middle of the step, which is only safe in a graph when all stages replay in step",
            "use --runner eager, or tensor and data parallelism",
        )
    reasons = {
        "torch_ddp": "torch's reducer drives its buckets from host code that a replay does not run",
        "fsdp2": "fully_shard frees and allocates parameters from host code that a replay does not run",
    }
    if parallel.data_parallel_strategy in reasons:
        yield error(
            "--runner",
            f"full_iteration_graph with --data-parallel-strategy {parallel.data_parallel_strategy}: "
            f"{reasons[parallel.data_parallel_strategy]}",
            "use --data-parallel-strategy megatron_ddp (with --use-distributed-optimizer to cut the optimizer's state)",
        )
    if world_size > 1 and os.environ.get(NCCL_REGISTER, "0") != "0":
        yield error(
            f"environment variable {NCCL_REGISTER}",
            f"{os.environ[NCCL_REGISTER]}: NCCL would register one graph's buffers where ranks may replay different graphs",
            f"unset it (0 is set with {FLAG})",
        )
    passes = config.training.micro_batch_size * max(1, config.data_parallel_size(world_size))
    # Packs have one shape whatever the prompts.
    if config.data.prompt_padding != "max" and not config.data.packing and config.global_batch_size(world_size) > passes > 0:
        yield warning(
            "--prompt-padding",
            f"{config.data.prompt_padding} gives micro-batches of several widths, and with {FLAG} every sequence of widths in "
            "a step is a graph of its own",
            "use --prompt-padding max (a smaller --max-prompt-length makes it cheaper)",
        )


def runner_device_findings(config: RunConfig, has_gpu: bool) -> Iterator[Finding]:
    """What capturing needs of this machine."""
    if config.optimization.runner != "eager" and not has_gpu:
        yield error(
            "--runner", f"{config.optimization.runner} captures CUDA graphs, and there is no GPU here", "use --runner eager"
        )
