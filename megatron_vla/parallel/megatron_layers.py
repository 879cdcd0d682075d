"""megatron-core's tensor-parallel layers with this project's interface: output alone, names `weight` and `bias`, marked shards.

Imported only where the tensor-parallel size is above 1 (see linear.py).

Shape legend: B samples, L token slots, H hidden.
"""

from __future__ import annotations

import warnings
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_vla.parallel.parameter_shard import ParameterShard, mark_shard
from megatron_vla.parallel.sequence_parallel import padded_rows, sum_partial
from megatron_vla.parallel.tensor_parallel import TensorParallel

with warnings.catch_warnings():
    # The import announces which optional NVIDIA packages are absent; nothing here uses them.
    warnings.simplefilter("ignore")
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

# torch 2.13 renames the collectives that megatron-core and sequence_parallel.py call; torch 2.11 does not know the new names.
warnings.filterwarnings("ignore", message="`torch.distributed.(all_gather_into|reduce_scatter)_tensor`", category=FutureWarning)


def megatron_config(tensor_parallel: TensorParallel) -> ModelParallelConfig:
    """What megatron-core's layers ask for. Parameters are allocated on the current default device and not initialised."""
    return ModelParallelConfig(
        tensor_model_parallel_size=tensor_parallel.size,
        sequence_parallel=tensor_parallel.sequence_parallel,
        use_cpu_initialization=True,
        perform_initialization=False,
        # Needs a CUDA extension of apex; gradients are accumulated by the data-parallel wrap instead.
        gradient_accumulation_fusion=False,
    )


def no_first_values(weight: Tensor) -> None:
    """megatron-core's init_method: first values are drawn by name later."""


class ColumnParallel(ColumnParallelLinear):  # type: ignore[misc]  # megatron-core has no annotations
    """megatron-core's column-parallel layer on gathered rows; returns the output alone, still split.

    State-dict entries and hooks for Transformer Engine's extra state are left out.
    """

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def __init__(self, in_features: int, out_features: int, *, bias: bool, tensor_parallel: TensorParallel) -> None:
        _refuse_uneven("output", out_features, tensor_parallel)
        super().__init__(
            in_features,
            out_features,
            bias=bias,
            config=megatron_config(tensor_parallel),
            init_method=no_first_values,
            # The caller's gathered rows carry the gather and the gradient sum of all layers that read them.
            disable_grad_reduce=True,
            tp_group=tensor_parallel.group,
        )
        self.sequence_parallel = False
        self._load_state_dict_pre_hooks.clear()
        part = {"dim": 0, "rank": tensor_parallel.rank, "size": tensor_parallel.size}
        mark_shard(self.weight, ParameterShard((out_features, in_features), **part))
        if bias:
            mark_shard(self.bias, ParameterShard((out_features,), **part))

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in] -> [..., out / size]."""
        return cast(Tensor, super().forward(rows)[0])


class RowParallel(RowParallelLinear):  # type: ignore[misc]
    """megatron-core's row-parallel layer; returns the sum over ranks plus bias.

    Without sequence parallelism the output has the input's leading shape. With it, the output is this rank's share of the
    token rows [rows / size, out]: leading axes are flattened and rows padded to a multiple of `size` (see sequence_parallel,
    whose collectives survive a compiler, unlike those of the parent's forward).
    """

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def __init__(self, in_features: int, out_features: int, *, bias: bool, tensor_parallel: TensorParallel) -> None:
        _refuse_uneven("input", in_features, tensor_parallel)
        super().__init__(
            in_features,
            out_features,
            bias=bias,
            config=megatron_config(tensor_parallel),
            init_method=no_first_values,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=tensor_parallel.group,
        )
        self._load_state_dict_pre_hooks.clear()
        shard = ParameterShard((out_features, in_features), dim=1, rank=tensor_parallel.rank, size=tensor_parallel.size)
        mark_shard(self.weight, shard)
        if bias and tensor_parallel.sequence_parallel:
            self.bias.tensor_parallel_partial = True
        self.size = tensor_parallel.size
        self.tensor_parallel = tensor_parallel

    def forward(self, rows: Tensor) -> Tensor:
        """[..., in / size] -> [..., out], or this rank's rows of it."""
        if self.sequence_parallel:
            rows = padded_rows(rows, self.size)
        summed = sum_partial(F.linear(rows, self.weight), self.tensor_parallel)
        return summed if self.bias is None else summed + self.bias


class VocabParallel(VocabParallelEmbedding):  # type: ignore[misc]  # megatron-core has no annotations
    """megatron-core's embedding for any vocabulary: when the size does not divide it, the first ranks hold one row more.

    So no rank stores rows that are not in the vocabulary, and checkpoints and norms need no exception.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, padding_index: int | None, tensor_parallel: TensorParallel
    ) -> None:
        size = tensor_parallel.size
        if vocab_size < size:
            raise ValueError(f"--vocab-size {vocab_size} is smaller than --tensor-model-parallel-size {size}")
        rounded_up = -(-vocab_size // size) * size  # only what megatron-core's constructor accepts
        super().__init__(
            rounded_up,
            hidden_size,
            init_method=no_first_values,
            config=megatron_config(tensor_parallel),
            tp_group=tensor_parallel.group,
        )
        shard = ParameterShard((vocab_size, hidden_size), dim=0, rank=tensor_parallel.rank, size=size)
        self.num_embeddings = vocab_size
        self.vocab_start_index, self.vocab_end_index = shard.start, shard.stop
        self.num_embeddings_per_partition = shard.stop - shard.start
        self.weight = nn.Parameter(torch.empty(shard.local_shape))
        self.padding_index = padding_index
        mark_shard(self.weight, shard)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """Ids -> [B, L, H], complete on every rank; ids equal to `padding_index` give no gradient."""
        embedded_BLH = cast(Tensor, super().forward(tokens_BL))
        if self.padding_index is None:
            return embedded_BLH
        is_padding_BL1 = (tokens_BL == self.padding_index).unsqueeze(-1)
        return torch.where(is_padding_BL1, embedded_BLH.detach(), embedded_BLH)


def _refuse_uneven(side: str, features: int, tensor_parallel: TensorParallel) -> None:
    if features % tensor_parallel.size:
        raise ValueError(
            f"--tensor-model-parallel-size {tensor_parallel.size} does not divide the {features} {side} features of a layer"
        )
