"""The policy on a GPU: compiled and as CUDA graphs it acts as it does eagerly, for every batch size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from evaluation_fixtures import opened_up, random_observation, train_checkpoint

from megatron_vla.evaluation.policy import Policy, PolicySettings, load_policy, open_checkpoint
from megatron_vla.models.registry import MODEL_FAMILIES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


# A backbone in bf16 rounds otherwise where more is fused; that is no question of graphs.
FLAGS = {"pi05": (), "groot_n1_7": ("--frozen-dtype", "as_model")}


@pytest.fixture(scope="module", params=MODEL_FAMILIES)
def save(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_checkpoint(tmp_path_factory.mktemp("policy"), *FLAGS[request.param], model_name=request.param)


def loaded(save: Path, **settings: bool) -> Policy:
    policy = load_policy(open_checkpoint(save), PolicySettings(num_inference_steps=4, **settings), lambda line: None)  # type: ignore[arg-type]
    return opened_up(policy)


@pytest.mark.parametrize("settings", [{"cuda_graph": True}, {"compile": True}, {"compile": True, "cuda_graph": True}], ids=str)
def test_fast_paths_act_as_the_eager_one(save: Path, settings: dict[str, bool]) -> None:
    eager, fast = loaded(save), loaded(save, **settings)
    for size in (1, 3, 4, 3):
        observations = [random_observation(10 * size + k) for k in range(size)]
        noise = [eager.noise(0, k, size) for k in range(size)]
        for one, other in zip(eager.infer(observations, noise), fast.infer(observations, noise), strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-3)
    # Sizes 3 and 4 share one graph.
    if fast.settings.cuda_graph:
        assert len(fast._sampler._captured) == 2
    print({**settings, **fast.summary()})


def test_gpu_and_cpu_act_alike(save: Path) -> None:
    gpu = loaded(save)
    cpu = opened_up(load_policy(open_checkpoint(save), PolicySettings(device="cpu", num_inference_steps=4), lambda line: None))
    # Each device draws its own numbers.
    gpu.module.load_state_dict(cpu.module.state_dict())
    observations = [random_observation(k) for k in range(2)]
    noise = [gpu.noise(0, k, 0) for k in range(2)]
    for one, other in zip(cpu.infer(observations, noise), gpu.infer(observations, noise), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("settings", [{}, {"cuda_graph": True}, {"compile": True, "cuda_graph": True}], ids=str)
def test_the_second_gpu_acts_as_the_first(save: Path, settings: dict[str, bool]) -> None:
    """Which is the current one throughout."""
    first = loaded(save)
    chosen = PolicySettings(device="cuda:1", num_inference_steps=4, **settings)  # type: ignore[arg-type]
    second = opened_up(load_policy(open_checkpoint(save), chosen, lambda line: None))
    second.module.load_state_dict(first.module.state_dict())
    for size in (2, 1, 2):
        observations = [random_observation(10 * size + k) for k in range(size)]
        noise = [first.noise(0, k, size) for k in range(size)]
        for one, other in zip(first.infer(observations, noise), second.infer(observations, noise), strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-3)
    assert torch.cuda.current_device() == 0
