"""Pi0.5 against golden numbers: every intermediate, all gradients, one optimizer step, sampling (tests/golden/pi05).

Shape legend: B samples, V views, P prefix tokens, T action horizon, A padded action dimensions.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from pi05_fixtures import (
    CASE_NAMES,
    GoldenCase,
    golden_batch,
    golden_case,
    golden_model,
    gradients,
    mean_loss,
    our_name,
    relative_difference,
)
from torch import Tensor, nn

from megatron_vla.config.training import OptimizerConfig
from megatron_vla.models.common.attention import block_attention_mask, token_positions
from megatron_vla.models.pi05.layers import AttentionPlan
from megatron_vla.models.pi05.model import Pi05Model
from megatron_vla.training.gradient import clip_factor, gradient_norm
from megatron_vla.training.optimizer import AdamW

FP64, FP32_FORWARD, FP32_GRADIENT = 1e-9, 2e-5, 1e-4
BACKENDS = ("sdpa", "matmul", "eager")


def is_shift_invariant(name: str) -> bool:
    """A key bias shifts all logits of a query alike: its gradient is zero but for noise, which Adam turns into steps."""
    return name.startswith("vision_tower.") and name.endswith("k_proj.bias")


@cache
def captured(name: str, dtype: torch.dtype, backend: Any) -> dict[str, Tensor]:
    """Everything that one training forward computes, under the golden files' names."""
    case = golden_case(name)
    model, batch = golden_model(case, dtype, skip_dead_compute=False, attention_backend=backend), golden_batch(case)
    seen: dict[str, Tensor] = {}
    handles = [module.register_forward_hook(_recorder(seen, key)) for key, module in _hooked(model).items()]
    handles.append(model.layers[0].register_forward_pre_hook(lambda _, inputs: _record_plan(seen, *inputs)))
    with torch.no_grad():
        seen["loss_per_element"] = model(batch)
        seen["prefix_embs"], seen["prefix_pad_mask"] = model.embed_prefix(batch)
    for handle in handles:
        handle.remove()
    views = batch.camera_is_present_BV.shape[1]
    for key in [key for key in seen if key.startswith("vision.")]:
        for view, tokens in enumerate(seen.pop(key).unflatten(0, (-1, views)).unbind(1)):
            seen[key.replace("vision.", f"vision.cam{view}.")] = tokens
    return seen


def _hooked(model: Pi05Model) -> dict[str, nn.Module]:
    tower = model.vision_tower
    return {
        "vision.embeddings": tower.embeddings,
        **{f"vision.layer{k}": layer for k, layer in enumerate(tower.layers)},
        "vision.post_layernorm": tower.post_layernorm,
        "vision.projector": model.vision_projector,
        **{f"joint.{k}": layer for k, layer in enumerate(model.layers)},
        "prefix.final_norm": model.prefix_norm,
        "suffix.final_norm": model.suffix_norm,
        "time_mlp_in": model.time_mlp_in,
        "v_t": model.action_out_proj,
    }


