"""The training loop: step, log, save, stop.

The host never waits for the device inside an interval: losses are read once per --log-interval, and so is the finite check.
"""

from __future__ import annotations

import functools
import operator
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_vla.config.run import RunConfig
from megatron_vla.data.batch import Batch
from megatron_vla.models.registry import ModelFamily
from megatron_vla.parallel.failure import RankWatch
from megatron_vla.parallel.groups import ParallelGroups, shorten_timeouts
from megatron_vla.runner.build import Runner
from megatron_vla.training.checkpoint import TrainState
from megatron_vla.training.checkpoint_saving import CheckpointSaver
from megatron_vla.training.evaluation_jobs import EvaluationJobs
from megatron_vla.training.logging import Position, RunLogger, WindowTiming, window_record
from megatron_vla.training.metrics import MetricWindow, peak_memory_gib
from megatron_vla.training.nonfinite import diagnose
from megatron_vla.training.run_record import record_start
from megatron_vla.training.signals import StopSignals


class TimedIterator:
    """Measures how long the loop waits for each batch, and tells the watch about the wait."""

    def __init__(self, batches: Iterator[Batch], watch: RankWatch):
        self._batches = batches
        self._watch = watch
        self.iteration = 0
        self._waits: list[float] = []

    def __iter__(self) -> TimedIterator:
        return self

    def __next__(self) -> Batch:
        start = time.perf_counter()
        self._watch.enter(f"waiting for data of iteration {self.iteration}")
        batch = next(self._batches)
        self._watch.enter(f"training iteration {self.iteration}")
        self._waits.append(time.perf_counter() - start)
        return batch

    def take_waits(self) -> list[float]:
        """Seconds of each wait since the last call."""
        waits, self._waits = self._waits, []
        return waits


@dataclass
class TrainingRun:
    """Everything that the loop works on. `supply` is the DataSupply of data/build.py."""

    config: RunConfig
    family: ModelFamily
    groups: ParallelGroups
    supply: Any
    runner: Runner
    state: TrainState
    watch: RankWatch


def train(run: TrainingRun) -> EvaluationJobs | None:
    """Train until --train-iters, --exit-interval or a stop signal; saves at the end when --save is given.

    Returns the evaluations that may still be open (rank 0 with --eval-interval): wait for them after the groups are closed.

    Raises NonFiniteError (with the cause) when a loss or gradient was not finite, RuntimeError when a checkpoint cannot be
    written, and torch.OutOfMemoryError with the flags that help.
    """
    state, groups = run.state, run.groups
    logger = RunLogger(run.config, state.iteration) if groups.is_main else None
    if logger is not None and logger.folder is not None:
        record_start(logger.folder, run.config, groups, state.iteration)
    evaluations: EvaluationJobs | None = None
    try:
        with StopSignals(groups) as signals:
            loop = _Loop(run, logger, signals)
            try:
                loop.run()
            except BaseException:
                if loop.evaluations is not None:
                    loop.evaluations.stop()
                raise
            evaluations = loop.evaluations
            # A signal that came too late to end the loop means the evaluations all the same.
            if evaluations is not None and signals.received is not None:
                evaluations.stop()
        return evaluations
    except torch.OutOfMemoryError as exception:
        raise torch.OutOfMemoryError(_memory_advice(run.config, exception)) from exception
    finally:
        # Evaluations that are still open have results to write: they close it.
        if logger is not None and evaluations is None:
            logger.close()


