"""Pi0.5's invariants: masks, padding, pruning, dead compute, the forward-step contract.

Shape legend: B samples, V views, L prompt slots, T action horizon, A padded action dimensions.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from pi05_fixtures import (
    golden_batch,
    golden_case,
    golden_model,
    gradients,
    mean_loss,
    relative_difference,
    replaced,
    tiny_batch,
    tiny_config,
    tiny_model,
    uniform,
)
from safetensors.torch import load_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.config.run import parse_args
from megatron_vla.models.common.attention import attend, block_attention_mask, token_positions
from megatron_vla.models.common.attention_mask import key_mask
from megatron_vla.models.common.flow_matching import flow_time_embedding, integrate_velocity
from megatron_vla.models.common.vision_encoder import VisionEmbeddings, VisionSizes
from megatron_vla.models.pi05 import layers
from megatron_vla.models.pi05.family import FAMILY
from megatron_vla.optimizations.apply import apply_optimizations
from megatron_vla.parallel.linear import column_parallel_linear
from megatron_vla.parallel.tensor_parallel import TensorParallel

MASKS = Path(__file__).resolve().parents[1] / "golden" / "pi05_masks"


def run_config(*flags: str) -> Any:
    return parse_args(["--model-variant", "tiny", "--mock-data", *flags])


# Masks, positions, flow time -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pi05", "generic"])
def test_reference_masks(kind: str) -> None:
    golden = load_file(MASKS / "masks.safetensors")
    starts, valid = golden[f"{kind}.att_mask"], golden[f"{kind}.pad_mask"]
    assert torch.equal(block_attention_mask(starts, valid), golden[f"{kind}.mask_2d"])
    assert torch.equal(token_positions(valid), golden[f"{kind}.position_ids"])


def test_denoising_mask_and_positions() -> None:
    golden = load_file(MASKS / "masks.safetensors")
    prefix_BP = golden["denoise.prefix_pad_mask"]
    horizon = golden["denoise.mask_2d"].shape[1]
    valid_BS = torch.cat((prefix_BP, prefix_BP.new_ones(prefix_BP.shape[0], horizon)), dim=1)
    ours = (key_mask(valid_BS, torch.float32)[:, 0] == 0).expand_as(golden["denoise.mask_2d"])
    assert torch.equal(ours, golden["denoise.mask_2d"])
    assert torch.equal(token_positions(valid_BS)[:, prefix_BP.shape[1] :], golden["denoise.position_ids"])


def test_positions_before_the_first_valid_token() -> None:
    valid = torch.tensor([[0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1]], dtype=torch.bool)
    assert token_positions(valid).tolist() == [[-1, -1, 0, 1, 1, 1, 2, 3, 4, 4, 5, 6]]


@pytest.mark.parametrize("width", [32, 1024])
def test_flow_time_codes(width: int) -> None:
    golden = load_file(MASKS / "time_code.safetensors")
    code = flow_time_embedding(golden["time"], width, 4e-3, 4.0, torch.float64)
    assert relative_difference(code, golden[f"code_dim{width}"]) <= 1e-12


def test_flow_time_code_of_one() -> None:
    """Released constants: at t = 1 the fastest sine has turned 250 times, which fp32 angles lose."""
    code = flow_time_embedding(torch.ones(1), 1024, 4e-3, 4.0, torch.float32)[0]
    expected = torch.tensor([0.0, -0.783219, -0.7999136, 1.0, 1.0, -0.6217459, 0.6001152, 0.0])
    assert torch.allclose(code[[0, 1, 256, 511, 512, 513, 768, 1023]], expected, atol=1e-7)


def test_euler_steps_are_counted_not_accumulated() -> None:
    times: list[float] = []

    def velocity(x: torch.Tensor, time_B: torch.Tensor) -> torch.Tensor:
        times.append(float(time_B[0]))
        return torch.ones_like(x)

    result = integrate_velocity(velocity, torch.zeros(1, 2, 3), 10)
    assert times == pytest.approx([1.0 - k / 10 for k in range(10)], abs=1e-7)
    assert torch.allclose(result, torch.full((1, 2, 3), -1.0))
    with pytest.raises(ValueError, match="--num-inference-steps 0"):
        integrate_velocity(velocity, torch.zeros(1, 2, 3), 0)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_backends_agree_on_grouped_queries(groups: int) -> None:
    query, key = uniform(1, (2, 4, 5, 8)).double(), uniform(2, (2, groups, 7, 8)).double()
    value = uniform(3, (2, groups, 7, 8)).double()
    valid = torch.tensor([[1, 1, 0, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    mask = key_mask(valid, torch.float64)
    outputs = [attend(query, key, value, mask, backend) for backend in ("sdpa", "matmul", "eager")]
    assert all(relative_difference(output, outputs[-1]) <= 1e-14 for output in outputs[:-1])
    one_key = value[1, :, 0].repeat_interleave(4 // groups, dim=0).flatten()  # the only key that sample 1 may read
    assert relative_difference(outputs[0][1], one_key.expand(5, -1)) <= 1e-14


# Padding and pruning ---------------------------------------------------------------------------------------------------------


def test_garbage_in_padding_does_not_move_loss_or_gradients() -> None:
    config = tiny_config()
    model, batch = tiny_model(config), tiny_batch(config)
    dim_is_valid_BA = (torch.arange(config.max_action_dim) < 7).expand(2, -1)
    batch = replaced(
        batch,
        action_dim_is_valid_BA=dim_is_valid_BA,
        action_is_valid_BTA=batch.action_is_valid_BTA & dim_is_valid_BA[:, None],
        actions_BTA=torch.where(dim_is_valid_BA[:, None], batch.actions_BTA, 0.0),
        images_BVCHW=batch.images_BVCHW.float() / 127.5 - 1,
    )
    absent = ~batch.camera_is_present_BV[:, :, None, None, None]
    dirty = replaced(
        batch,
        images_BVCHW=torch.where(absent, float("nan"), batch.images_BVCHW),
        tokens_BL=torch.where(batch.token_is_valid_BL, batch.tokens_BL, 10**6),
        actions_BTA=torch.where(dim_is_valid_BA[:, None], batch.actions_BTA, float("nan")),
    )
    clean, found = gradients(model, batch), gradients(model, dirty)
    assert float(mean_loss(model, batch).detach()) == float(mean_loss(model, dirty).detach())
    assert clean.keys() == found.keys()
    assert all(torch.equal(clean[name], found[name]) for name in clean)


def test_the_padding_token_never_learns() -> None:
    """Row 0 of the table is padding in the reference (no gradient), even where a prompt really holds id 0."""
    batch = tiny_batch()
    found = gradients(tiny_model(), replaced(batch, tokens_BL=batch.tokens_BL * 0))
    assert found["token_embedding.weight"].count_nonzero() == 0


def test_pruned_empty_camera_slot_equals_the_padded_run() -> None:
    case = golden_case("tiny_a")
    model, batch = golden_model(case), golden_batch(case)
    black = torch.full_like(batch.images_BVCHW[:, :1], -1.0)
    padded = replaced(
        batch,
        images_BVCHW=torch.cat((batch.images_BVCHW, black), dim=1),
        camera_is_present_BV=torch.cat((batch.camera_is_present_BV, torch.zeros(3, 1, dtype=torch.bool)), dim=1),
    )
    _assert_equal_runs(model, batch, padded)


def test_prompt_trimmed_to_the_longest_equals_the_padded_run() -> None:
    case = golden_case("tiny_a")
    model, batch = golden_model(case), golden_batch(case)
    padding = torch.zeros(3, 12, dtype=torch.int64)
    padded = replaced(
        batch,
        tokens_BL=torch.cat((batch.tokens_BL, padding), dim=1),
        token_is_valid_BL=torch.cat((batch.token_is_valid_BL, padding.bool()), dim=1),
    )
    _assert_equal_runs(model, batch, padded)


def _assert_equal_runs(model: Any, batch: Any, other: Any) -> None:
    first, second = gradients(model, batch), gradients(model, other)
    for name in first:
        if not name.endswith("k_proj.bias"):  # mathematically zero, so only noise
            assert relative_difference(second[name], first[name]) <= 1e-12, name
    with torch.no_grad():
        assert relative_difference(model(other), model(batch)) <= 1e-12


def test_views_are_one_batch() -> None:
    """Every view passes the tower in one call, and each view's features are those of that view alone."""
    model, batch = tiny_model(), tiny_batch()
    calls: list[int] = []
    model.vision_tower.register_forward_hook(lambda _, inputs, output: calls.append(inputs[0].shape[0]))
    with torch.no_grad():
        both, _ = model.embed_prefix(batch)
        second, _ = model.embed_prefix(
            replaced(batch, images_BVCHW=batch.images_BVCHW[:, 1:], camera_is_present_BV=batch.camera_is_present_BV[:, 1:])
        )
    assert calls == [4, 2]
    patches = model.vision_tower.embeddings.position_embedding.num_embeddings
    assert relative_difference(second[:, :patches], both[:, patches : 2 * patches]) <= 1e-14


