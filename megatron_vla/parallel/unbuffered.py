"""Data parallelism that reduces backward's own tensors, without gradient buffers: for one micro-batch per step.

A buffer costs a copy of every gradient (5 ms of a step of Pi0.5's 3.2e9 bf16 parameters on an H200) and its memory (6.5 GB);
what it buys, few large collectives, NCCL's groups give as well: one kernel reduces the tensors of a bucket where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import AllreduceCoalescedOptions

from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.parallel.data_parallel import DirectGradients, named_parts
from megatron_vla.parallel.groups import ParallelGroups
from megatron_vla.parallel.partial_gradients import PartialSums, norm_scope

# Elements: as small as megatron-core's buckets can be.
BUCKET_SIZE = 40_000_000


class UnbufferedDataParallel(DirectGradients):
    """Buckets of gradients in the order in which backward makes them, each reduced when all of it and all before it is there.

    The order is that of the first backward pass on the group's first rank, so that all ranks reduce the same tensors in the
    same order whatever their batches reach; what one does not reach counts as zero.
    """

    def __init__(self, module: nn.Module, parallel: ParallelConfig, groups: ParallelGroups):
        super().__init__(module, groups)
        self._groups = groups
        self._group = groups.data_parallel_group
        self._first_rank = dist.get_global_rank(self._group, 0)
        self._bucket_size = parallel.ddp_bucket_size or BUCKET_SIZE
        self._overlap = parallel.overlap_grad_reduce
        # Random initialisation and loading are the same on all ranks; this makes it certain.
        for parameter in module.parameters():
            dist.broadcast(parameter.detach(), self._first_rank, group=self._group)
        self._partial = PartialSums(named_parts(module, self.owned_part), groups)
        self.norm_scope = norm_scope(groups, sharded=False, skipped=self._partial.counted_elsewhere)
        self._arrived: list[nn.Parameter] = []
        self._buckets: list[list[nn.Parameter]] = []
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._missing: list[int] = []
        self._num_started = 0
        self._works: list[Any] = []
        self._is_last = True
        for parameter in self._live:
            parameter.register_post_accumulate_grad_hook(self._note)

    def zero_gradients(self) -> None:
        """Drop the gradients; backward sets them anew."""
        super().zero_gradients()
        self._works.clear()
        self._num_started = 0
        self._missing = [len(bucket) for bucket in self._buckets]

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """A pass that is not its step's last starts nothing: the search for a number that is not finite is such a pass."""
        self._is_last = is_last
        try:
            yield
        finally:
            self._is_last = True

    def _note(self, parameter: nn.Parameter) -> None:
        if not self._is_last:
            return
        if not self._buckets:
            self._arrived.append(parameter)
        elif self._overlap:
            self._missing[self._bucket_of[parameter]] -= 1
            while self._num_started < len(self._buckets) and self._missing[self._num_started] == 0:
                self._start_next()

    def _start_next(self) -> None:
        """Reduce the next bucket beside what the current stream does from now on."""
        gradients = [_contiguous_gradient(parameter) for parameter in self._buckets[self._num_started]]
        options = AllreduceCoalescedOptions()
        options.asyncOp = True
        self._works.append(self._group.allreduce_coalesced(gradients, options))
        self._num_started += 1

    def finish_gradients(self) -> None:
        """Reduce what backward has not started, and wait for all."""
        super().finish_gradients()
        if not self._buckets:
            self._agree_on_buckets()
        while self._num_started < len(self._buckets):
            self._start_next()
        for work in self._works:
            work.wait()
        self._works.clear()
        self._partial.complete()

    def _agree_on_buckets(self) -> None:
        """End of the first pass, on all ranks of the run."""
        _refuse_shared_memory(self._live)
        place = {parameter: index for index, parameter in enumerate(self._live)}
        orders: list[Any] = [None] * self._groups.world_size
        dist.all_gather_object(orders, [place[parameter] for parameter in self._arrived], group=self._groups.host_group)
        order = dict.fromkeys([*orders[self._first_rank], *range(len(self._live))])
        self._buckets = list(_buckets([self._live[index] for index in order], self._bucket_size))
        self._bucket_of = {parameter: index for index, bucket in enumerate(self._buckets) for parameter in bucket}
        self._arrived.clear()


def _buckets(parameters: list[nn.Parameter], bucket_size: int) -> Iterator[list[nn.Parameter]]:
    """Cut into lists of one dtype and at least `bucket_size` elements, those that are full first."""
    open_buckets: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        bucket = open_buckets.setdefault(parameter.dtype, [])
        bucket.append(parameter)
        if sum(p.numel() for p in bucket) >= bucket_size:
            yield open_buckets.pop(parameter.dtype)
    yield from open_buckets.values()


def _refuse_shared_memory(parameters: list[nn.Parameter]) -> None:
    """What two gradients share would be summed twice."""
    gradients = [cast(Tensor, parameter.grad) for parameter in parameters]
    ranges = sorted((g.data_ptr(), g.data_ptr() + g.numel() * g.element_size()) for g in gradients if g.numel())
    if any(following[0] < stop for (_, stop), following in pairwise(ranges)):
        raise ValueError("two parameters' gradients share memory: --no-gradient-buffers cannot reduce them; drop it")


def _contiguous_gradient(parameter: nn.Parameter) -> Tensor:
    gradient = cast(Tensor, parameter.grad)
    if not gradient.is_contiguous():
        parameter.grad = gradient = gradient.contiguous()
    return gradient
