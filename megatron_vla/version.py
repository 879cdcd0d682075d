"""The one version string, read by setup.py and written into every checkpoint, and what else records say about the code."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

__version__ = "0.1.0"

GIT_SECONDS = 20.0


def code_versions() -> dict[str, str]:
    """This package and what its numbers depend on."""
    import torch

    return {
        "megatron_vla": __version__,
        "megatron_core": version("megatron-core"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def git_commit(root: Path) -> str | None:
    """The commit that is checked out at `root`, with "+" when code differs from it; None outside of a git checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_SECONDS).stdout.strip()

    try:
        # Results that are written again are no change of what ran.
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py", "*.cu", "*.cuh")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
