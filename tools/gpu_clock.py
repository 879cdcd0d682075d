"""Clock, power and what limits the clock while something is measured: why one GPU is slower than another of the same model.

Products of large matrices draw more than the power limit of an H100 or H200 at full clock: the clock sinks until they do not,
by another amount on every card and at every temperature.
"""

from __future__ import annotations

import statistics
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

# Bits of nvidia-smi's clocks_throttle_reasons.active.
LIMITS = {0x4: "power", 0x8: "hardware slowdown", 0x20: "temperature", 0x40: "temperature", 0x80: "power brake"}
FIELDS = "clocks.sm,power.draw,clocks_throttle_reasons.active"
PERIOD_MS = 50


class ClockLog:
    """Asks nvidia-smi every 50 ms from `with` to the end of the block; `figures` afterwards, empty where it cannot be asked."""

    def __init__(self, uuid: str | None):
        self.uuid = uuid
        self.figures: dict[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ClockLog:
        self._folder = TemporaryDirectory()
        self._path = Path(self._folder.name) / "clock.csv"
        if self.uuid is not None:
            command = ["nvidia-smi", "-i", f"GPU-{self.uuid}", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
            try:
                with self._path.open("wb") as file:
                    self._process = subprocess.Popen([*command, f"-lms={PERIOD_MS}"], stdout=file, stderr=subprocess.DEVNULL)
            except OSError:
                self._process = None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self.figures = figures_of(self._path.read_text())
        self._folder.cleanup()


def figures_of(text: str) -> dict[str, Any]:
    """Medians of nvidia-smi's lines, and the limits that were active in at least half of them."""
    rows = [row for row in (_row(line) for line in text.splitlines()) if row is not None]
    if not rows:
        return {}
    active = {name for bit, name in LIMITS.items() if sum(bool(reasons & bit) for _, _, reasons in rows) * 2 >= len(rows)}
    return {
        "sm_clock_mhz": statistics.median(clock for clock, _, _ in rows),
        "power_w": statistics.median(power for _, power, _ in rows),
        "clock_limited_by": sorted(active),
    }


def _row(line: str) -> tuple[float, float, int] | None:
    """(MHz, W, reasons) of a whole line; None for the cut one at the end, or where a figure is not available."""
    try:
        clock, power, reasons = line.split(",")
        return float(clock), float(power), int(reasons.strip(), 16)
    except ValueError:
        return None
