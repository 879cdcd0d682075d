"""The masked softmax kernel against fp64, and attention by plain products with it and without it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from kernel_fixtures import captured, drawn, needs_kernel
from torch import Tensor

from megatron_vla.kernels import SELECTION
from megatron_vla.kernels.masked_softmax import op
from megatron_vla.models.common.matmul_attention import matmul_attention

pytestmark = needs_kernel("masked_softmax")
SCALE = 72**-0.5  # no power of two
# Keys that exist and keys with those added for alignment: every number of vectors of a lane.
WIDTHS = [(8, 8), (11, 16), (250, 256), (264, 264), (512, 512), (576, 576), (626, 632), (768, 768), (890, 896), (1024, 1024)]


def refuse(*arguments: Any) -> Tensor:
    raise AssertionError("the reference ran in place of the kernel")


@pytest.fixture
def only_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "masked_softmax_reference", refuse)


drawn_fp32 = partial(drawn, dtype=torch.float32)


def drawn_mask(num_samples: int, num_keys: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A third hidden, but never the first key; finite numbers too."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.where(torch.rand(num_samples, 1, num_keys, generator=generator) < 0.3, float("-inf"), 0.0)
    mask[:, :, 0] = 0.375
    return mask.to("cuda", dtype)


def exact(logits: Tensor, mask: Tensor | None, num_keys: int) -> tuple[Tensor, Tensor]:
    """Probabilities in fp64 of logits that were scaled in fp32, as torch's code scales them; and the scaled logits."""
    scaled = (logits * SCALE).double()
    scaled[:, :, num_keys:] = float("-inf")
    if mask is not None:
        scaled[:, :, :num_keys] += mask.double()
    return scaled.softmax(-1), scaled


def check(logits: Tensor, mask: Tensor | None, num_keys: int) -> Tensor:
    assert op.can_run(logits, mask, num_keys, torch.bfloat16)
    found = op.masked_softmax(logits, SCALE, mask, num_keys, torch.bfloat16)
    expected, scaled = exact(logits, mask, num_keys)
    # bf16 rounds by a relative 2^-8 at most. Before that come a relative 2e-6, and fp32's roundings of scale * logit + mask
    # and of its distance to the maximum. Results below 2^-126 may be 0.
    finite = scaled.masked_fill(scaled.isinf(), 0.0).abs()
    rounding = 2e-6 + 2.0**-22 * (finite + finite.amax(-1, keepdim=True))
    assert ((found.double() - expected).abs() <= expected * (2.0**-8 + 1.01 * rounding) + 2.0**-126).all()
    assert (found[scaled.isneginf()] == 0).all()
    assert torch.equal(op.masked_softmax(logits, SCALE, mask, num_keys, torch.bfloat16), found)
    return found


@pytest.mark.usefixtures("only_the_kernel")
@pytest.mark.parametrize("kind", ["none", "one", "each", "each in fp32"])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_against_fp64(widths: tuple[int, int], kind: str) -> None:
    num_keys, width = widths
    mask = None
    if kind != "none":
        mask = drawn_mask(1 if kind == "one" else 3, num_keys, torch.float32 if kind.endswith("fp32") else torch.bfloat16)
    for num_rows in (1, 31, 100):
        check(drawn_fp32(3, num_rows, width, seed=0, factor=20.0), mask, num_keys)


@pytest.mark.usefixtures("only_the_kernel")
@pytest.mark.parametrize("factor", [0.0, 1e-3, 1e3, 1e6, 1e30])
def test_logits_of_any_size(factor: float) -> None:
    found = check(drawn_fp32(2, 40, 576, seed=0, factor=factor), drawn_mask(2, 576), 576)
    assert ((found.double().sum(-1) - 1).abs() < 0.01).all()


@pytest.mark.usefixtures("only_the_kernel")
def test_sizes_of_a_model() -> None:
    check(drawn_fp32(8, 8 * 576, 576, seed=0, factor=16.0), drawn_mask(8, 576), 576)
    check(drawn_fp32(32, 8 * 50, 632, seed=0, factor=16.0), drawn_mask(32, 626), 626)


