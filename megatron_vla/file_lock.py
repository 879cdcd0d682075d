"""A folder that one process at a time works in."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_FILE = ".lock"


@contextmanager
def alone_in(folder: Path, work: str) -> Iterator[None]:
    """Hold `folder` (made if missing); the kernel lets go of it when the process ends, however it ends.

    Raises ValueError, with `work` in its message ("conversion"), while another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK_FILE, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            raise ValueError(
                f"{folder}: another {work} is at work here -> wait for it or stop it, or give another --output"
            ) from problem
        yield
