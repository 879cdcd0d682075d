"""Flow matching for action chunks (arXiv:2210.02747).

Families differ in direction: Pi0.5 has noise at t = 1 and data at t = 0 (openpi), GR00T the reverse.

Shape legend: B samples, K draws of noise, D = B * K action chunks, T action horizon, A action dimensions, E embedding width.
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


def repeated(values_B: Tensor, num_draws: int) -> Tensor:
    """Each sample's values once for each of its draws of noise (--flow-draws), in a row: [B * K, ...]."""
    return values_B if num_draws == 1 else values_B.repeat_interleave(num_draws, dim=0)


def mean_over_draws(values_D: Tensor, num_draws: int) -> Tensor:
    """[B * K, ...] -> [B, ...]: the mean of each sample's draws."""
    return values_D if num_draws == 1 else values_D.unflatten(0, (-1, num_draws)).mean(dim=1)


def interpolate(at_zero_BTA: Tensor, at_one_BTA: Tensor, time_B: Tensor) -> Tensor:
    """x_t = t * at_one + (1 - t) * at_zero."""
    time_B11 = time_B[:, None, None]
    return time_B11 * at_one_BTA + (1.0 - time_B11) * at_zero_BTA


def noisy_actions(actions_BTA: Tensor, noise_BTA: Tensor, time_B: Tensor) -> Tensor:
    """x_t = t * noise + (1 - t) * actions."""
    return interpolate(actions_BTA, noise_BTA, time_B)


def target_velocity(actions_BTA: Tensor, noise_BTA: Tensor) -> Tensor:
    """u_t = dx_t/dt = noise - actions."""
    return noise_BTA - actions_BTA


def integer_time_code(step_B: Tensor, width: int, spacing: int, dtype: torch.dtype, *, cosines_first: bool) -> Tensor:
    """Sines and cosines of integer time steps at frequencies 10000^(-j / spacing), j < width / 2: [B, width] in `dtype`.

    Always computed in float64: angles reach 1000 rad, where fp32 errs by 6e-5.
    """
    place_E = torch.arange(width // 2, dtype=torch.float64, device=step_B.device)
    angle_BE = step_B.double().unsqueeze(-1) * torch.exp(place_E * (-math.log(10000.0) / spacing))
    parts = (angle_BE.cos(), angle_BE.sin()) if cosines_first else (angle_BE.sin(), angle_BE.cos())
    return torch.cat(parts, dim=-1).to(dtype)


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
