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
from megatron_vla.models.registry import ModelFamily
from megatron_vla.parallel.groups import ParallelGroups

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
                lines.append(f"batch field {name} is not finite for sample(s) {batch.sample_index_B[bad_B].tolist()}")
    return lines


def _first_bad_gradient(loss: Tensor, module: nn.Module) -> str | None:
    """The non-finite parameter gradient nearest to the loss: backward meets the last parameters first."""
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
    for (name, _), gradient in reversed(list(zip(named, gradients, strict=True))):
        if gradient is not None and _is_bad(gradient):
            return f"the forward pass is finite; the gradient of {name} is not"
    return None


def examine(family: ModelFamily, module: nn.Module, batch: Batch) -> list[str]:
    """What is not finite in one micro-batch, nearest to the cause first; empty when everything is finite."""
    found = _bad_samples(batch)
    first: list[str] = []

    def hook(name: str) -> Any:
        def look(owner: nn.Module, inputs: Any, output: Any) -> None:
            # Children finish before their parents, so the first report is the innermost module.
            if not first and _is_bad(output):
                blame = "its input was already" if _is_bad(inputs) else "its input was finite"
                first.append(f"first non-finite module: {name or 'the model'} ({type(owner).__name__}); {blame}")

        return look

    handles = [m.register_forward_hook(hook(name)) for name, m in module.named_modules()]
    try:
        output, loss_func = family.forward_step(iter([batch]), module)
        loss_sum, _, _ = loss_func(output)
    finally:
        for handle in handles:
            handle.remove()
    found += first
    if not first and not _is_bad(loss_sum):
        gradient = _first_bad_gradient(loss_sum, module)
        found += [gradient] if gradient else []
    elif not first:
        found.append("every module's output is finite; the loss is not")
    return found


def diagnose(
    family: ModelFamily, module: nn.Module, groups: ParallelGroups, batches: Iterator[Batch], iteration: int, loss: float
) -> NonFiniteError:
    """The error to raise, equal on all ranks. `batches`: this rank's micro-batches of the bad iteration, on the host."""
    reports: list[str] = []
    for number, batch in enumerate(batches):
        found = examine(family, module, batch.to(groups.device))
        if found:
            ids = batch.sample_index_B.tolist()
            shown = ", ".join(map(str, ids[:MAX_IDS_SHOWN])) + (", ..." if len(ids) > MAX_IDS_SHOWN else "")
            reports.append(f"rank {groups.rank}, micro-batch {number}, samples [{shown}]: {'; '.join(found)}")
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
