"""Exponential moving average of the fp32 main parameters.

After each update: ema = decay * ema + (1 - decay) * parameter, started from the initial parameters. Kept in the main dtype:
with decay 0.999 a bf16 average would never move.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_vla.training.optimizer import AdamW
from megatron_vla.training.state_shard import StateShard


class ParameterAverage:
    """Averages of every parameter that the optimizer touches (frozen ones equal their average), sharded as its state is."""

    def __init__(self, optimizer: AdamW, decay: float):
        self.decay = decay
        self._mains = [p.main for p in optimizer.parameters]
        self._averages = [main.clone() for main in self._mains]
        self._names = [p.name for p in optimizer.parameters]
        self._parts = [p.part for p in optimizer.parameters]

    @torch.no_grad()
    def update(self) -> None:
        """One averaging step, after the optimizer's."""
        torch._foreach_mul_(self._averages, self.decay)
        torch._foreach_add_(self._averages, self._mains, alpha=1 - self.decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Start again from the current main parameters (after pretrained weights were loaded)."""
        torch._foreach_copy_(self._averages, self._mains)

    def tensors(self) -> dict[str, Tensor]:
        """Parameter name -> average, sharing memory with this object."""
        return dict(zip(self._names, self._averages, strict=True))

    def state_shards(self) -> Iterator[StateShard]:
        """This rank's part of the averages, live."""
        for name, part, average in zip(self._names, self._parts, self._averages, strict=True):
            yield StateShard("ema", name, average, part.flat_range, part.local_shape)
