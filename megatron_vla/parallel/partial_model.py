"""A model of which a rank holds only a part, and what it still knows of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn

from megatron_vla.data.batch import Batch
from megatron_vla.parallel.parameter_shard import shard_of
from megatron_vla.parallel.stage_plan import Chunk


class PartialModel(nn.Module):
    """A model of which this rank holds a part, under the names of the whole.

    A family's stage derives from this and gives `chunks`, `boundary_dtype`, `boundary_numel(batch)` and
    `forward(batch, chunk number, received)`. `absent_shapes` and `absent_modules` describe what other stages hold, so that
    loading and module patterns can tell "elsewhere" from "nowhere".
    """

    chunks: Sequence[Chunk] = ()  # none: still whole
    absent_shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    absent_modules: tuple[str, ...] = ()

    @property
    def boundary_dtype(self) -> torch.dtype:
        """Dtype of the tensor between stages."""
        raise NotImplementedError

    def boundary_numel(self, batch: Batch) -> int:
        """Elements of the tensor between stages for a micro-batch of these shapes."""
        raise NotImplementedError

    def take_inventory(self) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]]:
        """Whole shapes of the parameters and module names now, for `record_absent`."""
        shapes = {name: shard_of(parameter).global_shape for name, parameter in self.named_parameters()}
        return shapes, tuple(name for name, _ in self.named_modules() if name)

    def record_absent(self, inventory: tuple[dict[str, tuple[int, ...]], tuple[str, ...]]) -> None:
        """Remember what has gone since `inventory` was taken."""
        shapes, modules = inventory
        held_shapes, held_modules = self.take_inventory()
        self.absent_shapes = {name: shape for name, shape in shapes.items() if name not in held_shapes}
        self.absent_modules = tuple(name for name in modules if name not in set(held_modules))
