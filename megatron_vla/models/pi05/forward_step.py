"""Pi0.5's forward step in Megatron's contract.

Shape legend: B samples, V views, T action horizon, A padded action dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor, nn

from megatron_vla.data.batch import Batch
from megatron_vla.data.packed_batch import PackedBatch
from megatron_vla.models.common.flow_matching import masked_loss

BATCH_FIELDS = frozenset(
    {
        "images_BVCHW",
        "camera_is_present_BV",
        "tokens_BL",
        "token_is_valid_BL",
        "actions_BTA",
        "action_is_valid_BTA",
        "action_dim_is_valid_BA",
        "noise_BTA",
        "time_B",
    }
)

METRIC_NAMES = ("camera_present_fraction", "prompt_tokens", "valid_action_fraction")

LossResult = tuple[Tensor, Tensor, dict[str, Tensor]]


def loss_func(batch: Batch | PackedBatch, elements_BTA: Tensor) -> LossResult:
    """(sum of the valid loss elements, their number, metrics), device tensors of shape []."""
    loss_sum, count = masked_loss(elements_BTA, batch.action_is_valid_BTA)
    is_present, prompt_tokens_B = _inputs(batch)
    # Empty slots of a pack are no samples.
    num_samples = (batch.sample_index_B >= 0).sum() if isinstance(batch, PackedBatch) else batch.size
    metrics = {
        "valid_action_fraction": batch.action_is_valid_BTA.float().mean(),
        "camera_present_fraction": is_present.float().mean(),
        "prompt_tokens": prompt_tokens_B.sum() / num_samples,
    }
    return loss_sum, count, metrics


def _inputs(batch: Batch | PackedBatch) -> tuple[Tensor, Tensor]:
    """(which image slots hold an image, prompt tokens of each sample)."""
    if isinstance(batch, PackedBatch):
        return batch.image_is_present_I, batch.num_prompt_B
    return batch.camera_is_present_BV, batch.token_is_valid_BL.sum(dim=1)


def forward_step(
    data_iterator: Iterator[Batch | PackedBatch], model: nn.Module
) -> tuple[Tensor, Callable[[Tensor], LossResult]]:
    """(loss elements [B, T, A], loss_func of them) for the next micro-batch; `model` may be wrapped."""
    batch = next(data_iterator)
    return model(batch), partial(loss_func, batch)