class _Loop:
    """State of the loop that nothing else needs."""

    def __init__(self, run: TrainingRun, logger: RunLogger | None, signals: StopSignals):
        self.run_parts = run
        self.config = run.config
        self.state = run.state
        self.groups = run.groups
        self.logger = logger
        self.signals = signals
        self.global_batch_size = run.config.global_batch_size(run.groups.world_size)
        self.window = MetricWindow()
        self.window_start = time.perf_counter()
        # A resumed run that has nothing left to do must not write its own checkpoint again.
        resumed_here = run.state.iteration > 0 and run.config.checkpoint.load == run.config.checkpoint.save
        self.saved_at: int | None = run.state.iteration if resumed_here else None
        can_save = run.config.checkpoint.save is not None
        self.saver = CheckpointSaver(run.config, run.groups, run.supply) if can_save else None
        evaluates = run.config.evaluation.eval_interval is not None and can_save and run.groups.is_main
        self.evaluations = EvaluationJobs(run.config, logger) if evaluates else None

    def run(self) -> None:
        training = self.config.training
        first = self.state.iteration
        # Opened inside StopSignals: worker processes inherit handlers that leave Ctrl-C to this process.
        with closing(self._open(self.state.consumed_samples, max(0, training.train_iters - first), first)) as source:
            batches = TimedIterator(source, self.run_parts.watch)
            reason = "all iterations are done"
            while self.state.iteration < training.train_iters:
                self._step(batches)
                if self.state.iteration == first + 1:
                    shorten_timeouts(self.config.parallel, self.groups)
                iteration = self.state.iteration
                if self.saver is not None:
                    self._message(self.saver.poll())
                stop = self.signals.poll()
                if stop and self.evaluations is not None:
                    # Before the save: it ends while the checkpoint is written.
                    self.evaluations.stop()
                leave = training.exit_interval is not None and iteration % training.exit_interval == 0
                interval = self.config.checkpoint.save_interval
                save = interval is not None and iteration % interval == 0
                if self.evaluations is not None:
                    self._message(self.evaluations.poll())
                if iteration % self.config.logging.log_interval == 0 or stop or leave or save:
                    self._flush(batches)
                if save or ((stop or leave) and self.config.checkpoint.save is not None):
                    self._save()
                if stop or leave:
                    reason = "stop signal" if stop else f"--exit-interval {training.exit_interval}"
                    break
            self._flush(batches)
            self.signals.finish()
            self._finish(reason)

    def _open(self, consumed_samples: int, num_iterations: int, iteration: int) -> Any:
        """This rank's micro-batches (a generator) from a position in the order of samples, after `iteration` steps."""
        groups = self.groups
        place = (groups.data_parallel_rank, groups.data_parallel_size, num_iterations, groups.device.type == "cuda")
        return self.run_parts.supply.iterator(consumed_samples, *place, iteration)

    def _step(self, batches: TimedIterator) -> None:
        learning_rate = self.state.schedule.learning_rate(self.state.consumed_slots)
        batches.iteration = self.state.iteration + 1
        metrics = self.run_parts.runner.step(batches, learning_rate)
        self.state.iteration += 1
        if self.run_parts.supply.packing is None:
            self.state.consumed_samples += self.global_batch_size
        else:
            # Packs hold as many samples as fit: they are counted when the counts of all ranks come together.
            self.state.empty_slots += self.global_batch_size
        self.window.append(self.state.iteration, learning_rate, metrics)
        self._message(self.run_parts.runner.poll())
        if self.logger is not None:
            self.logger.live(f"iteration {self.state.iteration}/{self.config.training.train_iters}")

    def _flush(self, batches: TimedIterator) -> None:
        """Read the window's numbers (the only host-device synchronisation), check them, write them."""
        count = len(self.window)
        if not count:
            return
        records = self.window.read()
        seconds = time.perf_counter() - self.window_start
        bad = next((r for r in records if not r.is_finite), None)
        if bad is not None and self.config.training.check_for_nan_in_loss_and_grad:
            start = self.state.consumed_samples - (self.state.iteration - bad.iteration + 1) * self.global_batch_size
            # The pass that looks for the cause needs the memory, and nothing is replayed any more.
            self.run_parts.runner.release()
            with closing(self._open(start, 1, bad.iteration - 1)) as again:
                forward_step = self.run_parts.family.forward_step
                raise diagnose(self.run_parts.runner.schedule, forward_step, self.groups, again, bad.iteration, bad.loss)
        timing = self._timing(batches.take_waits(), seconds, count)
        if self.logger is not None:
            position = Position(
                consumed_samples=self.state.consumed_samples,
                epoch=self.state.consumed_samples / max(1, self.run_parts.supply.num_samples),
                remaining_iters=self.config.training.train_iters - self.state.iteration,
            )
            self.logger.window(window_record(records, timing, position))
        self.window_start = time.perf_counter()

    def _timing(self, waits: list[float], seconds: float, count: int) -> WindowTiming:
        """Worst rank's data wait (with its stages) and memory: one slow loader holds everybody up."""
        gathered: list[Any] = [None] * self.groups.world_size
        packs = self.run_parts.supply.pack_window(self.state.iteration - count + 1, self.state.iteration)
        mine = (waits, peak_memory_gib(self.groups.device), self.run_parts.supply.metrics(), packs)
        dist.all_gather_object(gathered, mine, group=self.groups.host_group)
        totals = [sum(rank_waits) for rank_waits, *_ in gathered]
        worst = totals.index(max(totals))
        quantiles = [np.quantile(rank_waits or [0.0], [0.5, 0.99]) * 1e3 for rank_waits, *_ in gathered]
        samples, data = count * self.global_batch_size, gathered[worst][2]
        if packs is not None:
            whole = functools.reduce(operator.add, [rank_packs for *_, rank_packs in gathered])
            samples, data = whole.samples, {**data, **whole.metrics()}
            self.state.consumed_samples += samples
            self.state.empty_slots -= samples
        return WindowTiming(
            seconds=seconds,
            data_wait_seconds=totals[worst],
            data_wait_rank=worst,
            peak_memory_gib=max(peak for _, peak, *_ in gathered),
            samples=samples,
            data_wait_p50_ms=tuple(float(p50) for p50, _ in quantiles),
            data_wait_p99_ms=tuple(float(p99) for _, p99 in quantiles),
            data={**data, **self.run_parts.runner.counters()},
        )

    def _message(self, lines: list[str]) -> None:
        if self.logger is not None:
            for line in lines:
                self.logger.message(line)

    def _save(self) -> None:
        if self.saver is None or self.saved_at == self.state.iteration:
            return
        self.run_parts.watch.enter(f"saving the checkpoint of iteration {self.state.iteration}")
        # With overlapped gathers the model's weights are those of the last forward pass until somebody asks.
        self.run_parts.runner.model.gather_parameters()
        if self.evaluations is not None:
            # Before the save: it deletes old checkpoints, but none that is marked.
            self.evaluations.add(self.state.iteration)
        self._message(self.saver.save(self.state))
        self.saved_at = self.state.iteration
        if self.logger is not None:
            self.logger.draw_curve()
        # A save is not part of the next window's step time.
        self.window_start = time.perf_counter()

    def _finish(self, reason: str) -> None:
        """Last checkpoint, curve, and the line that says how to go on."""
        self._save()
        if self.saver is not None:
            self._message(self.saver.finish())
        self._message(self.run_parts.runner.summary())
        if self.evaluations is not None:
            self._message(self.evaluations.poll())
        if self.logger is None:
            return
        curve = self.logger.draw_curve()
        if curve is not None:
            self.logger.message(f"metrics and loss curve: {curve.parent}")
        done = f"finished at iteration {self.state.iteration} ({reason})"
        if self.config.checkpoint.save is None:
            self.logger.message(f"{done}; nothing was saved (no --save)")
            return
        self.logger.message(f"{done}; checkpoint: {self.config.checkpoint.save}")
        all_done = self.state.iteration >= self.config.training.train_iters
        self.logger.message(f"to go on: {resume_command(self.config, self.groups.world_size, all_done)}")


def resume_command(config: RunConfig, world_size: int, all_done: bool) -> str:
    """The command line that continues this run; twice as long when it is `all_done` (the last of equal flags counts)."""
    words = list(sys.argv)
    if config.checkpoint.load != config.checkpoint.save:
        words += ["--load", str(config.checkpoint.save)]
    if all_done:
        words += ["--train-iters", str(2 * config.training.train_iters)]
    launcher = ["torchrun", f"--nproc-per-node={world_size}"] if world_size > 1 else [Path(sys.executable).name]
    return shlex.join([*launcher, *words])


def _memory_advice(config: RunConfig, exception: BaseException) -> str:
    """What to change when memory runs out, in the order of how little it costs."""
    micro = config.training.micro_batch_size
    advice = []
    if not config.optimization.activation_checkpoint_module_patterns:
        advice.append("recompute activations with --activation-checkpoint-module-patterns")
    if micro > 1:
        advice.append(f"lower --micro-batch-size {micro} (keep --global-batch-size: the rest is accumulated)")
    if not config.model.bf16:
        advice.append("compute in --bf16")
    return f"{exception}\nout of memory: {'; '.join(advice) or 'use more GPUs or a smaller model'}"
