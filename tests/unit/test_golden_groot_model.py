"""GR00T N1.7 against golden numbers: every intermediate, gradients, optimizer steps (tests/golden/groot_n1_7).

Shape legend: as megatron_vla/models/groot_n1_7/batch.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from groot_model_fixtures import (
    CASE_NAMES,
    golden_batch,
    golden_case,
    golden_model,
    gradients,
    our_names,
    our_parts,
    released_loss,
)
from pi05_fixtures import relative_difference
from torch import Tensor, nn

from megatron_vla.config.training import OptimizerConfig
from megatron_vla.models.common.flow_matching import interpolate
from megatron_vla.models.groot_n1_7.model import GrootN17Model, groups_of
from megatron_vla.models.groot_n1_7.text import plan_text
from megatron_vla.parallel.parameter_shard import is_decayed
from megatron_vla.training.gradient import clip_factor, gradient_norm
from megatron_vla.training.optimizer import AdamW

FP64, FP32_FORWARD, FP32_GRADIENT = 1e-9, 1e-4, 3e-4
BACKENDS = ("sdpa", "eager")


def is_shift_invariant(name: str) -> bool:
    """A key bias shifts all logits of a query alike: its gradient is zero but for noise, which Adam turns into steps."""
    return name.endswith("k_proj.bias")


@cache
def captured(name: str, dtype: torch.dtype, backend: Any) -> dict[str, Tensor]:
    """Everything that one training forward computes, under the golden files' names."""
    case = golden_case(name)
    model, batch = golden_model(case, dtype, attention_backend=backend), golden_batch(case)
    seen: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(lambda _, inputs, output, key=key: seen.update({key: output}))
        for key, module in _hooked(model).items()
    ]
    for key, module in {f"text.layer{k}_input": layer for k, layer in enumerate(model.text_layers)}.items():
        module.register_forward_pre_hook(lambda _, inputs, key=key: seen.update({key: inputs[0]}))
    model.text_layers[0].register_forward_pre_hook(lambda _, inputs: seen.update({"text.layers_input": inputs[0]}))
    model.vision_tower.layers[0].register_forward_pre_hook(lambda _, inputs: seen.update({"vision.blocks_input": inputs[0]}))
    model.dit_layers[0].register_forward_pre_hook(lambda _, inputs: seen.update({"head.dit_input": inputs[0]}))
    model.time_mlp_in.register_forward_pre_hook(lambda _, inputs: seen.update({"head.dit_time_proj": inputs[0]}))
    with torch.no_grad():
        elements_BTA = model(batch)
        seen["backbone_features"] = seen[f"text.layer{case.config.num_layers - 1}"]
        for handle in handles:
            handle.remove()
        groups = groups_of(batch)
        for key in ("head.action_W1", "head.action_W2"):  # computed in the order of the groups
            seen[key] = groups.restore(seen[key])
        seen["head.dit_output"] = model.output_proj(seen.pop("head.output_norm"))
        seen["head.decoder"] = model.action_decoder(seen["head.dit_output"], groups)
        seen["loss_per_element_masked"] = torch.where(batch.action_is_valid_BTA, elements_BTA, 0.0)
        seen["loss"] = released_loss(model, batch)
        rotary = plan_text(batch, case.config, dtype).rotary
        for part, table in (("cos", rotary.cos_B1SD), ("sin", rotary.sin_B1SD)):
            seen[f"text.rope_{part}"] = torch.cat((table[:, 0], table[:, 0]), dim=-1)
        x_BTA = interpolate(batch.noise_BTA.to(dtype), batch.actions_BTA.to(dtype), batch.time_B.to(dtype))
        seen["noisy_trajectory"] = x_BTA
    return {
        key: value.flatten(0, 1) if key.startswith("vision.") and value.dim() == 3 else value for key, value in seen.items()
    }