def _recorder(seen: dict[str, Tensor], key: str) -> Any:
    def record(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if key.startswith("joint."):
            depth = key.removeprefix("joint.")
            seen[f"prefix.layer{depth}"], seen[f"suffix.layer{depth}"] = output
        else:
            # The vision tower runs a second time for `prefix_embs`, on the same input.
            seen[key] = output[0] if isinstance(output, tuple) else output
        if key == "time_mlp_in":
            seen["time_sincos"] = inputs[0]

    return record


def _record_plan(seen: dict[str, Tensor], prefix: Tensor, suffix: Tensor, condition: Tensor, plan: AttentionPlan) -> None:
    seen["suffix_embs"], seen["adarms_cond"] = suffix, condition
    for part in ("cos", "sin"):
        halves = [getattr(rotary, f"{part}_B1SD")[:, 0] for rotary in (plan.prefix_rotary, plan.suffix_rotary)]
        angles_BSD = torch.cat(halves, dim=1)
        seen[f"rope.{part}"] = torch.cat((angles_BSD, angles_BSD), dim=-1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, FP64), (torch.float32, FP32_FORWARD)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_every_intermediate(name: str, dtype: torch.dtype, limit: float, backend: str) -> None:
    golden = golden_case(name).tensors("forward_fp64")
    seen = captured(name, dtype, backend)
    valid_BP = golden["prefix_pad_mask"]
    differences = {}
    for key in sorted(set(golden) & set(seen)):
        actual, expected = seen[key], golden[key]
        if key.startswith("prefix."):  # rows of padding depend on the implementation, and nothing reads them
            actual, expected = actual[valid_BP], expected[valid_BP]
        if expected.dtype == torch.bool:
            assert torch.equal(actual, expected), key
        else:
            differences[key] = relative_difference(actual, expected)
    assert not {key: d for key, d in differences.items() if not d <= limit}
    depth, tower = golden_case(name).config.num_layers, golden_case(name).config.vision_num_layers
    views = golden_case(name).settings["cameras"]
    assert len(differences) >= 2 * depth + views * (tower + 2) + 10  # the names above really met golden ones


@pytest.mark.parametrize("name", CASE_NAMES)
def test_masks_and_positions(name: str) -> None:
    golden = golden_case(name).tensors("forward_fp64")
    is_valid_BS = torch.cat((golden["prefix_pad_mask"], golden["suffix_pad_mask"]), dim=1)
    starts_BS = torch.cat((golden["prefix_att_mask"], golden["suffix_att_mask"].bool()), dim=1)
    assert torch.equal(block_attention_mask(starts_BS, is_valid_BS), golden["attention_mask_2d"])
    assert torch.equal(token_positions(is_valid_BS), golden["position_ids"])


@pytest.mark.parametrize("name", CASE_NAMES)
def test_losses(name: str) -> None:
    case = golden_case(name)
    golden, elements_BTA = case.tensors("forward_fp64"), captured(name, torch.float64, "sdpa")["loss_per_element"]
    own_BTA = elements_BTA[..., : case.action_dim]
    for key, value in {
        "loss": own_BTA.mean(),
        "loss_all_dims": elements_BTA.mean(),
        "loss_per_sample": own_BTA.mean(dim=(1, 2)),
        "loss_per_dim": own_BTA.mean(dim=(0, 1)),
    }.items():
        assert relative_difference(value, golden[key]) <= FP64, key


@pytest.mark.parametrize("skip_dead", [True, False], ids=["skip_dead", "compute_dead"])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_all_gradients_fp64(name: str, skip_dead: bool) -> None:
    case = golden_case(name)
    model = golden_model(case, skip_dead_compute=skip_dead)
    found = gradients(model, golden_batch(case))
    for released, expected in case.tensors("grads_fp64").items():
        assert relative_difference(found[our_name(released)], expected) <= FP64, released
    for released, expected in case.tensors("grads_all").items():  # stored in fp32: half an ulp of it
        ours = our_name(released)
        if ours in found and not is_shift_invariant(ours):
            assert relative_difference(found[ours], expected) <= 1e-7, released
    checked = set()
    for released, numbers in case.numbers["parameters"].items():
        ours = our_name(released)
        if ours in found and not is_shift_invariant(ours):
            assert float(found[ours].norm()) == pytest.approx(numbers["grad_norm"], rel=FP64), released
            checked.add(ours)
    assert checked == {ours for ours in found if not is_shift_invariant(ours)}
    total = gradient_norm(list(found.values()))
    assert float(total) == pytest.approx(case.numbers["grad_norm_total"], rel=FP64)


@pytest.mark.parametrize("name", CASE_NAMES)
def test_gradients_of_the_loss_over_all_dimensions(name: str) -> None:
    case = golden_case(name)
    model, batch = golden_model(case), golden_batch(case)
    model(batch).mean().backward()
    norms = {n: float(p.grad.norm()) for n, p in model.named_parameters() if p.grad is not None}
    for released, numbers in case.numbers["parameters"].items():
        ours = our_name(released)
        if ours in norms and not is_shift_invariant(ours):
            assert norms[ours] == pytest.approx(numbers["grad_norm_loss_all_dims"], rel=FP64), released


@pytest.mark.parametrize("name", CASE_NAMES)
def test_all_gradients_fp32(name: str) -> None:
    case = golden_case(name)
    found = gradients(golden_model(case, torch.float32), golden_batch(case))
    for stem in ("grads_fp64", "grads_all"):
        for released, expected in case.tensors(stem).items():
            ours = our_name(released)
            if ours in found and not is_shift_invariant(ours):
                assert relative_difference(found[ours], expected) <= FP32_GRADIENT, released


@pytest.mark.parametrize("name", CASE_NAMES)
def test_parameters_without_a_gradient(name: str) -> None:
    """None in the reference = frozen here; exact zeros there = only decayed here; nothing else is frozen."""
    case = golden_case(name)
    model = golden_model(case)
    known = set(dict(model.named_parameters()))
    none = {our_name(n) for n in case.numbers["grad_none"] if not n.endswith("lm_head.weight")}
    zero = {our_name(n) for n in case.numbers["grad_zero"]}
    assert none | zero <= known
    decay_only = {n for n, p in model.named_parameters() if getattr(p, "decay_only", False)}
    assert decay_only and decay_only <= zero
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == none | decay_only
    found = gradients(model, golden_batch(case))
    assert set(found) == known - none - decay_only
    assert {n for n, g in found.items() if g.count_nonzero() == 0} == zero - decay_only
    gate = case.config.expert_hidden_size * 2  # the last third of the final norm's dense layer is never used
    assert found["suffix_norm.dense.weight"][gate:].count_nonzero() == 0
    assert found["token_embedding.weight"][0].count_nonzero() == 0


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, FP64), (torch.float32, FP32_GRADIENT)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_optimizer_steps(name: str, dtype: torch.dtype, limit: float) -> None:
    case = golden_case(name)
    numbers, settings = case.numbers, case.numbers["optimizer"]
    model, batch = golden_model(case, dtype), golden_batch(case)
    optimizer = AdamW(
        model.named_parameters(),
        OptimizerConfig(
            lr=settings["lr"],
            adam_beta1=settings["betas"][0],
            adam_beta2=settings["betas"][1],
            adam_eps=settings["eps"],
            weight_decay=settings["weight_decay"],
        ),
    )
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    losses = [_step(model, batch, optimizer, settings["lr"], numbers["clip"], numbers["grad_norm_per_step"][0], limit)]
    _compare_changes(case, model, start, "delta_norm_step1", dtype, limit)
    if dtype == torch.float64:
        for released, expected in case.tensors("step1_delta_fp64").items():
            ours = our_name(released)
            assert relative_difference(dict(model.named_parameters())[ours] - start[ours], expected) <= FP64, released
    for norm in numbers["grad_norm_per_step"][1:]:
        losses.append(_step(model, batch, optimizer, settings["lr"], numbers["clip"], norm, limit))
    _compare_changes(case, model, start, "delta_norm_step3", dtype, limit)
    losses.append(float(mean_loss(model, batch).detach()))
    assert losses == pytest.approx(numbers["loss_per_step"], rel=min(limit, FP32_FORWARD))


