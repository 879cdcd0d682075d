"""Which layers each pipeline stage computes: contiguous, balanced by training FLOPs, before anything is built.

A model is a row of units: what comes before its layers, the layers, and what follows them. Stages may be uneven: the first one
also carries the vision tower, so it gets fewer layers. With a virtual size above 1 every stage holds that many chunks, dealt in
turn (interleaved schedule): chunk c belongs to stage c modulo the number of stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.findings import Finding, error

# Forward, gradient of the input, gradient of the weights.
PASSES_OF_TRAINED_UNIT = 3


@dataclass(frozen=True)
class Unit:
    """An inseparable part of a model. `forward_flops` per sample; frozen parts have no backward pass."""

    name: str
    forward_flops: float
    is_trained: bool = True

    @property
    def cost(self) -> float:
        """FLOPs of one sample in training."""
        return self.forward_flops * (PASSES_OF_TRAINED_UNIT if self.is_trained else 1)


@dataclass(frozen=True)
class ModelUnits:
    """`first` stays with the first stage (vision tower, embeddings), `last` with the last one (read-out)."""

    first: Unit
    layers: tuple[Unit, ...]
    last: Unit

    @property
    def forward_flops(self) -> float:
        """Of the whole model, per sample."""
        return sum(unit.forward_flops for unit in (self.first, *self.layers, self.last))

    @property
    def cost(self) -> float:
        """FLOPs of one sample in training, of the whole model."""
        return sum(unit.cost for unit in (self.first, *self.layers, self.last))


@dataclass(frozen=True)
class Chunk:
    """Layers [first_layer, end_layer) with global numbers, and what is computed around them. `cost` as in Unit."""

    number: int
    first_layer: int
    end_layer: int
    is_first: bool
    is_last: bool
    cost: float

    @property
    def num_layers(self) -> int:
        """Layers of this chunk."""
        return self.end_layer - self.first_layer


@dataclass(frozen=True)
class StagePlan:
    """All chunks of the model in the order in which they are computed."""

    num_stages: int
    chunks: tuple[Chunk, ...]

    def of_stage(self, stage: int) -> tuple[Chunk, ...]:
        """Chunks of one stage, in the order of computation."""
        return self.chunks[stage :: self.num_stages]

    def table(self) -> str:
        """One line per stage: its layers and its share of the training FLOPs."""
        total = sum(chunk.cost for chunk in self.chunks)
        stages = [self.of_stage(stage) for stage in range(self.num_stages)]
        costs = [sum(chunk.cost for chunk in chunks) for chunks in stages]
        parts = [", ".join(_described(chunk) for chunk in chunks) for chunks in stages]
        width = max(len(part) for part in parts)
        lines = [f"{'stage':>5}  {'computes':<{width}}  FLOPs"]
        lines += [
            f"{stage:>5}  {part:<{width}}  {cost / total:>5.1%}"
            for stage, (part, cost) in enumerate(zip(parts, costs, strict=True))
        ]
        # Every stage waits for the slowest one.
        balance = total / (self.num_stages * max(costs))
        return "\n".join([*lines, f"pipeline balance {balance:.0%} (100% = all stages take equally long)"])


def _described(chunk: Chunk) -> str:
    layers = f"layers {chunk.first_layer}-{chunk.end_layer - 1}" if chunk.num_layers else ""
    return " + ".join(filter(None, ["inputs" if chunk.is_first else "", layers, "output" if chunk.is_last else ""]))


def num_chunks(parallel: ParallelConfig) -> int:
    """Chunks of the whole model: stages times virtual size."""
    return parallel.pipeline_model_parallel_size * (parallel.virtual_pipeline_model_parallel_size or 1)


def layout_findings(num_layers: int, parallel: ParallelConfig) -> Iterator[Finding]:
    """What is impossible about the asked stages for a model of `num_layers` layers."""
    stages, virtual = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    size_flag, virtual_flag = "--pipeline-model-parallel-size", "--virtual-pipeline-model-parallel-size"
    layout_flag = "--pipeline-layout"
    if stages == 1:
        for flag, is_given in ((virtual_flag, virtual is not None), (layout_flag, bool(parallel.pipeline_layout))):
            if is_given:
                yield error(flag, f"has no effect with {size_flag} 1", f"drop it, or use {size_flag} 2")
        return
    if virtual is not None and virtual < 2:
        yield error(virtual_flag, f"{virtual} chunk(s) per stage is no interleaving", f"use {virtual_flag} 2, or leave it out")
        return
    chunks = num_chunks(parallel)
    if chunks > num_layers:
        if stages > num_layers:
            fix = f"use {size_flag} {num_layers}" + (f" without {virtual_flag}" if virtual is not None else "")
        elif stages * 2 > num_layers:
            fix = f"leave {virtual_flag} out"
        else:
            fix = f"use {virtual_flag} {num_layers // stages}"
        times = f" x {virtual_flag} {virtual}" if virtual is not None else ""
        yield error(size_flag, f"{stages}{times} = {chunks} parts, but the model has {num_layers} layers", fix)
        return
    layout = parallel.pipeline_layout
    if not layout:
        return
    share, rest = divmod(num_layers, chunks)
    example = f"for example {layout_flag} " + " ".join(str(share + (number >= chunks - rest)) for number in range(chunks))
    shown = " ".join(map(str, layout))
    if len(layout) != chunks:
        yield error(layout_flag, f"{shown} names {len(layout)} layer counts for {chunks} parts", example)
    elif sum(layout) != num_layers:
        yield error(layout_flag, f"{shown} adds up to {sum(layout)} of {num_layers} layers", example)
    elif layout[0] < 0 or min(layout[1:]) < 1:
        yield error(layout_flag, f"{shown} leaves a part other than the first without a layer", example)


def plan_stages(units: ModelUnits, parallel: ParallelConfig) -> StagePlan:
    """The layout that was asked for, or the best one. Call after `layout_findings` found nothing."""
    count = num_chunks(parallel)
    layout = parallel.pipeline_layout or balanced_layout(units, count)
    assert sum(layout) == len(units.layers) and len(layout) == count, (layout, count)
    ends = list(itertools.accumulate(layout))
    chunks = []
    for number, (size, end) in enumerate(zip(layout, ends, strict=True)):
        first, last = number == 0, number == count - 1
        cost = sum(unit.cost for unit in units.layers[end - size : end])
        cost += (units.first.cost if first else 0.0) + (units.last.cost if last else 0.0)
        chunks.append(Chunk(number, end - size, end, first, last, cost))
    return StagePlan(parallel.pipeline_model_parallel_size, tuple(chunks))


def balanced_layout(units: ModelUnits, count: int) -> tuple[int, ...]:
    """Layer counts of `count` chunks with the smallest possible largest cost; among those the evenest (sum of squares).

    Exact: dynamic programming over (chunks, layers), once for the bound and once for the evenness under it. The first chunk
    may be without layers (a heavy vision tower), no other.
    """
    sums = [0.0, *itertools.accumulate(unit.cost for unit in units.layers)]

    def cost(chunk: int, start: int, end: int) -> float:
        around = (units.first.cost if chunk == 0 else 0.0) + (units.last.cost if chunk == count - 1 else 0.0)
        return sums[end] - sums[start] + around

    bound, _ = _best_layout(len(units.layers), count, lambda so_far, *chunk: max(so_far, cost(*chunk)))

    def evenness(so_far: float, *chunk: int) -> float:
        own = cost(*chunk)
        return so_far + own * own if own <= bound else float("inf")

    return _best_layout(len(units.layers), count, evenness)[1]


def _best_layout(num_layers: int, count: int, extend: Callable[..., float]) -> tuple[float, tuple[int, ...]]:
    """(smallest value, its layer counts); `extend(value so far, chunk, start, end)` adds one chunk."""
    # best[end]: value and counts of the cheapest way to give layers [0, end) to the chunks so far.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for chunk in range(count):
        fewest = 0 if chunk == 0 else 1
        extended: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (value, counts) in best.items():
            for end in range(start + fewest, num_layers + 1):
                candidate = extend(value, chunk, start, end)
                if end not in extended or candidate < extended[end][0]:
                    extended[end] = (candidate, (*counts, end - start))
        best = extended
    return best[num_layers]
