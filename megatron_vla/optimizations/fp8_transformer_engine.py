"""NVIDIA Transformer Engine's linear layers in place of torch's (--fp8 transformer_engine).

Its layers cannot be traced by torch.compile: they break the graph, so nothing around them is fused (refused by the checks).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from megatron_vla.optimizations.fp8_linear import aligned_rows, restored_rows


def convert_to_transformer_engine(model: nn.Module, names: Iterable[str]) -> None:
    """Replace the named layers; they take over the Parameter objects, so names, precision and checkpoints stay.

    One scale per tensor, computed from the tensor itself (Float8CurrentScaling), as in the other backends: nothing is
    remembered between steps, so there is no extra state to save.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    recipe = Float8CurrentScaling()

    class Linear(te.Linear):  # type: ignore[misc]
        """Computes in FP8 by itself, without a context around the model; adds no entry to the state dict."""

        get_extra_state = nn.Module.get_extra_state
        set_extra_state = nn.Module.set_extra_state

        def forward(self, input: Tensor) -> Tensor:
            # Its products refuse numbers of rows that are no multiple of 8, such as one sample's 50 actions.
            rows_MK, missing = aligned_rows(input)
            with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                output_MN: Tensor = super().forward(rows_MK)
            return restored_rows(output_MN, missing, input)

    for name in names:
        old = model.get_submodule(name)
        assert isinstance(old, nn.Linear)
        has_bias = old.bias is not None
        new = Linear(old.in_features, old.out_features, bias=has_bias, params_dtype=torch.bfloat16, device="meta")
        new.weight = old.weight
        if has_bias:
            new.bias = old.bias
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, new)
