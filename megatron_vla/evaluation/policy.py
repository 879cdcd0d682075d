"""A policy from a checkpoint folder alone: weights, preprocessing, statistics, tokenizer and cameras all come from it.

Preprocessing is the very object that training used (data/preprocess.py), called the way training calls it, so that the model
cannot see anything else than it was trained on. The model never draws: noise comes with each request.

Shape legend: B requests, T action horizon, A padded action dimensions, D the robot's own dimensions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from megatron_vla.config.evaluation import EvaluationConfig
from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.config.run import RunConfig, from_dict
from megatron_vla.data.batch import Batch, collate_tensors
from megatron_vla.data.dataset import RawSample
from megatron_vla.data.draws import flow_draws
from megatron_vla.data.loader import PromptWidth
from megatron_vla.data.preprocess import Preprocessor
from megatron_vla.evaluation.environments.interface import Observation
from megatron_vla.evaluation.sampling import ActionSampler
from megatron_vla.models.registry import ModelFamily, model_family
from megatron_vla.parallel.groups import ParallelGroups
from megatron_vla.training.checkpoint import load_weights
from megatron_vla.training.checkpoint_folder import STATE_FILE, CheckpointFolder, find_latest, open_folder

PROMPT_BUCKET = 16


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """How a checkpoint is run; None: as it says itself."""

    device: str | None = None
    weights: Literal["auto", "average", "raw"] = "auto"
    num_inference_steps: int | None = None
    compile: bool = False
    cuda_graph: bool = False
    dataset: str | None = None
    """Which dataset's preprocessing, for a checkpoint that was trained on a mixture."""
    max_batch_size: int = 64

    @staticmethod
    def from_config(config: EvaluationConfig) -> PolicySettings:
        """From --eval-* flags."""
        return PolicySettings(
            device=config.eval_device,
            weights=config.eval_weights,
            num_inference_steps=config.eval_inference_steps,
            compile=config.eval_compile,
            cuda_graph=config.eval_cuda_graph,
        )


@dataclass
class PolicyTimes:
    """Costs so far, host clock, in seconds."""

    preprocess_seconds: float = 0.0
    call_seconds: list[float] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)

    def summary(self, actions_per_request: int) -> dict[str, float]:
        """Latency of a call (batch to physical actions) in milliseconds and actions per second; {} before the first call."""
        if not self.batch_sizes:
            return {}
        call_ms, requests = np.array(self.call_seconds) * 1e3, sum(self.batch_sizes)
        return {
            "calls": len(self.batch_sizes),
            "requests": requests,
            "mean_batch_size": requests / len(self.batch_sizes),
            "preprocess_ms_per_request": self.preprocess_seconds * 1e3 / requests,
            "call_ms_p50": float(np.quantile(call_ms, 0.5)),
            "call_ms_p99": float(np.quantile(call_ms, 0.99)),
            "actions_per_s": requests * actions_per_request / (self.preprocess_seconds + sum(self.call_seconds)),
        }


def open_checkpoint(path: Path) -> CheckpointFolder:
    """`path` is one checkpoint folder, or a --save folder, whose latest complete one is taken. Raises ValueError."""
    if (path / STATE_FILE).is_file():
        return open_folder(path)
    found, remarks = find_latest(path)
    if found is None:
        raise ValueError(f"{path}: no complete checkpoint here{''.join(f'; {r}' for r in remarks)}")
    return found


def serving_config(config: RunConfig) -> RunConfig:
    """The run's configuration in one process, without the switches that only training needs."""
    # This attention kernel works with cached keys and values, on every device and inside graphs.
    return replace(config, parallel=ParallelConfig(), optimization=OptimizationConfig(attention_backend="sdpa"))


def _one_process(device: torch.device) -> ParallelGroups:
    """What building a model asks of groups, without any process group."""
    return ParallelGroups(
        world_size=1,
        rank=0,
        local_rank=0,
        device=device,
        data_parallel_rank=0,
        data_parallel_size=1,
        data_parallel_group=None,
        tensor_model_parallel_rank=0,
        tensor_model_parallel_size=1,
        tensor_model_parallel_group=None,
        pipeline_model_parallel_rank=0,
        pipeline_model_parallel_size=1,
        pipeline_model_parallel_group=None,
        model_parallel_group=None,
        host_group=None,
    )


def load_preprocessor(folder: CheckpointFolder, dataset: str | None) -> Preprocessor:
    """The stored preprocessing. Raises ValueError for a run on mock data, and for a mixture without a choice."""
    if folder.preprocessor is None:
        raise ValueError(f"{folder.path}: trained on mock data, so it knows no cameras, state or action units and cannot act")
    return Preprocessor.load(folder.preprocessor / dataset if dataset else folder.preprocessor)


