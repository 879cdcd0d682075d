"""What nvidia-smi printed, as figures of a benchmark."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from gpu_clock import ClockLog, figures_of

LINES = """1980, 120.50, 0x0000000000000000
1755, 698.10, 0x0000000000000004
1740, 699.00, 0x0000000000000004
1725, 700.30, 0x0000000000000024
17"""


def test_medians_and_what_limits_the_clock() -> None:
    figures = figures_of(LINES)
    assert figures == {"sm_clock_mhz": 1747.5, "power_w": pytest.approx(698.55), "clock_limited_by": ["power"]}


def test_nothing_where_nothing_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert figures_of("[N/A], [N/A], [N/A]\n") == {}
    monkeypatch.setenv("PATH", "")
    for uuid in (None, "00000000-0000-0000-0000-000000000000"):
        with ClockLog(uuid) as log:
            pass
        assert log.figures == {}
