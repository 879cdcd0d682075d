"""Rules of the evaluation flags of a training run."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from megatron_vla.config.datasets import dataset_parts
from megatron_vla.config.evaluation import EvaluationConfig
from megatron_vla.config.run import RunConfig
from megatron_vla.findings import Finding, error, too_small


def rollout_findings(evaluation: EvaluationConfig) -> Iterator[Finding]:
    """Values that no evaluation can work with, beside a training or by itself."""
    bounds = (
        ("--eval-trials-per-task", evaluation.eval_trials_per_task, 1),
        ("--eval-workers", evaluation.eval_workers, 1),
        ("--eval-environments-per-worker", evaluation.eval_environments_per_worker, 1),
        ("--eval-action-repeat", evaluation.eval_action_repeat, 1),
        ("--eval-image-size", evaluation.eval_image_size, 8),
        ("--eval-seed", evaluation.eval_seed, 0),
        ("--eval-videos-per-task", evaluation.eval_videos_per_task, 0),
        ("--eval-step-timeout-seconds", evaluation.eval_step_timeout_seconds, 1),
    )
    yield from too_small(bounds)
    for flag, given, least in (
        ("--eval-max-steps", evaluation.eval_max_steps, 1),
        ("--eval-inference-steps", evaluation.eval_inference_steps, 1),
        ("--eval-replan-interval", evaluation.eval_replan_interval, 1),
        ("--eval-wait-steps", evaluation.eval_wait_steps, 0),
    ):
        if given is not None and given < least:
            yield error(flag, f"{given} is too small", f"use {least} or more, or leave it out for the default")
    if evaluation.eval_video_format == "mp4" and find_spec("av") is None:
        yield error("--eval-video-format", "mp4 needs the package av", "pip install av, or use --eval-video-format gif")
    yield from _gate(evaluation)


def evaluation_findings(config: RunConfig) -> Iterator[Finding]:
    """Errors of --eval-* flags that can be known from the flags alone."""
    checkpoint, interval = config.checkpoint, config.evaluation.eval_interval
    yield from rollout_findings(config.evaluation)
    if interval is None:
        return
    if interval < 1:
        yield error("--eval-interval", f"{interval} is not positive", "for example --eval-interval 1000")
        return
    if checkpoint.save is None:
        yield error("--eval-interval", "evaluates saved checkpoints, and none is saved", "add --save FOLDER")
    elif checkpoint.save_interval is None or (checkpoint.save_interval > 0 and interval % checkpoint.save_interval):
        what = f"{interval} is no multiple of --save-interval {checkpoint.save_interval}: there would be nothing to evaluate"
        yield error("--eval-interval", what, f"use --save-interval {interval}")
    if config.data.mock_data:
        yield error("--eval-interval", "a policy trained on mock data knows no cameras and cannot act", "drop it")
    yield from _dataset(config)


def _dataset(config: RunConfig) -> Iterator[Finding]:
    """Which robot of a mixture acts: cameras, state and actions are one dataset's."""
    chosen = config.evaluation.eval_dataset
    parts, _ = dataset_parts(config.data)  # their own problems are reported when the data is built
    names = [part.name for part in parts]
    if len(names) > 1 and chosen not in names:
        what = "a mixture has one preprocessing per dataset, and rollouts need one of them"
        yield error("--eval-dataset", what if chosen is None else f"no dataset {chosen!r}", f"choose one of {', '.join(names)}")
    elif len(names) == 1 and chosen is not None:
        yield error("--eval-dataset", "there is one dataset only", "drop it")


def _gate(evaluation: EvaluationConfig) -> Iterator[Finding]:
    from megatron_vla.evaluation.gate import parse_gate

    try:
        parse_gate(evaluation.eval_gate)
    except ValueError as problem:
        yield error("--eval-gate", str(problem).removeprefix("--eval-gate "), "for example --eval-gate min_success=0.6")
