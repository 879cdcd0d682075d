"""tools/step_profile.py on an event list whose figures are known by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from step_profile import MAX_ROWS, activities_of, kernel_table, stream_figures, write_profile

# (start, end, name, stream) in microseconds: stream 7 works 10..20, 22..30, 31..41; stream 9 from 28 to 33.
EVENTS = [(22, 30, "gemm"), (10, 20, "gemm"), (31, 41, "norm\twith a tab"), (28, 33, "Memcpy DtoD")]


def event(start: float, end: float, name: str) -> SimpleNamespace:
    stream = 9 if name.startswith("Memcpy") else 7
    return SimpleNamespace(time_range=SimpleNamespace(start=start, end=end), name=name, device_resource_id=stream)


def test_figures_of_streams() -> None:
    figures = stream_figures(activities_of(event(*e) for e in EVENTS))
    assert figures == {
        "span_us": 31,
        "covered_us": 29,  # 10..20 and 22..41
        "sum_of_durations_us": 33,
        "overlap_us": 4,  # 28..30 and 31..33
        "num_streams": 2,
        "busiest_stream_count": 3,
        "busiest_stream_covered_us": 28,
        "busiest_stream_gap_us": 3,
    }


def test_a_kernel_inside_another_is_not_counted_twice() -> None:
    figures = stream_figures(activities_of([event(0, 10, "a"), event(2, 3, "b"), event(12, 13, "c")]))
    assert (figures["covered_us"], figures["busiest_stream_gap_us"], figures["overlap_us"]) == (11, 2, 1)


def test_files(tmp_path: Path) -> None:
    table, timeline = write_profile(tmp_path / "new", "graph / fp8", activities_of(event(*e) for e in EVENTS))
    assert (table.name, timeline.name) == ("graph_fp8.kernels.json", "graph_fp8.timeline.tsv.gz")
    content = json.loads(table.read_text())
    assert content["rung"] == "graph / fp8" and content["step"]["busiest_stream_gap_us"] == 3
    assert content["kernels"][0] == {"name": "gemm", "count": 2, "total_us": 18, "mean_us": 9, "min_us": 8, "max_us": 10}
    lines = gzip.decompress(timeline.read_bytes()).decode().splitlines()
    assert lines[1:3] == ["0.00\t10.00\t7\tgemm", "12.00\t8.00\t7\tgemm"] and len(lines) == 5
    assert lines[-1] == "21.00\t10.00\t7\tnorm with a tab"


def test_the_table_stays_small_and_complete(tmp_path: Path) -> None:
    events = [event(i, i + 1 + i / 1e4, f"{i:04d}" + "x" * 3000) for i in range(4000)]
    activities = activities_of(events)
    rows = kernel_table(activities)
    assert len(rows) == MAX_ROWS + 1 and rows[-1]["name"] == f"({4000 - MAX_ROWS} other names)"
    assert sum(row["count"] for row in rows) == 4000
    assert sum(row["total_us"] for row in rows) == pytest.approx(sum(a.duration for a in activities), abs=1e-2 * len(rows))
    assert write_profile(tmp_path, "rung", activities)[0].stat().st_size < 200_000
