"""Worker processes that are started once per test module and run many training cases: imports cost more than the cases."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import multiprocessing
import os
import socket
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from megatron_vla.parallel.groups import shut_down

# Twenty times what the longest case takes on a quiet machine.
CASE_TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Outcome:
    """What one rank returned: the case's value, what it printed, and its traceback if it failed."""

    value: Any
    printed: str
    failure: str | None


def free_port() -> int:
    """A TCP port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(rank: int, world_size: int, connection: Any, module: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1")
    while True:
        request = connection.recv()
        if request is None:
            return
        port, case, arguments = request
        os.environ["MASTER_PORT"] = str(port)
        printed = io.StringIO()
        value, failure = None, None
        try:
            with contextlib.redirect_stdout(printed):
                value = getattr(importlib.import_module(module), case)(rank, *arguments)
        except BaseException:
            failure = traceback.format_exc()
            with contextlib.suppress(Exception):
                shut_down()  # so that the next case can start
        connection.send(Outcome(value, printed.getvalue(), failure))
        # Hooks tie models and process groups into cycles, and every group that lives on keeps its threads and sockets.
        del value
        gc.collect()


class WorkerPool:
    """`world_size` processes; `run` gives one case to all of them and collects the outcomes in rank order.

    Cases are functions of the module `cases`, called with the rank first.
    """

    def __init__(self, world_size: int, cases: str = "training_cases"):
        context = multiprocessing.get_context("spawn")
        self._connections = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            # Not daemons: those may not start data-loading workers.
            process = context.Process(target=_serve, args=(rank, world_size, theirs, cases))
            process.start()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, case: str, *arguments: Any) -> list[Outcome]:
        """Outcomes of all ranks; fails the test with the traceback when a rank failed or did not answer."""
        port = free_port()
        for connection in self._connections:
            connection.send((port, case, arguments))
        outcomes = []
        for rank, connection in enumerate(self._connections):
            assert connection.poll(CASE_TIMEOUT_SECONDS), f"rank {rank} did not answer"
            outcomes.append(connection.recv())
        failures = [o.failure for o in outcomes if o.failure]
        assert not failures, failures[0]
        return outcomes

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()


def pool_fixture(world_size: int, cases: str = "training_cases") -> Any:
    """A fixture of a test module: `pool = pool_fixture(2)`; its processes live as long as the module's tests."""

    @pytest.fixture(scope="module")
    def pool() -> Iterator[WorkerPool]:
        workers = WorkerPool(world_size, cases)
        yield workers
        workers.close()

    return pool
