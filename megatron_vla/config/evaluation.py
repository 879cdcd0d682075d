"""Closed-loop evaluation: which simulator and trials, how the policy acts, what decides whether a checkpoint is promoted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation: closed-loop rollouts of a checkpoint, in processes of their own"""

    eval_interval: int | None = None
    """Evaluate the checkpoints of iterations divisible by this, while training goes on (a multiple of --save-interval)."""

    eval_environment: Literal["metaworld", "libero", "gymnasium", "isaac_lab"] = "metaworld"
    """Simulator."""

    eval_suite: str | None = None
    """Task suite (mt1, mt10, libero_object, ...) or Gymnasium id. Not set: the simulator's first one."""

    eval_tasks: tuple[str, ...] = ()
    """Only these tasks of the suite. None: all."""

    eval_trials_per_task: int = 20
    """Trials of each task. Trial k starts alike for every checkpoint, so that two of them can be compared in pairs."""

    eval_seed: int = 0
    """Placements and the policy's noise follow from it."""

    eval_replan_interval: int | None = None
    """Actions executed of each predicted chunk before the next prediction. Not set: half of the chunk."""

    eval_max_steps: int | None = None
    """Actions after which a trial has failed. Not set: as the suite's protocol says."""

    eval_wait_steps: int | None = None
    """Do-nothing steps after a reset. Not set: as the suite's protocol says."""

    eval_initial_states: Literal["official", "random"] = "official"
    """official: the suite's own list of starts, where it has one; random: drawn from the seed."""

    eval_action_repeat: int = 1
    """Control steps that an action is held for; must give the rate of the training data."""

    eval_check_rate: bool = True
    """Refuse a simulator whose actions per second differ from those of the training data."""

    eval_image_size: int | None = None
    """Side of the rendered pictures in pixels. Not set: that of the training data, or 224 where its pictures are not square or
    the checkpoint does not tell."""

    eval_rotate_images: bool | None = None
    """Turn pictures by 180 degrees before the policy sees them. Not set: as the suite's protocol says."""

    eval_fast_rendering: bool | None = None
    """No shadows, multisampling or reflections: 5 to 10 times faster on CPUs. Not set: as the training data was recorded, or on
    where that is not known."""

    eval_camera_map: tuple[str, ...] = ()
    """CHECKPOINT_CAMERA=SIMULATOR_CAMERA where the names differ."""

    eval_options: tuple[str, ...] = ()
    """KEY=JSON settings that only this simulator knows (its module's docstring lists them)."""

    eval_workers: int = 2
    """Simulator processes."""

    eval_environments_per_worker: int = 1
    """Simulators in each of them, stepped one after the other (together, where the simulator is batched)."""

    eval_step_timeout_seconds: float = 300.0
    """A simulator process that is silent for longer is replaced, and its trials run again."""

    eval_videos_per_task: int = 1
    """Film the first trials of each task."""

    eval_video_format: Literal["gif", "mp4"] = "gif"
    """Format of the videos; each stays below 500 kB. mp4 needs the package av."""

    eval_device: str | None = None
    """Device of the policy, which the simulators render on too (cuda:1; cpu: in software). Not set: a GPU if there is one."""

    eval_weights: Literal["auto", "average", "raw"] = "auto"
    """Which weights act: their average (--ema-decay), the raw ones, or (auto) the average where the checkpoint has it."""

    eval_dataset: str | None = None
    """Which dataset's cameras, state and actions, for a model that was trained on a mixture (its name in --data-path)."""

    eval_inference_steps: int | None = None
    """Denoising steps. Not set: as the model's configuration says."""

    eval_compile: bool = False
    """Compile the policy's prefill and denoising step."""

    eval_cuda_graph: bool = False
    """Replay the whole sampling as one CUDA graph for every batch size that occurs."""

    eval_gate: tuple[str, ...] = ()
    """Conditions for promotion, all of which must hold: min_success=0.6 (share of all trials), min_lower_bound=0.5 (its
    95 percent Wilson bound), min_task_success=0.1 (every task), rule=not_worse|better (than the promoted checkpoint, exact
    McNemar test on the same trials), alpha=0.05, margin=0.1 (largest drop of the share). None: no gate."""
