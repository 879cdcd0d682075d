"""Merged projections: linear layers that read the same rows become one matrix product; their parameters stay separate.

With --neighbouring-weights these parameters lie side by side in memory, so that nothing is copied to join them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.kernels.gated_gelu import op as gated_gelu
from megatron_vla.kernels.joined_gradients import op as joined_gradients
from megatron_vla.models.common.decoder_layer import GatedMlp
from megatron_vla.models.common.joined_parameters import make_neighbours
from megatron_vla.models.common.merged_linear import MergesProjections, projection_groups
from megatron_vla.models.registry import ModelFamily
from megatron_vla.optimizations.fused_kernels import code_of, obstacle_of

FLAG = "--merge-projections"


def apply(model: nn.Module, config: OptimizationConfig, family: ModelFamily, report: Callable[[str], None]) -> nn.Module:
    """Switch every module that can merge. Raises ValueError when the model has none."""
    if not config.merge_projections:
        return model
    merging = [module for module in model.modules() if isinstance(module, MergesProjections)]
    if not merging:
        raise ValueError(f"{FLAG}: model {family.name} has no projections that can be merged; drop the flag")
    for module in merging:
        module.merged = True
    groups = projection_groups(model)
    line = f"merged projections: {sum(map(len, groups))} linear layers in {len(groups)} products"
    if config.neighbouring_weights:
        line += f", {sum(map(make_neighbours, groups))} of which read neighbours in memory"
    gates = [[m.gate_proj.get_parameter("weight")] for m in merging if isinstance(m, GatedMlp) and m.activation == "gelu_tanh"]
    if gates:
        but = ", but not in MLPs that are all FP8" if config.fp8 is not None and config.fp8_recipe == "delayed" else ""
        obstacle = obstacle_of(gates, gated_gelu.VECTOR)
        line += f"; gated GELU: {code_of('gated_gelu', gated_gelu.IS_BUILT, config, obstacle, but)}"
    biased = [[p for layer in group for p in layer.parameters()] for group in groups if isinstance(group[0].bias, Tensor)]
    if biased:
        but = ", but not in FP8 layers" if config.fp8 is not None else ""
        obstacle = obstacle_of(biased, joined_gradients.VECTOR)
        line += (
            f"; gradients of biased products: {code_of('joined_gradients', joined_gradients.IS_BUILT, config, obstacle, but)}"
        )
    report(line)
    return model
