"""Rules of the speed and memory switches: what cannot work together, and why."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from megatron_vla.config.run import RunConfig
from megatron_vla.findings import Finding, error

FLASH_ATTENTION_PACKAGES = ("flash_attn_interface", "flash_attn")
COMPILE_DETAILS = ("compile_scope", "compile_mode", "compile_warmup")


def optimization_findings(config: RunConfig) -> Iterator[Finding]:
    """Everything wrong with the optimization section, also together with the parallel layout."""
    optimization = config.optimization
    if optimization.attention_backend == "flash_attn" and not any(map(find_spec, FLASH_ATTENTION_PACKAGES)):
        yield error(
            "--attention-backend",
            f"flash_attn: none of the packages {', '.join(FLASH_ATTENTION_PACKAGES)} is installed",
            "install one, or use --attention-backend auto",
        )
    if optimization.report_memory and config.parallel.pipeline_model_parallel_size > 1:
        yield error(
            "--report-memory",
            "measures a whole model, and a pipeline stage is a part",
            "use --pipeline-model-parallel-size 1, with --tensor-model-parallel-size if it does not fit",
        )
    if "neighbouring_weights" in config.given and not optimization.merge_projections:
        yield error("--neighbouring-weights", "has no effect without --merge-projections", "add that, or drop it")
    if optimization.compile:
        yield from _compile(config)
        return
    for name in COMPILE_DETAILS:
        if name in config.given:
            yield error("--" + name.replace("_", "-"), "has no effect without --compile", "add --compile, or drop it")


def _compile(config: RunConfig) -> Iterator[Finding]:
    optimization, parallel = config.optimization, config.parallel
    strategy = parallel.data_parallel_strategy
    if strategy == "torch_ddp" and optimization.dynamo_optimize_ddp:
        # Not left to the crash: it comes on a cold cache only, as BackendCompilerFailed about a FakeTensor.
        yield error(
            "--compile",
            "with --data-parallel-strategy torch_ddp, torch's DDPOptimizer compiles what is already compiled once more from "
            "outside, and runs the inner graphs on tensors without memory to learn shapes: it crashes whenever the compile "
            "cache is cold",
            "add --no-dynamo-optimize-ddp; --compile-scope multi_group lets reductions start during backward without it",
        )
    if optimization.compile_scope == "backbone" and parallel.pipeline_model_parallel_size > 1:
        yield error(
            "--compile-scope",
            "backbone compiles all layers as one graph, but a pipeline stage runs only some of them",
            "use --compile-scope per_layer or multi_group",
        )
    if strategy == "fsdp2" and optimization.compile_scope == "backbone":
        yield error(
            "--compile-scope",
            "backbone is one graph, but fsdp2 gathers each layer's parameters by hooks between the layers",
            "use --compile-scope per_layer or multi_group",
        )
    elif strategy == "fsdp2" and config.model.bf16:
        yield error(
            "--compile",
            "fsdp2 gathers a bf16 model's fp32 norms by hooks inside each layer, which cannot be part of a graph",
            "use --data-parallel-strategy megatron_ddp with --use-distributed-optimizer, or drop --compile or --bf16",
        )
    if parallel.overlap_param_gather:
        yield error(
            "--compile",
            "--overlap-param-gather gathers parameters by hooks inside each layer, which a graph would only run when traced",
            "use --no-overlap-param-gather",
        )
    if config.data.prompt_padding == "longest" and not config.data.packing:
        yield error(
            "--prompt-padding",
            "longest gives a graph for every prompt width",
            "use --prompt-padding bucket (a few widths) or max (one)",
        )
