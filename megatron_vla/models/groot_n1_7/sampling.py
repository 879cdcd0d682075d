"""Actions of GR00T N1.7 from noise: Euler steps, optionally continuing a chunk that is being executed (real-time chunking).

Shape legend: B samples, T action horizon, A action dimensions, O overlapping steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_vla.models.groot_n1_7.batch import GrootN17Batch
from megatron_vla.models.groot_n1_7.model import GrootN17Model


@dataclass(frozen=True)
class PreviousChunk:
    """Normalised actions [B, T, A] of the chunk that is being executed, whose last `overlap` steps are the new one's first.

    frozen: so many of them will have been executed when the new chunk arrives and must not change. ramp_rate: how fast the
    others are set free.
    """

    actions_BTA: Tensor
    overlap: int
    frozen: int
    ramp_rate: float = 6.0

    def __post_init__(self) -> None:
        horizon = self.actions_BTA.shape[1]
        if not 0 <= self.frozen <= self.overlap <= horizon:
            raise ValueError(
                f"real-time chunking with {self.frozen} frozen and {self.overlap} overlapping steps of a chunk of {horizon}: "
                "they must not decrease in this order"
            )

    def start(self, noise_BTA: Tensor) -> Tensor:
        """Noise whose overlapping steps are the previous chunk's last ones."""
        tail_BOA = self.actions_BTA[:, self.actions_BTA.shape[1] - self.overlap :].to(noise_BTA.dtype)
        return torch.cat((tail_BOA, noise_BTA[:, self.overlap :]), dim=1)

    def velocity_shares(self, horizon: int, like: Tensor) -> Tensor:
        """Factors [1, T, 1] of the velocity: 0 for frozen steps, rising over the rest of the overlap, then 1."""
        free = self.overlap - self.frozen
        ramp = [-math.expm1(-self.ramp_rate * (k + 1) / (free + 1)) / -math.expm1(-self.ramp_rate) for k in range(free)]
        shares = [0.0] * self.frozen + ramp + [1.0] * (horizon - self.overlap)
        return torch.tensor(shares, dtype=like.dtype, device=like.device)[None, :, None]


@torch.no_grad()
def sample_actions(
    model: GrootN17Model,
    batch: GrootN17Batch,
    num_steps: int,
    noise_BTA: Tensor,
    previous: PreviousChunk | None = None,
) -> Tensor:
    """Normalised actions [B, T, A] by `num_steps` Euler steps from `noise_BTA` (its T is the horizon).

    Backbone, vision-language layers, and keys and values of the DiT run once. Reads everything of the batch but its actions,
    noise and time.
    """
    if num_steps < 1:
        raise ValueError(f"--num-inference-steps {num_steps}: at least 1 step is needed")
    x_BTA = noise_BTA.to(model.interface_dtype)
    shares_1T1 = None
    if previous is not None:
        x_BTA = previous.start(x_BTA)
        shares_1T1 = previous.velocity_shares(x_BTA.shape[1], x_BTA)
    memory, cached = model.prefill(batch)
    with model.autocast(x_BTA.device):
        for k in range(num_steps):
            step = int(k / num_steps * model.config.num_timestep_buckets)
            step_B = torch.full((x_BTA.shape[0],), step, dtype=torch.int64, device=x_BTA.device)
            velocity_BTA = model.cached_velocity(batch, memory, cached, x_BTA, step_B).to(x_BTA.dtype)
            if shares_1T1 is not None:
                velocity_BTA = velocity_BTA * shares_1T1
            x_BTA = x_BTA + velocity_BTA / num_steps
    return x_BTA
