"""A process that runs simulators: it is sent resets and whole action chunks, and answers with what came out.

Simulators are never in the main process: a GL context does not survive a fork, a crash of the physics ends one worker and not
the evaluation, and many of them run at the same time. Chunks, not single actions, travel: one message per prediction.

Shape legend: E environments, K actions of a chunk that are executed, A action, H height, W width.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np

from megatron_vla.evaluation.child_process import ChildProcess, tell
from megatron_vla.evaluation.environments.interface import (
    EnvironmentSettings,
    Observation,
    SimulatorError,
    Trial,
    VectorEnvironment,
    build_vector,
    load_backend,
)

FILM_SIDE = 160  # pixels


class WorkerError(RuntimeError):
    """A simulator process died, hung or raised; the text is its traceback. Its trials can be run again."""


@dataclass
class SlotReport:
    """What one slot did: its observation now (None after its end), steps taken, how it stands, pictures for a video."""

    observation: Observation | None
    num_steps: int = 0
    succeeded: bool = False
    ended: bool = False
    film: list[np.ndarray] = field(default_factory=list)


@dataclass
class WorkerReport:
    """Answer to one command: a report for each slot that was part of it. Seconds as the worker measured them."""

    slots: list[SlotReport | None]
    seconds: float = 0.0


@dataclass(frozen=True)
class Reset:
    """Begin these trials (None: leave the slot alone); film[e]: return a first picture."""

    trials: Sequence[Trial | None]
    film: Sequence[bool]


@dataclass(frozen=True)
class Advance:
    """Execute a chunk: actions_EKA (None: the scripted expert acts), at most limit_E steps in each slot; 0: not part of it."""

    actions_EKA: np.ndarray | None
    limit_E: np.ndarray
    film: Sequence[bool]
    film_stride: int


def small_picture(picture_HWC: np.ndarray) -> np.ndarray:
    """For videos: the picture, at most FILM_SIDE wide."""
    from PIL import Image

    height, width = picture_HWC.shape[:2]
    if width <= FILM_SIDE:
        return picture_HWC
    image = Image.fromarray(picture_HWC).resize((FILM_SIDE, max(1, height * FILM_SIDE // width)), Image.Resampling.BILINEAR)
    return np.asarray(image)


def reset_slots(environment: VectorEnvironment, command: Reset) -> WorkerReport:
    """Carry out a Reset."""
    observations = environment.reset(command.trials)
    reports = [None if trial is None else SlotReport(o) for trial, o in zip(command.trials, observations, strict=True)]
    _film(environment, reports, command.film)
    return WorkerReport(reports)


def advance_slots(environment: VectorEnvironment, command: Advance) -> WorkerReport:
    """Carry out an Advance. A slot stops at success, at its end, or at its limit."""
    limit_E = command.limit_E
    reports = [SlotReport(None) if limit > 0 else None for limit in limit_E]
    for step in range(int(limit_E.max())):
        is_active_E = np.array([
            report is not None and step < limit and not (report.succeeded or report.ended)
            for report, limit in zip(reports, limit_E, strict=True)
        ])  # fmt: skip
        if not is_active_E.any():
            break
        if command.actions_EKA is None:
            actions_EA = environment.expert_actions(is_active_E)
        else:
            actions_EA = command.actions_EKA[:, step]
        # Only the picture after the last action of a chunk is looked at.
        results = environment.step(actions_EA, is_active_E, render=step == int(limit_E.max()) - 1)
        for report, result in zip(reports, results, strict=True):
            if report is not None and result is not None:
                report.observation = result.observation
                report.num_steps += 1
                report.succeeded, report.ended = result.succeeded, result.ended
        is_filmed = [
            bool(film) and bool(active) and report is not None and ((step + 1) % command.film_stride == 0 or report.succeeded)
            for film, active, report in zip(command.film, is_active_E, reports, strict=True)
        ]
        _film(environment, reports, is_filmed)
    return WorkerReport(reports)


def _film(environment: VectorEnvironment, reports: Sequence[SlotReport | None], is_filmed: Sequence[bool]) -> None:
    if any(is_filmed):
        for report, picture, film in zip(reports, environment.pictures(), is_filmed, strict=True):
            if film and report is not None:
                report.film.append(small_picture(picture))


def _serve(connection: Connection, module: str, settings: EnvironmentSettings, num_environments: int, gl: str | None) -> None:
    """Body of the process."""
    if gl is not None:
        os.environ["MUJOCO_GL"] = gl
    environment: VectorEnvironment | None = None
    try:
        try:
            environment = build_vector(load_backend(module), settings, num_environments)
        except ValueError as problem:
            raise SimulatorError(str(problem)) from problem
        while (command := connection.recv()) is not None:
            started = time.perf_counter()
            report = reset_slots(environment, command) if isinstance(command, Reset) else advance_slots(environment, command)
            report.seconds = time.perf_counter() - started
            connection.send(report)
    except (EOFError, ConnectionError, KeyboardInterrupt):
        pass  # the evaluation has ended, or was killed
    except SimulatorError as problem:
        tell(connection, problem)
    except Exception:
        tell(connection, WorkerError(traceback.format_exc()))
    finally:
        if environment is not None:
            environment.close()
        connection.close()


class Worker(ChildProcess):
    """One simulator process as the evaluation sees it."""

    def __init__(self, module: str, settings: EnvironmentSettings, num_environments: int, gl: str | None) -> None:
        super().__init__(_serve, module, settings, num_environments, gl)
        self.num_environments = num_environments
        self.last_task: str | None = None

    def send(self, command: Reset | Advance, timeout_seconds: float) -> None:
        """Start a command. Raises WorkerError when the process is gone."""
        self.deadline = time.monotonic() + timeout_seconds
        try:
            self.connection.send(command)
        except (BrokenPipeError, ConnectionError) as failure:
            raise WorkerError(self._epitaph()) from failure

    def receive(self) -> WorkerReport:
        """The answer. Raises WorkerError, or SimulatorError for what a repetition cannot help."""
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionError) as failure:
            raise WorkerError(self._epitaph()) from failure
        self.deadline = float("inf")
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, WorkerReport)
        return answer

    def _epitaph(self) -> str:
        return f"the simulator process ended with exit status {self.exit_status(5)}"