def test_position_tables_are_made_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers of both streams share one table, also where backward recomputes them."""
    made: list[int] = []
    honest = layers.rotary_table

    def counted(*arguments: Any) -> Any:
        made.append(1)
        return honest(*arguments)

    monkeypatch.setattr(layers, "rotary_table", counted)
    switches = OptimizationConfig(activation_checkpoint_module_patterns=("layers.*",))
    model = apply_optimizations(tiny_model(), switches, FAMILY, lambda line: None)
    mean_loss(model, tiny_batch()).backward()
    assert len(made) == 1


def test_patches_are_embedded_as_by_the_convolution() -> None:
    """Output and gradients; images that need no gradient cause no work for one."""
    generator = torch.Generator().manual_seed(0)
    sizes = VisionSizes(
        hidden_size=10, ffn_hidden_size=8, num_attention_heads=2, norm_epsilon=1e-6, image_size=12, patch_size=4, num_layers=1
    )
    embeddings = VisionEmbeddings(sizes).double()
    convolution = embeddings.patch_embedding
    images = torch.randn(2, 3, 12, 12, dtype=torch.float64, generator=generator, requires_grad=True)
    inputs = [images, *embeddings.parameters()]
    expected = convolution(images).flatten(2).transpose(1, 2) + embeddings.position_embedding.weight
    found = embeddings(images)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)
    wanted = torch.autograd.grad(expected.sin().sum(), inputs)
    for mine, theirs in zip(torch.autograd.grad(found.sin().sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)
    with FlopCounterMode(display=False) as counter:
        embeddings(images.detach()).sum().backward()
    # Of 18 patches of 48 numbers: one product forward, one for the weight's gradient.
    assert counter.get_total_flops() == 2 * (2 * 18 * 48 * 10)


def test_uint8_images_become_the_documented_range() -> None:
    model, batch = tiny_model(), tiny_batch()
    floats = replaced(batch, images_BVCHW=batch.images_BVCHW.double() / 255 * 2 - 1)
    with torch.no_grad():
        assert torch.equal(model(batch), model(floats))


@pytest.mark.parametrize("backend", ["sdpa", "matmul", "eager", "varlen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_N05_all_cameras_masked_and_empty_prompt_stay_finite(dtype: torch.dtype, backend: Any) -> None:
    model, batch = tiny_model(dtype=dtype, attention_backend=backend, skip_dead_compute=False), tiny_batch()
    batch = replaced(
        batch,
        camera_is_present_BV=torch.tensor([[False, False], [True, True]]),
        token_is_valid_BL=batch.token_is_valid_BL & torch.tensor([[False], [True]]),
    )
    outputs: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda _, inputs, output, name=name: outputs.update({name: output[0] if isinstance(output, tuple) else output})
        )
    found = gradients(model, batch)
    assert len(outputs) > 60
    assert not [name for name, output in outputs.items() if not output.isfinite().all()]
    assert not [name for name, gradient in found.items() if not gradient.isfinite().all()]


def test_sample_without_prefix_reads_its_actions_only() -> None:
    """A sample's loss does not depend on the others, and without camera and prompt not on what its images hold."""
    model, batch = tiny_model(), tiny_batch()
    nothing = replaced(
        batch,
        camera_is_present_BV=torch.zeros(2, 2, dtype=torch.bool),
        token_is_valid_BL=torch.zeros_like(batch.token_is_valid_BL),
    )
    half = replaced(
        batch,
        camera_is_present_BV=torch.tensor([[False, False], [True, True]]),
        token_is_valid_BL=batch.token_is_valid_BL & torch.tensor([[False], [True]]),
    )
    with torch.no_grad():
        assert relative_difference(model(half)[0], model(nothing)[0]) <= 1e-14


