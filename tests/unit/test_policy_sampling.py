"""Compiled sampling takes every shape that a policy makes, a server warms up, and nothing that it keeps grows without end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from evaluation_fixtures import opened_up, random_observation, train_checkpoint
from torch import Tensor, nn

from megatron_vla.evaluation import policy as policy_module
from megatron_vla.evaluation.closed_loop import PolicyActor
from megatron_vla.evaluation.environments.interface import Trial
from megatron_vla.evaluation.policy import Policy, PolicySettings, PolicyTimes, check_finite, load_policy, open_checkpoint
from megatron_vla.evaluation.rollout import ActRequest
from megatron_vla.evaluation.sampling import ActionSampler
from megatron_vla.optimizations import compile as compile_optimization
from megatron_vla.training.checkpoint_folder import CheckpointFolder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFolder:
    return open_checkpoint(train_checkpoint(tmp_path_factory.mktemp("sampled"), "--num-layers", "1"))


def loaded(folder: CheckpointFolder, **settings: Any) -> Policy:
    chosen = PolicySettings(device="cpu", num_inference_steps=1, **settings)
    return opened_up(load_policy(folder, chosen, lambda line: None))


@pytest.fixture
def low_limit(aot_eager: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's limit of 8 graphs would take a minute to reach with a real model; this one is reached by the second shape."""
    monkeypatch.setattr(compile_optimization, "BACKEND", "eager")
    with torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=1):
        yield


@dataclass(frozen=True)
class Numbers:
    noise_BTA: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return {"noise_BTA": self.noise_BTA}


class Doubling(nn.Module):
    def double(self, x_BTA: Tensor) -> Tensor:
        return 2 * x_BTA + x_BTA.shape[0]


def sampler(compile: bool) -> ActionSampler:
    family: Any = SimpleNamespace(
        inference_methods=("double",), sample_actions=lambda module, batch, num_steps, noise_BTA: module.double(noise_BTA)
    )
    return ActionSampler(family, Doubling(), 1, compile=compile, cuda_graph=False)


def test_compiled_sampling_takes_more_shapes_than_torch_allows_by_itself(aot_eager: None) -> None:
    """In a thread that has compiled nothing before, as a server's: torch's limit is each thread's own."""
    plain, compiled = sampler(False), sampler(True)
    shapes = [(1 << k, width, 2) for k in range(7) for width in (16, 32)]
    batches: list[Any] = [Numbers(torch.randn(shape)) for shape in shapes]
    limits: list[int] = []
    answers: list[Tensor] = []

    def serve() -> None:
        limits.append(torch._dynamo.config.recompile_limit)
        answers.extend(compiled(batch) for batch in batches)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert len(answers) == len(shapes) == 14 > limits[0]
    for batch, answer in zip(batches, answers, strict=True):
        assert torch.equal(answer, plain(batch))


def test_a_compiled_policy_answers_every_batch_size_and_prompt_width(folder: CheckpointFolder, low_limit: None) -> None:
    plain, compiled = loaded(folder), loaded(folder, compile=True)
    for size, instruction in ((1, "Open"), (2, "Open a drawer " * 3)):
        observations = [random_observation(k, instruction) for k in range(size)]
        noise = [plain.noise(0, k, 0) for k in range(size)]
        for one, other in zip(plain.infer(observations, noise), compiled.infer(observations, noise), strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-4)
    assert len(compiled._sampler._compiled) == 2


def test_warm_up_meets_every_batch_size_and_is_told(folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = loaded(folder, max_batch_size=3)
    shapes: list[tuple[int, ...]] = []
    real = policy._sampler._sample

    def noted(batch: Any) -> Tensor:
        shapes.append(tuple(batch.tensors()["tokens_BL"].shape))
        return real(batch)

    monkeypatch.setattr(policy._sampler, "_sample", noted)
    told: list[str] = []
    policy.warm_up(("Open a drawer",), told.append)
    assert not shapes and not told, "plain batches keep their own size: there is nothing to warm up"
    policy._sampler.uses_few_shapes = True
    policy.warm_up(("Open", "Open a drawer " * 3), told.append)
    narrow, wide = shapes[0][1], shapes[3][1]
    assert shapes == [(n, narrow) for n in (1, 2, 4)] + [(n, wide) for n in (1, 2, 4)] and wide > narrow
    assert len(told) == 6 and told[0].startswith("warm-up 1/6: batches of 1, 'Open', ") and policy.summary() == {}
    # A request of the same instruction has one of these shapes.
    policy.infer([replace(random_observation(1, "Open"), state_D=np.zeros(4, np.float32))], [policy.noise(0, 1, 0)])
    assert shapes[-1] == (1, narrow)


def test_times_of_a_long_life_are_bounded_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "RECENT_CALLS", 100)
    times = PolicyTimes()
    for number in range(1000):
        times.add_call(1.0 if number < 900 else 0.001 * (number - 899), 1 + number % 4)
    assert len(times.recent_seconds) == 100 and len(times.batch_sizes) == 4
    summary = times.summary(actions_per_request=6)
    assert (summary["calls"], summary["requests"], summary["mean_batch_size"]) == (1000, 2500, 2.5)
    # 1 to 100 ms: those of the last hundred calls.
    assert summary["call_ms_p50"] == pytest.approx(50.5) and summary["call_ms_p99"] == pytest.approx(99.01)
    assert summary["actions_per_s"] == pytest.approx(2500 * 6 / (900 + 5.05))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_actions_that_are_no_numbers_are_refused(folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, bad: float) -> None:
    """Only for the observation that they belong to."""
    policy = loaded(folder)
    real = policy._sampler._sample

    def damaged(batch: Any) -> Tensor:
        actions_BTA = real(batch)
        actions_BTA[1, 2, 0] = bad
        return actions_BTA

    monkeypatch.setattr(policy._sampler, "_sample", damaged)
    observations, noise = [random_observation(k) for k in range(3)], [policy.noise(0, k, 0) for k in range(3)]
    with pytest.raises(ValueError, match=r"observation 1 \('Open a drawer'\): 24 of 24 predicted numbers are NaN or infinite"):
        policy.infer(observations, noise)
    # An evaluation ends with it: no trial is counted as a failure.
    trial = Trial(task="drawer-open-v3", index=0, seed=0)
    actor = PolicyActor(policy, 0, {key: key for key in policy.camera_keys})
    with pytest.raises(ValueError, match="predicted numbers are NaN or infinite"):
        actor([ActRequest(trial, observation, 0) for observation in observations])
    arrays = [policy.preprocess(observation) for observation in observations]
    chunks = policy.infer_prepared(arrays, [o.state_D for o in observations], noise)
    assert [bool(np.isfinite(chunk).all()) for chunk in chunks] == [True, False, True] and chunks[1].shape == (6, 4)
    check_finite(chunks[0])