def test_rows_without_a_finite_maximum_are_nan_as_in_torch() -> None:
    logits = drawn_fp32(2, 9, 24, seed=0)
    logits[0, 1, 3], logits[0, 2, 4], logits[0, 3, 5], logits[0, 4] = torch.nan, torch.inf, -torch.inf, -torch.inf
    mask = torch.zeros(2, 1, 20, device="cuda")
    mask[1] = float("-inf")
    found = op.masked_softmax(logits, SCALE, mask, 20, torch.bfloat16)
    expected = op.masked_softmax_reference(logits, SCALE, mask, 20, torch.bfloat16)
    assert torch.equal(found.isnan(), expected.isnan()) and int(found.isnan().any(-1).sum()) == 3 + 9
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=0, equal_nan=True)


def test_what_the_kernel_does_not_take_runs_the_reference() -> None:
    logits = drawn_fp32(2, 8, 16, seed=0)
    wanted = op.masked_softmax_reference(logits, SCALE, None, 13, torch.bfloat16)
    shifted = torch.empty(logits.numel() + 1, device="cuda")[1:].view_as(logits).copy_(logits)
    assert shifted.data_ptr() % op.ALIGNMENT and op.can_run(shifted, None, 13, torch.bfloat16)
    assert torch.equal(op.masked_softmax(shifted, SCALE, None, 13, torch.bfloat16), wanted)
    wide = drawn_fp32(1, 2, op.MAX_KEYS + 8, seed=0)
    assert not op.can_run(wide, None, wide.shape[-1], torch.bfloat16)
    assert op.masked_softmax(wide, SCALE, None, wide.shape[-1], torch.bfloat16).shape == wide.shape
    assert op.masked_softmax(logits[:, :0], SCALE, None, 16, torch.bfloat16).shape == (2, 0, 16)
    opposite = torch.ops.megatron_vla.masked_softmax
    for mask in (None, drawn_mask(2, 13)):
        arguments = (logits, SCALE, mask, 13, torch.bfloat16)
        torch.library.opcheck(opposite, arguments, test_utils=("test_schema", "test_faketensor"))


def attention_inputs(num_keys: int) -> list[Tensor]:
    shapes = ((2, 8 * 50, 256), (2, num_keys, 256), (2, num_keys, 256))
    return [drawn(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("num_keys", "masks"), [(576, 2), (626, 2), (626, 0), (626, 1), (64, 0)])
def test_attention_errs_no_more_than_with_torchs_softmax(
    num_keys: int, masks: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = attention_inputs(num_keys)
    mask = drawn_mask(masks, num_keys) if masks else None
    weight = drawn_fp32(2, 8 * 50, 256, seed=7)

    def results(leaves: list[Tensor], function: Any) -> list[Tensor]:
        output = function(*leaves, mask)
        return [output, *torch.autograd.grad((output * weight.to(output.dtype)).sum(), leaves)]

    def run() -> list[Tensor]:
        torch._dynamo.reset()
        return results(inputs, torch.compile(matmul_attention, fullgraph=True, dynamic=False) if compiled else matmul_attention)

    with monkeypatch.context() as patch:
        patch.setattr(SELECTION, "enabled", False)
        plain = run()
        truth = results([x.detach().double().requires_grad_() for x in inputs], matmul_attention)
    with monkeypatch.context() as patch:
        patch.setattr(op, "masked_softmax_reference", refuse)
        found = run()
        if not compiled:
            with torch.no_grad():
                assert torch.equal(matmul_attention(*inputs, mask), found[0])
    for mine, theirs, right in zip(found, plain, truth, strict=True):
        errors = [float(((x - right).norm() / right.norm()).detach()) for x in (mine, theirs)]
        assert errors[0] <= 1.02 * errors[1] and errors[0] < 0.02, errors


@pytest.mark.usefixtures("only_the_kernel")
def test_in_a_captured_graph() -> None:
    inputs = attention_inputs(626)
    logits, mask = drawn_fp32(2, 100, 632, seed=9), drawn_mask(2, 626)

    def step() -> list[Tensor]:
        output = matmul_attention(*inputs, mask)
        weights = op.masked_softmax(logits, SCALE, mask, 626, torch.bfloat16)
        return [weights, output.detach(), *torch.autograd.grad(output.square().sum(), inputs)]

    graph, replayed = captured(step)
    for factor in (1.0, 2.0, 0.25):
        with torch.no_grad():
            inputs[0].mul_(factor)
            logits.mul_(factor)
        graph.replay()
        expected = step()
        assert torch.equal(replayed[0], expected[0])
        for mine, wanted in zip(replayed, expected, strict=True):
            # Products may be summed in another order there.
            assert (mine - wanted).float().norm() <= 0.01 * wanted.float().norm()
