"""The choice of the decoder: proven on every codec, printed, never silently another one than asked for."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_fixture_dataset import code_frame

from megatron_vla.data import video_backends, video_probe
from megatron_vla.data.video_encoder import VideoEncoder
from megatron_vla.data.video_probe import choose_backend


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int]]:
    """One file of 12 frames per codec."""
    folder = tmp_path_factory.mktemp("clips")
    for codec in ("av1", "h264", "hevc"):
        encoder = VideoEncoder(folder / f"{codec}.mp4", fps=10, codec=codec)
        for k in range(12):
            encoder.add(code_frame(0, 0, k))
        encoder.close()
    return {codec: (folder / f"{codec}.mp4", 12) for codec in ("av1", "h264", "hevc")}


@pytest.mark.parametrize("requested", ["auto", "pyav", "decord"])
def test_V03_choice_is_proven_on_every_codec_and_printed(clips: dict[str, tuple[Path, int]], requested: str) -> None:
    choice = choose_backend(requested, clips, 10)
    chosen = "pyav" if requested == "auto" else requested
    assert choice.backend == chosen
    assert choice.results == {(codec, chosen): "works" for codec in clips}
    assert f"av1 x {chosen}: works" in str(choice)


class SameFrame(video_backends.PyAVDecoder):
    """A backend that answers every request with the file's first frame."""

    def frames_at(self, indices: Any, out_nCHW: Any = None) -> np.ndarray:
        return super().frames_at([0] * len(indices), out_nCHW)


def test_V03_backend_that_repeats_one_frame_is_caught(clips: dict[str, tuple[Path, int]], monkeypatch: Any) -> None:
    monkeypatch.setitem(video_backends.DECODERS, "decord", SameFrame)
    with pytest.raises(ValueError, match=r"h264 x decord: returns wrong pictures: frame 11 is off by \d+ of 255, frame 9"):
        choose_backend("decord", {"h264": clips["h264"]}, 10)


def test_V03_old_decord_refuses_av1_clearly(clips: dict[str, tuple[Path, int]], monkeypatch: Any) -> None:
    """decord 0.6.0 raises an unhelpful message for AV1; ours says what to install, and auto goes on without it."""

    def reader(path: str, **options: Any) -> Any:
        raise RuntimeError("cannot find video stream")

    old = types.SimpleNamespace(__version__="0.6.0", VideoReader=reader, cpu=lambda i: None, DECORDError=RuntimeError)
    monkeypatch.setitem(sys.modules, "decord", old)
    monkeypatch.setattr(video_probe, "import_problem", lambda backend: None)
    with pytest.raises(ValueError, match=r"av1 x decord: fails: .*decord 0.6.0 cannot read AV1 -> install decord2"):
        choose_backend("decord", {"av1": clips["av1"]}, 10)


def test_V06_broken_install_explicit_is_an_error_auto_falls_to_pyav(
    clips: dict[str, tuple[Path, int]], tmp_path: Path, monkeypatch: Any
) -> None:
    """A torchcodec whose import ends the process (missing FFmpeg libraries can do that) must not end ours."""
    (tmp_path / "torchcodec").mkdir()
    (tmp_path / "torchcodec/__init__.py").write_text("import os\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ValueError, match=r"--video-backend torchcodec: .*\n.*h264 x torchcodec: import ended by signal 6"
    ) as error:
        choose_backend("torchcodec", {"h264": clips["h264"]}, 10)
    assert "pyav" not in str(error.value)
    monkeypatch.setattr(video_probe, "BACKENDS", ("torchcodec", "pyav"))
    choice = choose_backend("auto", {"h264": clips["h264"]}, 10)
    assert choice.backend == "pyav"
    assert "h264 x torchcodec: import ended by signal 6" in str(choice)


def test_absent_backend_says_what_to_install(clips: dict[str, tuple[Path, int]], monkeypatch: Any) -> None:
    monkeypatch.setattr(video_probe, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"hevc x decord: not installed \(pip install decord2\)"):
        choose_backend("auto", {"hevc": clips["hevc"]}, 10)


def test_torchcodec_checks_the_times_it_is_given(tmp_path: Path, monkeypatch: Any) -> None:
    """A stand-in with torchcodec's interface: exact mode and one thread are asked for, a shifted frame is refused."""
    asked: dict[str, Any] = {}

    class Reader:
        metadata = types.SimpleNamespace(begin_stream_seconds=1.4)

        def __init__(self, path: str, **options: Any):
            asked.update(options)

        def __len__(self) -> int:
            return 12

        def get_frames_at(self, indices: list[int]) -> Any:
            seconds = np.array([1.4 + (i + (i == 5)) / 10 for i in indices])  # index 5 answers with frame 6
            data = np.stack([code_frame(0, 0, i) for i in indices])
            wrap = types.SimpleNamespace(numpy=lambda: data)
            return types.SimpleNamespace(data=wrap, pts_seconds=seconds)

    module = types.SimpleNamespace(VideoDecoder=Reader)
    monkeypatch.setitem(sys.modules, "torchcodec", types.SimpleNamespace(decoders=module))
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", module)
    decoder = video_backends.TorchcodecDecoder(tmp_path / "x.mp4", 10)
    assert asked == {"dimension_order": "NHWC", "num_ffmpeg_threads": 1, "seek_mode": "exact"}
    assert decoder.frames_at([3, 1]).shape == (2, 48, 64, 3)
    with pytest.raises(video_backends.FrameMismatch, match=r"frame 5 should be at 0\.5000 s, .* 0\.6000 s"):
        decoder.frames_at([4, 5])
    with pytest.raises(video_backends.FrameMismatch, match="file ends before it"):
        decoder.frames_at([12])
