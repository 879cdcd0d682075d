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
from megatron_vla.optimizations.fused_kernels import code_of

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
    if any(isinstance(module, GatedMlp) and module.activation == "gelu_tanh" for module in merging):
        line += f"; gated GELU: {code_of('gated_gelu', gated_gelu.IS_BUILT, config)}"
    if any(isinstance(group[0].bias, Tensor) for group in groups):
        line += f"; gradients of biased products: {code_of('joined_gradients', joined_gradients.IS_BUILT, config)}"
    report(line)
    return model
