"""One closed-loop evaluation: list the trials, run what is missing, film some, write the report.

Shape legend: T action horizon, A action.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vla.config.evaluation import EvaluationConfig
from megatron_vla.evaluation.environments.interface import (
    EnvironmentBackend,
    EnvironmentSettings,
    Observation,
    TaskSpec,
    Trial,
    environment_backend,
)
from megatron_vla.evaluation.environments.rendering import choose_backend
from megatron_vla.evaluation.plan import (
    compatibility,
    conditions,
    environment_settings,
    list_trials,
    package_versions,
    picture_findings,
    simulator_cameras,
)
from megatron_vla.evaluation.policy import Policy
from megatron_vla.evaluation.results import (
    MONTAGE,
    REPORT_JSON,
    REPORT_MARKDOWN,
    ResultFolder,
    build_report,
    markdown,
    share_of,
)
from megatron_vla.evaluation.results import write_json as write_report
from megatron_vla.evaluation.rollout import Actor, ActRequest, Rollout, RolloutSettings, TrialResult
from megatron_vla.evaluation.statistics import Share
from megatron_vla.evaluation.video import finished_film, montage, read_video, write_video
from megatron_vla.file_lock import alone_in

FILM_FPS = 10.0


class PolicyActor:
    """A checkpoint acts. Noise is a function of (seed, trial, number of the prediction)."""

    def __init__(self, policy: Policy, seed: int, camera_of: Mapping[str, str]) -> None:
        """camera_of: the policy's cameras -> the simulator's."""
        self.policy, self.seed, self.camera_of = policy, seed, camera_of

    def __call__(self, requests: Sequence[ActRequest]) -> list[np.ndarray]:
        """See Actor."""
        noise = [self.policy.noise(self.seed, zlib.crc32(r.trial.key.encode()), r.chunk) for r in requests]
        return self.policy.infer([self._renamed(r.observation) for r in requests], noise)

    def _renamed(self, observation: Observation) -> Observation:
        images = {key: observation.images[camera] for key, camera in self.camera_of.items()}
        return dataclasses.replace(observation, images=images)


def expert_actor(requests: Sequence[ActRequest]) -> None:
    """The simulator's scripted expert acts, through the same runner: the reference row of a table."""


def evaluate(
    config: EvaluationConfig,
    output: Path,
    policy: Policy | None,
    policy_facts: Mapping[str, Any],
    say: Callable[[str], None] = print,
    check: Callable[[Mapping[str, Any]], object] = lambda description: None,
) -> tuple[dict[str, Any], list[TrialResult], dict[str, Any]]:
    """Run (or go on with) an evaluation in `output` -> (report, results, description). `policy` None: the scripted expert.

    Raises ValueError for what cannot work, before any simulator starts where that can be known; `check` is given the
    description then, and may raise too.
    """
    backend = environment_backend(config.eval_environment)
    data = policy.preprocessor.pictures if policy is not None else None
    settings = environment_settings(config, backend, data)
    tasks = backend.tasks(settings)
    if policy is None and not backend.has_expert:
        raise ValueError(f"--policy expert: {backend.name} has no scripted expert")
    camera_of: dict[str, str] = {}
    if policy is not None:
        compatibility(policy.preprocessor.settings, backend, settings, config)
        for finding in picture_findings(settings, backend, data):
            say(str(finding))
        camera_of = simulator_cameras(policy.camera_keys, config)
        settings = dataclasses.replace(settings, cameras=tuple(dict.fromkeys(camera_of.values())))
    shared = conditions(config, backend, settings, policy.action_horizon if policy else 16)
    trials = list_trials(tasks, config.eval_trials_per_task, config.eval_seed, settings)
    description = {
        "policy": dict(policy_facts),
        **shared,
        # None where nothing is unusual, as for the revision.
        "camera_map": camera_of if config.eval_camera_map else None,
        "tasks": [task.name for task in tasks],
        "trials_per_task": config.eval_trials_per_task,
    }
    check(description)
    gl = None
    if backend.uses_mujoco(settings) and find_spec("mujoco") is not None:
        gl = choose_backend(config.eval_device)
        say(f"rendering with MUJOCO_GL={gl}, fast rendering {'on' if settings.fast_rendering else 'off'}")
    actor: Actor = expert_actor if policy is None else PolicyActor(policy, config.eval_seed, camera_of)
    with alone_in(output, "evaluation"):
        # What is there already is read by whoever holds the folder: another evaluation may have just finished it.
        run = _Run(config, backend, settings, tasks, ResultFolder(output, description), gl, shared["replan_interval"], say)
        report = run.finish(trials, actor, policy, description)
    return report, run.results, description


