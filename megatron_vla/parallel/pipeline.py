"""Forward and backward of all micro-batches of a step with megatron-core's schedules: 1F1B, interleaved, or no pipeline.

Without a pipeline the same code runs megatron-core's plain loop. Losses are sums that nobody divides: the optimizer does, once,
by the global number of valid elements. Nothing here reads a device value.
"""

from __future__ import annotations

import importlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_vla.data.batch import Batch
from megatron_vla.parallel.cpu import install_schedule_shims
from megatron_vla.parallel.data_parallel import DataParallelModel
from megatron_vla.parallel.groups import ParallelGroups
from megatron_vla.parallel.partial_model import PartialModel

LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]
ForwardStep = Callable[[Iterator[Batch], nn.Module], tuple[Tensor, LossFunction]]


class _ScheduledChunk(nn.Module):
    """One chunk as megatron-core's schedule wants to see it: `config`, `model_type`, `set_input_tensor` and a forward."""

    def __init__(self, forward_module: nn.Module, number: int | None, config: Any, model_type: Any) -> None:
        super().__init__()
        self.forward_module = forward_module
        self.number = number
        self.config = config
        self.model_type = model_type
        self._received: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """Called by the schedule before each forward with what the previous stage sent (None on the first one)."""
        self._received = tensors[0]

    def forward(self, batch: Batch) -> Tensor:
        """Model output, or the tensor for the next stage."""
        if self.number is None:
            return cast(Tensor, self.forward_module(batch))
        received, self._received = self._received, None
        return cast(Tensor, self.forward_module(batch, self.number, received))


