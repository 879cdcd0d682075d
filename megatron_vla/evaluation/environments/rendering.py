"""Headless rendering: which GL library works on this machine, and the quality that CPU rendering can afford.

MuJoCo reads MUJOCO_GL once, when it is first imported; a wrong value fails late and ends the process. So each candidate is
tried in a process of its own, and the choice is printed by whoever asks for it.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PROBE = """
import mujoco
model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><light/><geom size='1'/></worldbody></mujoco>")
renderer = mujoco.Renderer(model, 16, 16)
renderer.update_scene(mujoco.MjData(model))
renderer.render()
"""

# EGL also drives a GPU; OSMesa is software only, and on CPUs about twice as fast as EGL's software path.
BACKENDS = ("egl", "osmesa")

EGL_VENDOR_VARIABLE = "__EGL_VENDOR_LIBRARY_FILENAMES"
NVIDIA_EGL = "libEGL_nvidia.so.0"
EGL_DEVICE_VARIABLE = "MUJOCO_EGL_DEVICE_ID"

INSTALL_HINT = "install one, for example on Debian or Ubuntu: apt-get install -y libegl1 libgl1-mesa-dri   (or: libosmesa6)"


def probe_backend(backend: str, timeout_seconds: float = 60.0) -> str | None:
    """None when `backend` renders one picture in a fresh process, else the last line of what it said."""
    environment = {**os.environ, "MUJOCO_GL": backend}
    try:
        result = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no picture after {timeout_seconds:.0f} s"
    if result.returncode == 0:
        return None
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit status {result.returncode}"


def nvidia_vendor_file() -> Path | None:
    """A file that sends EGL to NVIDIA's driver, where that is installed; None without the driver.

    Containers often have the driver's library but not the file that announces it: EGL then finds no device or uses the CPU.
    """
    try:
        ctypes.CDLL(NVIDIA_EGL)
    except OSError:
        return None
    path = Path(tempfile.gettempdir()) / f"megatron_vla_egl_vendor_{os.getuid()}.json"
    path.write_text(json.dumps({"file_format_version": "1.0.0", "ICD": {"library_path": NVIDIA_EGL}}))
    return path


def egl_device(environment: Mapping[str, str]) -> str | None:
    """Number of this process's own GPU for MuJoCo, which otherwise renders on the machine's first; None where nothing says so.

    EGL numbers all GPUs of the machine, whatever CUDA_VISIBLE_DEVICES hides.
    """
    visible = [entry.strip() for entry in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    local_rank = environment.get("LOCAL_RANK")
    if not visible:
        return local_rank
    if not all(entry.isdecimal() for entry in visible):
        return None  # names of GPUs or of their parts
    if len(visible) == 1:
        return visible[0]
    rank = int(local_rank or 0)
    return visible[rank] if rank < len(visible) else None


def probe_egl() -> str | None:
    """`probe_backend("egl")` on this process's own GPU, where that is known and renders; the user's choice stays."""
    device = egl_device(os.environ)
    if EGL_DEVICE_VARIABLE not in os.environ and device is not None and nvidia_vendor_file() is not None:
        os.environ[EGL_DEVICE_VARIABLE] = device
        if probe_backend("egl") is None:
            return None
        # A container may number its GPUs in another way: any of them is better than none.
        del os.environ[EGL_DEVICE_VARIABLE]
    return probe_backend("egl")


def use_nvidia_egl() -> bool:
    """Point EGL (of this process and its children) at the GPU when it renders there; the user's own setting is left alone."""
    if EGL_VENDOR_VARIABLE in os.environ or (path := nvidia_vendor_file()) is None:
        return False
    os.environ[EGL_VENDOR_VARIABLE] = str(path)
    if probe_egl() is None:
        return True
    del os.environ[EGL_VENDOR_VARIABLE]
    return False


def choose_backend() -> str:
    """The GL library for MUJOCO_GL: the user's own setting if there is one, else the first candidate that renders.

    EGL is sent to an NVIDIA GPU where one renders, to this process's own if that is known. Raises ValueError with every
    candidate's own message when nothing renders.
    """
    asked = os.environ.get("MUJOCO_GL")
    if asked in (None, "egl") and use_nvidia_egl():
        return "egl"
    failures = {}
    for backend in (asked,) if asked else BACKENDS:
        failure = probe_egl() if backend == "egl" else probe_backend(backend)
        if failure is None:
            return backend
        failures[backend] = failure
    tried = "; ".join(f"MUJOCO_GL={name}: {message}" for name, message in failures.items())
    way_out = "unset MUJOCO_GL, so that a library that works is chosen" if asked else INSTALL_HINT
    raise ValueError(f"no GL library can render without a screen here ({tried}) -> {way_out}")


def set_fast_quality(model: Any) -> None:
    """Shadow maps and multisampling off in an MjModel; only has an effect before the GL context is made."""
    model.vis.quality.shadowsize = 0
    model.vis.quality.offsamples = 0


def set_fast_scene(scene: Any) -> None:
    """Shadow and reflection passes off in an MjvScene. With `set_fast_quality`: 5 to 10 times as many frames on CPUs."""
    import mujoco

    scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
    scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
