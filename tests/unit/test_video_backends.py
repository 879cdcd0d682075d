"""Frame k shows k, for every codec, backend, key frame distance and start time; a wrong frame is an error, never a sample."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from make_fixture_dataset import CAMERAS, LENGTHS, code_frame, read_code

from megatron_vla.data.frame_source import FrameSource, HandlePool
from megatron_vla.data.metadata import read_metadata
from megatron_vla.data.video_backends import FrameMismatch, PyAVDecoder, open_decoder
from megatron_vla.data.video_encoder import VideoEncoder
from megatron_vla.data.video_probe import import_problem

TORCHCODEC = pytest.param(
    "torchcodec", marks=pytest.mark.skipif(bool(import_problem("torchcodec")), reason="needs FFmpeg libraries")
)
BACKENDS = ("pyav", "decord", TORCHCODEC)


def write_clip(path: Path, num_frames: int = 12, skip: tuple[int, ...] = (), **options: Any) -> Path:
    """Frames 0..num_frames - 1 without `skip`, whose times stay empty."""
    encoder = VideoEncoder(path, fps=options.pop("fps", 10), **options)
    for k in range(num_frames):
        if k in skip:
            encoder._start_frame += 1
        else:
            encoder.add(code_frame(1, 2, k))
    encoder.close()
    return path


def shown(frames_nHWC: np.ndarray) -> list[int]:
    return [read_code(frame)[2] for frame in frames_nHWC]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", ["h264", "av1", "hevc"])
def test_V03_twelve_coloured_frames_differ_and_match(tmp_path: Path, codec: str, backend: str) -> None:
    path = write_clip(tmp_path / "clip.mp4", codec=codec)
    decoder = open_decoder(backend, path, 10)
    frames = decoder.frames_at(range(12))
    assert shown(frames) == list(range(12))
    expected = np.stack([code_frame(1, 2, k) for k in range(12)]).astype(np.float32)
    assert np.abs(frames - expected).mean() < 6
    decoder.close()


@pytest.mark.parametrize("codec", ["h264", "av1", "hevc"])
def test_an_encoder_leaves_scheduling_as_it_was(tmp_path: Path, codec: str) -> None:
    """Of root's processes SVT-AV1 makes real-time ones, which nothing else on the machine can compete with."""
    before = {thread: os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}
    encoder = VideoEncoder(tmp_path / "clip.mp4", fps=10, codec=codec)
    for k in range(3):
        encoder.add(code_frame(1, 2, k))
    during = {thread: os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}
    encoder.close()
    assert {**before, **during} == {thread: before.get(thread, os.SCHED_OTHER) for thread in {**before, **during}}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", ["h264", "hevc"])
@pytest.mark.parametrize(
    ("gop", "b_frames", "start"), [(1, 0, 0), (2, 0, 14), (12, 2, 0), (250, 0, 14), (250, 3, 14)], ids=lambda value: str(value)
)
def test_V07_index_k_shows_number_k(tmp_path: Path, backend: str, codec: str, gop: int, b_frames: int, start: int) -> None:
    """Start 14 frames at 10 fps is 1.4 s; order is random, so every frame is reached by a seek and by decoding on."""
    path = write_clip(tmp_path / "clip.mp4", 70, codec=codec, gop=gop, b_frames=b_frames, start_frame=start)
    with av.open(str(path)) as container:
        assert float((container.streams.video[0].start_time or 0) * container.streams.video[0].time_base) == start / 10
    if backend == "decord" and codec == "hevc" and (gop, b_frames) == (12, 2):
        # x265's default is an open GOP, where decord is off by the leading pictures: refused, not returned
        with pytest.raises(ValueError, match="open GOP"):
            open_decoder(backend, path, 10)
        return
    decoder = open_decoder(backend, path, 10)
    order = np.random.default_rng(gop).permutation(70)[:25].tolist()
    assert [shown(decoder.frames_at([k]))[0] for k in order] == order
    assert shown(decoder.frames_at([69, 0, 33, 0])) == [69, 0, 33, 0]
    decoder.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_V07_fixture_dataset_with_sparse_key_frames(fixture_dataset: Callable[..., Path], backend: str) -> None:
    table, _ = read_metadata(fixture_dataset("gop250_start"))
    source = FrameSource(table, backend, 4)
    for e, length in enumerate(LENGTHS):
        frames = source.frames(CAMERAS[1], e, range(length))
        assert [read_code(f) for f in frames] == [(1, e, k) for k in range(length)]


def test_D01_twenty_thousand_frames_with_float32_times(fixture_dataset: Callable[..., Path]) -> None:
    """The third episode starts 13,000 frames into the file; its start time is stored in float32."""
    table, findings = read_metadata(fixture_dataset("float_drift"))
    assert not findings
    assert table.num_frames == 20_000
    assert table.videos[CAMERAS[0]].files.file_of_E.tolist() == [0, 0, 1]
    random = np.random.default_rng(0)
    source = FrameSource(table, "pyav", 2)
    for e in range(3):
        for k in [0, int(table.length_E[e]) - 1, *random.integers(0, table.length_E[e], 6).tolist()]:
            assert read_code(source.frames(CAMERAS[0], e, [k])[0]) == (0, e, k)


