"""Variable-length attention on the CPU: against one sequence at a time, by brute force."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from megatron_vla.models.common.varlen import varlen_attention

QUERY_LENGTHS, KEY_LENGTHS = (3, 0, 5, 1, 2), (4, 2, 5, 7, 0)


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def brute_force(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One head at a time; zeros where a sequence has no key."""
    outputs = []
    queries, keys, values = query.split(QUERY_LENGTHS), key.split(KEY_LENGTHS), value.split(KEY_LENGTHS)
    for q, k, v in zip(queries, keys, values, strict=True):
        output = torch.zeros_like(q)
        if len(k):
            for head in range(q.shape[1]):
                group = head * k.shape[1] // q.shape[1]
                weights = (q[:, head] @ k[:, group].T / q.shape[2] ** 0.5).softmax(dim=-1)
                output = output.index_copy(1, torch.tensor([head]), (weights @ v[:, group])[:, None])
        outputs.append(output)
    return torch.cat(outputs)


@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_values_and_gradients_are_those_of_single_sequences(num_groups: int) -> None:
    generator = torch.Generator().manual_seed(3)

    def draw(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, 6, dtype=torch.float64, generator=generator).requires_grad_()

    query, key, value = draw(sum(QUERY_LENGTHS), 4), draw(sum(KEY_LENGTHS), num_groups), draw(sum(KEY_LENGTHS), num_groups)
    weight = torch.randn(query.shape, dtype=torch.float64, generator=generator)
    expected = brute_force(query, key, value)
    actual = varlen_attention(query, key, value, offsets(QUERY_LENGTHS), offsets(KEY_LENGTHS), 5, 7)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)
    for ours, theirs in zip(
        torch.autograd.grad((actual * weight).sum(), (query, key, value)),
        torch.autograd.grad((expected * weight).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_it_is_one_graph_without_a_host_read() -> None:
    """Shapes are static whatever the lengths, so other lengths need no further graph."""
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(varlen_attention, backend=counter, fullgraph=True, dynamic=False)
    query, key = torch.randn(11, 2, 4), torch.randn(18, 1, 4)
    for lengths in (QUERY_LENGTHS, (1, 1, 1, 1, 7)):
        compiled(query, key, key, offsets(lengths), offsets(KEY_LENGTHS), 7, 7)
    assert counter.frame_count == 1
