"""The eager iteration runner: forward and backward of every micro-batch (parallel/pipeline.py), one reduction, one update.

Nothing here reads a device value: counts, norms, clipping and the finite check are device scalars (no host synchronisation).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vla.data.batch import Batch
from megatron_vla.models.registry import ModelFamily
from megatron_vla.optimizations.fp8_scaling import DelayedScaling
from megatron_vla.parallel.data_parallel import DataParallelModel
from megatron_vla.parallel.groups import ParallelGroups
from megatron_vla.parallel.pipeline import Schedule
from megatron_vla.training.ema import ParameterAverage
from megatron_vla.training.gradient import clip_factor, global_gradient_norm
from megatron_vla.training.metrics import StepMetrics
from megatron_vla.training.optimizer import AdamW


class EagerRunner:
    """Runs one optimizer step per call.

    num_microbatches: forward passes of this rank per step. clip_grad: global norm limit, 0 for none. check_finite: turn a step
    with a non-finite loss or gradient, and every later one, into an exact no-op. fp8_scaling: factors of --fp8-recipe delayed.
    """

    def __init__(
        self,
        family: ModelFamily,
        model: DataParallelModel,
        optimizer: AdamW,
        average: ParameterAverage | None,
        groups: ParallelGroups,
        *,
        num_microbatches: int,
        clip_grad: float,
        check_finite: bool,
        fp8_scaling: DelayedScaling | None = None,
    ):
        self.family = family
        self.model = model
        self.optimizer = optimizer
        self.average = average
        self.groups = groups
        self.schedule = Schedule(model, groups, family.metric_names)
        self.num_microbatches = num_microbatches
        self.clip_grad = clip_grad
        self.check_finite = check_finite
        self.fp8_scaling = fp8_scaling
        # Sticky, so that the parameters still are those of the first bad step when the host comes to look for the cause.
        self._healthy = torch.ones((), dtype=torch.bool, device=groups.device)

    def step(self, batches: Iterator[Batch], learning_rate: float) -> StepMetrics:
        """One optimizer step on the next `num_microbatches` host batches; returns device tensors."""
        self.optimizer.advance(learning_rate)
        return self.iterate(batches)

    def iterate(self, batches: Iterator[Batch]) -> StepMetrics:
        """The step without its host side: nothing here depends on a host number that changes, so a graph can replay it."""
        return self.update(self.accumulate(batches))

    def accumulate(self, batches: Iterator[Batch]) -> Tensor:
        """Gradients of the next `num_microbatches` batches, summed over data-parallel ranks; totals as Schedule.run."""
        self.model.zero_gradients()
        totals = self.schedule.run(self.family.forward_step, batches, self.num_microbatches)
        self.model.finish_gradients()
        return totals

    def update(self, totals: Tensor) -> StepMetrics:
        """Clip, AdamW, EMA and publication of the accumulated gradients. `totals`: of this rank, summed over ranks in place."""
        dist.all_reduce(totals, group=self.groups.data_parallel_group)
        loss_sum, num_valid, extra_sums = totals[0], totals[1], totals[2:]
        # A batch without any valid element has loss 0 and no gradient; it must not divide by zero.
        count = num_valid.clamp(min=1.0)
        gradients = self.optimizer.gradients()
        scope = self.model.norm_scope
        counted = [g for g, entry in zip(gradients, self.optimizer.trainable, strict=True) if scope.counts(entry.part)]
        norm = global_gradient_norm(counted, scope.group, self.groups.device) / count
        loss = loss_sum / count
        is_finite = torch.isfinite(loss) & torch.isfinite(norm)
        healthy = self._healthy & is_finite
        if self.fp8_scaling is not None:
            self.fp8_scaling.roll(self.groups.data_parallel_group)
        self._apply(gradients, clip_factor(norm, self.clip_grad) / count, healthy)
        passes = self.num_microbatches * self.groups.data_parallel_size
        extra = {name: value / passes for name, value in zip(self.family.metric_names, extra_sums, strict=True)}
        return StepMetrics(loss, num_valid, norm, healthy if self.check_finite else is_finite, extra)

    def _apply(self, gradients: list[Tensor], scale: Tensor, healthy: Tensor) -> None:
        """Optimizer and EMA; a no-op on the device once anything was not finite."""
        keep: Tensor | None = None
        if self.check_finite:
            # In place: a graph finds the flag where the last step, eager or replayed, has left it.
            self._healthy.copy_(healthy)
            keep = healthy
            if not self.optimizer.is_fused:
                # NaN times zero is NaN: gradients of a refused step are replaced, not scaled.
                self.model.mask_gradients(keep)
            scale = torch.where(keep, scale, 0.0)
        self.optimizer.step(gradients, scale, keep)
        self.model.publish_parameters()
        if self.average is not None:
            self.average.update()

    def poll(self) -> list[str]:
        """See `Runner`."""
        return []

    def counters(self) -> dict[str, float]:
        """See `Runner`."""
        return {}

    def summary(self) -> list[str]:
        """See `Runner`."""
        return ["runner: eager"]

    def release(self) -> None:
        """See `Runner`."""
