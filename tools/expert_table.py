"""Success of a simulator's scripted experts, driven as a policy through the same runner as a checkpoint: JSON and Markdown.

    python tools/expert_table.py --environment libero --suites libero_object libero_spatial --trials-per-task 3 \\
        --output benchmarks/libero_expert --work-folder outputs/libero_expert

A killed run goes on where it was (--work-folder). Trial k of a task starts in its official initial state k, where there is one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_vla.config.cli import StrictParser, add_section, build_section
from megatron_vla.config.evaluation import EvaluationConfig
from megatron_vla.evaluation.closed_loop import evaluate

POLICY = {"name": "scripted expert"}


@dataclass(frozen=True, kw_only=True)
class ExpertTableConfig:
    """Expert table"""

    environment: Literal["metaworld", "libero"] = "libero"
    """Simulator."""

    suites: tuple[str, ...] = ("libero_object", "libero_spatial")
    """Task suites."""

    trials_per_task: int = 3
    """Trials of each task."""

    seed: int = 0
    """Placements that the official states leave open follow from it."""

    num_workers: int = 1
    """Simulator processes."""

    output: str = "benchmarks/libero_expert"
    """Where the table goes: with .json and with .md."""

    work_folder: str = "outputs/expert_table"
    """Where trials are noted as they end."""


def run_suite(config: ExpertTableConfig, suite: str) -> dict[str, Any]:
    """All trials of one suite (those that are missing) -> its report. Nothing is rendered: experts read the simulator."""
    evaluation = EvaluationConfig(
        eval_environment=config.environment,
        eval_suite=suite,
        eval_trials_per_task=config.trials_per_task,
        eval_seed=config.seed,
        eval_workers=config.num_workers,
        # The expert is asked at every step; this is only how often the process reports.
        eval_replan_interval=10,
        eval_videos_per_task=0,
        eval_options=("pictures=false",) if config.environment == "libero" else (),
    )
    report, results, _ = evaluate(evaluation, Path(config.work_folder) / suite, None, POLICY)
    by_task: dict[str, list[float]] = {}
    for result in results:
        by_task.setdefault(result.task, []).append(result.seconds)
    tasks = [dict(task) | {"seconds": round(sum(by_task[task["task"]]), 1)} for task in report["tasks"]]
    solved = sum(task["successes"] == task["trials"] > 0 for task in tasks)
    kept = {key: report[key] for key in ("success", "interval_95", "successes", "trials", "errors", "versions", "gl_backend")}
    return kept | {"suite": suite, "tasks_always_solved": solved, "tasks": tasks}


def markdown(table: dict[str, Any]) -> str:
    """The table as a page."""
    lines = [f"# Scripted experts in {table['environment']}", "", f"`{table['command']}`", ""]
    lines += [f"{table['date']}; {table['machine']}; {', '.join(f'{k} {v}' for k, v in table['versions'].items())}.", ""]
    for suite in table["suites"]:
        low, high = suite["interval_95"]
        lines += [
            f"## {suite['suite']}: {suite['successes']} of {suite['trials']} trials ({low:.0%} to {high:.0%}), "
            f"{suite['tasks_always_solved']} of {len(suite['tasks'])} tasks in every trial",
            "",
            "| task | successes | mean steps to success | seconds |",
            "|---|---:|---:|---:|",
        ]
        for task in suite["tasks"]:
            steps = task["mean_steps_of_successes"]
            shown = "" if steps is None else f"{steps:.0f}"
            share = f"{task['successes']} of {task['trials']}"
            lines.append(f"| {task['instruction']} | {share} | {shown} | {task['seconds']:.0f} |")
        lines.append("")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Run all suites, write both files."""
    parser = StrictParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_section(parser, ExpertTableConfig)
    config: ExpertTableConfig = build_section(ExpertTableConfig, parser.parse_flags(arguments))
    suites = [run_suite(config, suite) for suite in config.suites]
    versions = suites[0]["versions"]
    for suite in suites:
        del suite["versions"]
    table = {
        "environment": config.environment,
        "command": shlex.join(["python", "tools/expert_table.py", *arguments]),
        "date": datetime.date.today().isoformat(),
        # Seconds are wall time, and mean little where other work runs beside it.
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {config.num_workers} simulator process(es)",
        "seed": config.seed,
        "versions": versions,
        "suites": suites,
    }
    output = Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(table, indent=1) + "\n")
    output.with_suffix(".md").write_text(markdown(table))
    print(markdown(table))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as failure:
        raise SystemExit(f"error: {failure}") from None
