"""Several draws of noise and flow time for one pass of GR00T's backbone: the mean of as many passes with one draw each."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from flow_draws_fixtures import DRAWS, assert_mean_of_single_draws
from groot_model_fixtures import gradients, mean_loss, replaced, tiny_batch, tiny_config, tiny_model

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.config.run import parse_args
from megatron_vla.models.common.attention_mask import AttentionBackend
from megatron_vla.models.groot_n1_7.family import FAMILY
from megatron_vla.models.groot_n1_7.model import GrootN17Model
from megatron_vla.models.groot_n1_7.sampling import sample_actions
from megatron_vla.optimizations.apply import apply_optimizations


def models(backend: AttentionBackend = "eager", **changes: Any) -> tuple[GrootN17Model, GrootN17Model]:
    """The same weights for several draws, and for one."""
    config = tiny_config(tune_llm=True, tune_visual=True, **changes)
    several = dataclasses.replace(config, flow_draws=DRAWS)
    return tiny_model(several, attention_backend=backend), tiny_model(config, attention_backend=backend)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"mask_padded_action_dims": True, "attend_text_every_n_blocks": 1, "dit_num_layers": 3}],
    ids=["released", "masked"],
)
def test_loss_and_gradients_are_the_mean_of_single_draws(backend: AttentionBackend, changes: dict[str, Any]) -> None:
    together, alone = models(backend, **changes)
    batch = tiny_batch(together.config)
    assert_mean_of_single_draws(together, alone, batch, mean_loss, gradients)
    # Two embodiments, a group for each; then one group that is the whole batch.
    assert batch.group_embodiment_G.shape[0] == 2
    one_embodiment = replaced(
        batch,
        embodiment_B=torch.ones(2, dtype=torch.int64),
        group_embodiment_G=torch.ones(1, dtype=torch.int64),
        group_sample_GN=torch.arange(2)[None],
        sample_place_B=torch.arange(2),
    )
    assert_mean_of_single_draws(together, alone, one_embodiment, mean_loss, gradients)


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
    assert_mean_of_single_draws(together, alone, static, mean_loss, gradients)
    torch.testing.assert_close(together(static), together(batch), rtol=1e-12, atol=1e-12)


def test_merged_projections_read_the_backbone_once() -> None:
    together, alone = models()
    switched = apply_optimizations(together, OptimizationConfig(merge_projections=True), FAMILY, lambda line: None)
    assert isinstance(switched, GrootN17Model)
    assert_mean_of_single_draws(switched, alone, tiny_batch(together.config), mean_loss, gradients)


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
