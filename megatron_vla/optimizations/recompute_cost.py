"""What recomputing each kind of module costs and saves, measured on the model at hand: milliseconds per GiB.

Activations are counted as what forward leaves for backward: device memory on GPUs, bytes of saved tensors elsewhere.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.data.batch import Batch
from megatron_vla.models.registry import ModelFamily
from megatron_vla.optimizations import activation_checkpoint
from megatron_vla.optimizations.fp8_linear import delayed_scaling_of
from megatron_vla.optimizations.patterns import matches

GIB = 2**30
TIMED_PASSES = 3
# Patterns that hold less than this share of all activations are not worth a line.
SMALLEST_SHARE = 0.005


@dataclass(frozen=True)
class Cost:
    """Forward and backward with `patterns` recomputed: bytes held in between, and milliseconds."""

    patterns: tuple[str, ...]
    held_bytes: int
    milliseconds: float


@dataclass(frozen=True)
class Recommendation:
    """Patterns to recompute so that `held_bytes` of activations fit; `fits` tells whether they do."""

    patterns: tuple[str, ...]
    held_bytes: float
    extra_milliseconds: float
    fits: bool


@contextmanager
def recomputing(model: nn.Module, family: ModelFamily, patterns: tuple[str, ...]) -> Iterator[None]:
    """Activation checkpointing of `patterns`, for a while."""
    before = {module: vars(module).get("forward") for module in model.modules()}
    config = OptimizationConfig(activation_checkpoint_module_patterns=patterns)
    activation_checkpoint.apply(model, config, family, lambda line: None)
    try:
        yield
    finally:
        for module, forward in before.items():
            if forward is not None:
                module.forward = forward  # type: ignore[method-assign]
            elif "forward" in vars(module):
                del module.forward


def _loss(model: nn.Module, family: ModelFamily, batch: Batch) -> Tensor:
    output, loss_func = family.forward_step(iter([batch]), model)
    loss: Tensor = loss_func(output)[0]
    return loss


def candidate_patterns(model: nn.Module, family: ModelFamily, batch: Batch) -> list[str]:
    """Every kind of module inside the family's layers that forward calls and that contains other modules; layers included."""
    called: dict[str, None] = {}
    handles = [
        module.register_forward_hook(lambda *_, name=name: called.setdefault(name))
        for name, module in model.named_modules()
        if name and any(True for _ in module.children())
    ]
    try:
        # Hooks inside a compiled layer would not be called, or break its graph.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            _loss(model, family, batch)
    finally:
        for handle in handles:
            handle.remove()
    found: dict[str, None] = {}
    for name in called:
        segments = name.split(".")
        for block in family.block_names:
            depth = len(block.split("."))
            if matches(block, ".".join(segments[:depth])):
                found.setdefault(".".join([block, *segments[depth:]]))
    return sorted(found)


def measure(model: nn.Module, family: ModelFamily, batch: Batch, patterns: Sequence[str]) -> Cost:
    """Cost of one forward and backward on `batch`, which is on the model's device, as a run's later steps have it.

    Gradients are dropped. Magnitudes of --fp8-recipe delayed enter its history after each pass, as at the end of a step.
    """
    on_gpu = batch.tokens_BL.is_cuda
    scaling = delayed_scaling_of(model)
    with recomputing(model, family, tuple(patterns)):
        held = 0
        times = []
        for _ in range(1 + TIMED_PASSES):
            model.zero_grad(set_to_none=True)
            _wait(on_gpu)
            started = time.perf_counter()
            loss, held = _held_by_forward(model, family, batch) if on_gpu or not held else (_loss(model, family, batch), held)
            loss.backward()
            _wait(on_gpu)
            times.append((time.perf_counter() - started) * 1e3)
            if scaling is not None:
                # Until a step ends, every pass looks for factors in its data, as only a run's first step does.
                scaling.roll(None)
        model.zero_grad(set_to_none=True)
    # The first pass compiles and fills caches.
    return Cost(tuple(patterns), held, statistics.median(times[1:]))


