"""The gate: a checkpoint is trained, then evaluated, then promoted or rejected; only a promotion moves the best pointer.

    SAVE/best_checkpointed_iteration.txt     the promoted checkpoint
    SAVE/evaluation/status.json              {iteration: {"status", "success", ...}} of everything that was evaluated
    SAVE/evaluation/iter_0001000/            one evaluation (results.py), with verdict.json

The baseline is the checkpoint that is promoted now. Both ran the same trials from the same starts, so they are compared in
pairs by the exact McNemar test.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vla.evaluation.results import (
    DESCRIPTION_FILE,
    read_json,
    read_trials,
    share_of,
    told_differences,
    write_json,
)
from megatron_vla.evaluation.rollout import TrialResult
from megatron_vla.evaluation.statistics import PairedTest
from megatron_vla.training.checkpoint_folder import BEST_POINTER, EVALUATION_FOLDER, best_iteration, iteration_folder

STATUS_FILE, VERDICT_FILE = "status.json", "verdict.json"


@dataclass(frozen=True, kw_only=True)
class GateRules:
    """Conditions of a promotion; None: not asked for."""

    min_success: float | None = None
    min_lower_bound: float | None = None
    min_task_success: float | None = None
    rule: str = "not_worse"
    alpha: float = 0.05
    margin: float | None = None

    def findings(self, results: Sequence[TrialResult], baseline: Sequence[TrialResult] | None) -> list[str]:
        """Why these results are not good enough; empty: they are."""
        problems = []
        errors = sum(result.error is not None for result in results)
        if errors:
            problems.append(f"{errors} trials ended in errors and say nothing: run the evaluation again")
        share = share_of(results)
        if self.min_success is not None and not share.value >= self.min_success:
            problems.append(f"success {share} is below min_success={self.min_success:g}")
        if self.min_lower_bound is not None and share.interval[0] < self.min_lower_bound:
            problems.append(f"the lower bound of {share} is below min_lower_bound={self.min_lower_bound:g}")
        if self.min_task_success is not None:
            for task in dict.fromkeys(result.task for result in results):
                mine = share_of([result for result in results if result.task == task])
                if not mine.value >= self.min_task_success:
                    problems.append(f"{task}: {mine} is below min_task_success={self.min_task_success:g}")
        return problems + ([] if baseline is None else self._against(results, baseline))

    def _against(self, results: Sequence[TrialResult], baseline: Sequence[TrialResult]) -> list[str]:
        test = paired_test(results, baseline)
        told = f"{test.gained} trials gained, {test.lost} lost of {test.trials}"
        problems = []
        if self.rule == "better" and test.p_better >= self.alpha:
            problems.append(f"not shown to be better than the baseline: {told}, p = {test.p_better:.3g} (alpha={self.alpha:g})")
        if self.rule == "not_worse" and test.p_worse < self.alpha:
            problems.append(f"worse than the baseline: {told}, p = {test.p_worse:.3g} (alpha={self.alpha:g})")
        drop = (test.lost - test.gained) / test.trials
        if self.margin is not None and drop > self.margin:
            problems.append(f"success fell by {drop:.0%} against the baseline ({told}; margin={self.margin:g})")
        return problems


def parse_gate(entries: Sequence[str]) -> GateRules | None:
    """("min_success=0.6",) -> rules; () -> None. Raises ValueError naming the entry that is wrong."""
    if not entries:
        return None
    known = {field.name for field in dataclasses.fields(GateRules)}
    values: dict[str, Any] = {}
    for entry in entries:
        name, sign, text = entry.partition("=")
        if name not in known or not sign:
            raise ValueError(f"--eval-gate {entry!r}: write NAME=VALUE with a name of {', '.join(sorted(known))}")
        if name == "rule":
            if text not in ("not_worse", "better"):
                raise ValueError(f"--eval-gate {entry!r}: rule is not_worse or better")
            values[name] = text
            continue
        try:
            values[name] = float(text)
        except ValueError as problem:
            raise ValueError(f"--eval-gate {entry!r}: a number is needed") from problem
        if not 0.0 <= values[name] <= 1.0:
            raise ValueError(f"--eval-gate {entry!r}: a share between 0 and 1 is needed")
    return GateRules(**values)


def paired_test(results: Sequence[TrialResult], baseline: Sequence[TrialResult]) -> PairedTest:
    """Compare on equal trials. Raises ValueError when there is none: the seeds or the suite differ."""

    def outcomes(trials: Sequence[TrialResult]) -> dict[tuple[str, int, int | None], bool]:
        return {(t.key, t.seed, t.initial_state): t.succeeded for t in trials if t.error is None}

    new, old = outcomes(results), outcomes(baseline)
    common = new.keys() & old.keys()
    if not common:
        raise ValueError("the baseline ran other trials (suite, tasks or --eval-seed differ): there is nothing to compare")
    gained = sum(new[key] and not old[key] for key in common)
    lost = sum(old[key] and not new[key] for key in common)
    return PairedTest(gained, lost, len(common))


def read_baseline(folder: Path, description: Mapping[str, Any]) -> list[TrialResult]:
    """Trials of another evaluation under the same conditions. Raises ValueError naming what differs."""
    stored = folder / DESCRIPTION_FILE
    if not stored.is_file():
        raise ValueError(f"baseline {folder}: no evaluation ({DESCRIPTION_FILE} is missing) -> name its folder with --baseline")
    wanted = {k: description.get(k) for k in ("environment", "revision", "settings", "replan_interval", "seed")}
    told = told_differences(read_json(stored), json.loads(json.dumps(wanted)))
    if told:
        raise ValueError(
            f"baseline {folder}: evaluated differently ({'; '.join(told)}) -> evaluate one of the two again with the "
            "other's flags, or name another evaluation with --baseline"
        )
    return read_trials(folder)


@dataclass(frozen=True)
class Verdict:
    """status: evaluated (no gate), promoted or rejected; reasons of a rejection; how it compared with the baseline."""

    status: str
    reasons: tuple[str, ...] = ()
    baseline: str | None = None
    comparison: dict[str, float] | None = None


def judge(
    rules: GateRules | None, results: Sequence[TrialResult], baseline: Sequence[TrialResult] | None, name: str | None
) -> Verdict:
    """Verdict on finished trials; `name` says which baseline."""
    comparison = None
    if baseline is not None:
        test = paired_test(results, baseline)
        comparison = {**dataclasses.asdict(test), "p_worse": test.p_worse, "p_better": test.p_better}
    if rules is None:
        return Verdict("evaluated", (), name, comparison)
    reasons = tuple(rules.findings(results, baseline))
    return Verdict("rejected" if reasons else "promoted", reasons, name, comparison)


def evaluation_folder(root: Path, iteration: int) -> Path:
    """SAVE/evaluation/iter_0001000."""
    return root / EVALUATION_FOLDER / iteration_folder(root, iteration).name


def record_verdict(root: Path, iteration: int, verdict: Verdict, success: float | None) -> None:
    """Write the status, and on a promotion move the best pointer, in this order: a pointer never names an unjudged one."""
    status_file = root / EVALUATION_FOLDER / STATUS_FILE
    status_file.parent.mkdir(parents=True, exist_ok=True)
    status = read_json(status_file) if status_file.is_file() else {}
    status[str(iteration)] = {"success": success, **dataclasses.asdict(verdict)}
    write_json(status_file, status)
    if verdict.status == "promoted":
        temporary = root / f".{BEST_POINTER}.partial"
        temporary.write_text(f"{iteration}\n")
        os.replace(temporary, root / BEST_POINTER)


def promoted_baseline(root: Path, iteration: int) -> Path | None:
    """Evaluation folder of the promoted checkpoint, if there is one and it is not this one."""
    best = best_iteration(root)
    return None if best is None or best == iteration else evaluation_folder(root, best)
