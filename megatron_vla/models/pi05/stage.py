"""One pipeline stage of Pi0.5: some of the model's modules under their global names, and what travels between stages.

Everything that the next part needs travels in one flat tensor: prefix stream, action stream and condition, one after the other,
in the widest dtype of the three (fp32; fp64 in fp64 models). So nothing is rounded on the way, forward or backward. Masks and
positions do not travel: every stage reads the same batch.

Shape legend: B samples, P prefix tokens, T action horizon, A padded action dimensions, H prefix hidden, E expert hidden,
N elements of the tensor between stages. In the action stream B counts a sample's draws of noise (--flow-draws).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_vla.data.batch import Batch
from megatron_vla.models.common.flow_matching import noisy_actions
from megatron_vla.models.pi05.model import Pi05Model, vision_sizes
from megatron_vla.parallel.partial_model import PartialModel
from megatron_vla.parallel.sequence_parallel import stream_shape
from megatron_vla.parallel.stage_plan import Chunk

FIRST_MODULES = ("vision_tower", "vision_projector", "token_embedding", "action_in_proj", "time_mlp_in", "time_mlp_out")
LAST_MODULES = ("prefix_norm", "suffix_norm", "action_out_proj")


class Pi05Stage(Pi05Model, PartialModel):
    """Built whole (without memory, on the meta device), then reduced by `keep`.

    Afterwards `layers` maps global numbers to the layers of this stage's chunks, and modules of other stages are gone.
    """

    _interface_dtype: torch.dtype
    _stream_dtype: torch.dtype

    def keep(self, chunks: Sequence[Chunk]) -> None:
        """Drop every module that these chunks do not compute. Call after parameter dtypes are set."""
        before = self.take_inventory()
        # Read from modules that may be dropped.
        self._interface_dtype = super().interface_dtype
        self._stream_dtype = next(self.token_embedding.parameters()).dtype
        numbers = [number for chunk in chunks for number in range(chunk.first_layer, chunk.end_layer)]
        layers = list(self.layers)
        self.layers = nn.ModuleDict({str(number): layers[number] for number in numbers})  # type: ignore[assignment]
        for names, is_held in ((FIRST_MODULES, chunks[0].is_first), (LAST_MODULES, chunks[-1].is_last)):
            for name in () if is_held else names:
                delattr(self, name)
        self.chunks = tuple(chunks)
        self.record_absent(before)

    @property
    def interface_dtype(self) -> torch.dtype:
        """As in the whole model."""
        return self._interface_dtype if self.chunks else super().interface_dtype

    def mark_dead_parameters(self) -> None:
        """As in the whole model, on the stage that holds the last layer."""
        if not self.chunks or self.chunks[-1].is_last:
            super().mark_dead_parameters()

    # Packs have no fixed number of prefix tokens per sample to send on: the checks refuse them with stages.
    def forward(self, batch: Batch, chunk_number: int = 0, received_N11: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """What one of this stage's chunks makes of a micro-batch: [N, 1, 1] for the next one, or [B, T, A] as the whole model.

        `received_N11`: the previous chunk's output, None for the first chunk of the model.
        """
        chunk = self.chunks[chunk_number]
        if received_N11 is None:
            assert chunk.is_first
            prefix_BPH, suffix_BTE, condition_BE = self._inputs(batch)
        else:
            prefix_BPH, suffix_BTE, condition_BE = self._unpack(received_N11, batch)
        horizon = batch.actions_BTA.shape[1]
        plan = self.plan(self.prefix_is_valid(batch), horizon, self._stream_dtype, self.config.flow_draws)
        for number in range(chunk.first_layer, chunk.end_layer):
            layer = self.layers.get_submodule(str(number))
            prefix_BPH, suffix_BTE = layer(prefix_BPH, suffix_BTE, condition_BE, plan)
        if not chunk.is_last:
            return _packed(prefix_BPH, suffix_BTE, condition_BE)
        if not self.skip_dead_compute:
            self.prefix_norm(prefix_BPH)
        velocity_BTA = self.read_out(suffix_BTE, condition_BE, plan)
        actions_BTA, noise_BTA, _ = self.flow_inputs(batch)
        return self.squared_errors(velocity_BTA, actions_BTA, noise_BTA)

    def _inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        actions_BTA, noise_BTA, time_B = self.flow_inputs(batch)
        x_BTA = noisy_actions(actions_BTA, noise_BTA, time_B.to(self.interface_dtype))
        prefix_BPH, _ = self.embed_prefix(batch)
        return prefix_BPH, *self.embed_suffix(batch, x_BTA, time_B)

    def _shapes(self, batch: Batch) -> tuple[tuple[int, ...], ...]:
        """Shapes of prefix, suffix and condition between two chunks, from the batch's shapes."""
        num_samples, num_views = batch.camera_is_present_BV.shape
        num_prefix = num_views * vision_sizes(self.config).num_patches + batch.tokens_BL.shape[1]
        width, num_chunks = self.config.expert_hidden_size, num_samples * self.config.flow_draws
        return (
            stream_shape(num_samples, num_prefix, self.config.hidden_size, self.tensor_parallel),
            stream_shape(num_chunks, batch.actions_BTA.shape[1], width, self.tensor_parallel),
            (num_chunks, width),
        )

    @property
    def boundary_dtype(self) -> torch.dtype:
        """Dtype of the tensor between stages."""
        return torch.promote_types(self._interface_dtype, self._stream_dtype)

    def boundary_numel(self, batch: Batch) -> int:
        """Elements of the tensor between stages for a micro-batch of these shapes (reads no values)."""
        return sum(math.prod(shape) for shape in self._shapes(batch))

    def _unpack(self, received_N11: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        shapes = self._shapes(batch)
        parts = received_N11.flatten().split([math.prod(shape) for shape in shapes])
        prefix_BPH, suffix_BTE, condition_BE = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        return prefix_BPH.to(self._stream_dtype), suffix_BTE.to(self._stream_dtype), condition_BE.to(self._interface_dtype)


def _packed(prefix_BPH: Tensor, suffix_BTE: Tensor, condition_BE: Tensor) -> Tensor:
    # The promotion of `cat` is the boundary dtype. The result must not be a view: the schedule frees it after sending.
    return torch.cat([part.reshape(-1, 1, 1) for part in (prefix_BPH, suffix_BTE, condition_BE)])