def _wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def _held_by_forward(model: nn.Module, family: ModelFamily, batch: Batch) -> tuple[Tensor, int]:
    """(loss, bytes that its graph holds)."""
    if batch.tokens_BL.is_cuda:
        before = torch.cuda.memory_allocated()
        loss = _loss(model, family, batch)
        return loss, torch.cuda.memory_allocated() - before
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    known |= {t.untyped_storage().data_ptr() for t in batch.tensors().values()}
    stored: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            stored[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = _loss(model, family, batch)
    return loss, sum(stored.values())


def costs(
    model: nn.Module,
    family: ModelFamily,
    batch: Batch,
    candidates: Sequence[str],
    report: Callable[[str], None] = lambda line: None,
) -> list[Cost]:
    """Nothing recomputed (first and last, the faster counts), and between them each candidate alone.

    The result has nothing recomputed first, then those that save something worth a line, cheapest per GiB first.

    `report` gets a line about each as soon as it is known: with --compile, every one of them compiles its layers.
    """
    report(
        f"forward and backward of {batch.size} samples, nothing recomputed, then {len(candidates)} kinds of modules in turn:"
    )
    nothing = measure(model, family, batch, ())
    report(HEADER)
    report(row(nothing, nothing))
    single = []
    for pattern in candidates:
        single.append(measure(model, family, batch, (pattern,)))
        report(row(single[-1], nothing))
    # The first of all measurements was 84 ms of 788 slower than it is afterwards (H200, 64 samples of Pi0.5 base).
    nothing = min(nothing, measure(model, family, batch, ()), key=lambda cost: cost.milliseconds)
    worth = [c for c in single if nothing.held_bytes - c.held_bytes >= SMALLEST_SHARE * nothing.held_bytes]
    return [nothing, *sorted(worth, key=lambda c: price(c, nothing))]


def price(cost: Cost, nothing: Cost) -> float:
    """Milliseconds per GiB saved."""
    saved = (nothing.held_bytes - cost.held_bytes) / GIB
    return max(0.0, cost.milliseconds - nothing.milliseconds) / saved


def recommend(measured: Sequence[Cost], scale: float, budget_bytes: float) -> Recommendation:
    """The cheapest patterns, none inside another, that bring `scale` times the measured activations under `budget_bytes`.

    Of equally cheap ones those that hold least; nothing where that fits. Where nothing does, those that hold least of all.

    Activations and times grow with the number of samples: `scale` is the wanted batch over the measured one. What single
    patterns save and cost is taken to add up.
    """
    nothing, *single = measured
    # A model has about ten of them: every choice is looked at.
    choices = [_together(nothing, chosen, scale, budget_bytes) for chosen in _disjoint_choices(single)]
    fitting = [choice for choice in choices if choice.fits]
    if not fitting:
        return min(choices, key=lambda choice: (choice.held_bytes, choice.extra_milliseconds))
    if choices[0].fits:
        # Before patterns whose measured cost is zero by chance.
        return choices[0]
    return min(fitting, key=lambda choice: (choice.extra_milliseconds, choice.held_bytes))


def _disjoint_choices(single: Sequence[Cost]) -> list[tuple[Cost, ...]]:
    """Every choice of measured patterns none of which is inside another, that of nothing first."""
    choices: list[tuple[Cost, ...]] = [()]
    for cost in single:
        choices += [(*chosen, cost) for chosen in choices if not any(_overlap(cost, other) for other in chosen)]
    return choices


def _overlap(cost: Cost, other: Cost) -> bool:
    (pattern,), (known,) = cost.patterns, other.patterns
    return pattern.startswith(known + ".") or known.startswith(pattern + ".")


def _together(nothing: Cost, chosen: Sequence[Cost], scale: float, budget_bytes: float) -> Recommendation:
    held = scale * (nothing.held_bytes - sum(nothing.held_bytes - cost.held_bytes for cost in chosen))
    extra = scale * sum(max(0.0, cost.milliseconds - nothing.milliseconds) for cost in chosen)
    patterns = tuple(pattern for cost in chosen for pattern in cost.patterns)
    return Recommendation(patterns, held, extra, held <= budget_bytes)


HEADER = f"{'GiB held':>10} {'GiB saved':>10} {'ms':>9} {'ms more':>9} {'ms / GiB':>9}  recomputed"


def row(cost: Cost, nothing: Cost) -> str:
    """`cost` against `nothing` recomputed, below HEADER."""
    saved, more = (nothing.held_bytes - cost.held_bytes) / GIB, cost.milliseconds - nothing.milliseconds
    per_gib = f"{more / saved:9.1f}" if saved else f"{'-':>9}"
    name = " ".join(cost.patterns) or "nothing"
    return f"{cost.held_bytes / GIB:10.3f} {saved:10.3f} {cost.milliseconds:9.1f} {more:9.1f} {per_gib}  {name}"


def table(measured: Sequence[Cost], num_samples: int) -> str:
    """One line per pattern, for a log."""
    title = f"recomputation worth considering, forward and backward of {num_samples} samples, cheapest per GiB first:"
    return "\n".join([title, HEADER, *(row(cost, measured[0]) for cost in measured)])