class Schedule:
    """Runs forward and backward of a step's micro-batches on this rank's part of the model."""

    def __init__(self, model: DataParallelModel, groups: ParallelGroups, metric_names: Sequence[str]) -> None:
        self.model = model
        self.groups = groups
        self.metric_names = tuple(metric_names)
        module = model.module
        self.stage = module if isinstance(module, PartialModel) else None
        num_chunks = 1 if self.stage is None else len(self.stage.chunks)
        self._is_pipeline = groups.pipeline_model_parallel_size > 1
        assert self._is_pipeline == (self.stage is not None)
        self._config, model_type, self._forward_backward = _megatron_schedule(groups, num_chunks, self.stage)
        self._chunks = [
            _ScheduledChunk(model.forward_module, None if self.stage is None else number, self._config, model_type)
            for number in range(num_chunks)
        ]
        # The schedule counts tokens for its own normalisation; ours comes later.
        self._no_tokens = torch.zeros((), dtype=torch.int, device=groups.device)
        last = groups.pipeline_model_parallel_size - 1
        self._last_rank = dist.get_global_rank(groups.pipeline_model_parallel_group, last) if self._is_pipeline else groups.rank

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank reads images and prompts."""
        return self.groups.pipeline_model_parallel_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.groups.pipeline_model_parallel_rank == self.groups.pipeline_model_parallel_size - 1

    @property
    def fewest_microbatches(self) -> int:
        """The smallest step that the schedule can run."""
        return self.groups.pipeline_model_parallel_size if len(self._chunks) > 1 else 1

    def run(
        self, forward_step: ForwardStep, batches: Iterator[Batch], num_microbatches: int, *, reduce_gradients: bool = True
    ) -> Tensor:
        """Accumulate gradients of the next `num_microbatches` host batches.

        Returns fp64 [2 + metrics]: loss sum, valid count, sums of the metrics, over this data-parallel rank's micro-batches,
        equal on all its stages. `reduce_gradients`: let the last micro-batch start reductions over data-parallel ranks.
        """
        sources, numel = self._sources(batches, num_microbatches)
        self._config.no_sync_func = (lambda: self.model.micro_batch(is_last=False)) if reduce_gradients else nullcontext
        rows = self._forward_backward(
            forward_step_func=lambda source, chunk: self._scheduled_step(forward_step, source, chunk),
            data_iterator=sources,
            model=self._chunks,
            num_microbatches=num_microbatches,
            # The shape of the tensor between stages is (seq_length, micro_batch_size, hidden_size), and hidden_size is 1.
            seq_length=numel,
            micro_batch_size=1,
            forward_only=False,
        )
        if rows:
            totals = torch.stack(rows).sum(dim=0)
        else:
            totals = torch.zeros(2 + len(self.metric_names), dtype=torch.float64, device=self.groups.device)
        if self._is_pipeline:
            dist.broadcast(totals, src=self._last_rank, group=self.groups.pipeline_model_parallel_group)
        return totals

    def _sources(self, batches: Iterator[Batch], num_microbatches: int) -> tuple[list[Iterator[Batch]], int]:
        """One iterator of device batches per chunk, and the elements of the tensor between stages."""
        limited = itertools.islice(batches, num_microbatches)
        if self.stage is None:
            return [(batch.to(self.groups.device) for batch in limited)], 1
        first = next(limited)
        numel = self.stage.boundary_numel(first)
        stage = self.stage

        def on_device() -> Iterator[Batch]:
            for number, batch in enumerate(itertools.chain([first], limited)):
                # Host shapes only. A stage that waits for another size would hang or read garbage.
                if stage.boundary_numel(batch) != numel:
                    raise ValueError(
                        f"micro-batch {number} of this step gives {stage.boundary_numel(batch)} elements between stages, the "
                        f"first one {numel}: with pipeline stages all must have one shape; use --prompt-padding max"
                    )
                yield batch.to(self.groups.device)

        # Each chunk walks through the same micro-batches at its own pace.
        return list(itertools.tee(on_device(), len(self._chunks))), numel

    def _scheduled_step(
        self, forward_step: ForwardStep, source: Iterator[Batch], chunk: nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]:
        output, loss_func = forward_step(source, chunk)

        def loss_and_row(output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            loss_sum, num_valid, metrics = loss_func(output)
            assert set(metrics) == set(self.metric_names), f"{sorted(metrics)} are not the family's {self.metric_names}"
            values = (loss_sum, num_valid, *(metrics[name] for name in self.metric_names))
            return loss_sum, self._no_tokens, torch.stack([value.detach().double() for value in values])

        return output, loss_and_row


def _megatron_schedule(groups: ParallelGroups, num_chunks: int, stage: PartialModel | None) -> tuple[Any, Any, Any]:
    """(configuration, model type, forward-backward function) of megatron-core for this layout."""
    stages = groups.pipeline_model_parallel_size
    virtual = num_chunks if num_chunks > 1 else None
    with warnings.catch_warnings():
        # The import announces which optional NVIDIA packages are absent, the configuration its own deprecated fields.
        warnings.simplefilter("ignore")
        from megatron.core.enums import ModelType
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.transformer import TransformerConfig

        # The first forward step would import it, with an announcement of its own.
        importlib.import_module("megatron.core.transformer.multi_token_prediction")
        config = TransformerConfig(
            num_layers=stages * num_chunks,
            hidden_size=1,
            num_attention_heads=1,
            pipeline_model_parallel_size=stages,
            virtual_pipeline_model_parallel_size=virtual,
            pipeline_dtype=torch.float32 if stage is None else stage.boundary_dtype,
            # "Per token" leaves the loss as it is: a sum.
            calculate_per_token_loss=True,
            deallocate_pipeline_outputs=stages > 1,
            # Batched sends match by order on gloo, and two messages between the same two ranks (interleaved on two stages)
            # get mixed up without an error.
            batch_p2p_comm=groups.device.type == "cuda" and not (virtual and stages == 2),
            # It would wait for the device after every message.
            batch_p2p_sync=False,
        )
    install_schedule_shims(schedules)
    function = schedules.get_forward_backward_func(stages, virtual)
    return config, ModelType.encoder_or_decoder, function