def _hooked(model: GrootN17Model) -> dict[str, nn.Module]:
    tower = model.vision_tower
    return {
        "vision.patch_embed": tower.patch_embedding,
        **{f"vision.block{k}": layer for k, layer in enumerate(tower.layers)},
        "vision.merger": tower.merger,
        **{f"vision.deepstack{k}": merger for k, merger in enumerate(tower.deepstack_mergers)},
        **{f"text.layer{k}": layer for k, layer in enumerate(model.text_layers)},
        "head.vlln": model.vl_norm,
        **{f"head.vl_self_attention{k}": layer for k, layer in enumerate(model.vl_layers)},
        "head.state_features": model.state_encoder,
        "head.action_W1": model.action_encoder.fc1,
        "head.action_W2": model.action_encoder.fc2,
        "head.action_features": model.action_encoder,
        "head.temb": model.time_mlp_out,
        **{f"head.dit_block{k}": layer for k, layer in enumerate(model.dit_layers)},
        **{f"head.dit_block{k}_adaln": layer.norm1 for k, layer in enumerate(model.dit_layers)},
        **{f"head.dit_block{k}_attn": layer.attention.out_proj for k, layer in enumerate(model.dit_layers)},
        "head.output_norm": model.output_norm,
        "pred": model.action_decoder,
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, FP64), (torch.float32, FP32_FORWARD)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_every_intermediate(name: str, dtype: torch.dtype, limit: float, backend: str) -> None:
    golden, seen = golden_case(name).tensors("forward_fp64"), captured(name, dtype, backend)
    keys = set(golden) & set(seen)
    differences = {key: relative_difference(seen[key], golden[key]) for key in sorted(keys)}
    assert not {key: d for key, d in differences.items() if not d <= limit}
    not_compared = {key for key in set(golden) - keys if golden[key].is_floating_point()}
    assert not_compared == {"velocity", "head.action_time_code"}  # tested below


@pytest.mark.parametrize("name", CASE_NAMES)
def test_positions_masks_and_time_steps(name: str) -> None:
    case = golden_case(name)
    golden, batch = case.tensors("forward_fp64"), golden_batch(case)
    model = golden_model(case)
    assert torch.equal(batch.token_position_3BS, golden["text.position_ids"][1:])
    assert torch.equal(batch.token_is_valid_BS, golden["backbone_attention_mask"])
    is_image_BS = torch.zeros(batch.tokens_BS.numel(), dtype=torch.bool)
    is_image_BS[batch.image_token_M] = True
    assert torch.equal(is_image_BS.view_as(batch.tokens_BS), golden["image_mask"])
    assert torch.equal(model.time_step(batch.time_B), golden["timestep"])
    assert relative_difference(batch.actions_BTA - batch.noise_BTA, golden["velocity"]) <= 1e-7


@pytest.mark.parametrize("name", CASE_NAMES)
def test_all_gradients_of_the_head(name: str) -> None:
    case = golden_case(name)
    found = gradients(golden_model(case), golden_batch(case))
    for stem, limit in (("grads_fp64", FP64), ("grads_all", 1e-7)):  # the latter is stored in fp32
        for released, expected in case.tensors(stem).items():
            for ours, part in our_parts(released, expected).items():
                if not is_shift_invariant(ours):
                    assert relative_difference(found[ours], part) <= limit, released
    checked = set()
    for released, numbers in case.numbers["parameters"].items():
        (ours,) = our_names(released)
        checked.add(ours)
        if not is_shift_invariant(ours):
            assert float(found[ours].norm()) == pytest.approx(numbers["grad_norm"], rel=FP64), released
    assert checked == set(found)  # exactly the reference's parameters are trained
    total = gradient_norm(list(found.values()))
    assert float(total) == pytest.approx(case.numbers["grad_norm_total"], rel=FP64)


@pytest.mark.parametrize("name", CASE_NAMES)
def test_gradients_of_the_head_fp32(name: str) -> None:
    case = golden_case(name)
    found = gradients(golden_model(case, torch.float32), golden_batch(case))
    for released, expected in {**case.tensors("grads_fp64"), **case.tensors("grads_all")}.items():
        for ours, part in our_parts(released, expected).items():
            if not is_shift_invariant(ours):
                assert relative_difference(found[ours], part) <= FP32_GRADIENT, released