@pytest.mark.parametrize("fps", [30, 29.97, Fraction(50, 3)])
def test_D01_first_frame_survives_float32_over_hours(fps: float) -> None:
    """Table level: rounding float32 seconds times fps gives the integer back for files of more than two hours."""
    first = np.arange(0, int(2.5 * 3600 * fps), 997)
    stored = (first / float(fps)).astype(np.float32).astype(np.float64)
    assert np.array_equal(np.rint(stored * float(fps)).astype(np.int64), first)


@pytest.mark.parametrize("backend", BACKENDS)
def test_missing_frame_is_an_error_with_both_times(tmp_path: Path, backend: str) -> None:
    """Frame 7 was never written: its neighbours are a whole frame away, so nothing may be returned for it."""
    path = write_clip(tmp_path / "clip.mp4", 20, skip=(7,))
    decoder = open_decoder(backend, path, 10)
    with pytest.raises(FrameMismatch, match=r"frame 7 should be at 0\.7000 s, the nearest decoded frame is at 0\.8000 s"):
        decoder.frames_at([7])
    with pytest.raises(FrameMismatch, match=r"frame 30 should be at 3\.0000 s, the file ends before it"):
        decoder.frames_at([30])
    if backend == "pyav":  # decord counts frames, so every later one is refused too
        assert shown(decoder.frames_at([6, 8, 19])) == [6, 8, 19]


def test_source_names_file_episode_camera_and_frame(tmp_path: Path, fixture_dataset: Callable[..., Path]) -> None:
    table, _ = read_metadata(fixture_dataset("off_by_one"))
    source = FrameSource(table, "pyav", 2)
    message = rf"episode 3, camera '{CAMERAS[1]}', frame 16: .*file-001.mp4: frame 16 should be at 1\.6000 s, the file ends"
    with pytest.raises(ValueError, match=message):
        source.frames(CAMERAS[1], 3, [16])
    assert read_code(source.frames(CAMERAS[1], 3, [15])[0]) == (1, 3, 15)
    with pytest.raises(ValueError, match=r"frame 17 of 17 asked for"):
        source.frames(CAMERAS[0], 3, [17])


def _read_partially(path: Path) -> None:
    random = np.random.default_rng(5)
    for i in range(500):
        decoder = PyAVDecoder(path, 10)
        first = int(random.integers(0, 50))
        wanted = [first, first + 1, first + 2]
        assert shown(decoder.frames_at(wanted)) == wanted
        if i % 2:
            decoder.close()
    os._exit(0)


def test_V05_partial_reads_do_not_hang(tmp_path: Path) -> None:
    """Five hundred times three frames of sixty in a worker, half of the decoders dropped without closing."""
    path = write_clip(tmp_path / "clip.mp4", 60, gop=12, b_frames=2)
    worker = multiprocessing.get_context("fork").Process(target=_read_partially, args=(path,))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0
    assert PyAVDecoder(path, 10)._stream.codec_context.thread_count == 1
    assert str(PyAVDecoder(path, 10)._stream.thread_type) in ("SLICE", "ThreadType.SLICE", "2")


def test_handle_pool_is_bounded_and_least_recently_used() -> None:
    class Handle:
        def __init__(self, name: str):
            self.name = name

        def close(self) -> None:
            closed.append(self.name)

    closed: list[str] = []
    pool = HandlePool(2)
    a = pool.get("a", lambda: Handle("a"))
    pool.get("b", lambda: Handle("b"))
    assert pool.get("a", lambda: Handle("other")) is a
    pool.get("c", lambda: Handle("c"))
    assert closed == ["b"]
    assert len(pool) == 2
    with pytest.raises(ValueError, match="--video-decoder-cache-size 0"):
        HandlePool(0)


def test_V01_three_hundred_files_keep_eight_decoders(fixture_dataset: Callable[..., Path]) -> None:
    table, _ = read_metadata(fixture_dataset("many_files", "v2.1"))
    assert sum(video.files.num_files for video in table.videos.values()) == 300
    source = FrameSource(table, "pyav", 8)

    def read_all(k: int) -> None:
        for e in range(table.num_episodes):
            for i, camera in enumerate(table.cameras):
                assert read_code(source.frames(camera, e, [k])[0]) == (i, e, k)

    def resident_mib() -> float:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    read_all(0)
    before = resident_mib()
    read_all(5)
    open_files = [
        os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")
    ]
    assert sum(name.startswith(table.root) for name in open_files) == 8
    assert resident_mib() - before < 20
