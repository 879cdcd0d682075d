"""A folder that one process at a time works in."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_FILE = ".lock"


@contextmanager
def alone_in(folder: Path, work: str, *, wait: bool = False) -> Iterator[None]:
    """Hold `folder` (made if missing); the kernel lets go of it when the process ends, however it ends.

    Raises ValueError where it cannot be written, and, naming `work` ("conversion"), while another process holds it; with
    `wait`, for work of milliseconds, that one is waited for.
    """
    path = folder / LOCK_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as failure:
        raise ValueError(f"--output {folder}: {failure.strerror} -> name a folder that can be written") from failure
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as problem:
            raise ValueError(
                f"{folder}: another {work} is at work here -> wait for it or stop it, or give another --output"
            ) from problem
        yield


def is_held(folder: Path) -> bool:
    """Whether a process is alone in `folder` now."""
    path = folder / LOCK_FILE
    if not path.is_file():
        return False
    with path.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
