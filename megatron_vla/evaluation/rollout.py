"""Runs a fixed list of trials on several simulator processes, asking the policy for whatever simulators wait at the moment.

Every trial is listed before the first begins and each one is finished: stopping after the first N that end would favour short,
successful ones. A process that dies, hangs or raises is replaced and its trials run again; a trial that fails so more than
MAX_ATTEMPTS times is reported as an error, never as a failure of the policy.

Shape legend: E environments of a worker, T action horizon, K executed actions, A action.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, Protocol

import numpy as np

from megatron_vla.evaluation.environments.interface import (
    ENVIRONMENTS,
    EnvironmentBackend,
    EnvironmentSettings,
    Observation,
    TaskSpec,
    Trial,
)
from megatron_vla.evaluation.worker import Advance, Reset, Worker, WorkerError, WorkerReport

MAX_ATTEMPTS = 3


@dataclass(frozen=True)
class ActRequest:
    """One slot waits for actions: `chunk` predictions have been made in this trial before."""

    trial: Trial
    observation: Observation
    chunk: int


class Actor(Protocol):
    """Who acts. `None` from `act` lets the simulator's scripted expert act."""

    def __call__(self, requests: Sequence[ActRequest]) -> list[np.ndarray] | None:
        """Physical action chunks [T, A], one per request."""
        ...


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """How trials are run, without influence on their outcome (but for `replan_interval`)."""

    replan_interval: int
    num_workers: int = 2
    environments_per_worker: int = 1
    step_timeout_seconds: float = 300.0
    film_stride: int = 4
    gl: str | None = None


@dataclass
class TrialResult:
    """One finished trial, JSON-ready but for `film`."""

    task: str
    index: int
    seed: int
    initial_state: int | None
    succeeded: bool
    num_steps: int
    seconds: float
    attempts: int = 1
    error: str | None = None
    video: str | None = None
    film: list[np.ndarray] = field(default_factory=list, repr=False)

    @property
    def key(self) -> str:
        """As Trial.key."""
        return f"{self.task}/{self.index}"


@dataclass
class RolloutTimes:
    """Where the wall time went: in the policy, and (summed over the workers) in the simulators."""

    wall_seconds: float = 0.0
    policy_seconds: float = 0.0
    simulator_seconds: float = 0.0
    num_steps: int = 0
    num_calls: int = 0
    replaced_workers: int = 0


@dataclass
class _Slot:
    """A simulator's place: the trial that runs in it."""

    trial: Trial | None = None
    attempts: int = 0
    observation: Observation | None = None
    num_steps: int = 0
    chunk: int = 0
    started: float = 0.0
    is_filmed: bool = False
    film: list[np.ndarray] = field(default_factory=list)


