"""The gate: a checkpoint is trained, then evaluated, then promoted or rejected; only a promotion moves the best pointer.

    SAVE/best_checkpointed_iteration.txt     the promoted checkpoint
    SAVE/evaluation/status.json              {iteration: {"status", "success", ...}} of everything that was evaluated
    SAVE/evaluation/iter_0001000/            one evaluation (results.py), with verdict.json

The baseline is the checkpoint that is promoted now. Both ran the same trials from the same starts, so they are compared in
pairs by the exact McNemar test.

What the best pointer names is what a robot gets, so it never names a rejected checkpoint, and never goes back by chance:

* A promoted checkpoint that is newer than the one it names takes its place.
* An older one that is judged again does so only if it is shown to be better (p < alpha), whatever the rules ask: not being
  worse is no reason to go back. Its status is promoted all the same.
* The checkpoint that it names may be judged again under other rules (without a baseline: there is nothing newer). When they
  reject it, the pointer goes back to the newest other promoted checkpoint that is still on disk, and is removed without one.
* An evaluation without a gate judges nothing: an earlier verdict stays in status.json.
"""

from __future__ import annotations

import dataclasses
import json
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
from megatron_vla.file_lock import alone_in
from megatron_vla.training.checkpoint_folder import BEST_POINTER, EVALUATION_FOLDER, best_iteration, iteration_folder
from megatron_vla.whole_file import replace_text

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


def _flag(difference: str) -> str:
    """`settings.max_steps: 5 there, 6 now` -> `--eval-max-steps: 5 there, 6 now`; a simulator's revision has no flag."""
    name, _, rest = difference.partition(": ")
    return difference if name == "revision" else f"--eval-{name.removeprefix('settings.').replace('_', '-')}: {rest}"


def read_baseline(folder: Path, description: Mapping[str, Any]) -> list[TrialResult]:
    """Trials of another evaluation under the same conditions (plan.conditions). Raises ValueError naming the flags that differ,
    and for an evaluation that cannot be compared with because none of its trials has come to an end."""
    stored = folder / DESCRIPTION_FILE
    if not stored.is_file():
        raise ValueError(f"baseline {folder}: no evaluation ({DESCRIPTION_FILE} is missing) -> name its folder with --baseline")
    wanted = {k: description.get(k) for k in ("environment", "revision", "settings", "replan_interval", "seed")}
    told = told_differences(read_json(stored), json.loads(json.dumps(wanted)))
    if told:
        raise ValueError(
            f"baseline {folder}: evaluated differently ({'; '.join(map(_flag, told))}) -> evaluate one of the two again with "
            "the other's flags, or name another evaluation with --baseline"
        )
    trials = read_trials(folder)
    if all(trial.error is not None for trial in trials):
        raise ValueError(f"baseline {folder}: no trial has ended -> finish that evaluation, or name another with --baseline")
    return trials


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


def promoted_baseline(root: Path, iteration: int | None) -> Path | None:
    """Evaluation folder of the promoted checkpoint, if there is one and it is not this one."""
    best = best_iteration(root)
    return None if best is None or best == iteration else evaluation_folder(root, best)


def record_verdict(root: Path, iteration: int, verdict: Verdict, success: float | None, *, may_go_back: bool = False) -> None:
    """Write the status and move the best pointer by the rules above; `may_go_back`: an older checkpoint is shown to be better.

    In this order: a pointer never names an unjudged checkpoint or a rejected one. The caller holds SAVE/evaluation.
    """
    status_file = root / EVALUATION_FOLDER / STATUS_FILE
    status_file.parent.mkdir(parents=True, exist_ok=True)
    status = read_json(status_file) if status_file.is_file() else {}
    earlier = status.get(str(iteration))
    if verdict.status == "evaluated" and earlier is not None:
        status[str(iteration)] = {**earlier, "success": success}
    else:
        status[str(iteration)] = {"success": success, **dataclasses.asdict(verdict)}
    best = best_iteration(root)
    if verdict.status == "rejected" and best == iteration:
        others = (int(number) for number, told in status.items() if told["status"] == "promoted")
        _point_to_best(root, max((i for i in others if iteration_folder(root, i).is_dir()), default=None))
    write_json(status_file, status)
    if verdict.status == "promoted" and (best is None or iteration > best or may_go_back):
        _point_to_best(root, iteration)


def _point_to_best(root: Path, iteration: int | None) -> None:
    if iteration is None:
        (root / BEST_POINTER).unlink(missing_ok=True)
        return
    replace_text(root / BEST_POINTER, f"{iteration}\n")


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What a checkpoint's evaluation is measured by: rules (None: it is not judged), and another evaluation.

    baseline: that one's folder; None: that of the promoted checkpoint in `root` (a --save folder; None: there is none).
    iteration: the checkpoint's; None: it is not there yet.
    """

    rules: GateRules | None
    baseline: Path | None = None
    root: Path | None = None
    iteration: int | None = None

    def reference(self, description: Mapping[str, Any]) -> tuple[Path, list[TrialResult]] | None:
        """Folder and trials to compare with. Raises ValueError when they cannot be: ask before the rollouts."""
        if self.baseline is not None:
            return self.baseline, read_baseline(self.baseline, description)
        folder = None if self.root is None else promoted_baseline(self.root, self.iteration)
        if folder is None:
            return None
        assert self.root is not None
        try:
            return folder, read_baseline(folder, description)
        except ValueError as problem:
            if self.rules is None:
                return None  # nothing is judged, so nothing has to be comparable
            raise ValueError(
                f"{str(problem).partition(' -> ')[0]} -> give the same flags; or delete that folder and evaluate the promoted "
                f"checkpoint {self.root / folder.name} with the new ones; or delete {self.root / BEST_POINTER} to go on "
                "without a baseline"
            ) from problem

    def judge(self, results: Sequence[TrialResult], description: Mapping[str, Any]) -> Verdict:
        """The verdict on finished trials. Raises ValueError as `reference` does."""
        reference = self.reference(description)
        folder, trials = (None, None) if reference is None else reference
        return judge(self.rules, results, trials, None if folder is None else str(folder))

    def record(self, results: Sequence[TrialResult], description: Mapping[str, Any]) -> Verdict:
        """Judge, write the status, move the best pointer. One evaluation of a --save folder at a time, so that none compares
        with a checkpoint that is not promoted any more, or overwrites another one's verdict."""
        assert self.root is not None and self.iteration is not None
        share = share_of(results)
        with alone_in(self.root / EVALUATION_FOLDER, "verdict", wait=True):
            verdict = self.judge(results, description)
            is_better = verdict.status == "promoted" and self._is_better(results, description)
            success = share.value if share.trials else None
            record_verdict(self.root, self.iteration, verdict, success, may_go_back=is_better)
        return verdict

    def _is_better(self, results: Sequence[TrialResult], description: Mapping[str, Any]) -> bool:
        """Than the promoted checkpoint, by the exact test; not, where the two cannot be compared."""
        assert self.root is not None and self.rules is not None
        promoted = promoted_baseline(self.root, self.iteration)
        if promoted is None:
            return False
        try:
            return paired_test(results, read_baseline(promoted, description)).p_better < self.rules.alpha
        except ValueError:
            return False
