"""What all ranks of a graph runner decide together. Through gloo, between hosts: the device is never asked and never waits.

Ranks see different samples, so their batches may have different shapes. They may replay different graphs of one step, because
the collectives inside are the same, but a collective in a graph must not meet one that is launched eagerly: NCCL chooses
buffers and algorithms at capture. So a step is replayed on all ranks, or run eagerly on all.

Cost: one all-reduce of 4 bytes per step, on the host, which is ahead of its device by most of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from megatron_vla.parallel.groups import ParallelGroups
from megatron_vla.runner.contract import GraphContract


class Readiness(IntEnum):
    """How far one rank is for its batch; the least ready rank decides for all."""

    EAGER = 0
    """No graph and no room for one."""
    CAPTURE = 1
    """No graph yet."""
    REPLAY = 2


class RankAgreement:
    """All methods are called by all ranks together. A single process agrees with itself at no cost."""

    def __init__(self, groups: ParallelGroups):
        self._rank, self._size, self._group = groups.rank, groups.world_size, groups.host_group

    def lowest(self, mine: Readiness) -> Readiness:
        """The least of all ranks' readiness."""
        if self._size == 1:
            return mine
        value = torch.tensor(int(mine), dtype=torch.int32)
        dist.all_reduce(value, op=dist.ReduceOp.MIN, group=self._group)
        return Readiness(int(value))

    def wanted(self, mine: GraphContract | None) -> list[tuple[GraphContract, int]]:
        """Contracts that some rank has no graph for, each with the first such rank, in the order of ranks."""
        everybody: list[GraphContract | None] = [mine]
        if self._size > 1:
            everybody = [None] * self._size
            dist.all_gather_object(everybody, mine, group=self._group)
        owners: dict[GraphContract, int] = {}
        for rank, contract in enumerate(everybody):
            if contract is not None:
                owners.setdefault(contract, rank)
        return list(owners.items())

    def example(self, batches: Sequence[Any], owner: int) -> list[Any]:
        """The micro-batches of rank `owner`, on every rank's host: a shape that only one rank has met is captured by all."""
        if self._size == 1:
            return list(batches)
        mine = [batch.to(torch.device("cpu"), non_blocking=False) for batch in batches] if owner == self._rank else None
        message = [mine]
        dist.broadcast_object_list(message, src=owner, group=self._group)
        received = message[0]
        assert received is not None
        return list(batches) if owner == self._rank else received
