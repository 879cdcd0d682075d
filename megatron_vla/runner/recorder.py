"""Recording a step for replay. CUDA graphs here; what the runner needs of a recorder is small, so that others can stand in."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch

from megatron_vla.training.metrics import StepMetrics


class Recording(Protocol):
    """A recorded step. `result`: its outputs, at fixed addresses; valid (in stream order) after a replay."""

    result: StepMetrics

    def replay(self) -> None:
        """Run the recorded device work again, and none of the Python code."""

    def release(self) -> None:
        """Forget the work and free its memory; it cannot be replayed any more."""


class Recorder(Protocol):
    """Records steps. All recordings share one pool of memory, so only one may run at a time."""

    def make_room(self) -> None:
        """Give memory that eager steps have cached back to the device, where the pool can get it."""

    def record(self, work: Callable[[], StepMetrics]) -> Recording:
        """Run `work` on the host once, noting its device work without executing any."""

    def temporary_memory(self) -> AbstractContextManager[None]:
        """Eager work inside takes its memory from the recordings' pool: what it allocates must be gone before a replay."""

    def kept_bytes(self) -> int:
        """Memory in the pool that live tensors hold (outputs of recordings, and what eager work inside has left there)."""

    def pool_bytes(self) -> int:
        """Device memory that the pool occupies."""

    def release(self) -> None:
        """Give the pool back; all recordings have been released."""


class CudaRecording:
    """A captured CUDA graph. Holds on to the pool: a graph must not outlive its memory."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: StepMetrics, pool: torch.cuda.MemPool):
        self._graph = graph
        self.result = result
        self._pool: torch.cuda.MemPool | None = pool

    def replay(self) -> None:
        """One launch on the current stream."""
        self._graph.replay()

    def release(self) -> None:
        """Destroy the graph. NCCL's communicators cannot be destroyed before the graphs that use them."""
        torch.cuda.synchronize()  # the last replay may still be running
        self._graph.reset()
        self._pool = None


class CudaGraphRecorder:
    """Captures on the training stream itself, where gradient accumulators were made and eager steps run.

    On a stream of its own, a capture would fork from it to the accumulators' stream and back for every parameter, and could not
    reuse a gradient's memory before its end.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.current_stream(device)
        if self._stream == torch.cuda.default_stream(device):
            raise RuntimeError("the default stream cannot be captured: call prepare_device before the model is built")
        self._pool = torch.cuda.MemPool()

    def make_room(self) -> None:
        """Collects garbage first: an autograd graph in a cycle holds a whole step's activations."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()

    def record(self, work: Callable[[], StepMetrics]) -> CudaRecording:
        """Capture `work`."""
        graph = torch.cuda.CUDAGraph()
        self.make_room()
        # A collection in the middle could run finalizers that CUDA forbids during a capture.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            # thread_local: loader threads pin memory and NCCL's watchdog asks for events meanwhile; both is harmless.
            pool = cast(Any, self._pool.id)
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                result = work()
        finally:
            if was_enabled:
                gc.enable()
        return CudaRecording(graph, result, self._pool)

    def temporary_memory(self) -> AbstractContextManager[None]:
        """Routes this thread's allocations; backward must run in this thread too (the runner sees to it)."""
        return cast(AbstractContextManager[None], torch.cuda.use_mem_pool(self._pool, self._device))

    def kept_bytes(self) -> int:
        """Looks through the pool's blocks (milliseconds). Frees that wait for other streams do not count."""
        blocks = [block for segment in self._pool.snapshot() for block in segment["blocks"]]
        return sum(block["size"] for block in blocks if block["state"] == "active_allocated")

    def pool_bytes(self) -> int:
        """Sum of the pool's segments."""
        return sum(segment["total_size"] for segment in self._pool.snapshot())

    def release(self) -> None:
        """A later recording would start with an empty pool."""
        self._pool = torch.cuda.MemPool()
        gc.collect()
        torch.cuda.empty_cache()
