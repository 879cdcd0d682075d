"""Several draws of noise and flow time for one pass of the prefix: the mean of as many passes with one draw each."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from flow_draws_fixtures import DRAWS, assert_mean_of_single_draws, single
from pi05_fixtures import gradients, mean_loss, tiny_batch, tiny_config, tiny_model

from megatron_vla.config.run import parse_args
from megatron_vla.models.common.attention_mask import AttentionBackend
from megatron_vla.models.pi05.family import FAMILY
from megatron_vla.models.pi05.flops import model_units
from megatron_vla.models.pi05.model import Pi05Model


def models(backend: AttentionBackend, **changes: object) -> tuple[Pi05Model, Pi05Model]:
    """The same weights for several draws, and for one."""
    config = tiny_config(**changes)
    together = tiny_model(dataclasses.replace(config, flow_draws=DRAWS), attention_backend=backend)
    return together, tiny_model(config, attention_backend=backend)


@pytest.mark.parametrize("backend", ["eager", "sdpa", "matmul", "varlen"])
@pytest.mark.parametrize("changes", [{}, {"mask_padded_action_dims": True, "num_query_groups": 4}], ids=["plain", "masked"])
def test_loss_and_gradients_are_the_mean_of_single_draws(backend: AttentionBackend, changes: dict[str, object]) -> None:
    together, alone = models(backend, **changes)
    batch = tiny_batch(together.config)
    assert torch.equal(single(batch, 0).noise_BTA, tiny_batch().noise_BTA)
    assert_mean_of_single_draws(together, alone, batch, mean_loss, gradients)


def test_sampling_does_not_know_of_them() -> None:
    together, alone = models("sdpa")
    batch = tiny_batch()
    assert torch.equal(together.sample_actions(batch, 3, batch.noise_BTA), alone.sample_actions(batch, 3, batch.noise_BTA))


def test_samples_come_with_their_draws() -> None:
    config = tiny_config(flow_draws=DRAWS)
    fields = FAMILY.samples.draws(config, 1, 0, 5)
    assert fields["noise_BTA"].shape == (DRAWS * config.action_horizon, config.max_action_dim)
    assert fields["time_B"].shape == (DRAWS,)


def test_flops_count_every_draw() -> None:
    """Actions are linear in the number of draws; images and prompt are counted once."""
    counts = [
        model_units(tiny_config(flow_draws=draws), num_views=2, prompt_length=8, skip_dead_compute=False).forward_flops
        for draws in (1, 2, 3)
    ]
    assert counts[2] - counts[1] == pytest.approx(counts[1] - counts[0], rel=1e-12)
    assert 0 < counts[1] - counts[0] < 0.5 * counts[0]


def test_what_does_not_go_together_is_said() -> None:
    def findings(*flags: str) -> list[str]:
        config = parse_args(["--model-name", "pi05", "--model-variant", "tiny", "--mock-data", "--train-iters", "1", *flags])
        return [f"{finding.where}: {finding.what}" for finding in FAMILY.check(config)]

    assert findings("--flow-draws", "4") == []
    assert any("--flow-draws: 0 is not" in line for line in findings("--flow-draws", "0"))
    assert any("--packing, --flow-draws" in line for line in findings("--flow-draws", "2", "--packing"))
