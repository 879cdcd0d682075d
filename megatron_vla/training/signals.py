"""SIGTERM and SIGINT end a run with a checkpoint, at the same iteration on every rank."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from megatron_vla.parallel.groups import ParallelGroups


class StopSignals:
    """Catches the signals inside a `with` block. A second Ctrl-C ends at once; a second SIGTERM does not: batch systems send
    it to every process and launchers pass it on, so that one request arrives twice.

    `poll` must be called once per iteration on every rank. With several ranks its answer is one iteration old: the agreement
    travels over gloo while the next step runs, so neither the host nor the device waits for it. Without `groups` (before they
    are made, or after they are closed) a process answers for itself.
    """

    def __init__(self, groups: ParallelGroups | None):
        self._groups = groups
        self.received: str | None = None
        self._previous: dict[int, Any] = {}
        self._flag = torch.zeros((), dtype=torch.int32)
        self._work: Any = None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *details: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, self._previous[number])

    def poll(self) -> bool:
        """Whether any rank had received a signal (by the previous call, with several ranks)."""
        if self._groups is None or self._groups.world_size == 1:
            return self.received is not None
        stop = False
        if self._work is not None:
            self._work.wait()
            stop = bool(self._flag.item())
        self._flag = torch.tensor(int(self.received is not None), dtype=torch.int32)
        self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._groups.host_group, async_op=True)
        return stop

    def finish(self) -> None:
        """Complete the agreement in flight, so that no rank leaves while another still waits for it."""
        if self._work is not None:
            self._work.wait()
            self._work = None
