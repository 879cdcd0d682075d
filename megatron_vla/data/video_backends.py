"""Exact frames out of one video file, by integer index: PyAV, decord and torchcodec behind one interface.

Frame n of a file is the one shown n / fps seconds after the stream's start. What a decoder returns is checked against that
time: a frame more than half a frame duration away raises `FrameMismatch`, it is never handed on. Shape legend: n frames, H
height, W width, C colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_vla.data.video_encoder import fps_fraction
from megatron_vla.data.video_planes import FrameWriter

BACKENDS = ("pyav", "decord", "torchcodec")
# Decode on instead of seeking when the next wanted frame is this close: a seek costs at least the key frame and a flush.
FORWARD_FRAMES = 24
LEADING_PACKETS, LEADING_KEYS = 600, 3  # how far a file is searched for open GOPs: it is one encoder's habit


class FrameMismatch(ValueError):
    """The file has no frame at the wanted time, or the decoder returned another one. Times in seconds from the stream's
    start."""

    def __init__(self, path: Path, frame: int, wanted: float, found: float | None):
        self.path, self.frame, self.wanted, self.found = path, frame, wanted, found
        what = "the file ends before it" if found is None else f"the nearest decoded frame is at {found:.4f} s"
        super().__init__(f"{path}: frame {frame} should be at {wanted:.4f} s, {what}")

    def __reduce__(self) -> tuple[Any, ...]:
        return FrameMismatch, (self.path, self.frame, self.wanted, self.found)


class Decoder(Protocol):
    """One open file."""

    def frames_at(self, indices: Sequence[int], out_nCHW: np.ndarray | None = None) -> np.ndarray:
        """uint8 RGB [n, H, W, 3] of the file's frames `indices` (any order, repeats allowed). Raises FrameMismatch.

        `out_nCHW`: uint8 memory for them, colours first; used, and a view of it returned, where the pictures have that size.
        """

    def close(self) -> None:
        """Release the file."""


def room_for(shape_nHWC: tuple[int, ...], out_nCHW: np.ndarray | None) -> np.ndarray:
    """Memory for pictures of that shape: a view of `out_nCHW` where it fits, else new."""
    if out_nCHW is not None:
        view_nHWC = out_nCHW.transpose(0, 2, 3, 1)
        if view_nHWC.shape == shape_nHWC:
            return view_nHWC
    return np.empty(shape_nHWC, dtype=np.uint8)


def in_room(frames_nHWC: np.ndarray, out_nCHW: np.ndarray | None) -> np.ndarray:
    """The pictures, moved to `out_nCHW` where they fit."""
    if out_nCHW is None or (room_nHWC := out_nCHW.transpose(0, 2, 3, 1)).shape != frames_nHWC.shape:
        return frames_nHWC
    room_nHWC[...] = frames_nHWC
    return room_nHWC


class PyAVDecoder:
    """FFmpeg through PyAV: one thread, because frame threads deadlock in workers that stop reading early."""

    def __init__(self, path: Path, fps: float):
        import av

        self.path = path
        try:
            self._container: Any = av.open(str(path))
        except (av.error.FFmpegError, OSError) as problem:
            raise ValueError(
                f"{path}: not readable as video ({problem}) -> restore the file, or exclude its episodes"
            ) from problem
        if not self._container.streams.video:
            raise ValueError(f"{path}: no video stream, or no decoder for its codec -> restore the file, or install a newer av")
        self._stream = self._container.streams.video[0]
        self._stream.thread_type = "SLICE"
        self._stream.codec_context.thread_count = 1
        self._start: int = self._stream.start_time or 0
        self._time_base: Fraction = self._stream.time_base or Fraction(1, 90_000)
        self._frame_duration = float(1 / fps_fraction(fps) / self._time_base)  # in time base units
        self._writer = FrameWriter()
        self._errors = (av.error.FFmpegError,)
        self._decoded: Any = None  # running decode iterator
        self._position = -1  # file frame that the iterator gave last; -1: nothing decoded since the last seek

    def frames_at(self, indices: Sequence[int], out_nCHW: np.ndarray | None = None) -> np.ndarray:
        """See `Decoder`."""
        frames_nHWC: np.ndarray | None = None
        places: dict[int, list[int]] = {}
        for place, index in enumerate(indices):
            places.setdefault(index, []).append(place)
        for index in sorted(places):
            frame = self._frame(index)
            if frames_nHWC is None:
                frames_nHWC = room_for((len(indices), frame.height, frame.width, 3), out_nCHW)
            first, *others = places[index]
            self._writer.write(frame, frames_nHWC[first])
            for place in others:
                frames_nHWC[place] = frames_nHWC[first]
        assert frames_nHWC is not None, "at least one frame is asked for"
        return frames_nHWC

    def _frame(self, index: int) -> Any:
        """The picture as the file has it.

        Decode forward if near, else seek; if the key frame found lies behind the target (B-frames, odd indexes), seek earlier.
        """
        forward = self._decoded is not None and 0 <= self._position < index <= self._position + FORWARD_FRAMES
        back_off = 0
        while True:
            if not forward:
                self._seek(max(0, index - back_off))
            frame, overshot = self._decode_until(index)
            if frame is not None and not overshot:
                return frame
            if not forward and back_off >= index:
                found = None if frame is None else float((frame.pts - self._start) * self._time_base)
                raise FrameMismatch(self.path, index, float(index * self._frame_duration * self._time_base), found)
            forward = False
            # a missing frame is only reported after decoding from the file's start
            back_off = index if frame is None or back_off >= 256 else max(16, back_off * 4)

    def _seek(self, index: int) -> None:
        target = self._start + int(index * self._frame_duration)
        self._container.seek(target, stream=self._stream, backward=True, any_frame=False)
        self._decoded = self._container.decode(self._stream)
        self._position = -1

    def _decode_until(self, index: int) -> tuple[Any, bool]:
        """(frame, False) when frame `index` came; (later frame, True) when it was passed; (None, False) at the end of the
        file."""
        wanted = self._start + index * self._frame_duration
        tolerance = self._frame_duration / 2
        try:
            for frame in self._decoded:
                if frame.pts is None:
                    continue
                self._position = round((frame.pts - self._start) / self._frame_duration)
                if frame.pts >= wanted - tolerance:
                    return frame, frame.pts > wanted + tolerance
        except self._errors as problem:
            self._decoded = None
            raise ValueError(
                f"{self.path}: broken near frame {index} ({problem}) -> restore the file, or exclude it"
            ) from problem
        self._decoded = None
        return None, False

    def close(self) -> None:
        """See `Decoder`."""
        self._decoded = None
        self._container.close()


def has_leading_pictures(path: Path) -> bool:
    """True if pictures that are shown before a key frame are stored after it (open GOP), as far as the first key frames tell.

    A decoder that seeks to such a key frame drops them. Whoever counts frames from there, as decord does, is off by their
    number.
    """
    import av

    with av.open(str(path)) as container:
        key_pts, keys = None, 0
        for number, packet in enumerate(container.demux(container.streams.video[0])):
            if packet.pts is None or number > LEADING_PACKETS or keys > LEADING_KEYS:
                break
            if packet.is_keyframe:
                key_pts, keys = packet.pts, keys + 1
            elif key_pts is not None and packet.pts < key_pts:
                return True
    return False


class DecordDecoder:
    """decord2 (import name decord). decord 0.6.0, the older package of the same name, has no AV1.

    decord tells the time of an index, not of the picture it decoded, so files where the two can differ are refused when PyAV
    is there to recognise them.
    """

    def __init__(self, path: Path, fps: float):
        import decord

        self.path = path
        self._frame_duration = float(1 / fps_fraction(fps))
        try:
            self._reader: Any = decord.VideoReader(str(path), ctx=decord.cpu(0), num_threads=1)
        except (decord.DECORDError, RuntimeError) as problem:
            text = str(problem).strip().split("\n")[-1]
            hint = (
                "decord 0.6.0 cannot read AV1 -> install decord2 instead (same import name)"
                if decord.__version__ == "0.6.0"
                else ""
            )
            raise ValueError(f"{path}: decord cannot open it ({text}) {hint or '-> --video-backend pyav'}") from problem
        if find_spec("av") is not None and has_leading_pictures(path):
            raise ValueError(
                f"{path}: pictures shown before a key frame are stored after it (open GOP); decord returns their neighbours "
                "after a seek -> --video-backend pyav"
            )
        self._start = float(self._reader.get_frame_timestamp(0)[0])

    def frames_at(self, indices: Sequence[int], out_nCHW: np.ndarray | None = None) -> np.ndarray:
        """See `Decoder`."""
        count = len(self._reader)
        for index in indices:
            wanted = index * self._frame_duration
            if index >= count:
                raise FrameMismatch(self.path, index, wanted, None)
            found = float(self._reader.get_frame_timestamp(index)[0]) - self._start
            if abs(found - wanted) > self._frame_duration / 2:
                raise FrameMismatch(self.path, index, wanted, found)
        unique = sorted(set(indices))
        frames_nHWC = self._reader.get_batch(unique).asnumpy()
        place = {index: i for i, index in enumerate(unique)}
        return in_room(frames_nHWC[[place[index] for index in indices]], out_nCHW)

    def close(self) -> None:
        """See `Decoder`."""
        self._reader = None


class TorchcodecDecoder:
    """torchcodec in exact mode (the approximate one is off by frames when the start is not 0 or key frames are sparse)."""

    def __init__(self, path: Path, fps: float):
        from torchcodec.decoders import VideoDecoder

        self.path = path
        self._frame_duration = float(1 / fps_fraction(fps))
        try:
            self._reader: Any = VideoDecoder(str(path), dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="exact")
        except (RuntimeError, ValueError) as problem:
            raise ValueError(f"{path}: torchcodec cannot open it ({problem}) -> --video-backend pyav") from problem
        self._start = float(self._reader.metadata.begin_stream_seconds or 0.0)

    def frames_at(self, indices: Sequence[int], out_nCHW: np.ndarray | None = None) -> np.ndarray:
        """See `Decoder`."""
        count = len(self._reader)
        beyond = next((index for index in indices if index >= count), None)
        if beyond is not None:
            raise FrameMismatch(self.path, beyond, beyond * self._frame_duration, None)
        batch = self._reader.get_frames_at(list(indices))
        for index, seconds in zip(indices, batch.pts_seconds.tolist(), strict=True):
            wanted, found = index * self._frame_duration, seconds - self._start
            if abs(found - wanted) > self._frame_duration / 2:
                raise FrameMismatch(self.path, index, wanted, found)
        return in_room(batch.data.numpy(), out_nCHW)

    def close(self) -> None:
        """See `Decoder`."""
        self._reader = None


DECODERS: dict[str, Any] = {"pyav": PyAVDecoder, "decord": DecordDecoder, "torchcodec": TorchcodecDecoder}


def open_decoder(backend: str, path: Path, fps: float) -> Decoder:
    """Open `path` with `backend`. Raises ValueError naming the file."""
    if not path.is_file():
        raise ValueError(
            f"{path}: missing -> restore the file, or exclude its episodes (tools/check_dataset.py --write-exclude-list)"
        )
    decoder: Decoder = DECODERS[backend](path, fps)
    return decoder
