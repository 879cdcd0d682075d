"""Several draws of noise and flow time for one pass of GR00T's backbone: the mean of as many passes with one draw each."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from groot_model_fixtures import gradients, mean_loss, replaced, tiny_batch, tiny_config, tiny_model
from pi05_fixtures import assert_gradients_close
from torch import Tensor

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.config.run import parse_args
from megatron_vla.models.common.attention_mask import AttentionBackend
from megatron_vla.models.groot_n1_7.batch import GrootN17Batch
from megatron_vla.models.groot_n1_7.family import FAMILY
from megatron_vla.models.groot_n1_7.model import GrootN17Model
from megatron_vla.models.groot_n1_7.sampling import sample_actions
from megatron_vla.optimizations.apply import apply_optimizations

DRAWS = 3


def single(batch: GrootN17Batch, draw: int) -> GrootN17Batch:
    """One of the draws."""
    return replaced(batch, noise_BTA=batch.noise_BTA.unflatten(1, (DRAWS, -1))[:, draw], time_B=batch.time_B[:, draw])


def models(backend: AttentionBackend = "eager", **changes: Any) -> tuple[GrootN17Model, GrootN17Model]:
    """The same weights for several draws, and for one."""
    config = tiny_config(tune_llm=True, tune_visual=True, **changes)
    several = dataclasses.replace(config, flow_draws=DRAWS)
    return tiny_model(several, attention_backend=backend), tiny_model(config, attention_backend=backend)


def assert_mean_of_single_draws(together: GrootN17Model, alone: GrootN17Model, batch: GrootN17Batch) -> None:
    losses = [float(mean_loss(alone, single(batch, draw)).detach()) for draw in range(DRAWS)]
    assert len(set(losses)) == DRAWS
    assert float(mean_loss(together, batch).detach()) == pytest.approx(sum(losses) / DRAWS, rel=1e-12)
    sums: dict[str, Tensor] = {}
    for draw in range(DRAWS):
        for name, gradient in gradients(alone, single(batch, draw)).items():
            sums[name] = sums.get(name, 0.0) + gradient / DRAWS
    assert_gradients_close(gradients(together, batch), sums, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"mask_padded_action_dims": True, "attend_text_every_n_blocks": 1, "dit_num_layers": 3}],
    ids=["released", "masked"],
)
def test_loss_and_gradients_are_the_mean_of_single_draws(backend: AttentionBackend, changes: dict[str, Any]) -> None:
    together, alone = models(backend, **changes)
    batch = tiny_batch(together.config)
    assert_mean_of_single_draws(together, alone, batch)
    # Two embodiments, a group for each; then one group that is the whole batch.
    assert batch.group_embodiment_G.shape[0] == 2
    one_embodiment = replaced(
        batch,
        embodiment_B=torch.ones(2, dtype=torch.int64),
        group_embodiment_G=torch.ones(1, dtype=torch.int64),
        group_sample_GN=torch.arange(2)[None],
        sample_place_B=torch.arange(2),
    )
    assert_mean_of_single_draws(together, alone, one_embodiment)


def test_unfilled_groups() -> None:
    """Static capacities leave places in a group that hold no sample."""
    together, alone = models()
    batch = tiny_batch(together.config)
    static = replaced(
        batch,
        group_embodiment_G=torch.tensor([0, 1, 0]),
        group_sample_GN=torch.tensor([[-1, 0], [1, -1], [-1, -1]]),
        sample_place_B=torch.tensor([1, 2]),
    )
    assert_mean_of_single_draws(together, alone, static)
    torch.testing.assert_close(together(static), together(batch), rtol=1e-12, atol=1e-12)


def test_merged_projections_read_the_backbone_once() -> None:
    together, alone = models()
    switched = apply_optimizations(together, OptimizationConfig(merge_projections=True), FAMILY, lambda line: None)
    assert isinstance(switched, GrootN17Model)
    assert_mean_of_single_draws(switched, alone, tiny_batch(together.config))


def test_sampling_does_not_know_of_them() -> None:
    together, alone = models()
    batch = tiny_batch()
    found = [sample_actions(model, batch, 3, batch.noise_BTA) for model in (together, alone)]
    assert torch.equal(*found)


def test_samples_come_with_their_draws() -> None:
    config = tiny_config(flow_draws=DRAWS)
    several, one = (FAMILY.samples.draws(c, 1, 0, 5) for c in (config, tiny_config()))
    assert several["noise_BTA"].shape == (DRAWS * config.action_horizon, config.max_action_dim)
    np.testing.assert_array_equal(several["noise_BTA"][: config.action_horizon], one["noise_BTA"])
    assert several["time_B"].shape == (DRAWS,) and several["time_B"][0] == one["time_B"] and one["time_B"].shape == ()


def test_a_count_of_zero_is_refused() -> None:
    flags = ["--model-name", "groot_n1_7", "--model-variant", "tiny", "--mock-data", "--train-iters", "1"]
    assert FAMILY.check(parse_args([*flags, "--flow-draws", "4"])) == []
    findings = [f"{finding.where}: {finding.what}" for finding in FAMILY.check(parse_args([*flags, "--flow-draws", "0"]))]
    assert any("--flow-draws: 0 is not" in line for line in findings)
