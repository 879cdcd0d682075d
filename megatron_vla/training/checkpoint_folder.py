"""Where checkpoints lie and what makes one complete.

SAVE/iter_0000010/ is written under a temporary name, flushed, and renamed: it is there whole or not at all.
SAVE/latest_checkpointed_iteration.txt is replaced last and names the one to resume from. state.json, the last file of a folder,
lists every file with its size, so that a folder damaged later (a copy cut short) is noticed before anything is loaded.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POINTER = "latest_checkpointed_iteration.txt"
STATE_FILE = "state.json"
CONFIG_FILE = "config.json"
PREPROCESSOR_FOLDER = "preprocessor"
# Written by evaluation (evaluation/gate.py); named here because deleting old checkpoints must know them.
BEST_POINTER = "best_checkpointed_iteration.txt"
EVALUATION_FOLDER = "evaluation"
IN_USE_FILE = "in_use"
TEMPORARY_SUFFIX = ".incomplete"
_FOLDER_NAME = re.compile(r"iter_(\d{7,})")


def iteration_folder(root: Path, iteration: int) -> Path:
    """SAVE/iter_0000010 for 10."""
    return root / f"iter_{iteration:07d}"


@dataclass(frozen=True)
class CheckpointFolder:
    """One complete checkpoint on disk. `state` is its state.json."""

    path: Path
    state: dict[str, Any]

    @property
    def iteration(self) -> int:
        """Optimizer steps done."""
        return int(self.state["iteration"])

    @property
    def consumed_samples(self) -> int:
        """Samples consumed by those steps."""
        return int(self.state["consumed_samples"])

    @property
    def preprocessor(self) -> Path | None:
        """Folder of the stored preprocessing and statistics; None for mock data."""
        folder = self.path / PREPROCESSOR_FOLDER
        return folder if folder.is_dir() else None

    def config(self) -> dict[str, Any]:
        """The configuration of the run that wrote it (RunConfig.to_dict)."""
        content: dict[str, Any] = json.loads((self.path / CONFIG_FILE).read_text())
        return content


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None when it is complete."""
    state_file = folder / STATE_FILE
    if not state_file.is_file():
        return f"{STATE_FILE} is missing"
    try:
        files = json.loads(state_file.read_text())["files"]
    except (json.JSONDecodeError, KeyError, UnicodeDecodeError) as exception:
        return f"{STATE_FILE} is unreadable ({exception})"
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def open_folder(folder: Path) -> CheckpointFolder:
    """The checkpoint in `folder`. Raises ValueError saying what is missing or damaged."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such checkpoint folder")
    problem = damage(folder)
    if problem:
        raise ValueError(f"{folder}: incomplete checkpoint: {problem}; choose another with --load-iteration")
    return CheckpointFolder(folder, json.loads((folder / STATE_FILE).read_text()))


def iterations_in(root: Path) -> list[int]:
    """Iterations of all checkpoint folders under `root`, ascending, complete or not."""
    if not root.is_dir():
        return []
    matches = (_FOLDER_NAME.fullmatch(entry.name) for entry in root.iterdir() if entry.is_dir())
    return sorted(int(match.group(1)) for match in matches if match)


def find_latest(root: Path) -> tuple[CheckpointFolder | None, list[str]]:
    """The checkpoint that the pointer names if it is complete, else the newest complete one, else None; and remarks.

    The pointer wins over a newer folder: after a resume from an older iteration, newer folders belong to an abandoned run.
    """
    remarks: list[str] = []
    pointer = root / POINTER
    candidates = list(reversed(iterations_in(root)))
    if pointer.is_file():
        text = pointer.read_text().strip()
        if text.isdigit():
            candidates = [int(text), *(i for i in candidates if i != int(text))]
        else:
            remarks.append(f"{pointer} holds {text!r}, not an iteration: looking at the folders instead")
    for iteration in candidates:
        folder = iteration_folder(root, iteration)
        problem = damage(folder) if folder.is_dir() else "the folder does not exist"
        if problem is None:
            return open_folder(folder), remarks
        remarks.append(f"skipped {folder}: {problem}")
    return None, remarks


def _flush_folder(folder: Path) -> None:
    """Make renames and new names inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Write and flush."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def start_temporary(root: Path, iteration: int) -> Path:
    """An empty temporary folder for a checkpoint; leftovers of killed saves are removed first."""
    root.mkdir(parents=True, exist_ok=True)
    for entry in root.glob(f"*{TEMPORARY_SUFFIX}"):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    folder = Path(str(iteration_folder(root, iteration)) + TEMPORARY_SUFFIX)
    folder.mkdir()
    return folder


def seal(temporary: Path, state: dict[str, Any]) -> Path:
    """Write state.json with the file list, flush everything, give the folder its final name. Returns the final path."""
    files = sorted(path for path in temporary.rglob("*") if path.is_file())
    for path in files:
        _flush_file(path)
    sizes = {str(path.relative_to(temporary)): path.stat().st_size for path in files}
    write_text(temporary / STATE_FILE, json.dumps({**state, "files": sizes}, indent=1))
    _flush_folder(temporary)
    final = Path(str(temporary).removesuffix(TEMPORARY_SUFFIX))
    # A rename cannot replace a filled folder (the same iteration saved again after a resume from an older one): the old one
    # steps aside for the moment between two renames.
    aside = Path(f"{final}.replaced{TEMPORARY_SUFFIX}") if final.exists() else None
    if aside is not None:
        os.rename(final, aside)
    os.rename(temporary, final)
    _flush_folder(final.parent)
    if aside is not None:
        shutil.rmtree(aside)
    return final


def point_to(root: Path, iteration: int) -> None:
    """Replace the pointer atomically."""
    temporary = root / (POINTER + TEMPORARY_SUFFIX)
    write_text(temporary, f"{iteration}\n")
    os.replace(temporary, root / POINTER)
    _flush_folder(root)


def best_iteration(root: Path) -> int | None:
    """The promoted checkpoint, if one was."""
    path = root / BEST_POINTER
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdigit() else None


def in_use_file(root: Path, iteration: int) -> Path:
    """Exists while an evaluation waits for this checkpoint or reads it."""
    return root / EVALUATION_FOLDER / iteration_folder(root, iteration).name / IN_USE_FILE


def remove_old(root: Path, keep_last: int | None, current: int) -> list[int]:
    """Delete all but the `keep_last` newest checkpoints up to `current`; returns the iterations deleted.

    The promoted checkpoint and those that an evaluation still reads stay.
    """
    if keep_last is None:
        return []
    best = best_iteration(root)
    old = [i for i in iterations_in(root) if i <= current][:-keep_last]
    old = [i for i in old if i != best and not in_use_file(root, i).exists()]
    for iteration in old:
        shutil.rmtree(iteration_folder(root, iteration))
    return old
