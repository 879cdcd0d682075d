"""Delayed scaling: the factor of an FP8 operand comes from the magnitudes of the steps before (arXiv:2209.05433; TE's recipe).

Quantising then is one pass over the data instead of two, and a kernel that makes an operand can quantise it on the way. What
exceeds the range of the format saturates for this one step: the largest magnitude of the step enters the history, and the
factor, a power of two, leaves room of up to one bit above the largest of the last steps.

One table holds every operand of this rank. It changes only at the end of a step (`roll`), so all micro-batches, recomputed
layers and pipeline stages of one step use the same factors; the largest magnitudes are those of all data-parallel ranks, so
replicas quantise alike. A run's first step, without a history, takes its factors from its own first micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vla.kernels.fp8_quantize.op import (
    ACTIVATION_DTYPE,
    CALIBRATION,
    GRADIENT_DTYPE,
    IS_KNOWN,
    LARGEST,
    RECIPROCAL,
    SCALE,
    power_of_two_scale,
)

OPERANDS = {"rows": ACTIVATION_DTYPE, "weight": ACTIVATION_DTYPE, "gradient": GRADIENT_DTYPE}


class LayerSlots:
    """Slots, fp32 [4] each (kernels/fp8_quantize/op.py), of a product's three operands."""

    def __init__(self, rows: Tensor, weight: Tensor, gradient: Tensor):
        self.rows = rows
        self.weight = weight
        self.gradient = gradient


class DelayedScaling:
    """Factors and history of the operands of `layers` (names), on `device`."""

    def __init__(self, layers: Sequence[str], history_length: int, device: torch.device):
        self.layers = tuple(layers)
        count = len(layers) * len(OPERANDS)
        # Rows of 16 bytes: generated code copies an input that is not aligned to them, and the ops would write to the copy;
        # cuBLASLt wants its scales there.
        self._slots = torch.zeros(count, 4, device=device)
        self._slots[:, [RECIPROCAL, SCALE]] = 1.0
        # Newest first.
        self._history = torch.zeros(history_length, count, device=device)
        # Operands of layers that a checkpoint knows: without a history too, they go on as they were.
        self._is_loaded = torch.zeros(count, dtype=torch.bool, device=device)
        limits = [torch.finfo(dtype).max for dtype in OPERANDS.values()]
        self._limits = torch.tensor(limits, device=device).repeat(len(layers))
        CALIBRATION.active = True

    def slots_of(self, layer: str) -> LayerSlots:
        """Views of the table."""
        first = self.layers.index(layer) * len(OPERANDS)
        return LayerSlots(*self._slots[first : first + len(OPERANDS)].unbind())

    @torch.no_grad()
    def roll(self, group: Any) -> None:
        """End of a step: its magnitudes, the largest of all ranks of `group` (None: this process alone), make new factors.

        No host synchronisation, and the same operations every time: a graph may hold it. What is not finite leaves no trace.
        """
        largest = self._slots[:, LARGEST]
        largest = torch.where(largest.isfinite(), largest, 0.0)
        if group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        self._history.copy_(torch.cat([largest[None], self._history[:-1]]))
        self._slots[:, LARGEST] = 0.0
        self._set_factors()
        CALIBRATION.active = False

    def _set_factors(self) -> None:
        peak = self._history.amax(0)
        is_known = peak > 0
        scale, reciprocal = power_of_two_scale(torch.where(is_known, peak, 1.0), self._limits)
        # Operands that have never been met keep what they have.
        self._slots[:, SCALE] = torch.where(is_known, scale, self._slots[:, SCALE])
        self._slots[:, RECIPROCAL] = torch.where(is_known, reciprocal, self._slots[:, RECIPROCAL])
        self._slots[:, IS_KNOWN] = torch.where(is_known, 1.0, self._slots[:, IS_KNOWN])

    @torch.no_grad()
    def forget_passes(self) -> None:
        """After passes that were no training (compiling): their magnitudes, and factors that were taken from them, go."""
        self._slots[:, LARGEST] = 0.0
        stays = (self._history.amax(0) > 0) | self._is_loaded
        for column, value in ((SCALE, 1.0), (RECIPROCAL, 1.0), (IS_KNOWN, 0.0)):
            self._slots[:, column] = torch.where(stays, self._slots[:, column], value)

    def state(self) -> dict[str, dict[str, list[float]]]:
        """Histories by layer and operand, newest first, of the operands that were met; for `load`."""
        rows = iter(self._history.t().tolist())
        table = {layer: {operand: next(rows) for operand in OPERANDS} for layer in self.layers}
        return {layer: operands for layer, operands in table.items() if any(map(any, operands.values()))}

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
        """Take the stored histories of this rank's layers (cut or filled with zeros to this run's length); a line to print.

        Layers that are not among them take factors from the data of this run's first step, as a new run does.
        """
        history = torch.zeros_like(self._history, device="cpu")
        is_loaded = torch.tensor([layer in state for layer in self.layers], dtype=torch.bool)
        for number, layer in enumerate(self.layers):
            for place, operand in enumerate(OPERANDS):
                stored = list(state.get(layer, {}).get(operand, ()))[: len(history)]
                history[: len(stored), number * len(OPERANDS) + place] = torch.tensor(stored)
        self._history.copy_(history)
        self._is_loaded.copy_(is_loaded.repeat_interleave(len(OPERANDS)))
        self._set_factors()
        self._slots[:, IS_KNOWN] = torch.where(self._is_loaded, 1.0, self._slots[:, IS_KNOWN])
        # Layers that share their input with the first of a merged product have no operands of their own, stored or not:
        # whether others are missing, the first step shows.
        CALIBRATION.active = not bool(is_loaded.all())
        return f"loaded FP8 magnitudes of {int(is_loaded.sum())} of {len(self.layers)} layers"
