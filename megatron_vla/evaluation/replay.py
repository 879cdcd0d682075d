"""Replay: recorded samples, of the training or held out, through the serving path.

The model must see the very same tensors, and its actions are compared with the recorded ones in physical units.

The serving path is the whole one: the observation is encoded and decoded as a client's message, then preprocessed as a request.

Shape legend: N samples, T action horizon, D the robot's own action dimensions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_vla.config.run import RunConfig
from megatron_vla.data.build import build_data
from megatron_vla.data.mixture import MixtureSource
from megatron_vla.data.robot_source import RobotSource
from megatron_vla.evaluation.policy import Policy
from megatron_vla.evaluation.wire import observation_of, pack, unpack
from megatron_vla.training.checkpoint_folder import CheckpointFolder
from megatron_vla.training.resume import with_stored_preprocessing

# What a request cannot know, or what only numbers samples.
NOT_SERVED = frozenset({"actions_BTA", "action_is_valid_BTA", "sample_index_B", "epoch_B"})
STATE_KEY = "observation.state"


@dataclass(frozen=True)
class ReplayResult:
    """differing: "sample: field" of tensors that are not bit-equal. error_D and spread_D in the dataset's units.

    data_path: whose samples; empty: those of the training, where they lay.
    """

    num_samples: int
    fields: tuple[str, ...]
    differing: tuple[str, ...]
    names: tuple[str, ...]
    error_D: np.ndarray
    spread_D: np.ndarray
    data_path: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """For people."""
        equal = "bit for bit equal" if not self.differing else f"DIFFERENT in {', '.join(self.differing[:8])}"
        lines = [f"replay: {self.num_samples} samples through the serving path: {', '.join(self.fields)} {equal}"]
        for name, mean_error, spread in zip(self.names, self.error_D, self.spread_D, strict=True):
            lines.append(f"  action {name:24s} mean |error| {mean_error:9.4g}   (the data's own spread {spread:.4g})")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "data_path": list(self.data_path),
            "num_samples": self.num_samples,
            "fields": list(self.fields),
            "differing": list(self.differing),
            "action_names": list(self.names),
            "mean_absolute_error": self.error_D.tolist(),
            "mean_absolute_deviation_of_data": self.spread_D.tolist(),
        }


def is_bit_equal(one: Any, other: Any) -> bool:
    """Same dtype, shape and bytes (NaN equals NaN here)."""
    left, right = np.asarray(one), np.asarray(other)
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def training_samples(
    policy: Policy, folder: CheckpointFolder, config: RunConfig, data_path: tuple[str, ...]
) -> tuple[RobotSource, int]:
    """Samples of the dataset that the policy acts for, as training makes them but for random augmentation, and their number."""
    stored = with_stored_preprocessing(config, folder)
    # Read again from where it lies now, a mixture whole: its datasets share one order of views.
    changes: dict[str, Any] = {"data_access": "random", "num_workers": 0, "augmentation": "none"}
    if data_path:
        # Held-out episodes keep the policy's own statistics, wherever these put them: they stand for what it will meet.
        changes |= {"data_path": data_path, "allow_foreign_statistics": True, "max_out_of_range_fraction": 1.0}
    supply = build_data(dataclasses.replace(stored, data=dataclasses.replace(stored.data, **changes)), policy.family)
    if isinstance(supply.source, MixtureSource):
        parts = dict(zip(supply.preprocessor.parts, supply.source.parts(), strict=True))  # type: ignore[union-attr]
        if policy.settings.dataset not in parts:
            raise ValueError(f"--eval-dataset {policy.settings.dataset}: --data-path now holds {', '.join(parts)}")
        return parts[policy.settings.dataset]
    if not isinstance(supply.source, RobotSource):
        raise ValueError("--replay: mock data has no recorded samples")
    return supply.source, supply.num_samples


def replay(
    policy: Policy,
    folder: CheckpointFolder,
    config: RunConfig,
    num_samples: int,
    data_path: tuple[str, ...] = (),
    say: Callable[[str], None] = print,
) -> ReplayResult:
    """Compare `num_samples` samples spread over the run's dataset, or over `data_path`: where it lies now, or other episodes of
    the same robot, whose errors say what the policy makes of what it was not trained on.

    Raises CheckError when the dataset cannot be read.
    """
    source, available = training_samples(policy, folder, config, data_path)
    numbers = np.unique(np.linspace(0, available - 1, num_samples).astype(int))
    fields: tuple[str, ...] = ()
    differing, served, physical, raw_samples = [], [], [], []
    for number in numbers.tolist():
        trained = source(number, 0)
        raw = source.dataset[number if source.rows is None else int(source.rows[number])]
        message = {**raw.images, STATE_KEY: raw.state_D, "prompt": raw.instruction}
        observation = observation_of(unpack(pack(message)), policy.camera_keys, STATE_KEY, {})
        arrays = policy.preprocess(observation)
        fields = tuple(sorted(trained.keys() - NOT_SERVED))
        differing += [f"sample {number}: {f}" for f in fields if f not in arrays or not is_bit_equal(trained[f], arrays[f])]
        served.append(arrays)
        raw_samples.append(raw)
        physical.append(observation.state_D)
    noise = [policy.noise(config.training.seed, number, 0) for number in numbers.tolist()]
    with torch.no_grad():
        chunks_NTD = np.stack(policy.infer_prepared(served, physical, noise))
    recorded_NTD = np.stack([raw.actions_TD for raw in raw_samples])
    # Beyond an episode's end the recording repeats its last action: nothing to be compared with.
    is_real_NT = np.stack([raw.action_is_in_episode_T for raw in raw_samples])
    recorded, predicted = recorded_NTD[is_real_NT], chunks_NTD[is_real_NT]
    result = ReplayResult(
        num_samples=len(numbers),
        fields=fields,
        differing=tuple(differing),
        names=policy.preprocessor.settings.action_names,
        error_D=np.abs(predicted - recorded).mean(axis=0),
        spread_D=np.abs(recorded - recorded.mean(axis=0)).mean(axis=0),
        data_path=data_path,
    )
    for line in result.lines():
        say(line)
    return result
