"""Device batches with fixed addresses, which one captured graph reads.

Host batches are copied in stream order: the copy waits for the replay before it, so one set of buffers is enough, without
events. On a stream of its own the copy could run under that replay, but would need a second set and a copy on the device;
there is little to hide: 10 MB of images (Pi0.5 at 32 samples) take 0.2 ms of a 540 ms step. From pinned memory the host does
not wait.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_vla.runner.contract import contract_of


class StaticBuffers:
    """One step's micro-batches on the device, of the shapes of `examples` (host batches, or device ones)."""

    def __init__(self, examples: Sequence[Any], device: torch.device):
        self.contract = contract_of(examples)
        self.batches: list[Any] = []
        self._targets: list[list[tuple[str, Tensor]]] = []
        for batch in examples:
            tensors = {
                field.name: torch.empty(value.shape, dtype=value.dtype, device=device)
                for field in dataclasses.fields(batch)
                if isinstance(value := getattr(batch, field.name), Tensor)
            }
            self.batches.append(dataclasses.replace(batch, **tensors))
            self._targets.append(list(tensors.items()))

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        return sum(tensor.nbytes for targets in self._targets for _, tensor in targets)

    def fill(self, batches: Sequence[Any]) -> None:
        """Copy a step's micro-batches. They must fulfil the contract (whoever chooses the graph has compared it)."""
        for targets, batch in zip(self._targets, batches, strict=True):
            for name, target in targets:
                source = getattr(batch, name)
                # Copying would broadcast or convert where the contract was broken.
                assert source.shape == target.shape and source.dtype == target.dtype, (name, source.shape, target.shape)
                target.copy_(source, non_blocking=True)