class _Run:
    """Running trials, videos and the report of one evaluation."""

    def __init__(
        self,
        config: EvaluationConfig,
        backend: EnvironmentBackend,
        settings: EnvironmentSettings,
        tasks: Sequence[TaskSpec],
        folder: ResultFolder,
        gl: str | None,
        replan_interval: int,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.backend, self.settings, self.tasks = config, backend, settings, tasks
        self.folder, self.gl, self.say = folder, gl, say
        fps = backend.fps(settings)
        stride = max(1, round(fps / FILM_FPS))
        self.film_fps = fps / stride
        self.rollout_settings = RolloutSettings(
            replan_interval=replan_interval,
            num_workers=config.eval_workers,
            environments_per_worker=config.eval_environments_per_worker,
            step_timeout_seconds=config.eval_step_timeout_seconds,
            film_stride=stride,
            gl=gl,
        )
        self.films: dict[str, list[np.ndarray]] = {}
        self.results: list[TrialResult] = []

    def finish(
        self, trials: Sequence[Trial], actor: Actor, policy: Policy | None, description: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Run what is missing, then report."""
        done = {result.key: result for result in self.folder.results}
        missing = [trial for trial in trials if trial.key not in done]
        if done:
            self.say(f"{self.folder.path}: {len(done)} of {len(trials)} trials are there, {len(missing)} to run")
        rollout = Rollout(self.backend, self.settings, self.tasks, self.rollout_settings, actor, self._is_filmed)
        for number, result in enumerate(rollout.run(missing), 1):
            if result.film:
                self._film(result)
            self.folder.add(result)
            done[result.key] = result
            if number % max(1, len(missing) // 10) == 0 or number == len(missing):
                self.say(f"{len(done)}/{len(trials)} trials, success {share_of(list(done.values()))}")
        self.results = [done[trial.key] for trial in trials if trial.key in done]
        self._montage()
        return self._report(rollout, policy, description)

    def _montage(self) -> None:
        """The first film of each task side by side, with those that were made before an interruption."""
        path = self.folder.path / f"{MONTAGE}.{self.config.eval_video_format}"
        if not self.films and path.is_file():
            return  # nothing new
        for result in self.results:
            if result.index == 0 and result.task not in self.films and result.video is not None:
                film = self.folder.path / result.video
                if film.is_file():
                    self.films[result.task] = read_video(film, self.film_fps)
        ordered = [self.films[task.name] for task in self.tasks if task.name in self.films]
        if ordered:
            write_video(montage(ordered, int(np.ceil(np.sqrt(len(ordered))))), path, self.film_fps)

    def _is_filmed(self, trial: Trial) -> bool:
        return trial.index < self.config.eval_videos_per_task

    def _film(self, result: TrialResult) -> None:
        instruction = next(task.instruction for task in self.tasks if task.name == result.task)
        film = finished_film(result.film, instruction, result.succeeded)
        if result.index == 0:
            self.films[result.task] = film
        outcome = "success" if result.succeeded else "failure"
        name = f"{result.task.replace('/', '_')}_{result.index}_{outcome}.{self.config.eval_video_format}"
        write_video(film, self.folder.path / "videos" / name, self.film_fps)
        result.video = f"videos/{name}"
        result.film = []

    def _report(self, rollout: Rollout, policy: Policy | None, description: Mapping[str, Any]) -> dict[str, Any]:
        times = rollout.times
        steps_per_s = times.num_steps / times.wall_seconds if times.wall_seconds else 0.0
        facts = {
            "policy": description["policy"].get("name", "expert"),
            "simulator": f"{self.backend.name} {self.settings.suite}, {self.settings.image_size} px, "
            f"{self.backend.fps(self.settings):g} actions/s, replan every {self.rollout_settings.replan_interval}, "
            f"fast rendering {'on' if self.settings.fast_rendering else 'off'}, MUJOCO_GL={self.gl}",
            "seeds": f"--eval-seed {self.config.eval_seed}, {self.config.eval_trials_per_task} trials a task",
            "time": f"{times.wall_seconds:.0f} s wall, {times.policy_seconds:.0f} s in the policy, "
            f"{times.simulator_seconds:.0f} s summed over {self.config.eval_workers} simulator process(es), "
            f"{steps_per_s:.0f} steps/s",
        }
        policy_times = {} if policy is None else policy.summary()
        if policy_times:  # not where all trials were there already
            facts["latency"] = (
                f"{policy_times['call_ms_p50']:.1f} ms a call of the policy (p50), {policy_times['call_ms_p99']:.1f} ms (p99), "
                f"mean batch {policy_times['mean_batch_size']:.1f}, {policy_times['actions_per_s']:.0f} actions/s"
            )
        more = {
            "facts": facts,
            "times": dataclasses.asdict(times),
            "policy_times": policy_times,
            "versions": package_versions(self.backend),
            "gl_backend": self.gl,
        }
        report = build_report(description, self.tasks, self.results, more)
        write_report(self.folder.path / REPORT_JSON, report)
        (self.folder.path / REPORT_MARKDOWN).write_text(
            markdown(report, f"Success on {self.settings.suite or self.backend.name}")
        )
        return report


def success_line(report: Mapping[str, Any]) -> str:
    """`success 61% (54% to 67%, 128/210)`."""
    return f"success {Share(report['successes'], report['trials'])}"
