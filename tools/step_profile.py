"""Files about one profiled step, for reading it without the GPU: kernels by name, and every kernel in the order of time."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Templates name kernels of thousands of characters. The table stays below 200 kB: at most MAX_ROWS rows of MAX_NAME characters.
MAX_NAME = 240
MAX_ROWS = 550
TIMELINE_NAME = 60


@dataclass(frozen=True)
class DeviceActivity:
    """A kernel, copy or fill, in microseconds."""

    start: float
    end: float
    name: str
    stream: int

    @property
    def duration(self) -> float:
        """Microseconds."""
        return self.end - self.start


def device_events(events: Iterable[Any]) -> list[Any]:
    """Those of a profile's events (torch.autograd.profiler_util.FunctionEvent) that are work of the GPU.

    Annotations are not: the profiler draws each once more on the GPU's time line, around the kernels launched in it. Whoever
    records shapes gets one around every graph of torch.compile ("## Call CompiledFxGraph").
    """
    import torch  # not above: tools/benchmark.py starts its rungs without it

    return [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation]


def activities_of(events: Iterable[Any]) -> list[DeviceActivity]:
    """The device's work among a profile's events, in the order of its starts."""
    found = [DeviceActivity(e.time_range.start, e.time_range.end, e.name, e.device_resource_id) for e in device_events(events)]
    return sorted(found, key=lambda activity: (activity.start, activity.end))


def _covered(activities: Sequence[DeviceActivity]) -> float:
    """Time during which at least one of `activities` (sorted by start) runs."""
    total, reached = 0.0, float("-inf")
    for activity in activities:
        total += max(0.0, activity.end - max(activity.start, reached))
        reached = max(reached, activity.end)
    return total


def stream_figures(activities: Sequence[DeviceActivity]) -> dict[str, float]:
    """Span of the step, time covered by work, gaps on the stream that works most, work hidden under other work."""
    by_stream: dict[int, list[DeviceActivity]] = {}
    for activity in activities:
        by_stream.setdefault(activity.stream, []).append(activity)
    busiest = max(by_stream.values(), key=_covered)
    covered = _covered(activities)
    return {
        "span_us": max(a.end for a in activities) - activities[0].start,
        "covered_us": covered,
        "sum_of_durations_us": sum(a.duration for a in activities),
        # The union, not the sum, of durations: more than two at once count as what they hide.
        "overlap_us": sum(a.duration for a in activities) - covered,
        "num_streams": len(by_stream),
        "busiest_stream_count": len(busiest),
        "busiest_stream_covered_us": _covered(busiest),
        "busiest_stream_gap_us": max(a.end for a in busiest) - busiest[0].start - _covered(busiest),
    }


def kernel_table(activities: Sequence[DeviceActivity]) -> list[dict[str, Any]]:
    """Kernels grouped by name, the costliest first; what does not fit is one row at the end."""
    by_name: dict[str, list[float]] = {}
    for activity in activities:
        by_name.setdefault(activity.name, []).append(activity.duration)
    ordered = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    rest = [duration for _, durations in ordered[MAX_ROWS:] for duration in durations]
    shown = [(name[:MAX_NAME], durations) for name, durations in ordered[:MAX_ROWS]]
    if rest:
        shown.append((f"({len(ordered) - MAX_ROWS} other names)", rest))
    return [
        {
            "name": name,
            "count": len(durations),
            "total_us": round(sum(durations), 2),
            "mean_us": round(sum(durations) / len(durations), 3),
            "min_us": round(min(durations), 3),
            "max_us": round(max(durations), 3),
        }
        for name, durations in shown
    ]


def write_profile(folder: Path, rung: str, activities: Sequence[DeviceActivity]) -> list[Path]:
    """FOLDER/RUNG.kernels.json and FOLDER/RUNG.timeline.tsv.gz (start from the first kernel on, duration, stream, name)."""
    folder.mkdir(parents=True, exist_ok=True)
    file_name = re.sub(r"[^\w.-]+", "_", rung)
    table, timeline = folder / f"{file_name}.kernels.json", folder / f"{file_name}.timeline.tsv.gz"
    rows = ",\n  ".join(json.dumps(row) for row in kernel_table(activities))
    figures = {name: round(value, 2) for name, value in stream_figures(activities).items()}
    table.write_text(f'{{\n "rung": {json.dumps(rung)},\n "step": {json.dumps(figures)},\n "kernels": [\n  {rows}\n ]\n}}\n')
    first = activities[0].start
    with gzip.open(timeline, "wt") as file:
        file.write("start_us\tduration_us\tstream\tname\n")
        for activity in activities:
            name = activity.name[:TIMELINE_NAME].replace("\t", " ")
            file.write(f"{activity.start - first:.2f}\t{activity.duration:.2f}\t{activity.stream}\t{name}\n")
    return [table, timeline]
