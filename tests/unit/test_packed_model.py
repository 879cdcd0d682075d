"""Pi0.5 on a pack against Pi0.5 on the padded batch of the same samples."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from pi05_fixtures import relative_difference, tiny_config, tiny_model
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from megatron_vla.data.batch import Batch, collate_tensors
from megatron_vla.data.packed_batch import PackedBatch, pack_samples
from megatron_vla.data.packing import PackLimits
from megatron_vla.models.common.flow_matching import masked_loss
from megatron_vla.models.common.row_selection import take_rows
from megatron_vla.models.pi05.model import Pi05Model, vision_sizes

CONFIG = tiny_config()
PATCHES = vision_sizes(CONFIG).num_patches
LIMITS = PackLimits(
    tokens=50, images=9, samples=6, image_tokens=PATCHES, most_images=3, most_prompt_tokens=8, pool_size=4, max_wait=8
)
SHAPES = ((2, 5), (3, 8), (1, 1), (0, 3))  # (cameras that are there, prompt tokens) of each sample


def sample(number: int, cameras: int, prompt: int, seed: int = 0) -> dict[str, Any]:
    """Arrays of one sample; everything that a mask hides is garbage."""
    generator = np.random.default_rng([seed, number])
    horizon, width = CONFIG.action_horizon, CONFIG.max_action_dim
    views = generator.permutation(3)[:cameras]
    dims = np.arange(width) < 5 + number
    actions_TA = generator.normal(size=(horizon, width)).astype(np.float32)
    return {
        "images_BVCHW": generator.integers(0, 256, (3, 3, CONFIG.image_size, CONFIG.image_size), dtype=np.uint8),
        "camera_is_present_BV": np.isin(np.arange(3), views),
        "tokens_BL": generator.integers(1, CONFIG.vocab_size, CONFIG.max_prompt_length),
        "token_is_valid_BL": np.arange(CONFIG.max_prompt_length) < prompt,
        "actions_BTA": actions_TA,
        "action_is_valid_BTA": (np.arange(horizon) < horizon - number)[:, None] & dims,
        "action_dim_is_valid_BA": dims,
        "noise_BTA": generator.normal(size=(horizon, width)).astype(np.float32),
        "time_B": np.float32(generator.uniform(0.1, 1)),
        "state_BD": generator.normal(size=width).astype(np.float32),
        "sample_index_B": np.int64(100 + number),
        "epoch_B": np.int64(0),
    }


def samples(seed: int = 0) -> list[dict[str, Any]]:
    return [sample(number, *shape, seed=seed) for number, shape in enumerate(SHAPES)]


def packed(arrays: list[dict[str, Any]], **changes: Any) -> PackedBatch:
    limits = dataclasses.replace(LIMITS, **changes)
    return PackedBatch(**pack_samples(arrays, limits), longest_sequence=limits.longest_prefix)


def losses(model: Pi05Model, batch: Batch | PackedBatch) -> Tensor:
    """Loss sum of each sample slot."""
    return torch.where(batch.action_is_valid_BTA, model(batch), 0.0).sum(dim=(1, 2))


def gradients_of(model: Pi05Model, batch: Batch | PackedBatch) -> dict[str, Tensor]:
    model.zero_grad()
    loss_sum, count = masked_loss(model(batch), batch.action_is_valid_BTA)
    (loss_sum / count).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        if name.endswith("self_attn.k_proj.bias"):  # moves all logits of a row alike: exactly zero but for rounding
            assert max(float(g.abs().max()) for g in (gradient, found[name])) < 1e-15
        else:
            assert relative_difference(found[name], gradient) <= 1e-10, name


@pytest.mark.parametrize("skip_dead_compute", [True, False])
def test_pack_equals_padded_batch_in_losses_and_gradients(skip_dead_compute: bool) -> None:
    model = tiny_model(CONFIG, skip_dead_compute=skip_dead_compute)
    padded, pack = Batch(**collate_tensors(samples())), packed(samples())
    with torch.no_grad():
        one, other = losses(model, padded), losses(model, pack)
    assert relative_difference(other[:4], one) <= 1e-10
    assert torch.equal(other[4:], torch.zeros(2, dtype=torch.float64))
    assert_same_gradients(gradients_of(model, pack), gradients_of(model, padded))


def test_other_budget_slots_and_neighbours_give_the_same_losses() -> None:
    """How a pack is cut does not enter: more room, fewer samples, another order."""
    model = tiny_model(CONFIG)
    with torch.no_grad():
        reference = losses(model, packed(samples()))[:4]
        roomy = losses(model, packed(samples(), tokens=90, images=11, samples=9))[:4]
        single = torch.cat([losses(model, packed([one]))[:1] for one in samples()])
        turned = losses(model, packed(samples()[::-1]))[:4].flip(0)
    for other in (roomy, single, turned):
        assert relative_difference(other, reference) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_neighbours_do_not_move_a_sample_by_a_bit(dtype: torch.dtype) -> None:
    """Other pictures, words, actions, noise and time in all other samples of the pack, of the same sizes."""
    model = tiny_model(CONFIG, dtype=dtype)
    reference, others = samples(), samples(seed=1)
    with torch.no_grad():
        before = losses(model, packed(reference))
        for kept in range(len(SHAPES)):
            mixed = [reference[n] if n == kept else others[n] for n in range(len(SHAPES))]
            after = losses(model, packed(mixed))
            assert torch.equal(after[kept], before[kept])
            assert all(not torch.equal(after[n], before[n]) for n in range(len(SHAPES)) if n != kept)


def test_what_no_sample_owns_may_hold_garbage() -> None:
    model = tiny_model(CONFIG)
    pack = packed(samples())
    with torch.no_grad():
        before = model(pack)[pack.action_is_valid_BTA]
    used = int(pack.num_prefix_B.sum())
    assert 0 < used < LIMITS.tokens and not bool(pack.image_is_present_I.all())
    pack.tokens_P[used:] = 7
    pack.images_ICYX[~pack.image_is_present_I] = 99
    pack.actions_BTA[4:], pack.noise_BTA[4:] = 3.0, -2.0
    with torch.no_grad():
        assert torch.equal(model(pack)[pack.action_is_valid_BTA], before)


def test_padding_of_a_pack_gets_no_gradient_and_changes_none() -> None:
    """Unread rows: left-over memory in their gradient must not reach a weight."""
    source = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    rows, place = torch.tensor([3, 1, 0, 0]), torch.tensor([-1, 1, -1, 0, -1])
    taken = take_rows(source, rows, place)
    assert torch.equal(taken, source.detach()[rows])
    taken.backward(torch.tensor([[1.0, 2.0], [3.0, 4.0], [float("nan"), float("inf")], [5.0, 5.0]], dtype=torch.float64))
    assert source.grad is not None
    assert source.grad.tolist() == [[0, 0], [3, 4], [0, 0], [1, 2], [0, 0]]


def test_shapes_and_sequences_do_not_depend_on_the_samples() -> None:
    shapes = [
        {name: (tensor.dtype, tensor.shape) for name, tensor in packed(some).tensors().items()}
        for some in (samples(), samples()[:1], samples()[2:])
    ]
    assert shapes[0] == shapes[1] == shapes[2]
    for some in (samples(), samples()[:1]):
        pack = packed(some)
        for offsets, end in (
            (pack.prefix_offsets_Q, LIMITS.tokens),
            (pack.query_offsets_Q, LIMITS.samples * CONFIG.action_horizon),
            (pack.key_offsets_Q, LIMITS.tokens + LIMITS.samples * CONFIG.action_horizon),
        ):
            steps = offsets.diff()
            assert int(offsets[0]) == 0 and int(offsets[-1]) == end and bool((steps >= 0).all())
            longest = LIMITS.longest_prefix + (0 if offsets is pack.prefix_offsets_Q else CONFIG.action_horizon)
            assert int(steps.max()) <= longest
        assert sorted(pack.joint_row_J.tolist()) == list(range(len(pack.joint_row_J)))


def test_rows_of_images_name_their_samples() -> None:
    pack = packed(samples())
    assert pack.samples_of_rows("images_ICYX").tolist() == [100, 100, 101, 101, 101, 102, -1, -1, -1]
    assert pack.samples_of_rows("noise_BTA").tolist() == [100, 101, 102, 103, -1, -1]


@pytest.mark.slow
def test_layers_compile_in_one_graph_that_serves_every_pack() -> None:
    """Static shapes: other samples, no other graph; forward and backward as without compilation."""
    plain, compiled = tiny_model(CONFIG), tiny_model(CONFIG)
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(1)
        return make_boxed_func(graph.forward)

    for layer in compiled.layers:
        layer.compile(backend=aot_autograd(fw_compiler=count), fullgraph=True, dynamic=False)
    for some in (samples(), samples()[:2], samples(seed=3)[1:]):
        assert_same_gradients(gradients_of(compiled, packed(some)), gradients_of(plain, packed(some)))
    # One for the layers alike, one for the last layer, whose prefix stops at the keys; each forward and backward.
    assert len(graphs) <= 4
