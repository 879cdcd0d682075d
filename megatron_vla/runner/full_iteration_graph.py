"""A whole optimizer step as one CUDA graph: zero gradients, all micro-batches, reductions, clip, AdamW, EMA, publication.

The sequence of updates is that of the eager runner. The first steps are run eagerly, as training steps. Then, for every new
shape of a step's batch (contract.py): one forward and backward whose gradients are thrown away, so that kernels are chosen,
loaded and compiled; the capture, which executes nothing; the replay, which is the step. Outside the graph remain the batch
copy (static_buffers.py), learning rate and step count (AdamW.advance fills device scalars), and a copy of the metrics.

Beyond --cuda-graph-max-buckets shapes, steps run eagerly, on all ranks together (agreement.py).

Memory: one pool for all graphs. Their temporaries overlap, since only one of them runs at a time, and eager work between
replays borrows the same pool: a run needs what its largest eager step needs, not twice that, plus the static batches (gradient
buffers, optimizer state and average are persistent anyway). What eager work leaves in the pool would be overwritten by the
next replay: that is looked for, and graphs that were captured before are then captured again.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from megatron_vla.data.batch import Batch
from megatron_vla.kernels.tensor_table import tables_of_capture
from megatron_vla.parallel.data_parallel import DataParallelModel
from megatron_vla.parallel.pipeline import Schedule
from megatron_vla.runner.agreement import RankAgreement, Readiness
from megatron_vla.runner.contract import GraphContract, contract_of
from megatron_vla.runner.eager import EagerRunner
from megatron_vla.runner.recorder import Recorder, Recording
from megatron_vla.runner.static_buffers import StaticBuffers
from megatron_vla.training.metrics import StepMetrics

Result = TypeVar("Result")


@dataclass
class RunnerCounts:
    """What has happened since the start."""

    warmup_steps: int = 0
    replays: int = 0
    eager_steps: int = 0
    captures: int = 0
    discarded: int = 0
    capture_seconds: float = 0.0


@dataclass
class _Captured:
    """One graph and the batch that it reads."""

    buffers: StaticBuffers
    recording: Recording


@dataclass
class _Table:
    """Contracts that may have a graph, in the order of admission and equal on all ranks; and the graphs that exist here."""

    limit: int
    admitted: list[GraphContract] = field(default_factory=list)
    graphs: dict[GraphContract, _Captured] = field(default_factory=dict)

    def readiness(self, contract: GraphContract) -> Readiness:
        if contract in self.graphs:
            return Readiness.REPLAY
        return Readiness.CAPTURE if contract in self.admitted or len(self.admitted) < self.limit else Readiness.EAGER

    def admit(self, contract: GraphContract) -> bool:
        """Whether `contract` may have a graph from now on."""
        if contract not in self.admitted and len(self.admitted) < self.limit:
            self.admitted.append(contract)
        return contract in self.admitted


class FullIterationGraphRunner:
    """Runs one optimizer step per call: one graph launch, where the batch's shape has a graph.

    eager: the runner whose steps are captured; it runs the others. num_warmup_steps: first steps, run eagerly. max_buckets:
    graphs. The recorder decides what capturing means.
    """

    def __init__(self, eager: EagerRunner, recorder: Recorder, *, num_warmup_steps: int, max_buckets: int):
        self.eager = eager
        self.recorder = recorder
        self.num_warmup_steps = num_warmup_steps
        self.counts = RunnerCounts()
        self._agreement = RankAgreement(eager.groups)
        self._table = _Table(max_buckets)
        self._kept_bytes = 0
        self._lines: list[str] = []

    @property
    def model(self) -> DataParallelModel:
        """The wrapped model."""
        return self.eager.model

    @property
    def schedule(self) -> Schedule:
        """Forward and backward without a graph, for readers of single batches."""
        return self.eager.schedule

    def step(self, batches: Iterator[Batch], learning_rate: float) -> StepMetrics:
        """One optimizer step on the next `num_microbatches` host batches; returns device tensors that stay as they are."""
        micro_batches = list(itertools.islice(batches, self.eager.num_microbatches))
        if len(micro_batches) < self.eager.num_microbatches:
            raise ValueError(
                f"the data ended after {len(micro_batches)} of {self.eager.num_microbatches} micro-batches of a step"
            )
        # Backward in this thread: memory from the graphs' pool is handed out by thread, and so are capture errors.
        with torch.autograd.set_multithreading_enabled(False):
            if self.counts.warmup_steps < self.num_warmup_steps:
                self.counts.warmup_steps += 1
                return self.eager.step(iter(micro_batches), learning_rate)
            contract = contract_of(micro_batches)
            if self._make_ready(contract, micro_batches):
                return self._replay(self._table.graphs[contract], micro_batches, learning_rate)
            return self._step_eagerly(contract, micro_batches, learning_rate)

    def _replay(self, captured: _Captured, micro_batches: list[Batch], learning_rate: float) -> StepMetrics:
        captured.buffers.fill(micro_batches)
        self.eager.optimizer.advance(learning_rate)
        captured.recording.replay()
        self.model.after_replay()
        self.counts.replays += 1
        # The next replay of the same graph writes to the same places.
        return captured.recording.result.copied()

    def _make_ready(self, contract: GraphContract, micro_batches: list[Batch]) -> bool:
        """Capture what is missing on any rank; whether all ranks have a graph for their batch now."""
        mine = self._table.readiness(contract)
        lowest = self._agreement.lowest(mine)
        if lowest != Readiness.CAPTURE:
            return lowest == Readiness.REPLAY
        all_ready = True
        for wanted, owner in self._agreement.wanted(contract if mine == Readiness.CAPTURE else None):
            if self._table.admit(wanted):
                # All ranks capture together, so that the collectives inside meet each other.
                self._capture(wanted, self._agreement.example(micro_batches, owner))
            else:
                all_ready = False
        # Graphs that this rank discarded while it captured others are made when their batch comes again.
        return self._agreement.lowest(self._table.readiness(contract)) == Readiness.REPLAY and all_ready

    def _capture(self, contract: GraphContract, example: list[Batch]) -> None:
        """Record a graph for `contract`. Parameters, moments, average and step count stay as they are."""
        start = time.perf_counter()
        if contract in self._table.graphs:
            self._table.graphs.pop(contract).recording.release()
        buffers = StaticBuffers(example, self.eager.groups.device)
        buffers.fill(example)
        self.recorder.make_room()
        # Gradients of this pass are dropped, and neither optimizer nor average sees them.
        self._in_pool(lambda: self.eager.accumulate(iter(buffers.batches)))
        self._end_pool_work()
        with tables_of_capture(self.eager.groups.device):
            recording = self.recorder.record(lambda: self.eager.iterate(iter(buffers.batches)))
        self.model.after_replay()
        self._table.graphs[contract] = _Captured(buffers, recording)
        self.counts.captures += 1
        seconds = time.perf_counter() - start
        self.counts.capture_seconds += seconds
        first = self._table.admitted[0]
        what = str(contract) if contract == first else f"as the first one, but {'; '.join(first.differences(contract))}"
        self._lines.append(
            f"captured graph {self._table.admitted.index(contract) + 1} (at most {self._table.limit}) in {seconds:.1f} s, "
            f"pool {self.recorder.pool_bytes() / 2**30:.2f} GiB: {what}"
        )

    def _step_eagerly(self, contract: GraphContract, micro_batches: list[Batch], learning_rate: float) -> StepMetrics:
        """A training step outside of all graphs."""
        if not self.counts.eager_steps:
            self._lines.append(
                f"a step runs eagerly: {self._table.limit} graphs are in use (--cuda-graph-max-buckets) and the shape of this "
                f"rank's batch, or another's, is none of theirs: {contract}; {_FEWER_SHAPES}"
            )
        self.counts.eager_steps += 1
        self.eager.optimizer.advance(learning_rate)
        totals = self._in_pool(lambda: self.eager.accumulate(iter(micro_batches)))
        # Outside the pool: the optimizer may keep tensors (tables of addresses) from step to step.
        metrics = self.eager.update(totals).copied()
        del totals
        self._end_pool_work()
        return metrics

    def _in_pool(self, work: Callable[[], Result]) -> Result:
        """Eager work that takes its memory from the graphs' pool."""
        self.model.zero_gradients()  # what the last step, or capture, has left there
        self._kept_bytes = self.recorder.kept_bytes()
        with self.recorder.temporary_memory():
            return work()

    def _end_pool_work(self) -> None:
        """Drop gradients; discard all graphs if the work has left something where they write."""
        self.model.zero_gradients()
        left = self.recorder.kept_bytes() - self._kept_bytes
        if left <= 0 or not self._table.graphs:
            return
        gc.collect()  # cycles that nobody can reach are no reason
        left = self.recorder.kept_bytes() - self._kept_bytes
        if left <= 0:
            return
        self._lines.append(
            f"{len(self._table.graphs)} graph(s) discarded, to be captured again: the model has kept {left} bytes from an "
            "eager pass, in memory that they write to"
        )
        self.counts.discarded += len(self._table.graphs)
        self._discard()

    def _discard(self) -> None:
        for captured in self._table.graphs.values():
            captured.recording.release()
        self._table.graphs.clear()

    def poll(self) -> list[str]:
        """See `Runner`."""
        lines, self._lines = self._lines, []
        return lines

    def counters(self) -> dict[str, float]:
        """See `Runner`."""
        counts = self.counts
        return {
            "graph_replays": counts.replays,
            "graph_captures": counts.captures,
            "graph_capture_seconds": round(counts.capture_seconds, 3),
            "graph_eager_steps": counts.eager_steps,
        }

    def summary(self) -> list[str]:
        """See `Runner`."""
        counts = self.counts
        line = (
            f"runner: full_iteration_graph, {len(self._table.graphs)} graph(s), {counts.captures} capture(s) in "
            f"{counts.capture_seconds:.1f} s, {counts.replays} replays, {counts.warmup_steps} warm-up steps, "
            f"{counts.eager_steps} eager steps of other shapes"
        )
        if counts.discarded:
            line += f", {counts.discarded} graph(s) discarded"
        return [line, *([f"hint: {_FEWER_SHAPES}"] if counts.eager_steps else [])]

    def release(self) -> None:
        """See `Runner`. A later step would capture again."""
        if self._table.graphs:
            self.model.zero_gradients()
        self._discard()
        self.recorder.release()


_FEWER_SHAPES = "raise --cuda-graph-max-buckets, or make fewer shapes (--prompt-padding max with a smaller --max-prompt-length)"