@pytest.mark.parametrize("name", CASE_NAMES)
def test_gradients_with_everything_trained(name: str) -> None:
    case = golden_case(name)
    config = replace(case.config, tune_llm=True, tune_visual=True)
    found = gradients(golden_model(case, config=config), golden_batch(case))
    for released, expected in case.tensors("grads_full_tune_fp64").items():
        for ours, part in our_parts(released, expected).items():
            assert relative_difference(found[ours], part) <= FP64, released
    backbone = case.numbers["full_tune_grad_norm_backbone"]
    for released, norm in backbone.items():
        names = our_names(released)
        joint = torch.stack([found[ours].norm() for ours in names]).norm()
        assert float(joint) == pytest.approx(norm, rel=FP64), released
    total = gradient_norm(list(found.values()))
    assert float(total) == pytest.approx(case.numbers["full_tune_grad_norm_total"], rel=FP64)
    assert {ours for n in case.numbers["full_tune_grad_none"] for ours in our_names(n)} == {"text_norm.weight"}
    assert "text_norm.weight" not in found


@pytest.mark.parametrize("name", CASE_NAMES)
def test_top_text_layers_alone(name: str) -> None:
    """--tune-top-llm-layers trains what it names, with the gradients of the fully trained model."""
    case = golden_case(name)
    config = replace(case.config, tune_top_llm_layers=2)
    found = gradients(golden_model(case, config=config), golden_batch(case))
    trained = {name for name in found if name.startswith(("vision", "token", "text"))}
    last = case.config.num_layers
    assert {name.split(".")[1] for name in trained} == {str(last - 1), str(last - 2)}
    for released, norm in case.numbers["full_tune_grad_norm_backbone"].items():
        for ours in our_names(released):
            if ours in trained:
                assert float(found[ours].norm()) == pytest.approx(norm, rel=FP64), released


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, FP64), (torch.float32, FP32_GRADIENT)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_optimizer_steps(name: str, dtype: torch.dtype, limit: float) -> None:
    case = golden_case(name)
    numbers, settings = case.numbers, case.numbers["optimizer"]
    model, batch = golden_model(case, dtype), golden_batch(case)
    for released, expected in numbers["parameters"].items():
        (ours,) = our_names(released)
        assert is_decayed(dict(model.named_parameters())[ours]) == expected["decay"], released
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
    losses = []
    for step, expected_norm in enumerate(numbers["grad_norm_per_step"], 1):
        model.zero_grad()
        loss = released_loss(model, batch)
        losses.append(float(loss.detach()))
        loss.backward()
        found = [state.parameter.grad for state in optimizer.trainable]
        norm = gradient_norm(found)
        assert float(norm) == pytest.approx(expected_norm, rel=limit)
        optimizer.advance(settings["lr"])
        optimizer.step(found, clip_factor(norm, numbers["clip"]))
        if step == 1 and dtype == torch.float64:
            for released, expected in case.tensors("step1_delta_fp64").items():
                (ours,) = our_names(released)
                assert relative_difference(dict(model.named_parameters())[ours] - start[ours], expected) <= FP64, released
        _compare_changes(case, model, start, f"delta_norm_step{step}", dtype, limit)
    losses.append(float(released_loss(model, batch).detach()))
    assert losses == pytest.approx(numbers["loss_per_step"], rel=min(limit, FP32_FORWARD))


def _compare_changes(
    case: Any, model: GrootN17Model, start: dict[str, Tensor], key: str, dtype: torch.dtype, limit: float
) -> None:
    """Norm of every parameter's change; an fp32 parameter only stores its change to half an ulp of itself."""
    for released, expected in case.numbers["parameters"].items():
        (ours,) = our_names(released)
        if key not in expected or is_shift_invariant(ours):
            continue
        change = (dict(model.named_parameters())[ours].detach() - start[ours]).double().norm()
        rounding = 3 * float(start[ours].double().norm()) * 6e-8 if dtype == torch.float32 else 0.0
        assert float(change) == pytest.approx(expected[key], rel=limit, abs=rounding), released
