"""Gradients that data parallelism alone leaves incomplete, and which gradients count in the global norm.

A whole parameter whose gradient covers only one rank's tokens or heads (`tensor_parallel_partial`) needs its gradient summed
over the tensor-parallel group; one that several pipeline stages hold (`pipeline_shared`), over the pipeline group. Both come
after the data-parallel reduction, on the elements that this rank updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vla.parallel.groups import ParallelGroups
from megatron_vla.parallel.owned_part import OwnedPart
from megatron_vla.parallel.parameter_shard import is_pipeline_shared, is_tensor_parallel_partial, shard_of

NamedParts = Sequence[tuple[str, OwnedPart]]
# What the ranks that share a parameter must agree on: flat range, local shape, dtype of the gradient.
Description = tuple[tuple[int, int], tuple[int, ...], torch.dtype]


def _description(part: OwnedPart) -> Description:
    return part.flat_range, part.local_shape, part.gradient_dtype


@torch.no_grad()
def sum_gradients(gradients: Sequence[Tensor], group: Any) -> None:
    """Sum over `group` in place, one collective per dtype: these tensors are small and many (norms, biases)."""
    for dtype in dict.fromkeys(g.dtype for g in gradients):
        same = [g for g in gradients if g.dtype == dtype]
        flat = torch.cat([g.reshape(-1) for g in same])
        dist.all_reduce(flat, group=group)
        parts = flat.split([g.numel() for g in same])
        torch._foreach_copy_(same, [part.view(g.shape) for part, g in zip(parts, same, strict=True)])


@dataclass(frozen=True)
class NormScope:
    """How local gradients make one global norm: squares of the counted parts, summed over `group` (None: nobody to ask)."""

    group: Any
    counts: Callable[[OwnedPart], bool]


def norm_scope(groups: ParallelGroups, *, sharded: bool, replica: int = 0, skipped: frozenset[int] = frozenset()) -> NormScope:
    """Scope of a layout. Each element of the model is counted by exactly one rank of the group.

    sharded: whether data-parallel ranks hold disjoint parts (they all are asked then). replica: which of several equal copies
    of the shards this rank holds; only copy 0 counts. skipped: ids of parameters that another pipeline stage counts.
    """

    def counts(part: OwnedPart) -> bool:
        is_cut = shard_of(part.parameter).dim is not None
        return replica == 0 and id(part.parameter) not in skipped and (is_cut or groups.tensor_model_parallel_rank == 0)

    if sharded and groups.world_size > 1:
        return NormScope(dist.group.WORLD, counts)
    model_parallel = groups.tensor_model_parallel_size * groups.pipeline_model_parallel_size > 1
    return NormScope(groups.model_parallel_group if model_parallel else None, counts)


class PartialSums:
    """Completes the marked gradients of one model; made once, before the first step, on all ranks.

    Raises ValueError when the members of a group would not sum the same elements.
    """

    def __init__(self, named_parts: NamedParts, groups: ParallelGroups):
        self._tensor_group = groups.tensor_model_parallel_group
        self._pipeline_group = groups.pipeline_model_parallel_group
        self._tensor_parts: list[OwnedPart] = []
        self._shared: list[Callable[[], Tensor]] = []
        self.counted_elsewhere: frozenset[int] = frozenset()
        if groups.tensor_model_parallel_size > 1:
            self._meet_tensor_peers([(n, p) for n, p in named_parts if is_tensor_parallel_partial(p.parameter)], groups)
        if groups.pipeline_model_parallel_size > 1:
            self._meet_stages({n: p for n, p in named_parts if is_pipeline_shared(p.parameter)}, groups)

    def _meet_tensor_peers(self, marked: NamedParts, groups: ParallelGroups) -> None:
        """Tensor-parallel ranks have equal models; a shard of one must be the same elements on the others too."""
        found: list[Any] = [None] * groups.tensor_model_parallel_size
        dist.all_gather_object(found, [(n, _description(p)) for n, p in marked], group=self._tensor_group)
        for other, theirs in enumerate(found):
            different = [(mine or their)[0] for mine, their in zip_longest(found[0], theirs) if mine != their]
            if different:
                raise ValueError(
                    f"tensor-parallel ranks 0 and {other} do not update the same elements of parameters with partial "
                    f"gradients (first difference: {different[0]}); use --no-use-distributed-optimizer with this layout"
                )
        self._tensor_parts = [part for _, part in marked]

    def _meet_stages(self, mine: dict[str, OwnedPart], groups: ParallelGroups) -> None:
        """Agree on the shared parameters' order; a stage without one takes part with zeros."""
        found: list[dict[str, Description]] = [{}] * groups.pipeline_model_parallel_size
        dist.all_gather_object(found, {n: _description(p) for n, p in mine.items()}, group=self._pipeline_group)
        skipped: set[int] = set()
        for name in sorted({n for stage in found for n in stage}):
            holders = [index for index, stage in enumerate(found) if name in stage]
            descriptions = {found[index][name] for index in holders}
            if len(descriptions) > 1:
                raise ValueError(
                    f"parameter {name} lives on pipeline stages {holders}, which update different elements of it: "
                    "use --no-use-distributed-optimizer with this layout"
                )
            (start, stop), _, dtype = descriptions.pop()
            if name in mine:
                self._shared.append(mine[name].read_gradient)
            else:
                self._shared.append(partial(torch.zeros, stop - start, dtype=dtype, device=groups.device))
            if name in mine and holders[0] != groups.pipeline_model_parallel_rank:
                skipped.add(id(mine[name].parameter))
        self.counted_elsewhere = frozenset(skipped)

    def complete(self) -> None:
        """After the data-parallel reduction: make the marked gradients the full sums."""
        if self._tensor_parts:
            sum_gradients([p.read_gradient() for p in self._tensor_parts], self._tensor_group)
        if self._shared:
            sum_gradients([read() for read in self._shared], self._pipeline_group)
