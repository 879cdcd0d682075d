"""Fixtures shared by all tests: small datasets, made once per session."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))  # the tools are scripts, not a package

# torch, BLAS, a simulator and one set of process groups have fewer.
MANY_THREADS = 40
GOLDEN_DATASETS = ROOT / "tests" / "golden" / "datasets"


def pytest_configure(config: pytest.Config) -> None:
    """MuJoCo takes its GL library from MUJOCO_GL when a process first imports it, which any test may do: choose before all of
    them. Worker processes inherit the choice."""
    if "MUJOCO_GL" in os.environ or find_spec("mujoco") is None:
        return
    from megatron_vla.evaluation.environments.rendering import choose_backend

    with suppress(ValueError):  # nothing renders here: the tests that need it say so, and are skipped
        os.environ["MUJOCO_GL"] = choose_backend()


@pytest.fixture(scope="session")
def fixture_dataset(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """fixture_dataset(defect or None, version="v3.0") -> folder, shared by the session: do not change it."""
    from make_fixture_dataset import make_dataset, make_defect

    made: dict[tuple[str | None, str], Path] = {}

    def get(defect: str | None = None, version: str = "v3.0") -> Path:
        if (defect, version) not in made:
            root = tmp_path_factory.mktemp(defect or "healthy") / version
            made[defect, version] = make_dataset(root, version) if defect is None else make_defect(root, defect, version)
        return made[defect, version]

    return get


@pytest.fixture(scope="session")
def golden_datasets() -> dict[str, Path]:
    """Datasets that LeRobot itself wrote: four episodes of 20 frames, two cameras, in both formats."""
    return {"v2.1": GOLDEN_DATASETS / "lerobot_v2.1", "v3.0": GOLDEN_DATASETS / "lerobot_v3.0"}


@pytest.fixture(scope="session")
def gl_backend() -> str:
    """The GL library that renders here. Skips, with what each of them said, where none does."""
    from megatron_vla.evaluation.environments.rendering import choose_backend

    try:
        return choose_backend()
    except ValueError as failure:
        pytest.skip(str(failure))


@pytest.fixture(autouse=True)
def dead_process_groups_end() -> Iterator[None]:
    """Hooks tie models and process groups into cycles, and every group that lives on keeps threads, which spin on closed
    sockets: after some modules 170 of them took most of both cores."""
    yield
    threads = Path("/proc/self/task")
    if threads.is_dir() and len(list(threads.iterdir())) > MANY_THREADS:
        gc.collect()


@pytest.fixture
def quick_and_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For models with any speed switches: no generated code; torch's own switches as they were afterwards."""
    import torch

    from megatron_vla.optimizations import compile as compile_optimization

    monkeypatch.setattr(compile_optimization, "BACKEND", "aot_eager")
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    torch._dynamo.reset()


@pytest.fixture
def aot_eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace and differentiate as inductor does, without generating code; start from empty caches and counters."""
    import torch
    from torch._dynamo.utils import counters

    from megatron_vla.optimizations import compile as compile_optimization

    monkeypatch.setattr(compile_optimization, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
