"""A policy from a checkpoint folder alone: weights, preprocessing, statistics, tokenizer and cameras all come from it.

Preprocessing is the very object that training used, and batches are put together by the code that training's loaders run, so
that the model cannot see anything else than it was trained on. The model never draws: noise comes with each request.

Shape legend: B requests, T action horizon, A padded action dimensions, D the robot's own dimensions.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from megatron_vla.config.evaluation import EvaluationConfig
from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.config.run import RunConfig, from_dict
from megatron_vla.data.batch import TensorFields
from megatron_vla.data.draws import NOISE_STREAM, sample_generator
from megatron_vla.data.load_preprocessor import ServedPreprocessor, load_preprocessor, mixture_names
from megatron_vla.data.loader import PromptWidth, collate_padded
from megatron_vla.data.watch import StageTimes
from megatron_vla.evaluation.environments.interface import Observation
from megatron_vla.evaluation.sampling import ActionSampler
from megatron_vla.models.registry import ModelFamily, model_family
from megatron_vla.parallel.groups import ParallelGroups
from megatron_vla.training.checkpoint import load_weights
from megatron_vla.training.checkpoint_folder import STATE_FILE, CheckpointFolder, find_latest, open_folder

PROMPT_BUCKET = 16
RECENT_CALLS = 1 << 16  # calls that the latency's quantiles look at; an evaluation has fewer


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
            dataset=config.eval_dataset,
        )


@dataclass
class PolicyTimes:
    """Costs so far, host clock, in seconds. Single calls are kept of the last RECENT_CALLS only: a server runs for months."""

    preprocess_seconds: float = 0.0
    total_seconds: float = 0.0
    batch_sizes: Counter[int] = field(default_factory=Counter)
    """Requests of a call -> calls."""
    recent_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_CALLS))

    def add_call(self, seconds: float, requests: int) -> None:
        """One call of the model has answered so many requests."""
        self.total_seconds += seconds
        self.batch_sizes[requests] += 1
        self.recent_seconds.append(seconds)

    def summary(self, actions_per_request: int) -> dict[str, float]:
        """Latency of a call (batch to physical actions) in milliseconds and actions per second; {} before the first call."""
        if not self.batch_sizes:
            return {}
        call_ms, calls = np.array(self.recent_seconds) * 1e3, self.batch_sizes.total()
        requests = sum(size * times for size, times in self.batch_sizes.items())
        return {
            "calls": calls,
            "requests": requests,
            "mean_batch_size": requests / calls,
            "preprocess_ms_per_request": self.preprocess_seconds * 1e3 / requests,
            "call_ms_p50": float(np.quantile(call_ms, 0.5)),
            "call_ms_p99": float(np.quantile(call_ms, 0.99)),
            "actions_per_s": requests * actions_per_request / (self.preprocess_seconds + self.total_seconds),
        }


def open_checkpoint(path: Path) -> CheckpointFolder:
    """`path` is one checkpoint folder, or a --save folder, whose latest complete one is taken. Raises ValueError."""
    if (path / STATE_FILE).is_file():
        return open_folder(path)
    found, remarks = find_latest(path)
    if found is None:
        what = "no complete checkpoint here" if path.is_dir() else "no complete checkpoint here: there is no such folder"
        raise ValueError(f"--checkpoint {path}: {what}{''.join(f'; {r}' for r in remarks)}")
    return found


def serving_config(config: RunConfig) -> RunConfig:
    """The run's configuration in one process, without the switches that only training needs."""
    return replace(
        config,
        parallel=ParallelConfig(),
        # This attention kernel works with cached keys and values, on every device and inside graphs.
        optimization=OptimizationConfig(attention_backend="sdpa"),
        data=replace(config.data, augmentation="none"),
    )


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


