"""Choose the linear layers that get faster in FP8: trace one bf16 step, map its matrix products to modules, time both.

    python tools/select_fp8.py --output benchmarks/fp8/pi05_base.json --fp8 native TRAINING FLAGS

Takes the flags of pretrain_vla.py beside its own. Writes the module list for --fp8-module-list, and a report (OUTPUT with .md)
of what was converted, what was skipped and why, the products' share of the step, and the gain to expect. Times include
quantisation. A layer that shares a product with others (--merge-projections) is judged together with them.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from step_profile import activities_of

from megatron_vla.config.cli import StrictParser, add_section, build_section
from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.config.run import RunConfig, parse_args
from megatron_vla.data.build import build_data
from megatron_vla.models.registry import ModelFamily, model_family
from megatron_vla.optimizations.check import FP8_FIELDS
from megatron_vla.optimizations.fp8_selection import select
from megatron_vla.optimizations.fp8_timing import Timer, estimated_times, measured_timer
from megatron_vla.optimizations.fp8_trace import LinearUse, ProductTime, by_product_key, product_times, trace_linears
from megatron_vla.runner.check import GRAPH_FIELDS


@dataclass(frozen=True, kw_only=True)
class SelectConfig:
    """Selection of FP8 layers"""

    output: str | None = None
    """JSON file to write; the report goes beside it (.md)."""

    include_sensitive: bool = False
    """Judge the modules that the family leaves in bf16 for their precision (vision tower and the like) by time alone too."""

    smallest_gain: float = 0.05
    """Convert a layer when FP8 saves at least this share of its time: below it, noise decides."""

    step_warmup: int = 5
    """Steps before the traced run's timing starts (compilation)."""

    steps: int = 10
    """Timed steps of the traced run."""

    dry_run: bool = False
    """Neither train nor time: shapes from the meta device, times estimated from an H200's rates (marked so)."""


@dataclass(frozen=True)
class StepTrace:
    """What one profiled bf16 step took: median of the step, all kernels, and the matrix products by sorted shape."""

    step_ms: float
    kernel_ms: float
    products: Mapping[tuple[int, ...], ProductTime] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """Times of a step (all micro-batches); `reason` says why a use stays in bf16, None when it is converted."""

    use: LinearUse
    bf16_ms: float | None
    fp8_ms: float | None
    reason: str | None

    @property
    def gain_ms(self) -> float:
        """Saved per step."""
        return 0.0 if self.reason or self.bf16_ms is None or self.fp8_ms is None else self.bf16_ms - self.fp8_ms


def decide(
    uses: Sequence[LinearUse],
    unfit: Mapping[str, str],
    timer: Timer,
    *,
    num_microbatches: int,
    smallest_gain: float,
    progress: Callable[[str], None] = print,
) -> list[Decision]:
    """One decision per use, in order; equal shapes are timed once. unfit: layer -> why it is ruled out whatever its time."""
    candidates = [use for use in uses if not any(name in unfit for name in use.names)]
    times: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    shapes = list(dict.fromkeys(use.shape for use in candidates))
    for number, shape in enumerate(shapes, 1):
        use = next(use for use in candidates if use.shape == shape)
        start = time.perf_counter()
        times[shape] = timer(use, False), timer(use, True)
        bf16, fp8 = (passes.of_micro_batch(use) for passes in times[shape])
        progress(
            f"[{number}/{len(shapes)}] {_shape_text(use)}: bf16 {bf16:.3f} ms, fp8 {fp8:.3f} ms, {bf16 / fp8:.2f}x "
            f"(measured in {time.perf_counter() - start:.1f} s)"
        )
    decisions = []
    for use in uses:
        if use not in candidates:
            reason = next(unfit[name] for name in use.names if name in unfit)
            decisions.append(Decision(use, None, None, reason))
            continue
        bf16_ms, fp8_ms = (passes.of_micro_batch(use) * num_microbatches for passes in times[use.shape])
        slow = None if fp8_ms <= bf16_ms * (1 - smallest_gain) else f"saves less than {smallest_gain:.0%}"
        decisions.append(Decision(use, bf16_ms, fp8_ms, slow))
    return decisions


def _shape_text(use: LinearUse) -> str:
    return f"[{use.rows}, {use.in_features}] x [{use.in_features}, {'+'.join(map(str, use.outputs))}]"


def unfit_layers(config: RunConfig, family: ModelFamily, include_sensitive: bool) -> dict[str, str]:
    """Layers that are not even timed, and why. --fp8-min-dim counts only when it was given: time decides here."""
    smallest = config.optimization.fp8_min_dim if "fp8_min_dim" in config.given else 0
    excluded = () if include_sensitive else family.fp8_excluded_names
    optimization = replace(config.optimization, fp8_min_dim=smallest, fp8_module_list=None)
    return dict(select(family.skeleton(config), optimization, replace(family, fp8_excluded_names=excluded)).skipped)


