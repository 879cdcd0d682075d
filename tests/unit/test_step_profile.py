"""tools/step_profile.py on an event list whose figures are known by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from step_profile import MAX_ROWS, activities_of, device_events, kernel_table, stream_figures, write_profile
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# (start, end, name, stream) in microseconds: stream 7 works 10..20, 22..30, 31..41; stream 9 from 28 to 33.
EVENTS = [(22, 30, "gemm"), (10, 20, "gemm"), (31, 41, "norm\twith a tab"), (28, 33, "Memcpy DtoD")]


def event(start: float, end: float, name: str, **kind: Any) -> SimpleNamespace:
    stream = 9 if name.startswith("Memcpy") else 7
    defaults = {"device_type": DeviceType.CUDA, "is_user_annotation": False, "device_resource_id": stream}
    return SimpleNamespace(time_range=SimpleNamespace(start=start, end=end), name=name, **(defaults | kind))


def test_the_devices_work_is_neither_operators_nor_annotations() -> None:
    """A compiled graph in a profile with shapes: the operator, the annotation on both time lines, and the kernel."""
    graph = "## Call CompiledFxGraph f ##"
    events = [
        event(0, 9, "aten::mm", device_type=DeviceType.CPU),
        event(0, 9, graph, device_type=DeviceType.CPU, is_user_annotation=True),
        event(2, 8, graph, is_user_annotation=True),
        event(2, 8, "gemm"),
    ]
    assert device_events(events) == events[-1:]
    assert [(a.name, a.duration) for a in activities_of(events)] == [("gemm", 6)]


def test_the_profilers_own_events_say_what_they_are() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler, torch.profiler.record_function("part"):
        torch.zeros(2).sum()
    events = profiler.events()
    assert [e.name for e in events if e.is_user_annotation] == ["part"]
    assert events and device_events(events) == []


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
