"""A decoded PyAV frame -> RGB pixels in memory that is given, row by row or colour by colour, with one copy.

A model takes colours first, and FFmpeg can convert to three planes (gbrp) as well as to interleaved pixels (rgb24): that saves
turning every picture around. Its two converters are different code, which agrees bit by bit only for some sizes and formats.
So planes are used where both were found equal, and pixels are the same either way.

Shape legend: H height, W width, C colours.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

# 8 bits, 4:2:0, planar: what robot videos are made of. Other formats always go through rgb24.
PLANAR_FORMATS = ("yuv420p", "yuvj420p")
PLANE_OF_COLOUR = (2, 0, 1)  # of red, green and blue in gbrp


class FrameWriter:
    """Converts frames of one file; not for several threads."""

    def __init__(self) -> None:
        from av.video.reformatter import VideoReformatter

        # One converter per file and no threads in it: a fresh one per frame starts threads, which costs more than decoding.
        self._pixels, self._planes = VideoReformatter(), VideoReformatter()
        self._planes_are_exact: bool | None = None

    def write(self, frame: Any, out_HWC: np.ndarray) -> None:
        """Pixels of `frame` into uint8 [H, W, 3] of its size; fastest where a colour's pixels are neighbours in memory."""
        if out_HWC.strides[1] != 1 or not self._exact(frame):
            out_HWC[...] = self._rgb_HWC(frame)
            return
        planes = self._planes.reformat(frame, format="gbrp", threads=1).planes
        out_CHW = out_HWC.transpose(2, 0, 1)
        for colour, plane in enumerate(PLANE_OF_COLOUR):
            out_CHW[colour] = _rows(planes[plane], 1)

    def _exact(self, frame: Any) -> bool:
        """Whether both converters agree, asked once: on this frame and on noise of its kind."""
        if self._planes_are_exact is None:
            name = frame.format.name
            kind = (name, frame.width, frame.height, frame.colorspace, frame.color_range)
            self._planes_are_exact = name in PLANAR_FORMATS and _converters_agree(frame) and _agree_on_noise(*kind)
        return self._planes_are_exact

    def _rgb_HWC(self, frame: Any) -> np.ndarray:
        picture = self._pixels.reformat(frame, format="rgb24", threads=1)
        return _rows(picture.planes[0], 3).reshape(picture.height, picture.width, 3)


def _rows(plane: Any, channels: int) -> np.ndarray:
    """uint8 [H, W * channels] view of a plane's own memory, without the padding of its rows."""
    rows = np.frombuffer(plane, dtype=np.uint8, count=plane.height * plane.line_size)
    return rows.reshape(plane.height, plane.line_size)[:, : channels * plane.width]


def _converters_agree(frame: Any) -> bool:
    """Whether planes and interleaved pixels of `frame` are equal, bit by bit."""
    from av.video.reformatter import VideoReformatter

    planes = VideoReformatter().reformat(frame, format="gbrp", threads=1).planes
    pixels = VideoReformatter().reformat(frame, format="rgb24", threads=1)
    pixels_HWC = _rows(pixels.planes[0], 3).reshape(pixels.height, pixels.width, 3)
    colours = enumerate(PLANE_OF_COLOUR)
    return all(np.array_equal(pixels_HWC[..., colour], _rows(planes[plane], 1)) for colour, plane in colours)


@lru_cache(maxsize=64)
def _agree_on_noise(name: str, width: int, height: int, colorspace: int, color_range: int) -> bool:
    """`_converters_agree` on random values: one real picture need not show a difference."""
    import av

    generator = np.random.default_rng(0)
    frame = av.VideoFrame(width, height, name)
    for plane in frame.planes:
        plane.update(generator.integers(0, 256, plane.buffer_size, dtype=np.uint8).tobytes())
    frame.colorspace, frame.color_range = colorspace, color_range
    return _converters_agree(frame)
