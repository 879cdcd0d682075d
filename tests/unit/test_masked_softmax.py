"""The masked softmax of attention by plain products: its reference, its op, when the kernel runs. The kernel: tests/gpu."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_fixtures import with_empty_parameters
from pi05_fixtures import assert_gradients_close, gradients, mean_loss, tiny_batch, tiny_model, uniform
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.kernels import SELECTION
from megatron_vla.kernels.masked_softmax import op
from megatron_vla.kernels.masked_softmax.reference import masked_softmax_reference
from megatron_vla.models.common.matmul_attention import matmul_attention
from megatron_vla.models.pi05.family import FAMILY
from megatron_vla.optimizations import fused_kernels
from megatron_vla.optimizations.apply import apply_optimizations

BF16 = torch.bfloat16
CHECKPOINT = "layers.*"


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The op wherever attention is computed by products; its reference runs inside. One entry per call."""
    calls: list[torch.dtype] = []

    def counted(logits: Tensor, scale: float, mask: Tensor | None, num_keys: int, dtype: torch.dtype) -> Tensor:
        calls.append(dtype)
        return masked_softmax_reference(logits, scale, mask, num_keys, dtype)

    monkeypatch.setattr(op, "can_run", lambda *arguments: True)
    monkeypatch.setattr(op, "masked_softmax_reference", counted)
    return calls


def hidden_mask(num_samples: int, num_keys: int, dtype: torch.dtype) -> Tensor:
    mask = torch.where(uniform(3, (num_samples, 1, num_keys)) < -0.4, float("-inf"), 0.25)
    mask[:, :, 0] = 0.0
    return mask.to(dtype)


