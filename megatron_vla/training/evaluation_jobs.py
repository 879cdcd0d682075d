"""Evaluations beside a training run: rank 0 starts one process per checkpoint and looks after it between steps.

No rank ever waits for a rollout: the evaluation reads a saved checkpoint, in a process without any process group, one at a time
and in the order of the checkpoints. Rank 0 waits for what is left when training ends, after the process groups are closed. A
run that was killed goes on with its open evaluations when it is resumed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from megatron_vla.config.cli import to_flags
from megatron_vla.config.run import RunConfig
from megatron_vla.training.checkpoint_folder import (
    EVALUATION_FOLDER,
    IN_USE_FILE,
    STATE_FILE,
    in_use_file,
    iteration_folder,
)

LOG_FILE = "evaluation.log"
REPORT_FILE, VERDICT_FILE = "report.json", "verdict.json"
# Set by launchers for training's own processes; an evaluation that read them would wait for peers.
LAUNCHER_PREFIXES = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_", "NCCL_ASYNC")


class EvaluationLog(Protocol):
    """Where results go, beside the line that is printed."""

    def evaluation(self, iteration: int, results: Mapping[str, float]) -> None:
        """Results of the checkpoint of `iteration`."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


def numbers_of(report: Mapping[str, Any], verdict: Mapping[str, Any]) -> dict[str, float]:
    """What a report says in numbers: success of all and of each task, how fast the policy was, the verdict."""
    low, high = report["interval_95"]
    numbers = {
        "success": report["success"],
        "success_interval_low": low,
        "success_interval_high": high,
        "trials": report["trials"],
        "errors": report["errors"],
        "promoted": float(verdict["status"] == "promoted"),
        "seconds": report["times"]["wall_seconds"],
        **{f"policy/{name}": value for name, value in report["policy_times"].items()},
        **{f"success/{row['task']}": row["success"] for row in report["tasks"]},
    }
    # A task without a finished trial has no success, which is not the same as none.
    return {name: value for name, value in numbers.items() if value is not None}


class EvaluationJobs:
    """The evaluations of one run; only on rank 0. `log` gets what they found, and is closed by `finish`."""

    def __init__(self, config: RunConfig, log: EvaluationLog | None = None) -> None:
        assert config.checkpoint.save is not None and config.evaluation.eval_interval is not None
        self.root = Path(config.checkpoint.save)
        self.interval = config.evaluation.eval_interval
        self.flags = to_flags(config.evaluation)
        self.log = log
        self.waiting: list[int] = sorted(self._left_open())
        self._process: subprocess.Popen[bytes] | None = None
        self._running: int | None = None
        self._log: IO[bytes] | None = None

    def _left_open(self) -> Iterator[int]:
        """Evaluations that a killed run had not finished; marks of deleted checkpoints are removed."""
        for mark in (self.root / EVALUATION_FOLDER).glob(f"iter_*/{IN_USE_FILE}"):
            iteration = int(mark.parent.name.removeprefix("iter_"))
            if iteration_folder(self.root, iteration).is_dir():
                yield iteration
            else:
                mark.unlink()

    def add(self, iteration: int) -> None:
        """A checkpoint of this iteration is being saved: evaluate it as soon as it is there."""
        if iteration % self.interval == 0 and iteration not in (*self.waiting, self._running):
            mark = in_use_file(self.root, iteration)
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
            self.waiting.append(iteration)

    def poll(self) -> list[str]:
        """What to print of an evaluation that has ended; starts the next one. Never waits."""
        lines = []
        if self._process is not None and self._process.poll() is not None:
            lines.append(self._ended())
        if self._process is None and self.waiting and self._is_complete(self.waiting[0]):
            lines.append(self._start(self.waiting.pop(0)))
        return lines

    def finish(self) -> Iterator[str]:
        """Wait for all that is left, line by line, and close the log."""
        try:
            yield from self._finish()
        finally:
            if self.log is not None:
                self.log.close()

    def _finish(self) -> Iterator[str]:
        while self._process is not None or self.waiting:
            if self._process is not None:
                self._process.wait()
            elif not self._is_complete(self.waiting[0]):
                iteration = self.waiting.pop(0)
                in_use_file(self.root, iteration).unlink(missing_ok=True)
                yield f"evaluation of iteration {iteration}: its checkpoint is not there"
            yield from self.poll()

    def _is_complete(self, iteration: int) -> bool:
        # A folder gets its final name when everything in it is durable.
        return (iteration_folder(self.root, iteration) / STATE_FILE).is_file()

    def _start(self, iteration: int) -> str:
        folder = in_use_file(self.root, iteration).parent
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint = iteration_folder(self.root, iteration)
        command = [sys.executable, "-m", "megatron_vla.evaluation", "--checkpoint", str(checkpoint), *self.flags]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
        package_root = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package_root, environment.get("PYTHONPATH"))))
        self._log = open(folder / LOG_FILE, "ab")  # noqa: SIM115  closed when the process has ended
        self._process = subprocess.Popen(command, env=environment, stdout=self._log, stderr=subprocess.STDOUT)
        self._running = iteration
        return f"evaluating {checkpoint} beside the training (log: {folder / LOG_FILE})"

    def _ended(self) -> str:
        assert self._process is not None and self._running is not None and self._log is not None
        iteration, status = self._running, self._process.returncode
        self._log.close()
        self._process = self._running = self._log = None
        mark = in_use_file(self.root, iteration)
        mark.unlink(missing_ok=True)
        verdict_file = mark.parent / VERDICT_FILE
        if status not in (0, 3) or not verdict_file.is_file():
            log = mark.parent / LOG_FILE
            said = log.read_text(errors="replace").strip().splitlines()[-1:] if log.is_file() else []
            why = f" ({said[0][:300]})" if said else ""
            return f"evaluation of iteration {iteration} failed with exit status {status}{why}: see {log}"
        report, verdict = json.loads((mark.parent / REPORT_FILE).read_text()), json.loads(verdict_file.read_text())
        if self.log is not None:
            self.log.evaluation(iteration, numbers_of(report, verdict))
        low, high = report["interval_95"]
        reasons = f" ({'; '.join(verdict['reasons'])})" if verdict["reasons"] else ""
        return (
            f"evaluation of iteration {iteration}: success {report['success'] or 0.0:.0%} "
            f"({low:.0%} to {high:.0%}, {report['trials']} trials), {verdict['status']}{reasons}"
        )
