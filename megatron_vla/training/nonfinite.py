"""Names the cause of a non-finite loss or gradient by running the very batch again, eagerly, with hooks.

The update of the bad step and of all later ones was refused on the device, and samples, noise and flow time are pure functions
of the position in the run: so parameters and batch are still exactly those of the bad step, however late the host looks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_vla.data.batch import Batch
from megatron_vla.parallel.groups import ParallelGroups
from megatron_vla.parallel.pipeline import ForwardStep, Schedule

MAX_IDS_SHOWN = 16


class NonFiniteError(ValueError):
    """Loss or gradient is not finite; the message names iteration, samples and the first module or tensor concerned."""


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)


def _is_bad(value: Any) -> bool:
    return any(t.is_floating_point() and not bool(torch.isfinite(t).all()) for t in _tensors_in(value))


def _bad_samples(batch: Batch) -> list[str]:
    """Batch fields with non-finite values, with the dataset indices of the samples that hold them."""
    lines = []
    for name, tensor in batch.tensors().items():
        if tensor.is_floating_point() and tensor.ndim:
            bad_B = ~torch.isfinite(tensor).flatten(1).all(dim=1) if tensor.ndim > 1 else ~torch.isfinite(tensor)
            if bool(bad_B.any()):
                samples = batch.samples_of_rows(name)[bad_B].unique().tolist()
                lines.append(f"batch field {name} is not finite for sample(s) {samples}")
    return lines


def _first_bad_gradient(module: nn.Module) -> str | None:
    """The non-finite parameter gradient nearest to the loss: backward meets the last parameters first."""
    for name, parameter in reversed([(n, p) for n, p in module.named_parameters() if p.requires_grad]):
        main_grad = getattr(parameter, "main_grad", None)
        if _is_bad(parameter.grad if main_grad is None else main_grad):
            return f"the forward pass is finite; the gradient of {name} is not"
    return None


def examine(schedule: Schedule, forward_step: ForwardStep, batch: Batch) -> list[str]:
    """What this rank finds not finite in one micro-batch, nearest to the cause first; empty when everything is finite.

    Runs forward and backward, so all stages of a pipeline call it together; the gradients that were accumulated are lost.
    """
    module = schedule.model.module
    # Every stage reads the same batch; one report is enough.
    found = _bad_samples(batch) if schedule.is_first_stage else []
    first: list[str] = []

    def hook(name: str) -> Any:
        def look(owner: nn.Module, inputs: Any, output: Any) -> None:
            # Children finish before their parents, so the first report is the innermost module.
            if not first and _is_bad(output):
                blame = "its input was already" if _is_bad(inputs) else "its input was finite"
                first.append(f"first non-finite module: {name or 'the model'} ({type(owner).__name__}); {blame}")

        return look

    handles = [m.register_forward_hook(hook(name)) for name, m in module.named_modules()]
    schedule.model.zero_gradients()
    count = schedule.fewest_microbatches
    try:
        # Hooks inside a compiled layer would not be called, or break its graph.
        with schedule.model.micro_batch(is_last=False), torch.compiler.set_stance("force_eager"):
            totals = schedule.run(forward_step, iter([batch] * count), count, reduce_gradients=False)
    finally:
        for handle in handles:
            handle.remove()
    found += first
    is_loss_bad = _is_bad(totals[0])
    if not first and not is_loss_bad:
        gradient = _first_bad_gradient(module)
        found += [gradient] if gradient else []
    elif not first and schedule.is_last_stage:
        found.append("every module's output is finite; the loss is not")
    return found


def diagnose(
    schedule: Schedule,
    forward_step: ForwardStep,
    groups: ParallelGroups,
    batches: Iterator[Batch],
    iteration: int,
    loss: float,
) -> NonFiniteError:
    """The error to raise, equal on all ranks. `batches`: this rank's micro-batches of the bad iteration, on the host."""
    reports: list[str] = []
    stages = groups.pipeline_model_parallel_size
    place = f" (pipeline stage {groups.pipeline_model_parallel_rank} of {stages})" if stages > 1 else ""
    for number, batch in enumerate(batches):
        found = examine(schedule, forward_step, batch.to(groups.device))
        if found:
            ids = batch.sample_index_B.tolist()
            shown = ", ".join(map(str, ids[:MAX_IDS_SHOWN])) + (", ..." if len(ids) > MAX_IDS_SHOWN else "")
            reports.append(f"rank {groups.rank}{place}, micro-batch {number}, samples [{shown}]: {'; '.join(found)}")
    gathered: list[Any] = [None] * groups.world_size
    dist.all_gather_object(gathered, reports, group=groups.host_group)
    lines = [line for rank_reports in gathered for line in rank_reports]
    if not lines:
        lines = ["every micro-batch is finite when run again eagerly: suspect a kernel, compilation or the hardware"]
    details = "\n  ".join(lines)
    return NonFiniteError(
        f"iteration {iteration}: loss {loss} or its gradient is not finite; "
        "the update was refused and parameters are unchanged\n"
        f"  {details}\n"
        "  check these samples with tools/check_dataset.py, lower --lr, or go on without the check "
        "(--no-check-for-nan-in-loss-and-grad)"
    )
