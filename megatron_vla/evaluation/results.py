"""What an evaluation leaves behind: trials.jsonl as it goes (so that it can be resumed), then report.json and report.md.

An evaluation's folder belongs to one description: policy, trials, simulator and seeds. Going on with another one is refused.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_vla.evaluation.environments.interface import TaskSpec
from megatron_vla.evaluation.rollout import TrialResult
from megatron_vla.evaluation.statistics import Share
from megatron_vla.whole_file import replace_text

TRIALS_FILE = "trials.jsonl"
DESCRIPTION_FILE = "evaluation.json"
REPORT_JSON, REPORT_MARKDOWN = "report.json", "report.md"
MONTAGE = "montage"


def write_json(path: Path, content: Any) -> None:
    """Whole or not at all."""
    replace_text(path, json.dumps(content, indent=1) + "\n")


def read_trials(folder: Path) -> list[TrialResult]:
    """Finished trials of an evaluation folder; half a line at the end, left by a kill, is no trial. Later lines win."""
    path = folder / TRIALS_FILE
    if not path.is_file():
        return []
    results: dict[str, TrialResult] = {}
    for line in path.read_text().splitlines():
        try:
            result = TrialResult(**json.loads(line))
        except json.JSONDecodeError:
            continue
        results[result.key] = result
    return list(results.values())


def read_json(path: Path) -> dict[str, Any]:
    """Raises ValueError naming the file when it is damaged."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as problem:
        raise ValueError(f"{path}: damaged ({problem}) -> delete it, or name a new --output folder") from problem
    return content


def told_differences(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What of `wanted` differs in `known`; of nested settings only those that do."""
    told = []
    for key, value in wanted.items():
        there = known.get(key)
        if isinstance(there, dict) and isinstance(value, dict):
            told += [f"{key}.{text}" for text in told_differences(there, value)]
        elif there != value:
            told.append(f"{key}: {there} there, {value} now")
    return told


class ResultFolder:
    """An evaluation's folder, new or gone on with. Raises ValueError when it belongs to another evaluation."""

    def __init__(self, path: Path, description: Mapping[str, Any]) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        stored = path / DESCRIPTION_FILE
        wanted = json.loads(json.dumps(description))
        if stored.is_file():
            differences = told_differences(read_json(stored), wanted)
            if differences:
                raise ValueError(f"--output {path}: holds another evaluation ({'; '.join(differences)}) -> name a new folder")
        else:
            write_json(stored, wanted)
        # Errors are no outcomes: they run again.
        self.results = [result for result in read_trials(path) if result.error is None]

    def add(self, result: TrialResult) -> None:
        """Append at once: a killed evaluation loses only what was running."""
        content = {k: v for k, v in dataclasses.asdict(dataclasses.replace(result, film=[])).items() if k != "film"}
        path = self.path / TRIALS_FILE
        # A torn last line must not swallow the new one.
        torn = path.is_file() and not path.read_bytes().endswith(b"\n")
        with path.open("a") as file:
            file.write(("\n" if torn else "") + json.dumps(content) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.results.append(result)


def first_error(results: Sequence[TrialResult]) -> str | None:
    """How many trials ended in errors, and the last line of the first one; None without any."""
    errors = [result for result in results if result.error is not None]
    if not errors:
        return None
    lines = str(errors[0].error).strip().splitlines() or ["no message"]
    return f"{len(errors)} trials ended in errors (all in {TRIALS_FILE}), first {errors[0].key}: {lines[-1]}"


def share_of(results: Sequence[TrialResult]) -> Share:
    """Successes; errors do not count as trials."""
    finished = [result for result in results if result.error is None]
    return Share(sum(result.succeeded for result in finished), len(finished))


def task_rows(tasks: Sequence[TaskSpec], results: Sequence[TrialResult]) -> list[dict[str, Any]]:
    """One JSON-ready row per task."""
    rows = []
    for task in tasks:
        mine = [result for result in results if result.task == task.name]
        share = share_of(mine)
        lengths = [result.num_steps for result in mine if result.succeeded]
        rows.append(
            {
                "task": task.name,
                "instruction": task.instruction,
                "successes": share.successes,
                "trials": share.trials,
                "success": None if share.trials == 0 else share.value,
                "interval_95": list(share.interval),
                "errors": sum(result.error is not None for result in mine),
                "mean_steps_of_successes": sum(lengths) / len(lengths) if lengths else None,
            }
        )
    return rows


def build_report(
    description: Mapping[str, Any], tasks: Sequence[TaskSpec], results: Sequence[TrialResult], more: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole result, JSON-ready."""
    share = share_of(results)
    return {
        "success": None if share.trials == 0 else share.value,
        "interval_95": list(share.interval),
        "successes": share.successes,
        "trials": share.trials,
        "errors": sum(result.error is not None for result in results),
        "tasks": task_rows(tasks, results),
        **more,
        "evaluation": dict(description),
    }


def markdown(report: Mapping[str, Any], title: str) -> str:
    """The table for people; success with its 95 percent Wilson interval."""
    lines = [f"# {title}", "", "| task | success | 95 % interval | trials | steps to success |", "|---|---:|---:|---:|---:|"]
    total = {**report, "task": "**all**", "mean_steps_of_successes": None}
    for row in (*report["tasks"], total):
        low, high = row["interval_95"]
        success = "-" if row["success"] is None else f"{row['success']:.0%}"
        steps = row["mean_steps_of_successes"]
        trials = f"{row['trials']} (+{row['errors']} errors)" if row["errors"] else str(row["trials"])
        cells = (row["task"], success, f"{low:.0%} to {high:.0%}", trials, "" if steps is None else f"{steps:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"* {name}: {value}" for name, value in report["facts"].items())]
    return "\n".join(lines) + "\n"
