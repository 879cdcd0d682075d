"""A process of its own for simulators, at the other end of a pipe."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

GOODBYE_SECONDS = 10.0


def tell(connection: Connection, what: object) -> None:
    """Send `what`. Nobody may be there any more."""
    with contextlib.suppress(ConnectionError):
        connection.send(what)


class ChildProcess:
    """Runs target(connection, *arguments). connection: its pipe; deadline: when it should have answered, by time.monotonic."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = get_context("spawn")  # a GL context does not survive a fork
        self.connection, theirs = context.Pipe()
        self.deadline = float("inf")
        self.process: Any = context.Process(target=target, args=(theirs, *arguments), daemon=True, name="simulator")
        self.process.start()
        theirs.close()

    def exit_status(self, seconds: float) -> int | None:
        """Of a process that has closed its pipe; None where it has not ended after `seconds`."""
        self.process.join(seconds)
        status: int | None = self.process.exitcode
        return status

    def stop(self, now: bool = False) -> None:
        """End the process; `now` does not wait for what it is doing."""
        if not now:
            with contextlib.suppress(ConnectionError):  # it has ended by itself
                self.connection.send(None)
                self.process.join(GOODBYE_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(GOODBYE_SECONDS)
        self.connection.close()
