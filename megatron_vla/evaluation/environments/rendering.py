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
MESA_VENDOR_FILES = tuple(Path(root) / "glvnd/egl_vendor.d/50_mesa.json" for root in ("/etc", "/usr/share"))

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


def egl_device(environment: Mapping[str, str], device: str | None = None) -> str | None:
    """Number of the GPU for MuJoCo, which otherwise renders on the machine's first; None where nothing says so.

    device: the policy's, as --eval-device names it ("cuda:1"); None: this process's own GPU.
    EGL numbers all GPUs of the machine, whatever CUDA_VISIBLE_DEVICES hides.
    """
    visible = [entry.strip() for entry in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    local_rank = environment.get("LOCAL_RANK")
    number = local_rank if device is None else device.partition(":")[2] or "0"
    if not visible:
        return number
    if not all(entry.isdecimal() for entry in visible):
        return None  # names of GPUs or of their parts
    if device is None and len(visible) == 1:
        return visible[0]
    index = int(number or 0)
    return visible[index] if index < len(visible) else None


def probe_egl(device: str | None = None) -> str | None:
    """`probe_backend("egl")` on the GPU of `egl_device`, where that is known and renders; the user's choice stays."""
    number = None if _is_cpu(device) else egl_device(os.environ, device)
    if EGL_DEVICE_VARIABLE not in os.environ and number is not None and nvidia_vendor_file() is not None:
        os.environ[EGL_DEVICE_VARIABLE] = number
        if probe_backend("egl") is None:
            return None
        # A container may number its GPUs in another way: any of them is better than none.
        del os.environ[EGL_DEVICE_VARIABLE]
    return probe_backend("egl")


def _is_cpu(device: str | None) -> bool:
    return device is not None and device.partition(":")[0] == "cpu"


def use_egl_of(vendor_file: Path | None, device: str | None) -> bool:
    """Point EGL (of this process and its children) at one driver when it renders; the user's own setting is left alone."""
    if EGL_VENDOR_VARIABLE in os.environ or vendor_file is None:
        return False
    os.environ[EGL_VENDOR_VARIABLE] = str(vendor_file)
    if probe_egl(device) is None:
        return True
    del os.environ[EGL_VENDOR_VARIABLE]
    return False


def mesa_vendor_file() -> Path | None:
    """What announces Mesa to EGL, which renders on CPUs; None without it."""
    return next((path for path in MESA_VENDOR_FILES if path.is_file()), None)


def choose_backend(device: str | None = None) -> str:
    """The GL library for MUJOCO_GL: the user's own setting if there is one, else the first candidate that renders.

    device: of the policy (--eval-device). EGL is sent to that NVIDIA GPU, without a device to this process's own if that is
    known; "cpu" keeps off the GPUs where software renders. Raises ValueError with every candidate's own message when none does.
    """
    asked = os.environ.get("MUJOCO_GL")
    nvidia = nvidia_vendor_file()
    keeps_off = _is_cpu(device) and nvidia is not None
    if asked in (None, "egl") and use_egl_of(mesa_vendor_file() if keeps_off else nvidia, device):
        return "egl"
    failures = {}
    for backend in (asked,) if asked else reversed(BACKENDS) if keeps_off else BACKENDS:
        failure = probe_egl(device) if backend == "egl" else probe_backend(backend)
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
