"""AdamW in PyTorch, one kernel per operation: the order of roundings that csrc/adamw.cu keeps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Coefficients:
    """Device scalars (shape []) of one step; for a refused step they are 1, 1, 1, and an infinite denominator scale."""

    decay: Tensor
    beta1: Tensor
    beta2: Tensor
    bias_correction2_sqrt: Tensor
    negative_step_size: Tensor


def adamw_update(
    mains: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    coefficients: Coefficients,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """One AdamW step in place on equal lists of tensors of one dtype; gradients are already normalised and clipped."""
    beta1, beta2 = betas
    torch._foreach_mul_(mains, coefficients.decay)
    torch._foreach_mul_(exp_avgs, coefficients.beta1)
    torch._foreach_add_(exp_avgs, gradients, alpha=1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, coefficients.beta2)
    torch._foreach_addcmul_(exp_avg_sqs, gradients, gradients, value=1 - beta2)
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominators, coefficients.bias_correction2_sqrt)
    torch._foreach_add_(denominators, eps)
    # The step size is a device scalar, which addcdiv's `value` cannot be: it goes into the denominator.
    torch._foreach_div_(denominators, coefficients.negative_step_size)
    torch._foreach_addcdiv_(mains, exp_avgs, denominators)


def skips_untouched(coefficients: Coefficients, scale: Tensor, eps: float) -> Tensor:
    """Whether the update changes no bit where both moments are +0 and the gradient, times `scale`, is +0 or -0: bool, shape [].

    The moments stay +0 (+0 plus either zero is +0) unless `scale` makes a NaN of the zero. What is added to the main parameter
    is +0 over the denominator: as the step size is negative or -0 this is -0, which leaves every number as it is, a main
    parameter of -0 too; without an epsilon it is NaN.
    """
    zero = torch.zeros_like(coefficients.decay)
    quotient = zero / ((zero / coefficients.bias_correction2_sqrt + eps) / coefficients.negative_step_size)
    is_negative_zero = (quotient == 0) & torch.signbit(quotient)
    return (coefficients.decay == 1) & (zero * scale == 0) & is_negative_zero