@pytest.mark.parametrize("masks", [0, 1, 2])
@pytest.mark.parametrize("num_keys", [13, 16])
@pytest.mark.parametrize(
    ("wide", "dtype"), [(torch.float32, BF16), (torch.float32, torch.float32), (torch.float64,) * 2], ids=str
)
def test_the_reference_and_the_op_have_the_bits_of_plain_code(
    wide: torch.dtype, dtype: torch.dtype, num_keys: int, masks: int
) -> None:
    """With a mask that was padded beforehand."""
    logits = (30 * uniform(0, (2, 5, 16))).to(wide)
    mask = hidden_mask(masks, num_keys, dtype) if masks else None
    plain = logits * 0.3
    if mask is not None or num_keys < 16:
        padded = torch.zeros(1, 1, num_keys, dtype=dtype) if mask is None else mask
        plain = plain + F.pad(padded, (0, 16 - num_keys), value=float("-inf")).to(wide)
    wanted = plain.softmax(dim=-1).to(dtype)
    arguments = (logits, 0.3, mask, num_keys, dtype)
    for function in (masked_softmax_reference, op.masked_softmax, torch.ops.megatron_vla.masked_softmax):
        assert torch.equal(function(*arguments), wanted)
    assert (wanted[..., num_keys:] == 0).all()
    torch.library.opcheck(torch.ops.megatron_vla.masked_softmax, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", [torch.float64, BF16])
@pytest.mark.parametrize(("num_keys", "masks"), [(13, 2), (13, 0), (16, 1)])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("aot_eager")
def test_attention_with_the_op_has_the_bits_of_plain_code(
    compiled: bool, num_keys: int, masks: int, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    inputs = [uniform(i, (2, n, 16)).to(dtype).requires_grad_() for i, n in enumerate((12, num_keys, num_keys))]
    mask = hidden_mask(masks, num_keys, dtype) if masks else None

    def run(function: Any) -> list[Tensor]:
        output = function(*inputs, mask)
        with torch.no_grad():
            without_gradient = function(*inputs, mask)
        return [output, without_gradient, *torch.autograd.grad(output.sin().sum(), inputs)]

    wanted = run(matmul_attention)
    calls = request.getfixturevalue("kernel")
    found = run(torch.compile(matmul_attention, backend="aot_eager", fullgraph=True) if compiled else matmul_attention)
    assert calls == [dtype] * 2
    assert all(torch.equal(mine, plain) for mine, plain in zip(found, wanted, strict=True))


@pytest.mark.parametrize("patterns", [(), (CHECKPOINT,)], ids=str)
@pytest.mark.usefixtures("aot_eager")
def test_a_compiled_model_computes_the_same(patterns: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    results = []
    for compiled in (False, True):
        if compiled:
            calls = request.getfixturevalue("kernel")
        config = OptimizationConfig(
            attention_backend="matmul", compile=compiled, activation_checkpoint_module_patterns=patterns if compiled else ()
        )
        model, batch = tiny_model(attention_backend="matmul"), tiny_batch()
        model = apply_optimizations(model, config, FAMILY, lambda line: None)
        results.append((float(mean_loss(model, batch).detach()), gradients(model, batch)))
    assert calls and results[0][0] == pytest.approx(results[1][0], rel=1e-13)
    assert_gradients_close(results[1][1], results[0][1], rtol=1e-11, atol=1e-14)


def test_where_the_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "IS_BUILT", True)
    with FakeTensorMode():

        def can_run(
            *, width: int = 632, num_keys: int = 626, dtype: torch.dtype = BF16, mask: Any = (2, 1, 626), **options: Any
        ) -> bool:
            settings = {"device": "cuda", "dtype": torch.float32, **options}
            mask_dtype = settings.pop("mask_dtype", BF16)
            added = None if mask is None else torch.empty(mask, device=settings["device"], dtype=mask_dtype)
            return op.can_run(torch.empty(2, 40, width, **settings), added, num_keys, dtype)

        assert can_run() and can_run(mask=None) and can_run(mask=(1, 1, 626)) and can_run(mask_dtype=torch.float32)
        assert can_run(width=1024, num_keys=1024, mask=None) and not can_run(width=1032, num_keys=1032, mask=None)
        assert not can_run(width=630, mask=None)
        assert not any(can_run(mask=shape) for shape in ((3, 1, 626), (2, 2, 626), (2, 1, 632)))
        assert not can_run(mask_dtype=torch.float16) and not can_run(dtype=torch.float32)
        assert not can_run(dtype=torch.float64) and not can_run(device="cpu")
        assert not op.can_run(torch.empty(2, 632, 40, device="cuda").transpose(1, 2), None, 632, BF16)
        monkeypatch.setattr(SELECTION, "enabled", False)
        assert not can_run()


def test_the_report_names_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def lines(model: Any = None, **options: Any) -> list[str]:
        found: list[str] = []
        fused_kernels.apply(model or torch.nn.Linear(1, 1), OptimizationConfig(**options), FAMILY, found.append)
        return found

    monkeypatch.setattr(SELECTION, "enabled", True)
    assert lines() == []
    assert lines(attention_backend="matmul") == [], "no attention on a CPU can use it"
    with FakeTensorMode():
        model: Any = with_empty_parameters(torch.nn.Linear(1, 1, device="meta"), torch.float32, "cuda")
        assert lines(model, attention_backend="matmul") == [], "nor one in fp32"
        model.config = SimpleNamespace(autocast_bf16=True)
        assert len(lines(model, attention_backend="matmul")) == 1
        model = with_empty_parameters(torch.nn.Linear(1, 1, device="meta"), BF16, "cuda")
        assert lines(model, attention_backend="sdpa") == []
        (line,) = lines(model, attention_backend="matmul")
    code = "the fused kernel" if op.IS_BUILT else "PyTorch operations (kernels/masked_softmax was not built)"
    assert line == f"softmax of attention: {code}"
    assert lines(attention_backend="matmul", fused_kernels=False) == [
        "fused kernels: none, PyTorch operations instead (--no-fused-kernels)"
    ]
