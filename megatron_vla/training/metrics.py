"""Per-step numbers stay on the device and are read once per log interval."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepMetrics:
    """Device tensors of shape [] of one optimizer step, equal on all ranks.

    loss: sum over valid elements / global number of valid elements. gradient_norm: of the normalised gradient, before clipping.
    is_finite: whether loss and gradient norm are finite, and so were all earlier ones. extra: the family's own, averaged over
    micro-batches and ranks.
    """

    loss: Tensor
    num_valid: Tensor
    gradient_norm: Tensor
    is_finite: Tensor
    extra: dict[str, Tensor] = field(default_factory=dict)

    def copied(self) -> StepMetrics:
        """The same numbers in memory of their own."""
        extra = {name: value.clone() for name, value in self.extra.items()}
        return StepMetrics(self.loss.clone(), self.num_valid.clone(), self.gradient_norm.clone(), self.is_finite.clone(), extra)


@dataclass(frozen=True)
class StepRecord:
    """Host numbers of one step."""

    iteration: int
    loss: float
    num_valid: int
    gradient_norm: float
    learning_rate: float
    is_finite: bool
    extra: dict[str, float]


class MetricWindow:
    """Steps since the last read."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, float, StepMetrics]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def append(self, iteration: int, learning_rate: float, metrics: StepMetrics) -> None:
        """Keep a step's device tensors; nothing is read."""
        self._steps.append((iteration, learning_rate, metrics))

    def read(self) -> list[StepRecord]:
        """One transfer for the whole window; empties it."""
        if not self._steps:
            return []
        names = sorted(self._steps[0][2].extra)
        rows = [
            torch.stack([t.double() for t in (m.loss, m.num_valid, m.gradient_norm, m.is_finite, *(m.extra[n] for n in names))])
            for _, _, m in self._steps
        ]
        values = torch.stack(rows).tolist()
        records = [
            StepRecord(
                iteration=iteration,
                loss=row[0],
                num_valid=int(row[1]),
                gradient_norm=row[2],
                learning_rate=learning_rate,
                is_finite=bool(row[3]),
                extra=dict(zip(names, row[4:], strict=True)),
            )
            for (iteration, learning_rate, _), row in zip(self._steps, values, strict=True)
        ]
        self._steps.clear()
        return records


def peak_memory_gib(device: torch.device) -> float:
    """Peak allocated device memory, or peak resident memory of the process on a CPU, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
