"""Chooses the video decoder: every backend must prove itself on every codec of the dataset before the first batch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vla.data.episode_table import EpisodeTable
from megatron_vla.data.video_backends import BACKENDS, open_decoder

MODULES = {"pyav": "av", "decord": "decord", "torchcodec": "torchcodec.decoders"}
PACKAGES = {"pyav": "av", "decord": "decord2", "torchcodec": "torchcodec"}
# Two decoders may differ by colour rounding, never by a whole picture.
MAX_MEAN_DIFFERENCE = 12.0
PROBE_FRAMES = 8
IMPORT_TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class BackendChoice:
    """The chosen backend and, for every (codec, backend) tried, "works" or the reason why not."""

    backend: str
    results: dict[tuple[str, str], str]

    def __str__(self) -> str:
        return f"video backend: {self.backend}\n{format_matrix(self.results)}"


def format_matrix(results: Mapping[tuple[str, str], str]) -> str:
    """One line per codec and backend."""
    return "\n".join(f"  {codec} x {backend}: {result}" for (codec, backend), result in results.items())


def import_problem(backend: str) -> str | None:
    """None if `backend` imports, else why not. Tried in another process: a broken FFmpeg may end the process that imports
    it."""
    module = MODULES[backend]
    if find_spec(module.split(".")[0]) is None:
        return f"not installed (pip install {PACKAGES[backend]})"
    if backend == "pyav":
        return None  # self-contained wheel; the decoding probe below covers the rest
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=IMPORT_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"import took longer than {IMPORT_TIMEOUT_SECONDS} s"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"import ended by signal {-done.returncode}"
    lines = [line for line in done.stderr.strip().splitlines() if line.strip() and not line.startswith("[")]
    return f"import fails: {lines[-1] if lines else 'no message'}"


def declared_codecs(table: EpisodeTable, cameras: tuple[str, ...]) -> dict[str, tuple[Path, int]]:
    """codec as meta/info.json declares it -> (a file of that camera, frames of it that its episodes need)."""
    found: dict[str, tuple[Path, int]] = {}
    for camera in cameras:
        video = table.videos.get(camera)
        if video is not None:
            in_file = video.files.file_of_E == video.files.file_of_E[0]
            frames = int((video.first_frame_E + table.length_E)[in_file].max())
            found.setdefault(table.features[camera].codec or "unknown codec", (video.files.path_of(0), frames))
    return found


def probe(backend: str, path: Path, num_frames: int, fps: float, reference: Any = None) -> str:
    """ "works", or what went wrong when decoding frames of `path` one by one; `reference` [n, H, W, 3] has the right ones."""
    indices = probe_indices(num_frames)
    try:
        decoder = open_decoder(backend, path, fps)
        try:
            frames_nHWC = np.concatenate([decoder.frames_at([index]) for index in indices])
        finally:
            decoder.close()
    except (ValueError, RuntimeError, OSError, ImportError) as problem:
        return f"fails: {problem}"
    if reference is None:
        return "works"
    difference = np.abs(frames_nHWC.astype(np.float32) - reference).mean(axis=(1, 2, 3))
    if difference.max() > MAX_MEAN_DIFFERENCE:
        wrong = [
            f"frame {i} is off by {d:.0f} of 255" for i, d in zip(indices, difference, strict=True) if d > MAX_MEAN_DIFFERENCE
        ]
        return f"returns wrong pictures: {', '.join(wrong)}"
    return "works"


def probe_indices(num_frames: int) -> list[int]:
    """Frames all over the file, backwards: each one needs a seek, and a backend that counts wrongly is off somewhere."""
    spread = np.linspace(0, num_frames - 1, PROBE_FRAMES).astype(int)
    return sorted({int(i) for i in spread}, reverse=True)


def choose_backend(requested: str, codec_files: Mapping[str, tuple[Path, int]], fps: float) -> BackendChoice:
    """The first backend that decodes every codec, or the requested one or nothing.

    Raises ValueError with the whole codec x backend list when the request (or, with "auto", every backend) fails.
    """
    candidates = BACKENDS if requested == "auto" else (requested,)
    results: dict[tuple[str, str], str] = {}
    references: dict[str, Any] = {}
    for backend in candidates:
        problem = import_problem(backend)
        for codec, (path, num_frames) in codec_files.items():
            if problem is None and backend != "pyav" and codec not in references:
                references[codec] = _reference(path, num_frames, fps)
            results[codec, backend] = problem or probe(backend, path, num_frames, fps, references.get(codec))
        if all(results[codec, backend] == "works" for codec in codec_files):
            return BackendChoice(backend, results)
    advice = (
        "install a decoder (pip install av), or encode the videos again"
        if requested == "auto"
        else "--video-backend auto takes the first one that works"
    )
    raise ValueError(
        f"--video-backend {requested}: no backend decodes every codec of the dataset -> {advice}\n{format_matrix(results)}"
    )


def _reference(path: Path, num_frames: int, fps: float) -> Any:
    """What PyAV decodes, to catch a backend that returns one frame for every index; None without PyAV."""
    if find_spec("av") is None:
        return None
    try:
        decoder = open_decoder("pyav", path, fps)
        try:
            return decoder.frames_at(probe_indices(num_frames)).astype(np.float32)
        finally:
            decoder.close()
    except ValueError:
        return None
