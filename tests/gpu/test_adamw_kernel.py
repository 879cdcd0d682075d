"""The AdamW kernel against the reference in kernels/adamw/reference.py: the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megatron_vla.config.training import OptimizerConfig
from megatron_vla.kernels import BUILD_COMMAND, load_launcher
from megatron_vla.kernels.tensor_table import tables_of_capture
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
    fused._kernels = fused._build_kernels()
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


# Pieces of the kernel have 2048 elements; the last one here is short and ends with three elements that fill no vector.
TABLE = (41, 2048)
REST = 40 * 2048 + 1000 + 3


def embedding_gradient(rows: tuple[int, ...], dtype: torch.dtype, numel: int) -> Tensor:
    """Zeros of either sign, but for a number in each of `rows`: at its start or its end."""
    gradient = torch.zeros(TABLE)
    gradient[1::2] = -0.0
    for row in rows:
        gradient[row, 0 if row % 2 else 999] = 1e-3 * (row + 1)
    return gradient.flatten()[:numel].to("cuda", dtype)


@pytest.mark.parametrize("decay", [0.0, 1e-10, 0.1])
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16], ids=str)
def test_untouched_rows_are_skipped_and_every_bit_stays(gradient: torch.dtype, decay: float) -> None:
    """Rows come and come again; steps are refused; a captured graph does the same as calls."""
    numel = REST
    values = torch.randn(numel, generator=torch.Generator().manual_seed(3))
    values[::7] = -0.0
    config = OptimizerConfig(**{**CONFIG, "weight_decay": decay})
    fused, plain = (
        AdamW([("table", nn.Parameter(values.to("cuda", torch.bfloat16)))], config),
        AdamW(
            [("table", nn.Parameter(values.to("cuda", torch.bfloat16)))],
            OptimizerConfig(**{**CONFIG, "weight_decay": decay, "fused_adam": False}),
        ),
    )
    for entry in fused.trainable:
        entry.parameter.main_grad = torch.empty_like(entry.parameter, dtype=gradient)  # type: ignore[attr-defined]
    fused._kernels = fused._build_kernels()
    assert fused._kernels is not None
    (kernel,) = fused._kernels.values()
    buffer = torch.zeros(numel, dtype=gradient, device="cuda")
    scale, keep = torch.tensor(0.5, device="cuda", dtype=torch.float64), torch.tensor(True, device="cuda")
    graph = torch.cuda.CUDAGraph()
    seen: set[int] = set()
    with tables_of_capture(buffer.device), torch.cuda.graph(graph):
        fused.step([buffer], scale, keep)
    assert kernel.num_untouched_pieces() == 0  # nothing ran
    for step, rows in enumerate(((), (3, 40), (3,), (), (7,), (8, 9, 31), ())):
        is_refused = step == 4
        keep.fill_(not is_refused)
        buffer.copy_(embedding_gradient(rows, gradient, numel))
        for optimizer in (fused, plain):
            optimizer.advance(1e-2 / (1 + step))
        if step % 2:
            graph.replay()
        else:
            fused.step([buffer], scale, keep)
        plain.step([torch.zeros_like(buffer) if is_refused else buffer.clone()], torch.where(keep, scale, 0.0), keep)
        seen |= set() if is_refused else set(rows)
        assert kernel.num_untouched_pieces() == 41 - len(seen)
        for one, other in zip(fused.trainable, plain.trainable, strict=True):
            for name in ("main", "exp_avg", "exp_avg_sq"):
                found, expected = getattr(one, name), getattr(other, name)
                assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), (step, name)
            weights = [entry.parameter.detach().view(torch.int16) for entry in (one, other)]
            assert torch.equal(*weights), step
    # Someone writes to a moment: after `state_shards` (as loading does) it is seen.
    shards = {shard.kind: shard.tensor for shard in fused.state_shards()}
    assert kernel.num_untouched_pieces() == 0
    for optimizer, moment in ((fused, shards["exp_avg"]), (plain, plain.trainable[0].exp_avg)):
        assert moment is not None
        moment[20 * 2048 + 5] = 1.0
        optimizer.advance(1e-3)
        optimizer.step([torch.zeros_like(buffer)], scale, None)
    assert torch.equal(fused.trainable[0].main, plain.trainable[0].main)
    assert kernel.num_untouched_pieces() == 41 - len(seen) - 1


def test_a_gradient_at_an_odd_address_leaves_nothing_known() -> None:
    """That step fills moments element by element; at the next aligned one they must not count as untouched."""
    fused, plain = (
        AdamW(
            [("p", nn.Parameter(torch.ones(4096, device="cuda")))],
            OptimizerConfig(**{**CONFIG, "weight_decay": 0.0, "fused_adam": fused_adam}),
        )
        for fused_adam in (True, False)
    )
    assert fused._kernels is not None
    kernel = next(iter(fused._kernels.values()))
    storage = torch.zeros(4097, device="cuda")
    aligned, odd = storage[:4096], storage[1:]
    scale = torch.tensor(1.0, device="cuda", dtype=torch.float64)
    for step, gradient in enumerate((aligned, odd, aligned)):
        storage.fill_(1.0 if step == 1 else 0.0)
        for optimizer in (fused, plain):
            optimizer.advance(1e-2)
            optimizer.step([gradient.clone() if optimizer is plain else gradient], scale, None)
        assert kernel.num_untouched_pieces() == (2 if step == 0 else 0)
        for found, expected in zip(state_of(fused), state_of(plain), strict=True):
            assert torch.equal(found, expected), step


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_spoils_untouched_rows_too(scale: float) -> None:
    """Without the finite check nothing is hidden."""
    parameter = nn.Parameter(torch.ones(4096, device="cuda"))
    optimizer = AdamW([("p", parameter)], OptimizerConfig(**{**CONFIG, "weight_decay": 0.0}))
    for step_scale in (1.0, scale):
        optimizer.advance(1e-3)
        optimizer.step([torch.zeros_like(parameter)], torch.tensor(step_scale, device="cuda", dtype=torch.float64), None)
    assert parameter.isnan().all()
