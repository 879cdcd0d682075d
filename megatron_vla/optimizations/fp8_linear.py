"""A linear layer that computes in FP8, and the libraries that can do the computing.

Shape legend: M rows (tokens), K input features, N output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.models.common.joined_parameters import parameter_parts
from megatron_vla.models.common.merged_linear import joined_bias
from megatron_vla.optimizations.fp8_delayed import DelayedBackend
from megatron_vla.optimizations.fp8_product import Accumulation, fp8_product
from megatron_vla.optimizations.fp8_scaling import DelayedScaling

# Every dimension of an FP8 matrix product on NVIDIA GPUs.
ALIGNMENT = 16


class Fp8Backend(Protocol):
    """Who computes: `product(rows [M, K], weights [N_i, K])` -> [M, sum N_i], differentiable, M a multiple of ALIGNMENT."""

    def product(self, rows_MK: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Rows times the transposed, joined weights."""
        ...


@dataclass(frozen=True)
class NativeBackend:
    """This project's own product: rows quantised once for all weights that read them, and saved for backward in FP8."""

    accumulation: Accumulation

    def product(self, rows_MK: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """See Fp8Backend."""
        return fp8_product(rows_MK, weights, self.accumulation)


@dataclass(frozen=True, eq=False)
class TorchaoBackend:
    """The autograd function of TorchAO's Float8Linear, with that layer's configuration."""

    function: Any
    products: Any
    config: Any

    def product(self, rows_MK: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """See Fp8Backend; several weights are joined in their own precision first."""
        weight_NK = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        return cast(Tensor, self.function.apply(rows_MK, weight_NK.t(), self.products, self.config))


def accumulation_of(config: OptimizationConfig) -> Accumulation:
    """What --fp8-fast-accumulation stands for."""
    return Accumulation(config.fp8_fast_accumulation != "none", config.fp8_fast_accumulation == "all")


def torchao_backend(config: OptimizationConfig, *, emulate: bool) -> TorchaoBackend:
    """TorchAO with the flags' recipe. `emulate` multiplies in fp32 (CPUs)."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.config import Float8GemmConfig
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    accumulation = accumulation_of(config)
    forward, backward = Float8GemmConfig(accumulation.fast_forward), Float8GemmConfig(accumulation.fast_backward)
    recipe = replace(
        Float8LinearConfig.from_recipe_name(config.fp8_recipe),
        emulate=emulate,
        gemm_config_output=forward,
        gemm_config_grad_input=backward,
        gemm_config_grad_weight=backward,
    )
    # Converting a sample layer by the public way also applies what TorchAO repairs in the compiler for its kernels.
    with torch.device("meta"):
        sample: Any = convert_to_float8_training(nn.Linear(ALIGNMENT, ALIGNMENT), config=recipe)
    return TorchaoBackend(matmul_with_hp_or_float8_args, sample.linear_mm_config, sample.config)


class Fp8Linear(nn.Linear):
    """`nn.Linear` whose products run in FP8. Parameters, their names and their precision are those of `nn.Linear`.

    Made from a layer by `convert`.
    """

    backend: Fp8Backend

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] -> [..., N] in the input's dtype."""
        return self.joint_output(input, (self,))

    def joint_output(self, hidden: Tensor, linears: Sequence[nn.Module]) -> Tensor:
        """[..., K] -> [..., sum N_i]: all `linears` in one product, with one scale for their weights together."""
        output = fp8_rows_product(self.backend, hidden, parameter_parts(linears, "weight"))
        bias = joined_bias(linears)
        return output if bias is None else output + bias

    def fuses_gated_mlp(self, layers: Sequence[nn.Module]) -> bool:
        """See FusesGatedMlp: with delayed scaling, when all three layers are converted."""
        return all(isinstance(layer, Fp8Linear) and isinstance(layer.backend, DelayedBackend) for layer in layers)

    def gated_mlp(self, hidden: Tensor, layers: Sequence[nn.Module]) -> Tensor:
        """See FusesGatedMlp."""
        gate, up, down = (cast(Fp8Linear, layer) for layer in layers)
        assert isinstance(gate.backend, DelayedBackend) and isinstance(down.backend, DelayedBackend)
        rows_MK, missing = aligned_rows(hidden)
        output_MN = gate.backend.gated_mlp(rows_MK, gate.weight, up.weight, down.weight, down.backend.slots)
        return restored_rows(output_MN, missing, hidden)


def convert(linear: nn.Linear, backend: Fp8Backend) -> None:
    """Turn `linear` into an Fp8Linear in place, so that its name, parameters, hooks and every reference to it stay."""
    assert type(linear) is nn.Linear, type(linear)
    linear.__class__ = Fp8Linear
    cast(Fp8Linear, linear).backend = backend


def delayed_scaling_of(module: nn.Module) -> DelayedScaling | None:
    """The table that the converted layers of `module` share; None without delayed scaling."""
    for layer in module.modules():
        if isinstance(layer, Fp8Linear) and isinstance(layer.backend, DelayedBackend):
            return layer.backend.scaling
    return None


def fp8_rows_product(backend: Fp8Backend, hidden: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """hidden [..., K] times the transposed, joined weights -> [..., sum N_i]; any number of rows."""
    rows_MK, missing = aligned_rows(hidden)
    return restored_rows(backend.product(rows_MK, weights), missing, hidden)


def aligned_rows(hidden: Tensor) -> tuple[Tensor, int]:
    """[M, K] with M a multiple of ALIGNMENT, and how many rows of zeros were added. Zeros change neither a scale nor a sum."""
    rows_MK = hidden.reshape(-1, hidden.shape[-1])
    # The rows are the summed axis of the weight gradient.
    missing = -rows_MK.shape[0] % ALIGNMENT
    return (F.pad(rows_MK, (0, 0, 0, missing)) if missing else rows_MK), missing


def restored_rows(output_MN: Tensor, missing: int, hidden: Tensor) -> Tensor:
    """[..., N] without the added rows."""
    output_MN = output_MN[:-missing] if missing else output_MN
    return output_MN.reshape(*hidden.shape[:-1], output_MN.shape[-1])
