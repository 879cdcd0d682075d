"""Kernels on tensors of a GPU that is not the current one, as a policy on cuda:1 calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from megatron_vla.kernels import BUILD_COMMAND, load_launcher
from megatron_vla.kernels.biased_gelu import op as biased_gelu
from megatron_vla.kernels.gated_gelu import op as gated_gelu
from megatron_vla.kernels.joined_gradients import op as joined_gradients
from megatron_vla.kernels.layer_norm import op as layer_norm
from megatron_vla.kernels.masked_softmax import op as masked_softmax
from megatron_vla.kernels.rms_norm import op as rms_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.skipif(load_launcher("layer_norm") is None, reason=f"kernels not built: {BUILD_COMMAND}"),
]

# Of rows [40, 1024] and a vector [1024].
CALLS: dict[str, Callable[[Tensor, Tensor], Sequence[Tensor]]] = {
    "biased_gelu": lambda rows, vector: [biased_gelu.gelu_with_bias(rows, vector)],
    "gated_gelu": lambda rows, vector: [gated_gelu.gated_gelu(rows)],
    "joined_gradients": lambda rows, vector: joined_gradients.split_with_bias(rows, vector, (512, 512)),
    "layer_norm": lambda rows, vector: layer_norm.add_layer_norm(rows, rows, vector, vector, 1e-6),
    "masked_softmax": lambda rows, vector: [
        masked_softmax.masked_softmax(rows.detach().float()[None], 0.1, None, 1024, torch.bfloat16)
    ],
    "rms_norm": lambda rows, vector: rms_norm.add_rms_norm(rows, rows, vector, 1.0, 1e-6),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits_on_both(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(*shape, 1024, generator=generator).bfloat16() for shape in ((40,), ())]
    results = []
    for device in ("cuda:0", "cuda:1"):
        leaves = [t.to(device).requires_grad_() for t in drawn]
        outputs = CALLS[name](*leaves)
        found = [output.detach() for output in outputs]
        if outputs[0].requires_grad:
            gradients = torch.autograd.grad(outputs, leaves, [output.detach().sin() for output in outputs], allow_unused=True)
            found += [gradient for gradient in gradients if gradient is not None]
        assert all(t.device == torch.device(device) for t in found)
        results.append([t.cpu() for t in found])
        assert torch.cuda.current_device() == 0
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
