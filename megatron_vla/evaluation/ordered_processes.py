"""Results of jobs in the order of the jobs, from processes that are replaced when they die, raise or hang.

`work(job, done)` gives the results of a job one by one, from number `done` on, and None between them as a sign of life. A job
whose process is lost goes on in a new one after the results that have arrived, so where a result depends on its job and number
alone, nothing shows that a process was lost.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, Literal, TypeVar

from megatron_vla.evaluation.child_process import GOODBYE_SECONDS, ChildProcess, tell

J = TypeVar("J")
R = TypeVar("R")

MAX_FAILURES = 3
# Jobs in work or finished for each process: results wait in memory for their turn.
JOBS_PER_PROCESS = 2
LONGEST_WAIT_SECONDS = 60.0

Kind = Literal["result", "done", "refused", "raised"]


def exit_with_parent() -> None:
    """Run in each process: a parent that was killed must not leave simulators at work or waiting for ever."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _serve(connection: Connection, work: Callable[[Any, int], Iterator[Any]]) -> None:
    """Body of the process."""
    exit_with_parent()
    try:
        while (command := connection.recv()) is not None:
            for result in work(*command):
                connection.send(("result", result))
            connection.send(("done", None))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        pass  # nobody waits for it any more
    except ValueError as problem:
        tell(connection, ("refused", problem))
    except Exception:
        tell(connection, ("raised", traceback.format_exc()))


@dataclass(eq=False)
class _Progress(Generic[J, R]):
    """A job of the window. results: not handed over yet; done: all that have arrived; signs: signs of life since the last."""

    job: J
    results: deque[R] = field(default_factory=deque)
    done: int = 0
    signs: int = 0
    failures: int = 0
    is_taken: bool = False
    is_finished: bool = False


class _Process(ChildProcess, Generic[J, R]):
    """One process as the parent sees it, and the job that it has."""

    def __init__(self, work: Callable[[J, int], Iterator[R | None]]) -> None:
        super().__init__(_serve, work)
        self.progress: _Progress[J, R] | None = None

    def take(self, progress: _Progress[J, R], timeout_seconds: float) -> None:
        """Begin, or go on with, a job."""
        self.progress, progress.is_taken, progress.signs = progress, True, 0
        self.deadline = time.monotonic() + timeout_seconds
        # A process that is gone is noticed by `receive`.
        with contextlib.suppress(ConnectionError):
            self.connection.send((progress.job, progress.done))

    def receive(self) -> tuple[Kind, Any]:
        """What it says next; ("raised", why) when it is gone."""
        try:
            answer: tuple[Kind, Any] = self.connection.recv()
        except (EOFError, ConnectionError):
            return "raised", f"its process ended with exit status {self.exit_status(GOODBYE_SECONDS)}"
        return answer


class OrderedProcesses(Generic[J, R]):
    """num_processes processes that do `work`. One that gives no sign for `timeout_seconds` is replaced.

    described(job, done, signs): what a lost process was doing, for messages. advice: what to do when the same result fails
    MAX_FAILURES times.
    """

    def __init__(
        self,
        work: Callable[[J, int], Iterator[R | None]],
        num_processes: int,
        timeout_seconds: float,
        described: Callable[[J, int, int], str],
        advice: str,
        say: Callable[[str], None] = print,
    ) -> None:
        self.work, self.num_processes, self.timeout_seconds = work, num_processes, timeout_seconds
        self.described, self.advice, self.say = described, advice, say
        self._processes: list[_Process[J, R]] = []
        self._window: deque[_Progress[J, R]] = deque()

    def results(self, jobs: Iterable[J]) -> Iterator[R]:
        """All results in order. Raises the ValueError that `work` raised, or one for a result that fails again and again; what
        the processes are doing then is not waited for."""
        waiting = iter(jobs)
        is_over = False
        try:
            while True:
                self._begin(waiting)
                if not self._window:
                    break
                first = self._window[0]
                if first.results:
                    yield first.results.popleft()
                    self._receive(0.0)
                elif first.is_finished:
                    self._window.popleft()
                else:
                    self._receive(LONGEST_WAIT_SECONDS)
            is_over = True
        finally:
            for process in self._processes:
                process.stop(now=not is_over)
            self._processes.clear()

    def _begin(self, waiting: Iterator[J]) -> None:
        """Fill the window, and give its jobs to processes that have none."""
        while len(self._window) < JOBS_PER_PROCESS * self.num_processes:
            try:
                self._window.append(_Progress(next(waiting)))
            except StopIteration:
                break
        for progress in self._window:
            if progress.is_taken:
                continue
            process = next((p for p in self._processes if p.progress is None), None)
            if process is None:
                if len(self._processes) == self.num_processes:
                    break
                process = _Process(self.work)
                self._processes.append(process)
            process.take(progress, self.timeout_seconds)

    def _receive(self, patience: float) -> None:
        """Take what the processes have sent, waiting for it for `patience` seconds at most; replace those that hang."""
        by_connection: dict[Any, _Process[J, R]] = {p.connection: p for p in self._processes if p.progress is not None}
        until = min((p.deadline for p in by_connection.values()), default=0.0) - time.monotonic()
        ready = wait(list(by_connection), timeout=max(0.0, min(patience, until)))
        for connection in ready:
            self._take(by_connection.pop(connection))  # type: ignore[call-overload]  # Pipe ends are Connections
        now = time.monotonic()
        for process in by_connection.values():
            if process.deadline < now:
                self._replace(process, f"it gave no answer within {self.timeout_seconds:g} s")

    def _take(self, process: _Process[J, R]) -> None:
        kind, what = process.receive()
        progress = process.progress
        assert progress is not None
        process.deadline = time.monotonic() + self.timeout_seconds
        if kind == "refused":
            raise what
        if kind == "raised":
            self._replace(process, what)
        elif kind == "done":
            progress.is_finished, process.progress = True, None
        elif what is None:
            progress.signs += 1
        else:
            progress.results.append(what)
            progress.done += 1
            progress.signs = progress.failures = 0

    def _replace(self, process: _Process[J, R], reason: str) -> None:
        """Its job goes on in another process, which the next `_begin` starts."""
        progress = process.progress
        assert progress is not None
        self._processes.remove(process)
        process.stop(now=True)
        progress.failures += 1
        what = self.described(progress.job, progress.done, progress.signs)
        if progress.failures == MAX_FAILURES:
            raise ValueError(f"{what}: {reason.strip()} ({MAX_FAILURES} times in a row) -> {self.advice}")
        self.say(f"{what}: {reason.strip()}; tried again in a new process")
        progress.is_taken = False