# Action dimensions and horizon -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
def test_N08_noise_in_a_padded_dimension(strict: bool) -> None:
    """Strict: noise in dimension 11 of a 7-dim robot moves nothing. Default: it does, as in the released weights."""
    config = tiny_config(mask_padded_action_dims=strict)
    model, batch = tiny_model(config), tiny_batch(config)
    dim_is_valid_BA = (torch.arange(config.max_action_dim) < 7).expand(2, -1)
    batch = replaced(
        batch, action_dim_is_valid_BA=dim_is_valid_BA, action_is_valid_BTA=batch.action_is_valid_BTA & dim_is_valid_BA[:, None]
    )
    moved_noise = batch.noise_BTA.clone()
    moved_noise[..., 11] += 3.0
    with torch.no_grad():
        loss, moved_loss = mean_loss(model, batch), mean_loss(model, replaced(batch, noise_BTA=moved_noise))
        actions = model.sample_actions(batch, 3, batch.noise_BTA)[..., :7]
        moved_actions = model.sample_actions(batch, 3, moved_noise)[..., :7]
    assert (float(loss) == float(moved_loss)) is strict
    assert torch.equal(actions, moved_actions) is strict


def test_C06_any_horizon_runs_with_the_same_weights() -> None:
    """Pi0.5 has no action position table: --action-horizon may exceed the one that the weights were trained with."""
    short, long = tiny_config(action_horizon=4), tiny_config(action_horizon=64)
    model, longer = tiny_model(short), tiny_model(long)
    longer.load_state_dict(model.state_dict())
    batch = tiny_batch(long)
    with torch.no_grad():
        assert longer(batch).isfinite().all()
        first = replaced(batch, **{n: getattr(batch, n)[:, :4] for n in ("actions_BTA", "noise_BTA", "action_is_valid_BTA")})
        assert relative_difference(longer(first), model(first)) <= 1e-14


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--action-horizon", "0"), "--action-horizon"),
        (("--image-size", "57"), "--image-size"),
        (("--vision-num-attention-heads", "3"), "--vision-hidden-size"),
        (("--num-query-groups", "3"), "--num-attention-heads"),
        (("--kv-channels", "15"), "--kv-channels"),
        (("--expert-hidden-size", "33"), "--expert-hidden-size"),
        (("--time-min-period", "5"), "--time-min-period"),
        (("--rope-theta", "0"), "--rope-theta"),
        (("--pretrained-reinitialize", "action_in_proj"), "--pretrained-reinitialize"),
    ],
)
def test_C06_impossible_dimensions_are_found_before_building(flags: tuple[str, ...], named: str) -> None:
    findings = FAMILY.check(run_config(*flags))
    assert [f for f in findings if f.severity == "error" and named in f.where], findings


