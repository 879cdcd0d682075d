"""One pipeline stage of GR00T N1.7: some of the model's layers under their global names, and what travels between stages.

The model is one row of layers: vision tower, text tower, vision-language layers, DiT. A cut may fall anywhere, so what travels
depends on the cut; all of it goes in one flat tensor, padded to the largest cut's size (stages exchange tensors of one shape),
in the widest dtype (fp32; fp64 in fp64 models), so that nothing is rounded on the way. Positions and masks do not travel:
every stage reads the same batch. A frozen stage sends no gradient but zeros, which keep the schedule in step.

Shape legend: as model.py, M image tokens of all samples, N elements of the tensor between stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron_vla.models.common.precision import dtype_of
from megatron_vla.models.groot_n1_7.batch import GrootN17Batch
from megatron_vla.models.groot_n1_7.config import GrootN17Config
from megatron_vla.models.groot_n1_7.model import STATE_TOKENS, GrootN17Model
from megatron_vla.models.groot_n1_7.text import add_image_features, embed_tokens, plan_text
from megatron_vla.parallel.partial_model import PartialModel
from megatron_vla.parallel.sequence_parallel import row_owners, stream_shape
from megatron_vla.parallel.stage_plan import Chunk, StagePlan


@dataclass(frozen=True)
class LayerRow:
    """Where each part of the model ends in the row of all layers."""

    vision: int
    text: int
    vl: int
    dit: int

    @staticmethod
    def of(config: GrootN17Config) -> LayerRow:
        """The row of a configuration."""
        vision = config.vision_num_layers
        text = vision + config.num_layers
        vl = text + config.vl_num_layers
        return LayerRow(vision, text, vl, vl + config.dit_num_layers)


def modules_of_layers(config: GrootN17Config, chunk: Chunk) -> Iterator[str]:
    """Names of the modules that a chunk computes."""
    row = LayerRow.of(config)
    held = range(chunk.first_layer, chunk.end_layer)
    if chunk.is_first:
        yield from ("vision_tower.patch_embedding", "vision_tower.position_embedding")
    for number in held:
        if number < row.vision:
            yield f"vision_tower.layers.{number}"
            if number in config.vision_deepstack_layers:
                yield f"vision_tower.deepstack_mergers.{config.vision_deepstack_layers.index(number)}"
        elif number < row.text:
            yield f"text_layers.{number - row.vision}"
        elif number < row.vl:
            yield f"vl_layers.{number - row.text}"
        else:
            yield f"dit_layers.{number - row.vl}"
    # By the layer before or after which they run; pairs, because without vision-language layers two of the numbers are one.
    others = (
        (row.vision, ("token_embedding",)),
        (row.text, ("vl_norm",)),
        (row.vl, ("state_encoder", "action_encoder", "action_position_embedding", "time_mlp_in", "time_mlp_out")),
        (row.vision - 1, ("vision_tower.merger",)),
        (row.text - 1, ("text_norm",)),
    )
    yield from (name for number, names in others if number in held for name in names)
    if chunk.is_last:
        yield from ("output_norm", "output_proj", "action_decoder")


@dataclass
class Flow:
    """What is known of one micro-batch between two layers; `deepstack` by number of the feature."""

    streams: dict[str, Tensor] = field(default_factory=dict)
    deepstack: dict[int, Tensor] = field(default_factory=dict)


class _Padding(torch.autograd.Function):
    """`size` zeros, whose gradient is zeros for `received`.

    A stage whose frozen layers read all that it received would have no gradient to send back, and the sender waits for one.
    """

    @staticmethod
    def forward(ctx: Any, received: Tensor, size: int) -> Tensor:
        ctx.like = received.shape, received.dtype, received.device
        return received.new_zeros(size, 1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        shape, dtype, device = ctx.like
        return torch.zeros(shape, dtype=dtype, device=device), None


class GrootN17Stage(GrootN17Model, PartialModel):
    """Built whole (without memory, on the meta device), then reduced by `keep`: modules of other stages are gone."""

    _dtypes: dict[str, torch.dtype]
    _cuts: tuple[int, ...]

    def keep(self, plan: StagePlan, stage: int) -> None:
        """Drop every module that this stage's chunks do not compute. Call after parameter dtypes are set."""
        before = self.take_inventory()
        # Read from modules that may be dropped.
        self._dtypes = {
            "vision": self.vision_tower.stream_dtype,
            "image": dtype_of(self.vision_tower.merger.mlp),
            "head": dtype_of(self.output_proj),
            "condition": dtype_of(self.time_mlp_in),
            "interface": self.action_position_embedding.weight.dtype,
        }
        chunks = plan.of_stage(stage)
        held = {name for chunk in chunks for name in modules_of_layers(self.config, chunk)}
        for owner, name in (
            (self.vision_tower, "layers"),
            (self.vision_tower, "deepstack_mergers"),
            (self, "text_layers"),
            (self, "vl_layers"),
            (self, "dit_layers"),
        ):
            prefix = f"vision_tower.{name}" if owner is self.vision_tower else name
            modules = {key: module for key, module in getattr(owner, name).named_children() if f"{prefix}.{key}" in held}
            setattr(owner, name, nn.ModuleDict(modules))
        for owner, prefix in ((self.vision_tower, "vision_tower."), (self, "")):
            for name, module in list(owner.named_children()):
                is_stack = isinstance(module, nn.ModuleDict) or name == "vision_tower"
                if not is_stack and f"{prefix}{name}" not in held:
                    delattr(owner, name)
        self.chunks = chunks
        self._cuts = tuple(chunk.end_layer for chunk in plan.chunks[:-1])
        self.record_absent(before)

    @property
    def interface_dtype(self) -> torch.dtype:
        """As in the whole model."""
        return self._dtypes["interface"] if self.chunks else super().interface_dtype

    @property
    def stream_dtype(self) -> torch.dtype:
        """As in the whole model."""
        return self._dtypes["head"] if self.chunks else super().stream_dtype

    @property
    def backbone_is_rounded(self) -> bool:
        """As in the whole model."""
        return not self.backbone_is_trained and self._dtypes["vision"] == torch.bfloat16

    def forward(self, batch: GrootN17Batch, chunk_number: int = 0, received_N11: Tensor | None = None) -> Tensor:
        """What one of this stage's chunks makes of a micro-batch: [N, 1, 1] for the next one, or [B, T, A] as the whole model.

        `received_N11`: the previous chunk's output, None for the first chunk of the model.
        """
        chunk, row = self.chunks[chunk_number], LayerRow.of(self.config)
        flow = Flow() if received_N11 is None else self._unpack(received_N11, batch, chunk.first_layer)
        with self.backbone_context(batch.tokens_BS.device):
            if received_N11 is None:
                flow.streams["vision"] = self.vision_tower.embed(batch)
            self._vision_layers(flow, batch, range(chunk.first_layer, min(chunk.end_layer, row.vision)))
            self._text_layers(flow, batch, range(max(chunk.first_layer, row.vision), min(chunk.end_layer, row.text)))
        with self.autocast(batch.tokens_BS.device):
            self._vl_layers(flow, batch, range(max(chunk.first_layer, row.text), min(chunk.end_layer, row.vl)))
            self._dit_layers(flow, batch, range(max(chunk.first_layer, row.vl), chunk.end_layer))
            if not chunk.is_last:
                return self._packed(flow, batch, chunk.end_layer, received_N11)
            tokens, condition = flow.streams["tokens"], flow.streams["condition"]
            velocity_DTA = self.read_out(batch, tokens, condition, self._num_tokens(batch), self._owners(batch))
        elements_BTA = self.squared_errors(batch, velocity_DTA)
        if received_N11 is None:
            return elements_BTA
        # Squares are not negative, so adding zero changes no bit.
        return elements_BTA + _Padding.apply(received_N11, 1).view(()).to(elements_BTA.dtype)

    def _vision_layers(self, flow: Flow, batch: GrootN17Batch, layers: range) -> None:
        if not layers:
            return
        plan, config = self.vision_tower.plan(batch, self._dtypes["vision"]), self.config
        hidden = flow.streams.pop("vision")
        for number in layers:
            hidden = self.vision_tower.layers.get_submodule(str(number))(hidden, plan)
            if number in config.vision_deepstack_layers:
                place = config.vision_deepstack_layers.index(number)
                flow.deepstack[place] = self.vision_tower.merged(f"deepstack_mergers.{place}", hidden, plan)
        if layers.stop == config.vision_num_layers:
            flow.streams["image"] = self.vision_tower.merged("merger", hidden, plan)
        else:
            flow.streams["vision"] = hidden

    def _text_layers(self, flow: Flow, batch: GrootN17Batch, layers: range) -> None:
        if not layers:
            return
        first = LayerRow.of(self.config).vision
        if layers.start == first:
            flow.streams["text"] = embed_tokens(self.token_embedding, flow.streams.pop("image"), batch, self.tensor_parallel)
        hidden = flow.streams["text"]
        plan = plan_text(batch, self.config, hidden.dtype)
        for index in range(layers.start - first, layers.stop - first):
            hidden = self.text_layers.get_submodule(str(index))(hidden, plan)
            if index in flow.deepstack:
                hidden = add_image_features(hidden, flow.deepstack.pop(index), batch, self.tensor_parallel)
        flow.streams["text"] = hidden

    def _vl_layers(self, flow: Flow, batch: GrootN17Batch, layers: range) -> None:
        row = LayerRow.of(self.config)
        if layers and layers.start == row.text:
            flow.streams["vl"] = self.vl_norm(flow.streams.pop("text").to(self.stream_dtype))
        for number in layers:
            layer = self.vl_layers.get_submodule(str(number - row.text))
            flow.streams["vl"] = layer(flow.streams["vl"], batch.tokens_BS.shape[1], self.vl_mask(batch))

    def _dit_layers(self, flow: Flow, batch: GrootN17Batch, layers: range) -> None:
        if not layers:
            return
        row, streams = LayerRow.of(self.config), flow.streams
        if layers.start == row.vl:
            if row.vl == row.text:
                streams["vl"] = self.vl_norm(streams.pop("text").to(self.stream_dtype))
            x_DTA, step_D = self.noisy_actions(batch), self.time_step(batch.time_B.flatten())
            streams["tokens"], streams["condition"], _ = self.embed(batch, x_DTA, step_D)
        memory, owners = self.sorted_tokens(batch, streams["vl"]), self._owners(batch)
        for index in range(layers.start - row.vl, layers.stop - row.vl):
            memory_BKH, mask = memory.of_block(index, self.config.attend_text_every_n_blocks)
            layer = self.dit_layers.get_submodule(str(index))
            streams["tokens"] = layer(
                streams["tokens"], streams["condition"], self._num_tokens(batch), owners, memory_BKH, mask
            )

    def _num_tokens(self, batch: GrootN17Batch) -> int:
        return batch.actions_BTA.shape[1] + STATE_TOKENS

    def _num_chunks(self, batch: GrootN17Batch) -> int:
        return batch.size * self.config.flow_draws

    def _owners(self, batch: GrootN17Batch) -> Any:
        return row_owners(self._num_chunks(batch), self._num_tokens(batch), batch.tokens_BS.device, self.tensor_parallel)

    def _contents(self, batch: GrootN17Batch, cut: int) -> tuple[dict[str, tuple[int, ...]], dict[int, tuple[int, ...]]]:
        """Shapes of the streams and of the deepstack features that are known, and still needed, after `cut` layers."""
        row, config, parallel = LayerRow.of(self.config), self.config, self.tensor_parallel
        num_samples, num_tokens = batch.tokens_BS.shape
        image_shape: tuple[int, ...] = (batch.image_token_M.shape[0], config.hidden_size)
        token_shape = stream_shape(num_samples, num_tokens, config.hidden_size, parallel)
        streams: dict[str, tuple[int, ...]] = {}
        if cut < row.vision:
            images, patches = batch.image_row_IQ.shape
            equal = images * patches == batch.pixels_PC.shape[0]
            sizes = (images, patches) if equal else (1, batch.pixels_PC.shape[0])
            streams["vision"] = stream_shape(*sizes, config.vision_hidden_size, parallel)
        elif cut == row.vision:
            streams["image"] = image_shape
        elif cut <= row.text:
            streams["text"] = token_shape
        else:
            streams["vl"] = token_shape
        if cut > row.vl:
            chunks = self._num_chunks(batch)
            streams["tokens"] = stream_shape(chunks, self._num_tokens(batch), config.dit_hidden_size, parallel)
            streams["condition"] = (chunks, config.dit_hidden_size)
        deepstack = {
            place: image_shape
            for place, layer in enumerate(config.vision_deepstack_layers)
            if layer < cut and place >= cut - row.vision
        }
        return streams, deepstack

    @property
    def boundary_dtype(self) -> torch.dtype:
        """Dtype of the tensor between stages."""
        return torch.promote_types(self._dtypes["interface"], torch.float32)

    def boundary_numel(self, batch: GrootN17Batch) -> int:  # type: ignore[override]
        """Elements of the tensor between stages for a micro-batch of these shapes (reads no values), for the largest cut."""
        return 1 + max(
            sum(math.prod(shape) for shapes in self._contents(batch, cut) for shape in shapes.values()) for cut in self._cuts
        )

    def _packed(self, flow: Flow, batch: GrootN17Batch, cut: int, received_N11: Tensor | None) -> Tensor:
        streams, deepstack = self._contents(batch, cut)
        parts = [flow.streams[name] for name in streams] + [flow.deepstack[place] for place in deepstack]
        flat = [part.reshape(-1, 1, 1).to(self.boundary_dtype) for part in parts]
        missing = self.boundary_numel(batch) - sum(part.shape[0] for part in flat)
        if received_N11 is None:
            padding = flat[0].new_zeros(missing, 1, 1)
        else:
            padding = _Padding.apply(received_N11, missing)
        # The result must not be a view: the schedule frees it after sending.
        return torch.cat([*flat, padding])

    def _unpack(self, received_N11: Tensor, batch: GrootN17Batch, cut: int) -> Flow:
        streams, deepstack = self._contents(batch, cut)
        shapes = [*streams.values(), *deepstack.values()]
        sizes = [math.prod(shape) for shape in shapes]
        padding = received_N11.shape[0] - sum(sizes)
        *rows, _ = received_N11.flatten().split([*sizes, padding])
        parts = [part.view(shape) for part, shape in zip(rows, shapes, strict=True)]
        # Text layers cast their input themselves: trained and frozen ones may differ.
        dtypes = {**self._dtypes, "text": self.boundary_dtype, "vl": self.stream_dtype, "tokens": self.stream_dtype}
        return Flow(
            {name: part.to(dtypes[name]) for name, part in zip(streams, parts[: len(streams)], strict=True)},
            {place: part.to(dtypes["image"]) for place, part in zip(deepstack, parts[len(streams) :], strict=True)},
        )
