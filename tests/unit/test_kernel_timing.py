"""kernels/timing.py on a GPU that is played: its clock moves with the kernels, and calls inside a capture are only noted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_vla.kernels import timing

LAUNCH_MS = 0.003


class PlayedGpu:
    """Milliseconds of the device since the start, and the notes of the capture that runs, if one does."""

    def __init__(self) -> None:
        self.now = 0.0
        self.notes: list[float] | None = None
        self.stream = "main"
        self.log: list[str] = []

    def kernel(self, milliseconds: float) -> None:
        if self.notes is None:
            self.log.append(f"call on {self.stream}")
            self.now += milliseconds
        else:
            self.notes.append(milliseconds)

    def wait(self) -> None:
        if self.notes is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = self

        class Graph:
            notes: list[float]

            def replay(self) -> None:
                gpu.log.append("replay")
                gpu.now += LAUNCH_MS + sum(self.notes)

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                gpu.log.append("event")
                self.time = gpu.now

            def elapsed_time(self, other: Event) -> float:
                return other.time - self.time

        class Stream:
            def wait_stream(self, other: Any) -> None:
                pass

        @contextlib.contextmanager
        def capture(graph: Graph) -> Iterator[None]:
            gpu.notes = graph.notes = []
            gpu.log.append("capture")
            try:
                yield
            finally:
                gpu.notes = None

        @contextlib.contextmanager
        def on(stream: Stream) -> Iterator[None]:
            gpu.stream = "side"
            yield
            gpu.stream = "main"

        played = {"CUDAGraph": Graph, "Event": Event, "Stream": Stream, "graph": capture, "stream": on}
        for name, stand_in in played.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch.cuda, "current_stream", Stream)
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PlayedGpu:
    played = PlayedGpu()
    played.install(monkeypatch)
    return played


@pytest.mark.parametrize("milliseconds", [0.02, 11.0])
def test_sustained_time_is_the_devices_alone(gpu: PlayedGpu, milliseconds: float) -> None:
    found = timing.sustained_ms(lambda: gpu.kernel(milliseconds))
    assert found == pytest.approx(milliseconds + LAUNCH_MS / timing.CALLS)
    assert gpu.log[: timing.WARM_UP_CALLS + 1] == ["call on side"] * timing.WARM_UP_CALLS + ["capture"]
    events = [number for number, entry in enumerate(gpu.log) if entry == "event"]
    first_group = events[-timing.GROUPS - 1]
    replay_ms = LAUNCH_MS + timing.CALLS * milliseconds
    assert gpu.log[:first_group].count("replay") * replay_ms >= timing.BUSY_MS, "the GPU is busy before the first group"
    assert (gpu.log[first_group:].count("replay") / timing.GROUPS) * replay_ms >= timing.GROUP_MS


def test_single_calls_in_turns(gpu: PlayedGpu) -> None:
    found = timing.median_ms([lambda: gpu.kernel(1.0), lambda: gpu.kernel(3.0), lambda: gpu.kernel(3.0)])
    assert found == pytest.approx(3.0 + LAUNCH_MS)


def test_what_waits_for_the_device_is_refused(gpu: PlayedGpu) -> None:
    with pytest.raises(RuntimeError, match=r"cannot be captured in a CUDA graph.*not permitted when stream is capturing"):
        timing.sustained_ms(gpu.wait)
    assert gpu.log == ["capture"]


def test_a_lack_of_memory_stays_what_it_is(gpu: PlayedGpu) -> None:
    def function() -> None:
        if gpu.notes is not None:
            raise torch.OutOfMemoryError("80 GiB")

    with pytest.raises(torch.OutOfMemoryError, match=r"^80 GiB$"):
        timing.captured(function)
