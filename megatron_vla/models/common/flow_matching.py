"""Flow matching for action chunks: t = 1 is noise, t = 0 is data (arXiv:2210.02747; direction as in openpi).

Shape legend: B samples, T action horizon, A action dimensions, E embedding width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def flow_time_embedding(time_B: Tensor, width: int, min_period: float, max_period: float, dtype: torch.dtype) -> Tensor:
    """Sines, then cosines, of t at width/2 periods spaced geometrically: [B, E] in `dtype`.

    Always computed in float64: the shortest period makes angles of 1571 rad at t = 1, where fp32 errs by 1e-4.
    """
    fraction_E = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=time_B.device)
    period_E = min_period * (max_period / min_period) ** fraction_E
    angle_BE = time_B.double().unsqueeze(-1) * (2.0 * math.pi / period_E)
    return torch.cat((angle_BE.sin(), angle_BE.cos()), dim=-1).to(dtype)


def noisy_actions(actions_BTA: Tensor, noise_BTA: Tensor, time_B: Tensor) -> Tensor:
    """x_t = t * noise + (1 - t) * actions."""
    time_B11 = time_B[:, None, None]
    return time_B11 * noise_BTA + (1.0 - time_B11) * actions_BTA


def target_velocity(actions_BTA: Tensor, noise_BTA: Tensor) -> Tensor:
    """u_t = dx_t/dt = noise - actions."""
    return noise_BTA - actions_BTA


def masked_loss(elements_BTA: Tensor, is_valid_BTA: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of the valid elements, number of them), both shape []; dividing is left to whoever knows the global number.

    Selected rather than multiplied, so that a non-finite masked element cannot reach the sum.
    """
    loss_sum = torch.where(is_valid_BTA, elements_BTA, 0.0).sum()
    return loss_sum, is_valid_BTA.sum()


def integrate_velocity(velocity: Callable[[Tensor, Tensor], Tensor], noise_BTA: Tensor, num_steps: int) -> Tensor:
    """Euler steps from noise (t = 1) to actions (t = 0): x <- x + dt * velocity(x, t) at t = 1 + k * dt, dt = -1 / num_steps.

    t is computed from k, never accumulated: fp32 accumulation drifts and can change the number of steps.
    """
    if num_steps < 1:
        raise ValueError(f"--num-inference-steps {num_steps}: at least 1 step is needed")
    step = -1.0 / num_steps
    x_BTA = noise_BTA
    for k in range(num_steps):
        time_B = torch.full((x_BTA.shape[0],), 1.0 + k * step, dtype=x_BTA.dtype, device=x_BTA.device)
        x_BTA = x_BTA + step * velocity(x_BTA, time_B)
    return x_BTA
