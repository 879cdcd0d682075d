"""How many of the host's cores were busy while something was measured, with the work of other processes: eager steps wait for
the host, so that a figure taken beside other work says little about the GPU.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

STAT = Path("/proc/stat")


class HostLoad:
    """Mean number of busy cores from `with` to the end of the block in `figures`; empty where /proc/stat cannot be read."""

    def __init__(self, stat: Path = STAT):
        self.figures: dict[str, Any] = {}
        self._stat = stat

    def __enter__(self) -> HostLoad:
        self._before, self._began = busy_seconds(self._stat), time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        after, seconds = busy_seconds(self._stat), time.monotonic() - self._began
        if self._before is not None and after is not None and seconds > 0:
            self.figures = {
                "host_busy_cores": round((after - self._before) / seconds, 1),
                "host_cores": os.cpu_count(),
            }


def busy_seconds(stat: Path) -> float | None:
    """Seconds that all cores together have worked since the host started: all but idle and waiting for disks (proc(5))."""
    try:
        with stat.open() as lines:
            name, *ticks = lines.readline().split()
        user, nice, system, _, _, interrupts, soft_interrupts, stolen = map(int, ticks[:8])
    except (OSError, ValueError):
        return None
    if name != "cpu":
        return None
    return (user + nice + system + interrupts + soft_interrupts + stolen) / os.sysconf("SC_CLK_TCK")
