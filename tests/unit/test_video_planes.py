"""Pictures written colour by colour are the very pixels of the interleaved way, whatever the file's format and size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from test_video_backends import BACKENDS, write_clip

from megatron_vla.data.video_backends import open_decoder
from megatron_vla.data.video_planes import FrameWriter


def noise_frame(name: str, width: int, height: int, colorspace: int = 2, color_range: int = 0) -> Any:
    generator = np.random.default_rng(7)
    frame = av.VideoFrame(width, height, name)
    for plane in frame.planes:
        # Of 10-bit formats values stay within 10 bits.
        values = generator.integers(0, 4 if "10" in name else 256, plane.buffer_size, dtype=np.uint8)
        plane.update(values.tobytes())
    frame.colorspace, frame.color_range = colorspace, color_range
    return frame


@pytest.mark.parametrize("size", [(256, 256), (64, 48), (640, 480), (224, 224), (322, 241), (37, 31), (34, 30)])
@pytest.mark.parametrize("name", ["yuv420p", "yuvj420p", "yuv422p", "yuv420p10le", "nv12", "gray"])
def test_planes_and_interleaved_pixels_are_equal(name: str, size: tuple[int, int]) -> None:
    width, height = size
    for colorspace, color_range in ((2, 0), (1, 1), (5, 2)):
        frame = noise_frame(name, width, height, colorspace, color_range)
        interleaved_HWC = np.empty((height, width, 3), dtype=np.uint8)
        planes_CHW = np.empty((3, height, width), dtype=np.uint8)
        FrameWriter().write(frame, interleaved_HWC)
        FrameWriter().write(frame, planes_CHW.transpose(1, 2, 0))
        assert np.array_equal(interleaved_HWC, frame.to_ndarray(format="rgb24"))
        assert np.array_equal(planes_CHW.transpose(1, 2, 0), interleaved_HWC)


def test_planes_are_used_where_they_are_exact() -> None:
    exact, other, odd = FrameWriter(), FrameWriter(), FrameWriter()
    room = np.empty((3, 256, 256), dtype=np.uint8)
    exact.write(noise_frame("yuv420p", 256, 256), room.transpose(1, 2, 0))
    other.write(noise_frame("nv12", 256, 256), room.transpose(1, 2, 0))
    odd.write(noise_frame("yuv420p", 37, 31), np.empty((3, 31, 37), dtype=np.uint8).transpose(1, 2, 0))
    assert exact._planes_are_exact is True
    assert other._planes_are_exact is False and odd._planes_are_exact is False


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", ["h264", "av1"])
def test_frames_in_given_memory_are_the_same(tmp_path: Path, codec: str, backend: str) -> None:
    path = write_clip(tmp_path / "clip.mp4", codec=codec)
    wanted = [3, 0, 7, 7, 11]
    plain_nHWC = open_decoder(backend, path, 10).frames_at(wanted)
    # Memory between other memory, as one view of several is.
    memory_nVCHW = np.zeros((5, 3, 3, *plain_nHWC.shape[1:3]), dtype=np.uint8)
    there_nHWC = open_decoder(backend, path, 10).frames_at(wanted, memory_nVCHW[:, 1])
    assert np.shares_memory(there_nHWC, memory_nVCHW)
    assert np.array_equal(there_nHWC, plain_nHWC) and np.array_equal(memory_nVCHW[:, 1].transpose(0, 2, 3, 1), plain_nHWC)
    assert not memory_nVCHW[:, ::2].any()
    elsewhere_nHWC = open_decoder(backend, path, 10).frames_at(wanted, np.zeros((5, 3, 8, 8), dtype=np.uint8))
    assert np.array_equal(elsewhere_nHWC, plain_nHWC)
