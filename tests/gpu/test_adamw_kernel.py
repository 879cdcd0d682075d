"""The AdamW kernel against the reference in kernels/adamw/reference.py: the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megatron_vla.config.training import OptimizerConfig
from megatron_vla.kernels import BUILD_COMMAND, load_launcher
from megatron_vla.training.optimizer import AdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(load_launcher("adamw") is None, reason=f"kernel not built: {BUILD_COMMAND}"),
]
# Shorter than a vector, not a multiple of one, exactly one chunk, several chunks and a rest, empty of nothing.
SHAPES = ((1,), (3,), (7, 5), (32768,), (3, 40961), (1024, 512), ())
CONFIG = {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "weight_decay": 0.01}


def parameters(dtype: torch.dtype) -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to("cuda", dtype) for shape in SHAPES]
    named = [(f"p{i}", nn.Parameter(v)) for i, v in enumerate(values)]
    zero = nn.Parameter(torch.ones(5, device="cuda", dtype=dtype), requires_grad=False)
    zero.decay_only = True  # type: ignore[attr-defined]
    return [*named, ("zero", zero)]


def gradients_of(step: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [(torch.randn(shape, generator=generator) * 10 ** (step % 5 - 2)).to("cuda", dtype) for shape in SHAPES]


def state_of(optimizer: AdamW) -> list[Tensor]:
    weights = [entry.parameter.detach() for entry in optimizer.parameters]
    return [*weights, *(entry.main for entry in optimizer.parameters), *optimizer.state_tensors().values()]


@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], ids=str)
def test_kernel_gives_the_bits_of_the_reference(weight: torch.dtype, gradient: torch.dtype) -> None:
    fused = AdamW(parameters(weight), OptimizerConfig(**CONFIG, fused_adam=True))
    plain = AdamW(parameters(weight), OptimizerConfig(**CONFIG, fused_adam=False))
    for entry in fused.trainable:
        entry.parameter.main_grad = torch.empty_like(entry.parameter, dtype=gradient)  # type: ignore[attr-defined]
    fused._kernel = fused._build_kernel()
    assert fused.kernel_name == "one fused kernel" and plain.kernel_name == "PyTorch operations"
    keep = torch.tensor(True, device="cuda")
    for step in range(12):
        # The third step is refused, with gradients that would spoil everything.
        keep = torch.tensor(step != 3, device="cuda")
        scale = torch.tensor(0.37 + step, device="cuda", dtype=torch.float64)
        for optimizer in (fused, plain):
            optimizer.advance(1e-2 / (1 + step))
            gradients = gradients_of(step, gradient)
            if step == 3:
                bad = torch.nan if optimizer is fused else 0.0
                gradients = [torch.full_like(g, bad) for g in gradients]
            optimizer.step(gradients, torch.where(keep, scale, 0.0), keep)
    for found, expected in zip(state_of(fused), state_of(plain), strict=True):
        assert torch.equal(found, expected)


def test_unaligned_shards_and_moving_gradients() -> None:
    """Views that start at odd elements, as shards of contiguous buffers do, and a new address for the gradient every step."""
    storage = torch.randn(5000, generator=torch.Generator().manual_seed(1)).cuda()
    views = [nn.Parameter(storage[3:1001]), nn.Parameter(storage[1001:4999].clone())]
    copies = [nn.Parameter(view.detach().clone()) for view in views]
    fused = AdamW([("a", views[0]), ("b", views[1])], OptimizerConfig(**CONFIG))
    plain = AdamW([("a", copies[0]), ("b", copies[1])], OptimizerConfig(**CONFIG, fused_adam=False))
    assert fused.kernel_name == "one fused kernel"
    kept = []
    for step in range(3):
        gradients = [torch.randn(v.shape, generator=torch.Generator().manual_seed(step)).cuda() for v in views]
        kept.append(gradients)  # so that the allocator gives other addresses
        for optimizer in (fused, plain):
            optimizer.advance(1e-2)
            optimizer.step([g.clone() for g in gradients], torch.tensor(0.5, device="cuda", dtype=torch.float64))
    for found, expected in zip(state_of(fused), state_of(plain), strict=True):
        assert torch.equal(found, expected)