class TrialQueue:
    """Trials that wait. A simulator keeps its task while there are trials of it, since changing the task is slow."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._by_task: dict[str, deque[tuple[Trial, int]]] = {}
        for trial in trials:
            self._by_task.setdefault(trial.task, deque()).append((trial, 1))

    def __len__(self) -> int:
        return sum(map(len, self._by_task.values()))

    def take(self, task: str | None) -> tuple[Trial, int] | None:
        """Next (trial, attempt): of `task` if there is one, else of the task with most trials left; None when all are taken."""
        if task is None or not self._by_task.get(task):
            waiting = {name: len(queue) for name, queue in self._by_task.items() if queue}
            if not waiting:
                return None
            task = max(waiting, key=lambda name: waiting[name])
        return self._by_task[task].popleft()

    def put_back(self, trial: Trial, attempt: int) -> None:
        """A trial that has to run again."""
        self._by_task[trial.task].appendleft((trial, attempt))


class Rollout:
    """One evaluation in progress; `run` yields results as trials finish."""

    def __init__(
        self,
        backend: EnvironmentBackend,
        environment: EnvironmentSettings,
        tasks: Sequence[TaskSpec],
        settings: RolloutSettings,
        act: Actor,
        is_filmed: Callable[[Trial], bool] = lambda trial: False,
    ) -> None:
        self.backend, self.environment, self.settings = backend, environment, settings
        self.max_steps = {task.name: task.max_steps for task in tasks}
        self.act, self.is_filmed = act, is_filmed
        self.times = RolloutTimes()
        self._workers: dict[Worker, list[_Slot]] = {}
        self._finished: deque[TrialResult] = deque()

    def run(self, trials: Sequence[Trial]) -> Iterator[TrialResult]:
        """Run all of them. Raises SimulatorError when the simulator cannot be made at all."""
        started = time.perf_counter()
        self._queue = TrialQueue(trials)
        per_worker = self.settings.environments_per_worker
        try:
            for _ in range(min(self.settings.num_workers, -(-len(trials) // per_worker))):
                self._start_worker()
            while self._workers:
                acting = []
                for worker in self._ready():
                    slots = self._workers[worker]
                    if self._received(worker, slots) and not self._refill(worker, slots):
                        acting.append(worker)
                self._advance(acting)
                while self._finished:
                    yield self._finished.popleft()
        finally:
            for worker in self._workers:
                worker.stop(now=True)
            self._workers.clear()
            self.times.wall_seconds += time.perf_counter() - started

    def _start_worker(self) -> None:
        count = self.settings.environments_per_worker
        worker = Worker(ENVIRONMENTS[self.backend.name], self.environment, count, self.settings.gl)
        self._workers[worker] = [_Slot() for _ in range(count)]
        self._refill(worker, self._workers[worker])

    def _ready(self) -> list[Worker]:
        """Workers with an answer; replaces those that are silent for too long."""
        by_connection: dict[Any, Worker] = {worker.connection: worker for worker in self._workers}
        patience = max(0.0, min(worker.deadline for worker in self._workers) - time.monotonic())
        ready = [by_connection[connection] for connection in wait(list(by_connection), timeout=min(patience, 60.0))]
        now = time.monotonic()
        for worker in [w for w in self._workers if w not in ready and w.deadline < now]:
            self._replace(worker, f"no answer within {self.settings.step_timeout_seconds:g} s")
        return ready

    def _received(self, worker: Worker, slots: list[_Slot]) -> bool:
        """Take a worker's answer into its slots; False when the worker had to be replaced."""
        try:
            report = worker.receive()
        except WorkerError as failure:
            self._replace(worker, str(failure))
            return False
        self.times.simulator_seconds += report.seconds
        self._take(slots, report)
        return True

    def _take(self, slots: list[_Slot], report: WorkerReport) -> None:
        for slot, part in zip(slots, report.slots, strict=True):
            if part is None or slot.trial is None:
                continue
            slot.observation = part.observation
            slot.num_steps += part.num_steps
            slot.film += part.film
            self.times.num_steps += part.num_steps
            if part.succeeded or part.ended or slot.num_steps >= self.max_steps[slot.trial.task]:
                self._finish(slot, part.succeeded)

    def _finish(self, slot: _Slot, succeeded: bool, error: str | None = None) -> None:
        assert slot.trial is not None
        trial = slot.trial
        result = TrialResult(
            task=trial.task,
            index=trial.index,
            seed=trial.seed,
            initial_state=trial.initial_state,
            succeeded=succeeded,
            num_steps=slot.num_steps,
            seconds=time.perf_counter() - slot.started,
            attempts=slot.attempts,
            error=error,
            film=slot.film,
        )
        self._finished.append(result)
        slot.trial = None

    def _refill(self, worker: Worker, slots: list[_Slot]) -> bool:
        """Give free slots their next trials; True when the worker is busy with that, or has nothing left to do."""
        trials: list[Trial | None] = [None] * len(slots)
        task = next((slot.trial.task for slot in slots if slot.trial is not None), worker.last_task)
        for number, slot in enumerate(slots):
            if slot.trial is None and (taken := self._queue.take(task)) is not None:
                trial, attempt = taken
                trials[number] = trial
                task = trial.task
                film = self.is_filmed(trial)
                slots[number] = _Slot(trial, attempt, started=time.perf_counter(), is_filmed=film)
        worker.last_task = task
        if any(trial is not None for trial in trials):
            film_E = [slot.is_filmed and trial is not None for slot, trial in zip(slots, trials, strict=True)]
            self._send(worker, Reset(trials, film_E))
            return True
        if all(slot.trial is None for slot in slots):
            worker.stop()
            del self._workers[worker]
            return True
        return False

    def _advance(self, workers: Sequence[Worker]) -> None:
        """One call of the policy for all slots that wait, then a chunk to each of their workers."""
        waiting = [(worker, slot) for worker in workers for slot in self._workers[worker] if slot.trial is not None]
        if not waiting:
            return
        requests = [ActRequest(slot.trial, slot.observation, slot.chunk) for _, slot in waiting]  # type: ignore[arg-type]
        started = time.perf_counter()
        chunks = self.act(requests)
        self.times.policy_seconds += time.perf_counter() - started
        self.times.num_calls += 1
        chunk_of = {} if chunks is None else {id(slot): chunk for (_, slot), chunk in zip(waiting, chunks, strict=True)}
        for worker in workers:
            self._send(worker, self._command(self._workers[worker], chunk_of))

    def _command(self, slots: Sequence[_Slot], chunk_of: dict[int, np.ndarray]) -> Advance:
        """The chunk of one worker's slots, padded with zeros where a slot is empty."""
        steps = self.settings.replan_interval
        limit_E = np.array([
            0 if slot.trial is None else min(steps, self.max_steps[slot.trial.task] - slot.num_steps) for slot in slots
        ])  # fmt: skip
        actions_EKA = None
        if chunk_of:
            width = next(iter(chunk_of.values())).shape[1]
            empty_KA = np.zeros((steps, width), np.float32)
            actions_EKA = np.stack([chunk_of[id(slot)][:steps] if id(slot) in chunk_of else empty_KA for slot in slots])
        for slot in slots:
            slot.chunk += 1
        return Advance(actions_EKA, limit_E, [slot.is_filmed for slot in slots], self.settings.film_stride)

    def _send(self, worker: Worker, command: Reset | Advance) -> None:
        try:
            worker.send(command, self.settings.step_timeout_seconds)
        except WorkerError as failure:
            self._replace(worker, str(failure))

    def _replace(self, worker: Worker, reason: str) -> None:
        """Stop a worker; its trials go back to the queue, or end as errors."""
        slots = self._workers.pop(worker)
        worker.stop(now=True)
        self.times.replaced_workers += 1
        for slot in slots:
            if slot.trial is None:
                continue
            if slot.attempts < MAX_ATTEMPTS:
                self._queue.put_back(slot.trial, slot.attempts + 1)
            else:
                slot.film = []
                self._finish(slot, False, error=reason)
        if len(self._queue):
            self._start_worker()
