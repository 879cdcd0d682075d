"""The evaluation command: `python tools/evaluate.py`, and what --eval-interval starts beside a training run.

Exit status: 0 evaluated or promoted, 1 error, 3 rejected by --eval-gate, 4 replay found a difference.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_vla.config.cli import StrictParser, add_section, build_section
from megatron_vla.config.evaluation import EvaluationConfig
from megatron_vla.config.evaluation_check import rollout_findings
from megatron_vla.config.run import from_dict
from megatron_vla.evaluation.closed_loop import evaluate, success_line
from megatron_vla.evaluation.gate import (
    VERDICT_FILE,
    Gate,
    Verdict,
    evaluation_folder,
    parse_gate,
)
from megatron_vla.evaluation.policy import Policy, PolicySettings, load_policy, open_checkpoint
from megatron_vla.evaluation.replay import replay
from megatron_vla.evaluation.results import REPORT_MARKDOWN, first_error, write_json
from megatron_vla.findings import raise_errors
from megatron_vla.training.checkpoint_folder import EVALUATION_FOLDER, STATE_FILE, CheckpointFolder, best_iteration

FAILED, REJECTED, DIFFERENT = 1, 3, 4
EXPERT_FOLDER = "expert"


@dataclass(frozen=True, kw_only=True)
class CommandConfig:
    """What to evaluate, and where the results go"""

    checkpoint: str = ""
    """A checkpoint folder (iter_0001000), or a --save folder, whose latest one is taken. Its stored evaluation flags are the
    defaults of those below."""

    policy: Literal["checkpoint", "expert"] = "checkpoint"
    """Who acts: the checkpoint, or the simulator's scripted expert (a reference; needs no checkpoint, and takes only the
    evaluation flags of one that is named)."""

    output: str | None = None
    """Folder of results, gone on with if it holds this evaluation. Not set: SAVE/evaluation/iter_N of the checkpoint, or
    SAVE/evaluation/expert."""

    baseline: str | None = None
    """Evaluation folder to compare with. Not set: that of the promoted checkpoint of the same --save folder."""

    replay: int = 0
    """Instead of rollouts: send this many recorded samples through the serving path and compare tensors and actions."""

    data_path: tuple[str, ...] = ()
    """For --replay: where the training data lies now (of a mixture: all of it), or held-out episodes of the same robot (not of
    a mixture), for which the policy keeps its own statistics. None: where the training data lay."""


def parse(arguments: Sequence[str]) -> tuple[CommandConfig, EvaluationConfig, CheckpointFolder | None]:
    """Flags -> sections; evaluation flags that are not given are those that the checkpoint was trained with."""
    parser = StrictParser(description="Closed-loop evaluation of a checkpoint.")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_section(parser, CommandConfig)
    add_section(parser, EvaluationConfig)
    given = parser.parse_flags(arguments)
    command: CommandConfig = build_section(CommandConfig, given)
    if not command.checkpoint:
        if command.policy == "expert" and command.output is not None:
            return command, build_section(EvaluationConfig, given), None
        raise ValueError("--checkpoint is not set -> name a checkpoint folder (or use --policy expert --output FOLDER)")
    folder = open_checkpoint(Path(command.checkpoint))
    stored = from_dict(folder.config()).evaluation
    return command, build_section(EvaluationConfig, given, dataclasses.asdict(stored)), folder


def policy_facts(policy: Policy, folder: CheckpointFolder) -> dict[str, Any]:
    """Which policy this is, wherever its folder lies."""
    settings = policy.settings
    return {
        "name": f"{policy.family.name}, iteration {folder.iteration}",
        "checkpoint": folder.path.name,
        "digest": hashlib.blake2b((folder.path / STATE_FILE).read_bytes(), digest_size=8).hexdigest(),
        "weights": settings.weights,
        "inference_steps": policy.num_steps,
        "dataset": settings.dataset,
    }


def run_rollouts(command: CommandConfig, config: EvaluationConfig, folder: CheckpointFolder | None) -> tuple[Verdict, int]:
    """Evaluate, judge, and move the best pointer on a promotion; the verdict, and how many trials came to an end."""
    baseline = Path(command.baseline) if command.baseline else None
    gate = Gate(rules=parse_gate(config.eval_gate), baseline=baseline)
    policy, facts, own = None, {"name": "scripted expert"}, None
    if command.policy == "checkpoint":
        assert folder is not None
        root = folder.path.parent
        gate = dataclasses.replace(gate, root=root, iteration=folder.iteration)
        own = evaluation_folder(root, folder.iteration)
        policy = load_policy(folder, PolicySettings.from_config(config))
        facts = policy_facts(policy, folder)
    if command.output is not None:
        output = Path(command.output)
    elif own is not None:
        output = own
    else:
        # Not the checkpoint's own folder, which its evaluation could not go on with.
        assert folder is not None
        output = folder.path.parent / EVALUATION_FOLDER / EXPERT_FOLDER
    report, results, description = evaluate(config, output, policy, facts, check=gate.reference)
    # Only where the results lie beside the checkpoints: an evaluation on the side must not move the pointer.
    is_recorded = own is not None and output.resolve() == own.resolve()
    verdict = gate.record(results, description) if is_recorded else gate.judge(results, description)
    # Last: an evaluation with this file is done.
    write_json(output / VERDICT_FILE, dataclasses.asdict(verdict))
    print((output / REPORT_MARKDOWN).read_text())
    print(f"{verdict.status}: {success_line(report)}; results in {output}")
    for reason in verdict.reasons:
        print(f"  {reason}")
    if (told := first_error(results)) is not None:
        print(f"  {told}")
    if is_recorded and gate.rules is not None:
        assert gate.root is not None
        print(f"promoted checkpoint of {gate.root}: {best_iteration(gate.root) or 'none'}")
    return verdict, int(report["trials"])


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    command, config, folder = parse(arguments)
    raise_errors(rollout_findings(config))
    if command.replay < 0:
        raise ValueError(f"--replay {command.replay}: a number of samples is needed, for example --replay 64")
    if command.replay:
        if folder is None:
            raise ValueError("--replay: needs --checkpoint")
        policy = load_policy(folder, PolicySettings.from_config(config))
        result = replay(policy, folder, from_dict(folder.config()), command.replay, command.data_path)
        if command.output is not None:
            Path(command.output).mkdir(parents=True, exist_ok=True)
            write_json(Path(command.output) / "replay.json", result.to_dict())
        print(json.dumps({name: round(value, 4) for name, value in policy.summary().items()}))
        return DIFFERENT if result.differing else 0
    verdict, finished = run_rollouts(command, config, folder)
    if verdict.status == "rejected":
        return REJECTED
    # A simulator that never answers says nothing about the policy, and must not look like a result.
    return 0 if finished else FAILED