def _step(model: Pi05Model, batch: Any, optimizer: AdamW, lr: float, clip: float, expected_norm: float, limit: float) -> float:
    model.zero_grad()
    loss = mean_loss(model, batch)
    loss.backward()
    found = [state.parameter.grad for state in optimizer.trainable]
    norm = gradient_norm(found)
    assert float(norm) == pytest.approx(expected_norm, rel=limit)
    optimizer.advance(lr)
    optimizer.step(found, clip_factor(norm, clip))
    return float(loss.detach())


def _compare_changes(
    case: GoldenCase, model: Pi05Model, start: dict[str, Tensor], key: str, dtype: torch.dtype, limit: float
) -> None:
    """Norm of every parameter's change; an fp32 parameter only stores its change to half an ulp of itself."""
    for released, expected in case.numbers["parameters"].items():
        if key not in expected or released.endswith("lm_head.weight"):
            continue
        ours = our_name(released)
        if is_shift_invariant(ours):
            continue
        change = (dict(model.named_parameters())[ours].detach() - start[ours]).double().norm()
        rounding = 3 * float(start[ours].double().norm()) * 6e-8 if dtype == torch.float32 else 0.0
        assert float(change) == pytest.approx(expected[key], rel=limit, abs=rounding), released


@pytest.mark.parametrize("backend", (*BACKENDS, "varlen"))
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, FP64), (torch.float32, FP32_FORWARD)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_sampled_actions(name: str, dtype: torch.dtype, limit: float, backend: Any) -> None:
    case = golden_case(name)
    golden, noise_BTA = case.tensors("infer_fp64"), case.tensors("inputs")["infer_noise"]
    model, batch = golden_model(case, dtype, attention_backend=backend), golden_batch(case)
    steps: list[tuple[Tensor, Tensor, Tensor]] = []
    original = model.cached_velocity

    def recorded(cache: Any, batch: Any, x_BTA: Tensor, time_B: Tensor) -> Tensor:
        velocity_BTA = original(cache, batch, x_BTA, time_B)
        steps.append((x_BTA, time_B, velocity_BTA))
        return velocity_BTA

    model.cached_velocity = recorded  # type: ignore[method-assign]
    actions_BTA = model.sample_actions(batch, case.config.num_inference_steps, noise_BTA)
    assert relative_difference(actions_BTA, golden["actions"]) <= limit
    assert relative_difference(torch.stack([s[1][0] for s in steps]), golden["time_all"]) <= limit
    assert relative_difference(torch.stack([s[2] for s in steps]), golden["v_t_all"]) <= limit
    states = torch.stack([s[0] for s in steps])
    assert relative_difference(states, golden["x_t_all"]) <= limit


@pytest.mark.parametrize("name", CASE_NAMES)
def test_prefix_cache(name: str) -> None:
    case = golden_case(name)
    golden = case.tensors("infer_fp64")
    model, batch = golden_model(case, skip_dead_compute=False), golden_batch(case)
    valid_BP = case.tensors("forward_fp64")["prefix_pad_mask"]
    assert torch.equal(token_positions(valid_BP), golden["prefill.position_ids"])
    hidden: list[Tensor] = []
    model.layers[-1].prefix.register_forward_hook(lambda _, inputs, output: hidden.append(output[0]))
    with torch.no_grad():
        cache = model.prefill(batch, case.config.action_horizon)
        final_BPH = model.prefix_norm(hidden[0])
    for depth, layer in enumerate(cache.layers):
        for part, tensor in (("key", layer.key_BGSD), ("value", layer.value_BGSD)):
            expected = golden[f"prefill.layer{depth}.{part}"]
            assert relative_difference(tensor.transpose(1, 2)[valid_BP], expected.transpose(1, 2)[valid_BP]) <= FP64
    assert relative_difference(final_BPH[valid_BP], golden["prefill.last_hidden"][valid_BP]) <= FP64
    mask_BQK = golden["denoise.attention_mask_2d"]
    ours_BQK = (cache.plan.suffix_mask[:, 0] == 0).expand_as(mask_BQK)
    assert torch.equal(ours_BQK, mask_BQK)
