"""run.json in the log folder: the command, flags, GPU and versions of a run, once for each of its starts.

metrics.jsonl holds what a run measured, this file what it was: tools/compare_loss.py sets both runs' beside each other.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megatron_vla.config.cli import flag_name
from megatron_vla.config.run import SECTIONS, RunConfig
from megatron_vla.parallel.groups import ParallelGroups
from megatron_vla.version import code_versions, git_commit
from megatron_vla.whole_file import replace_text

RUN_FILE = "run.json"


def given_flags(config: RunConfig) -> dict[str, Any]:
    """Flag -> value (true or false for a switch, a tuple of several values) of the flags that were given."""
    values = {name: value for section in (*SECTIONS, "family") for name, value in vars(vars(config)[section]).items()}
    # One of several values as if there could only be one: nobody can tell from a command line.
    single = {name: value[0] for name, value in values.items() if isinstance(value, tuple) and len(value) == 1}
    return {flag_name(name): single.get(name, values[name]) for name in config.given}


def record_start(folder: Path, config: RunConfig, groups: ParallelGroups, iteration: int) -> None:
    """Add a start after `iteration` steps to the folder's run.json (rank 0 only).

    Earlier starts of which no step remains go: a resume does what came after its checkpoint again.
    """
    start = {
        "iteration": iteration,
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "flags": given_flags(config),
        "gpu": torch.cuda.get_device_name(groups.device) if groups.device.type == "cuda" else "none (CPU)",
        "num_processes": groups.world_size,
        "versions": {**code_versions(), "cuda": torch.version.cuda},
        "commit": git_commit(Path(__file__).resolve().parents[2]),
    }
    starts = [earlier for earlier in read_starts(folder) if earlier["iteration"] < iteration]
    replace_text(folder / RUN_FILE, json.dumps({"starts": [*starts, start]}, indent=1) + "\n")


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """What `record_start` wrote, oldest first; empty for a log folder of before. Raises ValueError naming a broken file."""
    path = folder / RUN_FILE
    if not path.is_file():
        return []
    try:
        starts: list[dict[str, Any]] = json.loads(path.read_text())["starts"]
    except (json.JSONDecodeError, KeyError, TypeError) as problem:
        raise ValueError(f"{path}: not the record of a run ({problem!r}) -> delete it") from None
    return starts
