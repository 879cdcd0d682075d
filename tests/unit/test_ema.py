"""Averaged parameters against the recurrence written out."""

from __future__ import annotations

import torch
from torch import nn

from megatron_vla.config.training import OptimizerConfig
from megatron_vla.training.ema import ParameterAverage
from megatron_vla.training.optimizer import AdamW


def test_average_follows_the_fp32_main_parameters() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
    optimizer = AdamW([("weight", parameter)], OptimizerConfig())
    average = ParameterAverage(optimizer, decay=0.99)
    expected = parameter.detach().double()
    for step in range(20):
        optimizer.advance(1e-3)
        optimizer.step([torch.tensor([1.0, -0.5]) * (step + 1)], torch.tensor(1.0))
        average.update()
        expected = 0.99 * expected + 0.01 * optimizer.parameters[0].main.double()
    result = average.tensors()["weight"]
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=0)
    # A bf16 average would not have moved by this little.
    assert not torch.equal(result, torch.tensor([1.0, -2.0]))
    average.restart()
    assert torch.equal(average.tensors()["weight"], optimizer.parameters[0].main)
