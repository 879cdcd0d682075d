"""Busy cores of the host, counted from /proc/stat."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from host_load import HostLoad, busy_seconds


def write(path: Path, busy_ticks: int) -> Path:
    path.write_text(f"cpu  {busy_ticks} 10 20 999999 555 30 40 50 7 7\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    return path


def test_idle_and_waiting_cores_do_not_count(tmp_path: Path) -> None:
    assert busy_seconds(write(tmp_path / "stat", 850)) == pytest.approx(1000 / os.sysconf("SC_CLK_TCK"))


def test_busy_cores_are_the_difference_over_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((100.0, 104.0))
    monkeypatch.setattr("host_load.time.monotonic", lambda: next(clock))
    stat, ticks = write(tmp_path / "stat", 0), os.sysconf("SC_CLK_TCK")
    with HostLoad(stat) as load:
        write(stat, 6 * ticks)
    assert load.figures == {"host_busy_cores": 1.5, "host_cores": os.cpu_count()}


@pytest.mark.parametrize("text", ["", "cpu 1 2 3\n", "intr 1 2 3 4 5 6 7 8\n"])
def test_nothing_where_it_cannot_be_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "stat").write_text(text)
    for stat in (tmp_path / "stat", tmp_path / "none"):
        with HostLoad(stat) as load:
            pass
        assert load.figures == {}