class Policy:
    """Observations in, physical action chunks out."""

    def __init__(
        self,
        config: RunConfig,
        family: ModelFamily,
        module: nn.Module,
        preprocessor: Preprocessor,
        settings: PolicySettings,
        device: torch.device,
    ) -> None:
        self.config, self.family, self.module, self.preprocessor = config, family, module, preprocessor
        self.settings, self.device = settings, device
        self.times = PolicyTimes()
        # Buckets keep the number of shapes small; the masks make the width mean nothing.
        self._width = PromptWidth("bucket", PROMPT_BUCKET)
        assert family.num_inference_steps is not None
        self.num_steps = settings.num_inference_steps or family.num_inference_steps(config.family)
        self._sampler = ActionSampler(family, module, self.num_steps, compile=settings.compile, cuda_graph=settings.cuda_graph)

    @property
    def camera_keys(self) -> tuple[str, ...]:
        """Cameras that an observation must have."""
        return tuple(key for key in self.preprocessor.settings.camera_keys if key)

    @property
    def action_horizon(self) -> int:
        """Actions per prediction."""
        return self.preprocessor.settings.action_horizon

    def noise(self, seed: int, stream: int, chunk: int) -> np.ndarray:
        """float32 [T, A]: a pure function of (seed, stream, chunk), whatever else is in the batch."""
        noise_TA, _ = flow_draws(seed, chunk, stream, self.action_horizon, self.preprocessor.settings.max_action_dim)
        return noise_TA

    def preprocess(self, observation: Observation) -> dict[str, Any]:
        """Arrays of one request, as training makes them of a sample. Raises ValueError for what the observation lacks."""
        settings = self.preprocessor.settings
        missing = [key for key in self.camera_keys if key not in observation.images]
        if missing:
            raise ValueError(
                f"camera {', '.join(missing)} missing; the observation has {', '.join(observation.images) or 'none'}"
            )
        sample = RawSample(
            index=0,
            episode_index=0,
            frame_index=0,
            images={key: observation.images[key] for key in self.camera_keys},
            state_D=np.asarray(observation.state_D, dtype=np.float32),
            # Nobody knows the actions yet: zeros, which sampling does not read.
            actions_TD=np.zeros((settings.action_horizon, settings.action_dim), np.float32),
            action_is_in_episode_T=np.ones(settings.action_horizon, dtype=bool),
            instruction=observation.instruction,
        )
        return self.preprocessor(sample, 0)

    def batch(self, arrays: Sequence[dict[str, Any]], noise: Sequence[np.ndarray]) -> Batch:
        """One batch on the device."""
        drawn = [{**a, "noise_BTA": n, "time_B": np.float32(1.0)} for a, n in zip(arrays, noise, strict=True)]
        tensors: dict[str, Tensor] = collate_tensors(drawn)
        self._width.trim(tensors)
        return Batch(**tensors).to(self.device)

    def infer(self, observations: Sequence[Observation], noise: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Physical action chunks float32 [T, D], one per observation, computed in batches of up to `max_batch_size`."""
        started = time.perf_counter()
        arrays = [self.preprocess(observation) for observation in observations]
        self.times.preprocess_seconds += time.perf_counter() - started
        return self.infer_prepared(arrays, [o.state_D for o in observations], noise)

    def infer_prepared(
        self, arrays: Sequence[dict[str, Any]], states: Sequence[np.ndarray], noise: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """`infer` of what `preprocess` made, with the physical states that it was made from."""
        chunks: list[np.ndarray] = []
        for first in range(0, len(arrays), self.settings.max_batch_size):
            part = slice(first, first + self.settings.max_batch_size)
            started = time.perf_counter()
            # The copy to the host waits for the device, so the clock shows what the caller waits for.
            actions_BTA = self._sampler(self.batch(arrays[part], noise[part])).float().cpu().numpy()
            for actions_TA, state_D in zip(actions_BTA, states[part], strict=True):
                chunks.append(self.preprocessor.unnormalize_actions(actions_TA, np.asarray(state_D, dtype=np.float32)))
            self.times.call_seconds.append(time.perf_counter() - started)
            self.times.batch_sizes.append(len(actions_BTA))
        return chunks

    def summary(self) -> dict[str, float]:
        """Latency and actions per second so far."""
        return self.times.summary(self.action_horizon)


def load_policy(folder: CheckpointFolder, settings: PolicySettings, report: Any = print) -> Policy:
    """The policy of a checkpoint. Raises ValueError or CheckError naming what is missing; `report` gets one line."""
    config = serving_config(from_dict(folder.config()))
    family = model_family(config.model.model_name)
    if family.sample_actions is None:
        raise ValueError(f"{folder.path}: the family {family.name} has no sampling yet")
    preprocessor = load_preprocessor(folder, settings.dataset)
    device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if settings.cuda_graph and device.type != "cuda":
        raise ValueError(f"--eval-cuda-graph: the policy is on {device} -> drop it, or use a GPU")
    module = family.build(config, _one_process(device))
    averaged = bool(folder.state["has_average"]) if settings.weights == "auto" else settings.weights == "average"
    report(load_weights(folder, module, averaged=averaged) + (" (averaged weights)" if averaged else ""))
    module.requires_grad_(False).eval()
    return Policy(config, family, module, preprocessor, settings, device)
