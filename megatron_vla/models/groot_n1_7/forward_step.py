"""GR00T N1.7's forward step in Megatron's contract.

Shape legend: T action horizon, A action dimensions, B samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor, nn

from megatron_vla.models.common.flow_matching import masked_loss
from megatron_vla.models.groot_n1_7.batch import GrootN17Batch

# Kept for reports; the model does not read them.
_UNREAD = {"embodiment_B", "image_offset_I", "sample_index_B", "epoch_B"}
BATCH_FIELDS = frozenset(field.name for field in dataclasses.fields(GrootN17Batch)) - _UNREAD

METRIC_NAMES = ("image_token_fraction", "prompt_tokens", "valid_action_fraction")

LossResult = tuple[Tensor, Tensor, dict[str, Tensor]]


def loss_func(batch: GrootN17Batch, elements_BTA: Tensor) -> LossResult:
    """(sum of the valid loss elements, their number, metrics), device tensors of shape []."""
    loss_sum, count = masked_loss(elements_BTA, batch.action_is_valid_BTA)
    num_valid = batch.token_is_valid_BS.sum().float()
    metrics = {
        "valid_action_fraction": batch.action_is_valid_BTA.float().mean(),
        "prompt_tokens": num_valid / batch.size,
        "image_token_fraction": batch.image_token_M.shape[0] / num_valid,
    }
    return loss_sum, count, metrics


def forward_step(data_iterator: Iterator[GrootN17Batch], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], LossResult]]:
    """(loss elements [B, T, A], loss_func of them) for the next micro-batch; `model` may be wrapped."""
    batch = next(data_iterator)
    return model(batch), partial(loss_func, batch)
