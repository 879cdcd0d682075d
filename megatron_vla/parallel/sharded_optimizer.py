"""ZeRO-1: optimizer state, main parameters and their average are cut over the data-parallel ranks (arXiv:1910.02054).

megatron-core's DistributedDataParallel lays parameters and gradients out in contiguous buffers, cut into buckets, each padded
to a multiple of the number of ranks. Gradients are reduce-scattered bucket by bucket, this rank's AdamW updates its piece of
every bucket, and the new parameters are all-gathered: at once, or (--overlap-param-gather) each bucket just before the first
module that needs it runs forward.

The optimizer is this project's AdamW on views of those buffers and not megatron-core's DistributedOptimizer class: that one
owns the step (overflow check on the host, its own clipping and scaling), so that refusing a step on the device, the gradient
scale folded into the update and graph capture could not go through it, and its resume is wrong with torch's AdamW.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.parallel.data_parallel import MegatronDataParallel
from megatron_vla.parallel.groups import ParallelGroups
from megatron_vla.parallel.owned_part import OwnedPart, gradient_of, whole_part


class ShardedMegatronDataParallel(MegatronDataParallel):
    """megatron-core DistributedDataParallel with reduce-scattered gradients and all-gathered parameters."""

    def __init__(self, module: nn.Module, parallel: ParallelConfig, groups: ParallelGroups):
        # megatron-core's own business: it calls functions that torch 2.13 renames, and announces every bucket that
        # `_UncalledModules` gathers earlier than its place in the order.
        renamed = r".torch.distributed.(reduce_scatter|all_gather_into)_tensor. is deprecated"
        warnings.filterwarnings("ignore", renamed, FutureWarning)
        warnings.filterwarnings("ignore", "The next bucket's parameter all-gather operation has already", UserWarning)
        self._rank, self._size = groups.data_parallel_rank, groups.data_parallel_size
        # Filled by `owned_part` from the buffers, which exist once the parent has wrapped the module.
        self._places: dict[nn.Parameter, tuple[Any, Any]] = {}
        super().__init__(module, parallel, groups)
        self._uncalled = _UncalledModules(self) if parallel.overlap_param_gather else None

    def owned_part(self, parameter: nn.Parameter) -> OwnedPart | None:
        """The intersection of the parameter with this rank's piece of its bucket.

        Parameters without a gradient are in no bucket: all ranks keep them whole, and decay them alike.
        """
        if not parameter.requires_grad:
            return whole_part(parameter)
        if not self._places:
            self._places = {p: (buffer, b) for buffer in self.wrapped.buffers for b in buffer.buckets for p in b.params_list}
        buffer, bucket = self._places[parameter]
        begin, end, _ = buffer.param_index_map[parameter]
        piece = bucket.grad_data.numel() // self._size
        piece_begin = bucket.offset + self._rank * piece
        first, last = max(begin, piece_begin), min(end, piece_begin + piece)
        if first >= last:
            return None
        start, stop, shape = first - begin, last - begin, tuple(parameter.shape)
        if stop - start == math.prod(shape):
            return whole_part(parameter)

        def read_gradient() -> Tensor:
            return gradient_of(parameter).view(-1)[start:stop]

        return OwnedPart(parameter, parameter.detach().view(-1)[start:stop], (start, stop), shape, read_gradient)

    def mask_gradients(self, keep: Tensor) -> None:
        """One kernel per bucket, on this rank's piece: what lies outside is overwritten by the next step anyway."""
        for buffer in self.wrapped.buffers:
            for bucket in buffer.buckets:
                piece = bucket.grad_data.numel() // self._size
                bucket.grad_data[self._rank * piece : (self._rank + 1) * piece].masked_fill_(~keep, 0.0)

    @torch.no_grad()
    def publish_parameters(self) -> None:
        """All-gather now, or leave it to the forward hooks."""
        if self._uncalled is None:
            self.wrapped.start_param_sync()
        else:
            self._uncalled.finish_learning()

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """All-gather every bucket now; a later forward pass before the next update gathers nothing again."""
        self.wrapped.start_param_sync(force_sync=True)

    def after_replay(self) -> None:
        """The parameters have changed again: what was gathered for a reader in between is out of date."""
        for group in self.wrapped.bucket_groups:
            group.param_gather_dispatched = False


class _UncalledModules:
    """Finds parameters that are read without calling their module (`embedding.weight`), and gathers these before all others.

    megatron-core's hooks sit on the module that owns a parameter; a read from outside would see the old values, silently. The
    first step runs on equal parameters everywhere, so it is safe to learn from it which modules are called at all.
    """

    def __init__(self, model: ShardedMegatronDataParallel):
        self._model = model.wrapped
        self._module = model.module
        self._called: set[nn.Module] = set()
        self._groups: list[Any] | None = None
        self._watches = [m.register_forward_pre_hook(self._note) for m in self._module.modules() if m is not self._module]
        self._module.register_forward_pre_hook(self._before_forward, prepend=True)

    def _note(self, module: nn.Module, inputs: Any) -> None:
        self._called.add(module)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if self._groups is None:
            # Everything at once: a gather that the hooks start for a module that nobody calls would never be waited for.
            for group in self._model.bucket_groups:
                if not group.param_gather_dispatched:
                    group.start_param_sync(force_sync=True)
            return
        for group in self._groups:
            group.finish_param_sync(skip_next_bucket_dispatch=True)

    def finish_learning(self) -> None:
        """End of the first step (later calls do nothing)."""
        if self._groups is not None:
            return
        owners = [m for m in self._module.modules() if m is not self._module and m not in self._called]
        missed = [p for m in owners for p in m.parameters(recurse=False) if p in self._model.param_to_bucket_group]
        self._groups = list(dict.fromkeys(self._model.param_to_bucket_group[p] for p in missed))
        for watch in self._watches:
            watch.remove()