def usable_device(name: str | None) -> torch.device:
    """The device of that name (None: a GPU if there is one). Raises ValueError for one that is not there."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = ", ".join(("cpu", *(f"cuda:{i}" for i in range(gpus))))
    try:
        device = torch.device(name or ("cuda" if gpus else "cpu"))
    except RuntimeError as problem:
        raise ValueError(f"--eval-device {name}: no such device -> one of {there}") from problem
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and (device.index or 0) >= gpus):
        raise ValueError(f"--eval-device {name}: this machine has no such device -> one of {there}")
    return device


def stored_preprocessor(folder: CheckpointFolder, dataset: str | None) -> ServedPreprocessor:
    """The stored preprocessing. Raises ValueError for a run on mock data, and for a mixture without a choice."""
    if folder.preprocessor is None:
        raise ValueError(f"{folder.path}: trained on mock data, so it knows no cameras, state or action units and cannot act")
    names = mixture_names(folder.preprocessor)
    if (dataset is not None or names) and dataset not in names:
        known = f"a mixture of {', '.join(names)} -> choose one with --eval-dataset" if names else "one dataset -> drop it"
        raise ValueError(f"--eval-dataset {dataset or 'is not set'}: {folder.path} was trained on {known}")
    chosen: ServedPreprocessor = load_preprocessor(folder.preprocessor / dataset if dataset else folder.preprocessor)
    return chosen


def check_finite(actions_TD: np.ndarray) -> None:
    """Raise ValueError for actions that no robot may get."""
    wrong = int(actions_TD.size - np.isfinite(actions_TD).sum())
    if wrong:
        raise ValueError(
            f"{wrong} of {actions_TD.size} predicted numbers are NaN or infinite: the checkpoint's weights or statistics are "
            "damaged, or the state is far outside of the training data -> use another checkpoint, or check the state's units"
        )


class Policy:
    """Observations in, physical action chunks out."""

    def __init__(
        self,
        config: RunConfig,
        family: ModelFamily,
        module: nn.Module,
        preprocessor: ServedPreprocessor,
        settings: PolicySettings,
        device: torch.device,
    ) -> None:
        self.config, self.family, self.module, self.preprocessor = config, family, module, preprocessor
        self.settings, self.device = settings, device
        self.times = PolicyTimes()
        # Buckets keep the number of shapes small; the masks make the width mean nothing.
        self._width = PromptWidth("bucket", PROMPT_BUCKET)
        rules = family.samples
        self._assemble = None if rules.build_assembler is None else rules.build_assembler(config)
        assert family.num_inference_steps is not None
        self.num_steps = settings.num_inference_steps or family.num_inference_steps(config.family)
        self._sampler = ActionSampler(family, module, self.num_steps, compile=settings.compile, cuda_graph=settings.cuda_graph)

    @property
    def camera_keys(self) -> tuple[str, ...]:
        """Cameras that an observation must have."""
        return tuple(key for key in self.preprocessor.settings.camera_keys if key)

    @property
    def action_horizon(self) -> int:
        """Actions per prediction: the robot's own steps, without the model's padding of the chunk."""
        return self.preprocessor.settings.num_steps

    def noise(self, seed: int, stream: int, chunk: int) -> np.ndarray:
        """float32 [T, A]: a pure function of (seed, stream, chunk), whatever else is in the batch."""
        settings = self.preprocessor.settings
        shape = (settings.action_horizon, settings.max_action_dim)
        # In padded dimensions and steps too, as in training.
        return sample_generator(seed, NOISE_STREAM, chunk, stream).standard_normal(shape, dtype=np.float32)

    def preprocess(self, observation: Observation) -> dict[str, Any]:
        """Arrays of one request, by the code that training uses. Raises ValueError for what the observation lacks."""
        started = time.perf_counter()
        arrays = self._preprocess(observation)
        self.times.preprocess_seconds += time.perf_counter() - started
        return arrays

    def _preprocess(self, observation: Observation) -> dict[str, Any]:
        settings = self.preprocessor.settings
        missing = [key for key in self.camera_keys if key not in observation.images]
        if missing:
            raise ValueError(
                f"camera {', '.join(missing)} missing; the observation has {', '.join(observation.images) or 'none'}"
            )
        images = {key: observation.images[key] for key in self.camera_keys}
        state_D = np.asarray(observation.state_D, dtype=np.float32)
        shape = (settings.action_horizon, settings.max_action_dim)
        return {
            **self.preprocessor.preprocess_observation(images, state_D, observation.instruction),
            # Nobody knows the actions yet: zeros, which sampling does not read.
            "actions_BTA": np.zeros(shape, np.float32),
            "action_is_valid_BTA": np.zeros(shape, dtype=bool),
            "action_dim_is_valid_BA": np.arange(settings.max_action_dim) < settings.action_dim,
            "sample_index_B": np.int64(0),
            "epoch_B": np.int64(0),
        }

    def batch(self, arrays: Sequence[dict[str, Any]], noise: Sequence[np.ndarray]) -> TensorFields:
        """One batch on the device."""
        fields = self.family.samples.request_fields
        drawn = [({**a, "noise_BTA": n, **fields}, StageTimes()) for a, n in zip(arrays, noise, strict=True)]
        return collate_padded(drawn, self._width, self._assemble).batch.to(self.device)

    def infer(self, observations: Sequence[Observation], noise: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Physical action chunks float32 [T, D], one per observation, computed in batches of up to `max_batch_size`.

        Raises ValueError naming the observation whose actions are not finite.
        """
        arrays = [self.preprocess(observation) for observation in observations]
        chunks = self.infer_prepared(arrays, [o.state_D for o in observations], noise)
        for number, (observation, actions_TD) in enumerate(zip(observations, chunks, strict=True)):
            try:
                check_finite(actions_TD)
            except ValueError as problem:
                raise ValueError(f"observation {number} ({observation.instruction[:60]!r}): {problem}") from None
        return chunks

    def infer_prepared(
        self, arrays: Sequence[dict[str, Any]], states: Sequence[np.ndarray], noise: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """`infer` of what `preprocess` made, with the physical states that it was made from.

        A chunk may hold NaN or infinity (`check_finite`): one request must not spoil the others of its batch.
        """
        chunks: dict[int, np.ndarray] = {}
        for part in self._batches(arrays):
            started = time.perf_counter()
            # Compiled code and graphs want few shapes: copies of the last request fill the batch up.
            filled = [*part, *part[-1:] * (self._sampler.batch_size(len(part)) - len(part))]
            batch = self.batch([arrays[i] for i in filled], [noise[i] for i in filled])
            # The copy to the host waits for the device, so the clock shows what the caller waits for.
            actions_BTA = self._sampler(batch).float().cpu().numpy()
            for i, actions_TA in zip(part, actions_BTA[: len(part)], strict=True):
                chunks[i] = self._physical(actions_TA, np.asarray(states[i], dtype=np.float32))
            self.times.add_call(time.perf_counter() - started, len(part))
        return [chunks[i] for i in range(len(arrays))]

    def _physical(self, actions_TA: np.ndarray, state_D: np.ndarray) -> np.ndarray:
        """Normalised actions -> float32 [T, D]; all NaN where the model's are not finite."""
        if not np.isfinite(actions_TA).all():
            # Clipping would hide an infinity, and rotations of NaN raise.
            return np.full((self.action_horizon, self.preprocessor.settings.action_dim), np.nan, np.float32)
        return self.preprocessor.unnormalize_actions(actions_TA, state_D)

    def warm_up(self, instructions: Sequence[str], report: Callable[[str], None] = print) -> None:
        """Compute every batch size once with each instruction, so that requests of these shapes wait for no compiler.

        Nothing where batches keep their own size (neither compiled nor captured). Pictures are square, the state is zero;
        `summary` does not count it. Raises ValueError for an instruction that does not fit.
        """
        if not self._sampler.uses_few_shapes:
            return
        side, frames, states = (self.preprocessor.settings.image_size, *self._steps)
        picture = np.zeros((*frames, side, side, 3), np.uint8)
        state_D = np.zeros((*states, self.preprocessor.settings.state_dim), np.float32)
        largest = self._sampler.batch_size(self.settings.max_batch_size)
        sizes = [1 << k for k in range(largest.bit_length())]
        for number, (instruction, size) in enumerate(((i, s) for i in instructions for s in sizes), 1):
            started = time.perf_counter()
            observation = Observation(dict.fromkeys(self.camera_keys, picture), state_D, instruction)
            count = min(size, self.settings.max_batch_size)
            self.infer_prepared([self.preprocess(observation)] * count, [state_D] * count, [self.noise(0, 0, 0)] * count)
            seconds = time.perf_counter() - started
            report(f"warm-up {number}/{len(instructions) * len(sizes)}: batches of {size}, {instruction!r}, {seconds:.1f} s")
        self.times = PolicyTimes()

    @property
    def _steps(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Leading dimensions of pictures and of states: none where there is one step only."""
        settings = self.preprocessor.settings
        frames, states = len(settings.frame_steps), len(settings.state_steps)
        return (frames,) if frames > 1 else (), (states,) if states > 1 else ()

    def _batches(self, arrays: Sequence[dict[str, Any]]) -> Iterator[list[int]]:
        """Numbers of requests that are computed together."""
        key_of = self.family.samples.batch_key
        together: dict[Hashable, list[int]] = {}
        for i, request in enumerate(arrays):
            together.setdefault(None if key_of is None else key_of(self.config, request), []).append(i)
        size = self.settings.max_batch_size
        for numbers in together.values():
            yield from (numbers[first : first + size] for first in range(0, len(numbers), size))

    def summary(self) -> dict[str, float]:
        """Latency and actions per second so far."""
        return self.times.summary(self.action_horizon)


def load_policy(folder: CheckpointFolder, settings: PolicySettings, report: Any = print) -> Policy:
    """The policy of a checkpoint. Raises ValueError or CheckError naming what is missing; `report` gets one line."""
    config = serving_config(from_dict(folder.config()))
    family = model_family(config.model.model_name)
    if family.sample_actions is None:
        raise ValueError(f"{folder.path}: the family {family.name} has no sampling yet")
    preprocessor = stored_preprocessor(folder, settings.dataset)
    device = usable_device(settings.device)
    if settings.cuda_graph and device.type != "cuda":
        raise ValueError(f"--eval-cuda-graph: the policy is on {device} -> drop it, or use a GPU")
    module = family.build(config, _one_process(device))
    averaged = bool(folder.state["has_average"]) if settings.weights == "auto" else settings.weights == "average"
    report(load_weights(folder, module, averaged=averaged) + (" (averaged weights)" if averaged else ""))
    module.requires_grad_(False).eval()
    return Policy(config, family, module, preprocessor, settings, device)