def trace_step(config: RunConfig, family: ModelFamily, warmup: int, steps: int) -> StepTrace:
    """Train a few bf16 steps with the run's own switches, and profile one."""
    from torch.profiler import ProfilerActivity, profile

    from megatron_vla.training.session import training_session

    def finish() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    with training_session(config, family) as run:
        on_gpu = run.groups.device.type == "cuda"
        batches = run.supply.iterator(
            0, run.groups.data_parallel_rank, run.groups.data_parallel_size, warmup + steps + 1, on_gpu
        )
        count, times_ms = config.num_microbatches(run.groups.world_size), []
        for step in range(warmup + steps):
            loaded = [next(batches) for _ in range(count)]
            finish()
            start = time.perf_counter()
            run.runner.step(iter(loaded), config.optimizer.lr)
            finish()
            times_ms.append((time.perf_counter() - start) * 1e3)
            print(f"traced run: step {step + 1}/{warmup + steps}: {times_ms[-1]:.1f} ms", flush=True)
        loaded = [next(batches) for _ in range(count)]
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=kinds, record_shapes=True) as profiler:
            run.runner.step(iter(loaded), config.optimizer.lr)
            finish()
    events = profiler.events()
    kernel_us = sum(activity.duration for activity in activities_of(events))
    step_ms = statistics.median(times_ms[warmup:])
    return StepTrace(step_ms, kernel_us / 1e3 if on_gpu else step_ms, product_times(events))


def summary(
    decisions: Sequence[Decision], unused: Sequence[str], trace: StepTrace | None, num_microbatches: int
) -> dict[str, Any]:
    """The JSON object: modules, figures, and one row per kind of layer (digits in names shown as '*')."""
    gain_ms = sum(decision.gain_ms for decision in decisions)
    flops = sum(d.use.flops for d in decisions)
    converted_flops = sum(d.use.flops for d in decisions if d.reason is None)
    result: dict[str, Any] = {
        "modules": [name for d in decisions if d.reason is None for name in d.use.names],
        "num_linears": sum(len(d.use.names) for d in decisions) + len(unused),
        "never_run": list(unused),
        "converted_share_of_linear_flops": round(converted_flops / flops, 4) if flops else 0.0,
        "predicted_gain_ms": round(gain_ms, 3),
        "rows": _rows(decisions, trace, num_microbatches),
    }
    if trace is not None:
        products_ms = sum(product.milliseconds for product in trace.products.values())
        known = set(by_product_key(d.use for d in decisions))
        unmapped_ms = sum(product.milliseconds for key, product in trace.products.items() if key not in known)
        result |= {
            "step_ms": round(trace.step_ms, 2),
            "predicted_step_ms": round(trace.step_ms - gain_ms, 2),
            "matrix_product_share": round(products_ms / trace.kernel_ms, 4) if trace.kernel_ms else None,
            "products_of_no_linear_layer_ms": round(unmapped_ms, 3),
        }
    return result


def _rows(decisions: Sequence[Decision], trace: StepTrace | None, num_microbatches: int) -> list[dict[str, Any]]:
    kinds: dict[tuple[Any, ...], list[Decision]] = {}
    for decision in decisions:
        names = tuple(".".join("*" if part.isdigit() else part for part in n.split(".")) for n in decision.use.names)
        kinds.setdefault((names, decision.use.shape, decision.reason), []).append(decision)
    sharing = by_product_key(d.use for d in decisions)
    rows = []
    for (names, _, reason), members in kinds.items():
        use, first = members[0].use, members[0]
        traced = trace.products.get(use.product_key) if trace is not None else None
        # Products of one sorted shape look alike in a profile: its time is shared out by their number.
        alike = sum(other.num_products for other in sharing[use.product_key])
        share = len(members) * use.num_products / alike
        rows.append(
            {
                "modules": list(names),
                "count": len(members),
                "shape": _shape_text(use),
                "products_per_step": len(members) * use.num_products * num_microbatches,
                "traced_bf16_ms": round(traced.milliseconds * share, 3) if traced else None,
                "bf16_ms": _total(members, first.bf16_ms),
                "fp8_ms": _total(members, first.fp8_ms),
                "speedup": round(first.bf16_ms / first.fp8_ms, 2) if first.bf16_ms and first.fp8_ms else None,
                "kept_in_bf16": reason,
            }
        )
    return rows


