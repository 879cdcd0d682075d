"""Where queries, outputs and gradients lie in memory around the attention kernels of vision towers: nothing is copied for them.

The kernels (FlashAttention-2, cuDNN) read [B, S, N, D] in that order of memory, given as a view [B, N, S, D].
"""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, Node

from megatron_vla.models.common.attention_mask import AttentionBackend
from megatron_vla.models.common.joined_parameters import make_neighbours
from megatron_vla.models.common.vision_encoder import VisionLayer, VisionLayerSizes, VisionPlan
from megatron_vla.parallel.tensor_parallel import NOT_PARALLEL

IMAGES, TOKENS, HEADS, WIDTH = 2, 5, 3, 8
COPIES = ("clone", "_to_copy", "copy", "contiguous", "constant_pad_nd")


def compiled_graphs(backend: AttentionBackend, merged: str, device: str) -> list[GraphModule]:
    """Forward and backward graph of one compiled layer."""
    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    sizes = VisionLayerSizes(hidden_size=HEADS * WIDTH, ffn_hidden_size=32, num_attention_heads=HEADS, norm_epsilon=1e-6)
    with torch.device(device):
        layer = VisionLayer(sizes, "sdpa", NOT_PARALLEL).to(torch.bfloat16)
        hidden = torch.randn(IMAGES, TOKENS, HEADS * WIDTH, dtype=torch.bfloat16, requires_grad=True)
    layer.self_attn.backend, layer.self_attn.merged = backend, merged != "no"
    if merged == "neighbours":
        assert all(map(make_neighbours, layer.self_attn.projection_groups()))
    forward: Any = torch.compile(
        layer.forward, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True, dynamic=False
    )
    forward(hidden, VisionPlan(TOKENS)).sum().backward()
    assert len(graphs) == 2
    return graphs


def attention_node(graph: GraphModule) -> Node:
    (node,) = (n for n in graph.graph.nodes if n.op == "call_function" and "dot_product" in str(n.target))
    return cast(Node, node)


def lies_token_by_token(tensor: Tensor, row: int) -> bool:
    """Whether [B, N, S, D] has a token's heads as neighbours, in rows of `row` elements."""
    return tensor.stride() == (TOKENS * row, WIDTH, row, 1)


@pytest.mark.parametrize(
    ("backend", "device", "merged"),
    [("sdpa", "cpu", "no"), ("sdpa", "cpu", "copied"), ("sdpa", "cpu", "neighbours"), ("flash", "meta", "copied")],
)
def test_kernels_get_and_give_tokens_in_order(backend: AttentionBackend, device: str, merged: str) -> None:
    forward, backward = compiled_graphs(backend, merged, device)
    dense, joined = HEADS * WIDTH, HEADS * WIDTH * (1 if merged == "no" else 3)
    call = attention_node(forward)
    assert all(lies_token_by_token(cast(Node, n).meta["val"], joined) for n in call.args[:3])
    assert lies_token_by_token(call.meta["val"][0], dense)
    call = attention_node(backward)
    gradient = cast(Node, call.args[0])
    assert lies_token_by_token(gradient.meta["val"], dense)
    # It is a view of what the product with the output projection's weight has written.
    while gradient.target not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        assert str(gradient.target).split(".")[1] in ("view", "transpose", "permute", "_unsafe_view"), gradient.target
        gradient = gradient.all_input_nodes[0]
    assert all(lies_token_by_token(g, dense) for g in call.meta["val"][:3])
    names = [
        str(n.target).split(".")[1]
        for g in (forward, backward)
        for n in g.graph.nodes
        if n.op == "call_function" and "aten" in str(n.target)
    ]
    assert not set(names) & set(COPIES)
    # Merged: the three gradients become one operand of two products; weights and biases are joined where they lie apart.
    assert names.count("cat") == {"no": 0, "copied": 3, "neighbours": 1}[merged]
