"""The action expert on a CUDA stream of its own: each of its layers runs beside the prefix's next layer.

The prefix never reads the expert. Pi0.5 base, 32 samples on an H200: 2,464 kernels under 40 us, most of them the expert's, take
18 ms of a 485 ms step, and gaps of a microsecond between them some 3 ms more, while most of the GPU has nothing to do. Beside
the prefix they take the multiprocessors that its products leave free at their ends; how much that hides has to be measured.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.models.common.side_stream import SideStream
from megatron_vla.models.pi05.layers import JointLayer
from megatron_vla.models.pi05.model import Pi05Model
from megatron_vla.models.registry import ModelFamily

FLAG = "--expert-stream"


def apply(model: nn.Module, config: OptimizationConfig, family: ModelFamily, report: Callable[[str], None]) -> nn.Module:
    """Give the model its second stream. Raises ValueError for a model without an expert that reads, but is not read."""
    if not config.expert_stream:
        return model
    if type(model) is not Pi05Model:
        raise ValueError(f"{FLAG}: only whole pi05 models have an expert beside a prefix; drop the flag")
    device = next(model.parameters()).device
    model.expert_stream = SideStream(device)
    for layer in model.layers:
        assert isinstance(layer, JointLayer)
        # The two halves are launched on different streams, so they cannot be one graph.
        layer.compiled_methods = ("prefix.forward", "suffix.forward")
    # Gradient accumulators may be made on either stream; autograd waits where it has to, and says so at every start.
    silence = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    if silence is not None:
        silence(False)
    report("expert stream: " + ("the expert runs beside the prefix" if device.type == "cuda" else "no effect without a GPU"))
    return model
