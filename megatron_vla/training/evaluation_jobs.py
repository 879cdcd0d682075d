"""Evaluations beside a training run: rank 0 starts one process per checkpoint and looks after it between steps.

No rank ever waits for a rollout: the evaluation reads a saved checkpoint, in a process without any process group, one at a time
and in the order of the checkpoints. Rank 0 waits for what is left when training ends, after the process groups are closed.

The file `in_use` beside a checkpoint's results says that its evaluation is asked for; it goes when there is a verdict, or when
the evaluation has failed by itself. A stop signal of the training ends the running evaluation and starts no other one, and
what is left open is done after the next start, from the trials that are there. A training that was killed leaves its
evaluation running: the next start waits for that one and takes its result.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from megatron_vla.config.cli import to_flags
from megatron_vla.config.run import RunConfig
from megatron_vla.file_lock import is_held
from megatron_vla.training.checkpoint_folder import (
    EVALUATION_FOLDER,
    IN_USE_FILE,
    STATE_FILE,
    in_use_file,
    iteration_folder,
)
from megatron_vla.training.signals import StopSignals

LOG_FILE = "evaluation.log"
REPORT_FILE, VERDICT_FILE = "report.json", "verdict.json"
WAIT_SECONDS = 0.5
# An evaluation that was asked to end and has not, is killed; launchers kill a training 30 s after their signal.
STOP_SECONDS = 10.0
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
        self._is_stopping = False
        self._held: int | None = None

    def _left_open(self) -> Iterator[int]:
        """Evaluations that an earlier run had not finished; marks of deleted checkpoints are removed."""
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
            # From now on, a verdict beside the mark is the one that is asked for here.
            (mark.parent / VERDICT_FILE).unlink(missing_ok=True)
            mark.touch()
            self.waiting.append(iteration)

    def poll(self) -> list[str]:
        """What to print of an evaluation that has ended; starts the next one. Never waits."""
        lines = []
        if self._process is not None and self._process.poll() is not None:
            lines.append(self._ended())
        if self._process is None and not self._is_stopping and self.waiting and self._is_complete(self.waiting[0]):
            lines += self._next()
        return lines

    def stop(self) -> None:
        """Start nothing more, and ask the running evaluation to end. Does not wait for that: `finish` does."""
        self._is_stopping = True
        self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        """To the running evaluation and its simulators, which are one process group."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def finish(self) -> Iterator[str]:
        """Wait for all that is left (after `stop`, and after a stop signal that comes now: for the end of the running one, at
        most STOP_SECONDS), line by line, and close the log."""
        try:
            with StopSignals(None) as signals:
                yield from self._finish(signals)
        finally:
            self._send(signal.SIGTERM)
            if self.log is not None:
                self.log.close()

    def _finish(self, signals: StopSignals) -> Iterator[str]:
        while not self._is_stopping and (self._process is not None or self.waiting):
            if self._process is None and not self._is_complete(self.waiting[0]):
                iteration = self.waiting.pop(0)
                in_use_file(self.root, iteration).unlink(missing_ok=True)
                yield f"evaluation of iteration {iteration}: its checkpoint is not there"
            yield from self.poll()
            if self._process is not None or self._held is not None:
                self._wait(WAIT_SECONDS)
            if signals.poll():
                self.stop()
        if self._process is not None:
            self._wait(STOP_SECONDS)
            self._send(signal.SIGKILL)
            self._process.wait()
            yield self._ended()
        if self.waiting:
            numbers = ", ".join(map(str, self.waiting))
            yield f"evaluations left for the next start of this training: iteration {numbers}"

    def _wait(self, seconds: float) -> None:
        """For the end of the running process (or of another one's work), but no longer than that."""
        if self._process is None:
            time.sleep(seconds)
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def _is_complete(self, iteration: int) -> bool:
        # A folder gets its final name when everything in it is durable.
        return (iteration_folder(self.root, iteration) / STATE_FILE).is_file()

    def _next(self) -> list[str]:
        """Start the next one, unless somebody does it already, or did: the evaluation of a training that was killed."""
        iteration = self.waiting[0]
        folder = in_use_file(self.root, iteration).parent
        if is_held(folder):
            known, self._held = self._held, iteration
            told = f"evaluation of iteration {iteration}: another process is at work in {folder}, its result is waited for"
            return [] if known == iteration else [told]
        self._held = None
        self.waiting.pop(0)
        return [self._judged(iteration) if (folder / VERDICT_FILE).is_file() else self._start(iteration)]

    def _start(self, iteration: int) -> str:
        folder = in_use_file(self.root, iteration).parent
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint = iteration_folder(self.root, iteration)
        command = [sys.executable, "-m", "megatron_vla.evaluation", "--checkpoint", str(checkpoint), *self.flags]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
        package_root = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package_root, environment.get("PYTHONPATH"))))
        self._log = open(folder / LOG_FILE, "ab")  # noqa: SIM115  closed when the process has ended
        # A session of its own: a launcher's signals mean the training, which ends its evaluation itself (`stop`).
        self._process = subprocess.Popen(
            command, env=environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._running = iteration
        return f"evaluating {checkpoint} beside the training (log: {folder / LOG_FILE})"

    def _ended(self) -> str:
        assert self._process is not None and self._running is not None and self._log is not None
        iteration, status = self._running, self._process.returncode
        self._log.close()
        self._process = self._running = self._log = None
        mark = in_use_file(self.root, iteration)
        # Killed after its verdict: it is the one that was asked for.
        if (status in (0, 3) or status < 0) and (mark.parent / VERDICT_FILE).is_file():
            return self._judged(iteration)
        log = mark.parent / LOG_FILE
        if status < 0 or self._is_stopping:
            # Not its own fault: the mark stays, and with it the checkpoint.
            how = "stopped" if self._is_stopping else f"killed by signal {-status}"
            return f"evaluation of iteration {iteration} was {how}, the next start of this training goes on with it: see {log}"
        if is_held(mark.parent):
            # Somebody was faster in the moment of the start.
            self.waiting.insert(0, iteration)
            return f"evaluation of iteration {iteration} waits: another process is at work in {mark.parent}"
        mark.unlink(missing_ok=True)
        said = log.read_text(errors="replace").strip().splitlines()[-1:] if log.is_file() else []
        why = f" ({said[0][:300]})" if said else ""
        return f"evaluation of iteration {iteration} failed with exit status {status}{why}: see {log}"

    def _judged(self, iteration: int) -> str:
        """Hand the result on; the evaluation is done."""
        mark = in_use_file(self.root, iteration)
        report = json.loads((mark.parent / REPORT_FILE).read_text())
        verdict = json.loads((mark.parent / VERDICT_FILE).read_text())
        if self.log is not None:
            self.log.evaluation(iteration, numbers_of(report, verdict))
        mark.unlink(missing_ok=True)
        low, high = report["interval_95"]
        reasons = f" ({'; '.join(verdict['reasons'])})" if verdict["reasons"] else ""
        return (
            f"evaluation of iteration {iteration}: success {report['success'] or 0.0:.0%} "
            f"({low:.0%} to {high:.0%}, {report['trials']} trials), {verdict['status']}{reasons}"
        )
