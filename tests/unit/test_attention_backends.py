"""Every attention backend that exists on the CPU against the explicit one, and their descriptions of who reads whom."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from pi05_fixtures import gradients, mean_loss, relative_difference, replaced, tiny_batch, tiny_config, tiny_model, uniform
from torch import Tensor
from torch.nn import functional as F

from megatron_vla.config.check import check
from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.config.run import parse_args
from megatron_vla.data.batch import Batch
from megatron_vla.models.common import attention
from megatron_vla.models.common.attention import attend
from megatron_vla.models.common.attention_mask import (
    BLOCK,
    key_block_mask,
    key_mask,
    sequence_bounds,
    valid_first_order,
    without_mask,
)
from megatron_vla.models.pi05.family import FAMILY
from megatron_vla.optimizations.apply import apply_optimizations
from megatron_vla.training.preparation import device_findings


def holes_everywhere() -> Batch:
    """The first view absent in one sample, the second in the other, one empty prompt: valid tokens are nowhere contiguous."""
    batch = tiny_batch()
    length = torch.tensor([[3], [0]])
    return replaced(
        batch,
        camera_is_present_BV=torch.tensor([[False, True], [True, False]]),
        token_is_valid_BL=torch.arange(batch.tokens_BL.shape[1]) < length,
    )


@pytest.mark.parametrize("skip_dead", [True, False])
def test_varlen_model_equals_the_reference(skip_dead: bool) -> None:
    batch = holes_everywhere()
    models = [tiny_model(attention_backend=b, skip_dead_compute=skip_dead) for b in ("eager", "varlen")]
    losses = [float(mean_loss(model, batch).detach()) for model in models]
    assert losses[1] == pytest.approx(losses[0], rel=1e-13)
    expected, found = (gradients(model, batch) for model in models)
    assert found.keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-14 * scale, msg=name)


def published_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
) -> Tensor:
    """flash_attn 2's function of that name by its published interface, sequence by sequence."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and len(cu_seqlens_q) == len(cu_seqlens_k)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and q.shape[1] % k.shape[1] == 0 and dropout_p == 0
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert (starts_q[-1], starts_k[-1]) == (len(q), len(k))
    parts = []
    for (begin_q, end_q), (begin_k, end_k) in zip(pairwise(starts_q), pairwise(starts_k), strict=True):
        assert end_q - begin_q <= max_seqlen_q and end_k - begin_k <= max_seqlen_k
        query, key, value = (x.transpose(0, 1)[None] for x in (q[begin_q:end_q], k[begin_k:end_k], v[begin_k:end_k]))
        # Without keys the kernel writes zeros.
        is_read = query.shape[2] > 0 and key.shape[2] > 0
        output = F.scaled_dot_product_attention(query, key, value, enable_gqa=True) if is_read else torch.zeros_like(query)
        parts.append(output[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("package", ["flash_attn_interface", "flash_attn"])
def test_flash_attn_model_equals_the_reference(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Against a stand-in with the interface of the package; the Hopper build's function returns log sums too."""
    module = ModuleType(package)
    function = published_flash_attention if package == "flash_attn" else lambda *a: (published_flash_attention(*a), None)
    module.flash_attn_varlen_func = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package, module)
    monkeypatch.setitem(sys.modules, "flash_attn" if package == "flash_attn_interface" else "flash_attn_interface", None)
    attention._flash_attention_package.cache_clear()
    batch = holes_everywhere()
    models = [tiny_model(attention_backend=b) for b in ("eager", "flash_attn")]
    try:
        losses = [float(mean_loss(model, batch).detach()) for model in models]
        found = gradients(models[1], batch)
    finally:
        attention._flash_attention_package.cache_clear()
    assert losses[1] == pytest.approx(losses[0], rel=1e-13)
    for name, expected in gradients(models[0], batch).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-8, atol=1e-13, msg=name)


def test_varlen_samples_the_same_actions_from_its_cache() -> None:
    batch = holes_everywhere()
    actions = [tiny_model(attention_backend=b).sample_actions(batch, 3, batch.noise_BTA) for b in ("eager", "varlen")]
    torch.testing.assert_close(*actions, rtol=1e-12, atol=1e-13)


def test_flex_forward_equals_the_reference() -> None:
    """torch's flex attention has no backward on the CPU; the GPU tests compare gradients."""
    batch = holes_everywhere()
    with torch.no_grad():
        outputs = [tiny_model(dtype=torch.float32, attention_backend=b)(batch) for b in ("eager", "flex")]
        actions = [
            tiny_model(dtype=torch.float32, attention_backend=b).sample_actions(batch, 2, batch.noise_BTA)
            for b in ("eager", "flex")
        ]
    assert relative_difference(outputs[1], outputs[0]) <= 1e-5
    assert relative_difference(actions[1], actions[0]) <= 1e-5


def test_flex_reads_only_valid_keys_across_blocks() -> None:
    """Three blocks of keys: one whole, one in part, one not read at all; and a sample without any valid key stays finite."""
    num_keys, num_queries = 2 * BLOCK + 44, BLOCK + 9
    lengths = torch.tensor([[BLOCK + 5], [BLOCK], [0]])
    valid = torch.arange(num_keys) < lengths
    query, key, value = (uniform(i, (3, n, s, 16)) for i, n, s in ((1, 2, num_queries), (2, 1, num_keys), (3, 1, num_keys)))
    with torch.no_grad():
        expected = attend(query, key, value, key_mask(valid, torch.float32), "eager")
        found = attend(query, key, value, key_block_mask(valid, num_queries), "flex")
    assert relative_difference(found[:2], expected[:2]) <= 1e-5
    assert bool(found.isfinite().all())


def test_block_mask_lists_whole_and_partial_blocks() -> None:
    valid = torch.arange(2 * BLOCK + 44) < torch.tensor([[BLOCK + 5], [2 * BLOCK]])
    mask = key_block_mask(valid, num_queries=2 * BLOCK)
    assert mask.kv_num_blocks[:, 0].tolist() == [[1, 1], [0, 0]] and mask.kv_indices[0, 0, :, 0].tolist() == [1, 1]
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    assert mask.full_kv_num_blocks[:, 0].tolist() == [[1, 1], [2, 2]]
    assert mask.full_kv_indices[1, 0, 0, :2].tolist() == [0, 1]
    assert max(t.numel() for t in (mask.kv_indices, mask.full_kv_indices)) < valid.numel(), "no mask per query"


def test_bounds_alternate_valid_tokens_and_padding() -> None:
    queries = torch.ones(3, 4, dtype=torch.bool)
    keys = torch.arange(6) < torch.tensor([[2], [6], [0]])
    bounds = sequence_bounds(queries, keys)
    assert bounds.query_offsets.tolist() == [0, 4, 4, 8, 8, 12, 12]
    assert bounds.key_offsets.tolist() == [0, 2, 6, 12, 12, 12, 18]
    assert (bounds.max_query, bounds.max_key) == (4, 6)
    assert bounds.query_offsets.dtype == torch.int32


def test_valid_tokens_come_first_in_their_order() -> None:
    valid = torch.rand(5, 9, generator=torch.Generator().manual_seed(0)) < 0.5
    valid[0], valid[1] = True, False
    expected = torch.tensor([[i for i in range(9) if row[i]] + [i for i in range(9) if not row[i]] for row in valid])
    assert torch.equal(valid_first_order(valid), expected)


def test_attention_without_a_mask_needs_no_description() -> None:
    assert [without_mask(b) for b in ("varlen", "flex", "flash_attn", "matmul", "sdpa", "eager")] == [*["sdpa"] * 5, "eager"]


def test_auto_is_printed() -> None:
    lines: list[str] = []
    apply_optimizations(tiny_model(tiny_config()), OptimizationConfig(), FAMILY, lines.append)
    assert lines == ["attention backend: sdpa (auto)"]


@pytest.mark.parametrize(("backend", "words"), [("flex", "backward .* CPU"), ("flash_attn", "no CPU kernels")])
def test_a_backend_that_cannot_train_here_is_refused(backend: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"--attention-backend {backend}: .*{words}"):
        apply_optimizations(tiny_model(), OptimizationConfig(attention_backend=backend), FAMILY, lambda line: None)


@pytest.mark.parametrize(
    ("flags", "has_gpu", "expected"),
    [
        ("--attention-backend flex", False, "--attention-backend flex"),
        ("--attention-backend flex", True, None),
        ("--attention-backend varlen", True, "--attention-backend varlen"),
        ("--attention-backend varlen --bf16", True, None),
        ("--attention-backend varlen", False, None),
        ("--unmasked-attention flash --bf16", False, "--unmasked-attention flash"),
        ("--unmasked-attention flash", True, "--unmasked-attention flash"),
        ("--unmasked-attention flash --bf16", True, None),
    ],
)
def test_device_and_dtype_are_checked_before_anything_is_built(flags: str, has_gpu: bool, expected: str | None) -> None:
    config = parse_args(["--mock-data", *flags.split()])
    assert [f.where for f in device_findings(config, has_gpu)] == ([] if expected is None else [expected])


def test_a_missing_package_is_found_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_vla.config.check_optimization.find_spec", lambda name: None)
    config = parse_args(["--mock-data", "--attention-backend", "flash_attn"])
    assert ["flash_attn_interface" in f.what for f in check(config, FAMILY, 1) if f.where == "--attention-backend"] == [True]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_matmul_attention_has_the_derivatives_of_the_reference(dtype: torch.dtype) -> None:
    """Written out by hand: against autograd through the explicit form in fp64, with padded keys of an odd number."""
    valid = torch.tensor([[True] * 13, [True] * 4 + [False] * 9])
    exact = [
        uniform(i, (2, n, s, 16)).to(dtype).double().requires_grad_() for i, (n, s) in enumerate(((4, 6), (2, 13), (2, 13)))
    ]
    ours = [leaf.detach().to(dtype).requires_grad_() for leaf in exact]
    weight = uniform(5, (2, 6, 64)).to(dtype)
    results = []
    for leaves, backend in ((exact, "eager"), (ours, "matmul")):
        output = attend(*leaves, key_mask(valid, leaves[0].dtype), backend)  # type: ignore[arg-type]
        results.append((output, *torch.autograd.grad((output * weight.to(output.dtype)).sum(), leaves)))
    for expected, found in zip(*results, strict=True):
        assert relative_difference(found, expected) <= (1e-13 if dtype == torch.float64 else 0.02)


def test_matmul_attention_stores_nothing_in_fp32() -> None:
    leaves = [uniform(i, (1, 2, 8, 16)).bfloat16().requires_grad_() for i in range(3)]
    stored: list[torch.dtype] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        stored.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attend(*leaves, None, "matmul")
    assert stored and set(stored) == {torch.bfloat16}