def _total(members: Sequence[Decision], each_ms: float | None) -> float | None:
    return None if each_ms is None else round(len(members) * each_ms, 3)


def markdown(result: Mapping[str, Any]) -> str:
    """The report for people."""
    lines = [
        f"# FP8 selection: {len(result['modules'])} of {result['num_linears']} linear layers",
        "",
        f"{result['device']}, times {result['times']}, `{' '.join(result['flags'])}`",
        "",
        f"- share of the linear layers' FLOPs converted: {result['converted_share_of_linear_flops']:.1%}",
        f"- predicted gain: {result['predicted_gain_ms']} ms per step",
    ]
    if "step_ms" in result:
        lines += [
            f"- step in bf16: {result['step_ms']} ms, predicted in FP8: {result['predicted_step_ms']} ms",
            f"- matrix products without attention's: {result['matrix_product_share']:.1%} of the kernels' time; "
            f"{result['products_of_no_linear_layer_ms']} ms of them belong to no linear layer",
        ]
    if result["never_run"]:
        lines.append(f"- never run in training, so not converted: {', '.join(result['never_run'])}")
    columns = (
        "modules",
        "count",
        "shape",
        "products_per_step",
        "traced_bf16_ms",
        "bf16_ms",
        "fp8_ms",
        "speedup",
        "kept_in_bf16",
    )
    titles = ("modules", "count", "shape", "products", "traced ms", "bf16 ms", "fp8 ms", "speed-up", "kept in bf16 because")
    lines += ["", "| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for row in result["rows"]:
        cells = [", ".join(row[c]) if c == "modules" else row[c] for c in columns]
        lines.append("| " + " | ".join("-" if cell is None else str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def without_fp8(config: RunConfig) -> RunConfig:
    """The same run in bf16, for tracing: its products by name and its kernels launched one by one.

    Flags that then mean nothing, which a training would refuse, go with it.
    """
    dropped = {"fp8", *FP8_FIELDS, "runner", *GRAPH_FIELDS}
    defaults: dict[str, Any] = {f.name: f.default for f in fields(OptimizationConfig) if f.name in dropped}
    given = tuple(name for name in config.given if name not in dropped)
    return replace(config, optimization=replace(config.optimization, **defaults), given=given)


def run_selection(tool: SelectConfig, config: RunConfig, timer: Timer | None = None) -> dict[str, Any]:
    """The whole selection; `timer` replaces the measurement (tests)."""
    family = model_family(config.model.model_name)
    plain = without_fp8(config)
    # One process: what is selected is a property of the layers, not of the number of GPUs.
    num_microbatches = config.num_microbatches(1)
    supply = build_data(plain, family)
    uses, unused = trace_linears(plain, family, supply.first_batch())
    supply.close()
    unfit = unfit_layers(config, family, tool.include_sensitive)
    trace = None if tool.dry_run else trace_step(plain, family, tool.step_warmup, tool.steps)
    if timer is None:
        timer = estimated_times if tool.dry_run else measured_timer(config.optimization, compiled=config.optimization.compile)
    decisions = decide(uses, unfit, timer, num_microbatches=num_microbatches, smallest_gain=tool.smallest_gain)
    on_gpu = torch.cuda.is_available() and not tool.dry_run
    return {
        **summary(decisions, unused, trace, num_microbatches),
        "fp8": config.optimization.fp8,
        "fp8_recipe": config.optimization.fp8_recipe,
        "times": "estimated from an H200's rates" if tool.dry_run else "measured",
        "device": torch.cuda.get_device_name() if on_gpu else "no GPU",
        "torch": torch.__version__,
    }


def main(arguments: Sequence[str]) -> int:
    """Select, write list and report; status 0 also when nothing gets faster (the list is empty then, and says so)."""
    parser = StrictParser(description=(__doc__ or "").split("\n")[0])
    add_section(parser, SelectConfig)
    known, flags = parser.parse_known_args(arguments)
    tool: SelectConfig = build_section(SelectConfig, vars(known))
    config = parse_args(flags)
    if tool.output is None:
        parser.error("--output is needed")
    if config.optimization.fp8 is None or not config.model.bf16:
        parser.error("give --bf16 and --fp8 (torchao or native): the backend to time")
    if not tool.dry_run and not torch.cuda.is_available():
        parser.error("no GPU to time on; --dry-run estimates")
    result = {**run_selection(tool, config), "flags": flags}
    path = Path(tool.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(result))
    print(f"{len(result['modules'])} of {result['num_linears']} linear layers get faster: {path}, {path.with_suffix('.md')}")
    print(f"train with: --fp8 {config.optimization.fp8} --fp8-module-list {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
