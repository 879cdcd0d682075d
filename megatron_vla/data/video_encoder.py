"""Streaming video encoder for recorded episodes: RGB frames in, one mp4 out, frame k at time k / fps."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

# Codec name -> (FFmpeg encoder, default crf, encoder options). One thread everywhere: the bytes must not depend on the
# host's cores. No macroblock tree in x264: with it one picture in thousands was coded otherwise, by what lay in its memory
# before (in 3 of 8 processes that encoded the same 16 pictures 900 times; never without).
ENCODERS: dict[str, tuple[str, int, dict[str, str]]] = {
    "h264": ("libx264", 23, {"preset": "veryfast", "forced-idr": "1", "mbtree": "0"}),
    "hevc": (
        "libx265",
        28,
        {"preset": "veryfast", "forced-idr": "1", "x265-params": "pools=none:frame-threads=1:log-level=error"},
    ),
    "av1": ("libsvtav1", 30, {"preset": "10", "svtav1-params": "lp=1"}),
}


def fps_fraction(fps: float) -> Fraction:
    """Exact rate: 29.97 becomes 2997/100, integers stay integers."""
    return Fraction(fps).limit_denominator(100_000)


@contextmanager
def kept_scheduling() -> Iterator[None]:
    """This thread, and those that are started meanwhile, have its scheduling policy afterwards.

    When root opens an encoder, SVT-AV1 makes the calling thread and its own ones real-time (SCHED_FIFO, priority 99), for good:
    with two such processes on two cores everything else on the machine waited, and a test suite took twice its time.
    """
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    before = set(os.listdir("/proc/self/task"))
    try:
        yield
    finally:
        started = set(os.listdir("/proc/self/task")) - before
        for thread in (threading.get_native_id(), *map(int, started)):
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setscheduler(thread, policy, parameters)


class VideoEncoder:
    """Appends frames to one mp4.

    `start_frame` shifts every timestamp by that many frames (real recordings do not always start at 0); `b_frames` is the
    number of consecutive bidirectional frames (0 keeps decode order equal to display order). Raises ValueError for an
    unknown codec or a frame whose shape differs from the first.
    """

    def __init__(
        self,
        path: Path,
        *,
        fps: float,
        codec: str = "h264",
        gop: int = 2,
        crf: int | None = None,
        b_frames: int = 0,
        start_frame: int = 0,
    ):
        if codec not in ENCODERS:
            raise ValueError(f"video codec {codec!r}: known are {', '.join(ENCODERS)}")
        self.path = path
        self.num_frames = 0
        self._rate = fps_fraction(fps)
        self._codec, self._gop, self._crf, self._b_frames, self._start_frame = codec, gop, crf, b_frames, start_frame
        self._container: Any = None
        self._stream: Any = None

    def _open(self, height: int, width: int) -> None:
        os.environ.setdefault("SVT_LOG", "1")  # SVT-AV1 prints its whole configuration otherwise
        import av

        if height % 2 or width % 2:
            raise ValueError(f"{self.path}: {width}x{height} frames; yuv420p video needs an even width and height")
        encoder, default_crf, options = ENCODERS[self._codec]
        crf = default_crf if self._crf is None else self._crf
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._container = av.open(str(self.path), "w")
        self._stream = self._container.add_stream(encoder, rate=self._rate, options={**options, "crf": str(crf)})
        context = self._stream.codec_context
        context.width, context.height, context.pix_fmt = width, height, "yuv420p"
        context.gop_size, context.max_b_frames, context.thread_count = self._gop, self._b_frames, 1
        context.time_base = self._stream.time_base = 1 / self._rate
        with kept_scheduling():
            context.open()

    def add(self, frame_HWC: np.ndarray, *, keyframe: bool = False) -> None:
        """Append one uint8 RGB frame; `keyframe` makes it independently decodable (an episode's first frame)."""
        import av
        from av.video.frame import PictureType

        if frame_HWC.dtype != np.uint8 or frame_HWC.ndim != 3 or frame_HWC.shape[2] != 3:
            raise ValueError(
                f"{self.path}: frame {self.num_frames} is {frame_HWC.dtype} {frame_HWC.shape}; uint8 [H, W, 3] is needed"
            )
        height, width = frame_HWC.shape[:2]
        if self._container is None:
            self._open(height, width)
        context = self._stream.codec_context
        if (context.height, context.width) != (height, width):
            first = f"{context.width}x{context.height}"
            raise ValueError(f"{self.path}: frame {self.num_frames} is {width}x{height}, the file's first one {first}")
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame_HWC), format="rgb24")
        frame.pts, frame.time_base = self._start_frame + self.num_frames, 1 / self._rate
        if keyframe:
            frame.pict_type = PictureType.I
        self._container.mux(self._stream.encode(frame))
        self.num_frames += 1

    def close(self) -> None:
        """Flush and write the index; without this the file is not readable."""
        if self._container is None:
            return
        self._container.mux(self._stream.encode(None))
        self._container.close()
        self._container = None

    @property
    def size_bytes(self) -> int:
        """Bytes on disk so far."""
        return self.path.stat().st_size if self.path.exists() else 0
