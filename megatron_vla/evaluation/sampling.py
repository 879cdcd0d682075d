"""Runs a family's denoising: eagerly, compiled, or as one CUDA graph per batch shape.

A policy sees every batch size between 1 and its limit. Compiled code and graphs want few shapes, so for them a batch has to be
filled up to the next power of two (`batch_size`).

Shape legend: B samples, T action horizon, A padded action dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatron_vla.data.batch import TensorFields
from megatron_vla.models.registry import ModelFamily
from megatron_vla.optimizations.compile import RECOMPILE_LIMIT, allow_graphs, compiled_whole

WARM_UP_CALLS = 3
Shapes = tuple[tuple[int, ...], ...]


def shapes_of(batch: TensorFields) -> Shapes:
    """What a graph belongs to."""
    return tuple(tuple(tensor.shape) for tensor in batch.tensors().values())


@dataclass(frozen=True)
class _Captured:
    """A graph with the buffers that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    batch: TensorFields
    actions_BTA: Tensor


class ActionSampler:
    """Batch -> normalised actions [B, T, A]. Compiling replaces methods of `module`, whose parameter names stay."""

    def __init__(self, family: ModelFamily, module: nn.Module, num_steps: int, *, compile: bool, cuda_graph: bool) -> None:
        self.family, self.module, self.num_steps = family, module, num_steps
        self.uses_few_shapes = compile or cuda_graph
        self.compile, self.cuda_graph = compile, cuda_graph
        self._captured: dict[Shapes, _Captured] = {}
        self._compiled: set[Shapes] = set()
        if compile:
            # Whole methods: one that cannot be compiled whole is an error, never a quiet return to eager code.
            for name in family.inference_methods:
                setattr(module, name, compiled_whole(getattr(module, name)))

    def batch_size(self, num_samples: int) -> int:
        """Samples that a batch for so many should have."""
        return 1 << (num_samples - 1).bit_length() if self.uses_few_shapes else num_samples

    @torch.no_grad()
    def __call__(self, batch: TensorFields) -> Tensor:
        """Sample from the batch's own noise."""
        if self.compile and (shapes := shapes_of(batch)) not in self._compiled:
            self._compiled.add(shapes)
            # A graph for each: seven batch sizes times the widths of prompts are more than torch's own limit of 8.
            allow_graphs(RECOMPILE_LIMIT + len(self._compiled))
        if not self.cuda_graph:
            return self._sample(batch)
        # A capture records what the current GPU does, and nothing of another one that the policy acts on.
        with torch.cuda.device(batch.tensors()["noise_BTA"].device):
            return self._replay(batch)

    def _sample(self, batch: TensorFields) -> Tensor:
        assert self.family.sample_actions is not None
        noise_BTA = batch.tensors()["noise_BTA"]
        actions_BTA: Tensor = self.family.sample_actions(self.module, batch, self.num_steps, noise_BTA)
        return actions_BTA

    def _replay(self, batch: TensorFields) -> Tensor:
        shapes = shapes_of(batch)
        if shapes not in self._captured:
            self._captured[shapes] = self._capture(batch)
        captured = self._captured[shapes]
        for name, buffer in captured.batch.tensors().items():
            buffer.copy_(batch.tensors()[name])
        captured.graph.replay()
        # The caller copies it to the host before the next replay overwrites it.
        return captured.actions_BTA

    def _capture(self, batch: TensorFields) -> _Captured:
        static = replace(batch, **{name: tensor.clone() for name, tensor in batch.tensors().items()})
        # Warm-up on a side stream: libraries allocate workspaces and choose algorithms in their first calls.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_CALLS):
                self._sample(static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actions_BTA = self._sample(static)
        return _Captured(graph, static, actions_BTA)
