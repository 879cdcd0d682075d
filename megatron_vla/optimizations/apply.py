"""THE list: everything that makes a built model faster or smaller, in the order in which it is applied.

Each entry has the signature (model, config, family, report) -> model. Off means that the same object comes back untouched;
parameter names never change; a failure is an error, never a quiet return to the plain model.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.models.registry import ModelFamily
from megatron_vla.optimizations import (
    activation_checkpoint,
    attention,
    compile,
    fp8,
    fused_kernels,
    merge_projections,
    tf32,
)

Optimization = Callable[[nn.Module, OptimizationConfig, ModelFamily, Callable[[str], None]], nn.Module]

# Order matters: what swaps modules or changes how they compute comes first, then what wraps their forward. Compile comes before
# checkpointing: torch.compile of a function that checkpointing has wrapped finds nothing to compile. Which kernels a layer can
# use depends on all of them.
OPTIMIZATIONS: tuple[Optimization, ...] = (
    tf32.apply,
    attention.apply,
    merge_projections.apply,
    fp8.apply,
    compile.apply,
    activation_checkpoint.apply,
    fused_kernels.apply,
)


def apply_optimizations(
    model: nn.Module, config: OptimizationConfig, family: ModelFamily, report: Callable[[str], None] = print
) -> nn.Module:
    """Apply the list; `report` receives one line per optimization that changed something (pass a rank-0 printer)."""
    for optimization in OPTIMIZATIONS:
        model = optimization(model, config, family, report)
    return model