def test_good_dimensions_give_no_finding() -> None:
    assert FAMILY.check(run_config()) == []
    assert FAMILY.check(parse_args(["--mock-data"])) == []


# Dead compute, contracts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_skipping_dead_compute_changes_nothing(dtype: torch.dtype) -> None:
    batch = tiny_batch()
    on, off = tiny_model(dtype=dtype), tiny_model(dtype=dtype, skip_dead_compute=False)
    assert float(mean_loss(on, batch).detach()) == float(mean_loss(off, batch).detach())
    first, second = gradients(on, batch), gradients(off, batch)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [n for n, _ in on.named_parameters()] == [n for n, _ in off.named_parameters()]


def test_skipping_dead_compute_really_skips() -> None:
    model, called = tiny_model(), []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    model(tiny_batch())
    dead = {"attention.q_proj", "attention.o_proj", "mlp.down_proj", "post_attention_norm"}
    assert not {f"layers.1.prefix.{name}" for name in dead} & set(called)
    assert "prefix_norm" not in called
    assert "layers.0.prefix.mlp.down_proj" in called


def test_forward_step_contract() -> None:
    config = tiny_config()
    model, batch = tiny_model(config), tiny_batch(config)
    mask = torch.zeros_like(batch.action_is_valid_BTA)
    mask[0, :3, :7] = True
    batch = replaced(batch, action_is_valid_BTA=mask)
    output, loss_func = FAMILY.forward_step(iter([batch]), nn.Sequential(model))
    loss_sum, count, metrics = loss_func(output)
    assert loss_sum.shape == count.shape == torch.Size([]) and all(m.shape == torch.Size([]) for m in metrics.values())
    assert int(count) == 21
    assert float(loss_sum.detach()) == pytest.approx(float(output[0, :3, :7].detach().sum()), rel=1e-14)
    assert {f.name for f in dataclasses.fields(batch)} >= FAMILY.batch_fields


def test_batch_fields_are_all_that_the_step_reads() -> None:
    """Fields outside `batch_fields` may be anything."""
    batch = tiny_batch()
    others = {n: torch.full_like(t, 7) for n, t in batch.tensors().items() if n not in FAMILY.batch_fields}
    with torch.no_grad():
        assert torch.equal(tiny_model()(batch), tiny_model()(replaced(batch, **others)))


def test_samples_do_not_influence_each_other() -> None:
    model, batch = tiny_model(), tiny_batch()
    alone = type(batch)(**{n: t[1:] for n, t in batch.tensors().items()})
    with torch.no_grad():
        assert relative_difference(model(alone)[0], model(batch)[1]) <= 1e-13


def test_linears_refuse_tensor_parallelism_for_now() -> None:
    with pytest.raises(ValueError, match="--tensor-model-parallel-size 2"):
        column_parallel_linear(4, 4, bias=False, tensor_parallel=TensorParallel(size=2))
