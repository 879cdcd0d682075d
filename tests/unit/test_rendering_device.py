"""Which GPU simulators render on: what --eval-device says, in the environment that their processes get."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest

from megatron_vla.config.evaluation import EvaluationConfig
from megatron_vla.evaluation import closed_loop
from megatron_vla.evaluation.environments import interface, rendering

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # worker processes import fake_suite by its name
CONFIG = EvaluationConfig(
    eval_environment="fake",  # type: ignore[arg-type]
    eval_tasks=("near",),
    eval_trials_per_task=1,
    eval_workers=1,
    eval_videos_per_task=0,
)
EGL_VARIABLES = (rendering.EGL_VENDOR_VARIABLE, rendering.EGL_DEVICE_VARIABLE)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One with NVIDIA's driver and Mesa, where everything renders."""
    for name in (*EGL_VARIABLES, "MUJOCO_GL", "CUDA_VISIBLE_DEVICES", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # what the calls set is taken back afterwards
        monkeypatch.delenv(name)
    for vendor in ("nvidia", "mesa"):
        (tmp_path / vendor).touch()
    monkeypatch.setitem(interface.ENVIRONMENTS, "fake", "fake_suite")
    monkeypatch.setattr(closed_loop, "find_spec", lambda name: name)
    monkeypatch.setattr(rendering, "nvidia_vendor_file", lambda: tmp_path / "nvidia")
    monkeypatch.setattr(rendering, "MESA_VENDOR_FILES", (tmp_path / "absent", tmp_path / "mesa"))
    monkeypatch.setattr(rendering, "probe_backend", lambda backend: None)


def simulator_environment(folder: Path, device: str | None) -> dict[str, str]:
    """Of the process that runs the simulator of a whole evaluation."""
    written = folder / "environment.json"
    config = dataclasses.replace(CONFIG, eval_device=device, eval_options=(f"environment_file={written}",))
    closed_loop.evaluate(config, folder / "out", None, {"name": "expert"}, lambda text: None)
    environment: dict[str, str] = json.loads(written.read_text())
    return environment


@pytest.mark.parametrize(
    ("device", "visible", "number"),
    [
        ("cuda:7", None, "7"),
        ("cuda:1", "4, 6", "6"),
        ("cuda", "4,6", "4"),
        ("cuda:0", "5", "5"),
        ("cuda:1", "GPU-8d1b,GPU-9", None),
        (None, "5", "5"),
        (None, None, None),
    ],
)
def test_simulators_render_on_the_gpu_of_the_policy(
    machine: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    device: str | None,
    visible: str | None,
    number: str | None,
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    environment = simulator_environment(tmp_path, device)
    assert environment.get(rendering.EGL_DEVICE_VARIABLE) == number and environment["MUJOCO_GL"] == "egl"
    assert environment[rendering.EGL_VENDOR_VARIABLE] == str(tmp_path / "nvidia")


def test_a_policy_on_the_cpu_leaves_the_gpus_to_the_training(machine: None, tmp_path: Path) -> None:
    environment = simulator_environment(tmp_path, "cpu")
    assert environment["MUJOCO_GL"] == "egl" and environment[rendering.EGL_VENDOR_VARIABLE] == str(tmp_path / "mesa")
    assert rendering.EGL_DEVICE_VARIABLE not in environment


def test_without_mesa_software_comes_before_a_gpu(machine: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rendering, "MESA_VENDOR_FILES", ())
    assert rendering.choose_backend("cpu") == "osmesa"
    monkeypatch.setattr(rendering, "probe_backend", lambda backend: "not installed" if backend == "osmesa" else None)
    assert rendering.choose_backend("cpu") == "egl" and not set(EGL_VARIABLES) & set(os.environ)
    # Nothing to keep off: as ever.
    monkeypatch.setattr(rendering, "nvidia_vendor_file", lambda: None)
    monkeypatch.setattr(rendering, "probe_backend", lambda backend: None)
    assert rendering.choose_backend("cpu") == "egl" and not set(EGL_VARIABLES) & set(os.environ)


def test_the_users_own_device_stays(machine: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(rendering.EGL_DEVICE_VARIABLE, "3")
    assert simulator_environment(tmp_path, "cuda:1")[rendering.EGL_DEVICE_VARIABLE] == "3"
