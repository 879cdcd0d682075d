"""Building Pi0.5: parameter dtypes, first values, counts, FLOPs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pi05_fixtures import golden_batch, golden_case, golden_model, gradients, tiny_batch, tiny_config, tiny_model, uniform
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megatron_vla.config.run import parse_args
from megatron_vla.models.common.rotary import rotary_table, rotate
from megatron_vla.models.pi05.build import build, build_module
from megatron_vla.models.pi05.config import VARIANTS, Pi05Config
from megatron_vla.models.pi05.flops import model_units


def run_config(*flags: str) -> Any:
    return parse_args(["--model-variant", "tiny", "--mock-data", *flags])


def test_bf16_keeps_the_declared_parameters_in_fp32() -> None:
    model = build(run_config("--bf16"))
    narrow = {n for n, p in model.named_parameters() if p.dtype == torch.bfloat16}
    wide = {n for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert narrow | wide == {n for n, _ in model.named_parameters()}
    sensitive = ("norm", "embeddings.", "action_", "time_mlp")
    assert wide == {n for n, _ in model.named_parameters() if any(s in n for s in sensitive)}
    assert model(tiny_batch(run_config().family)).dtype == torch.float32


def test_bf16_is_as_close_to_fp64_as_its_rounding() -> None:
    """The residual streams carry 8 bits: the loss is off by a percent, not by more, and in both attention backends."""
    case = golden_case("tiny_a")
    batch, expected = golden_batch(case), case.tensors("forward_fp64")["loss_per_element"]
    for backend in ("sdpa", "eager"):
        with torch.no_grad():
            elements = golden_model(case, torch.bfloat16, attention_backend=backend)(batch)
        error = (elements.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert error < 0.02, backend


def test_bf16_rotation_rounds_once() -> None:

    heads = uniform(5, (1, 2, 6, 8)).bfloat16()
    positions = torch.tensor([[0, 5, 17, 200, 761, 1017]])
    exact = rotate(heads.double(), rotary_table(positions, 8, 1e4, torch.float64))
    ours = rotate(heads, rotary_table(positions, 8, 1e4, torch.bfloat16))
    assert (ours.double() - exact).abs().max() <= exact.abs().max() * 2**-8  # half an ulp is 2^-9 of the value


def test_first_values_follow_the_recipe_and_the_seed() -> None:
    model, again, other = build(run_config()), build(run_config()), build(run_config("--seed", "7"))
    same = {n: torch.equal(p, q) for (n, p), q in zip(model.named_parameters(), again.parameters(), strict=True)}
    assert all(same.values())
    assert not torch.equal(model.layers[0].prefix.mlp.up_proj.weight, other.layers[0].prefix.mlp.up_proj.weight)
    assert not torch.equal(model.layers[0].prefix.mlp.up_proj.weight, model.layers[1].prefix.mlp.up_proj.weight)
    start_at_zero = ("vision_projector.", "prefix_norm.", "suffix_norm.")
    for name, parameter in model.named_parameters():
        in_norm_of_a_layer = name.startswith("layers.") and "_norm." in name
        if name.endswith(".bias") or name.startswith(start_at_zero) or in_norm_of_a_layer:
            assert parameter.count_nonzero() == 0, name
        else:
            assert parameter.count_nonzero() > 0, name
    lecun = model.layers[0].prefix.attention.q_proj.weight
    assert float(lecun.detach().std() * lecun.shape[1] ** 0.5) == pytest.approx(1.0, abs=0.05)
    assert float(lecun.detach().abs().max() * lecun.shape[1] ** 0.5) <= 2 / 0.8796 + 1e-6
    xavier = model.vision_tower.layers[0].mlp.fc1.weight
    assert float(xavier.detach().abs().max()) <= (6 / sum(xavier.shape)) ** 0.5
    assert float(model.token_embedding.weight.detach().std()) == pytest.approx(0.01, rel=0.05)
    assert torch.equal(model.vision_tower.post_layernorm.weight, torch.ones(32))
    projector = build(run_config("--vision-projector-init", "fan_in")).vision_projector
    assert float(projector.weight.detach().std() * projector.weight.shape[1] ** 0.5) == pytest.approx(1.0, abs=0.05)
    assert projector.bias.count_nonzero() == 0


def test_first_values_do_not_depend_on_other_parameters_or_precision() -> None:
    """A parameter's stream is its own: fewer layers or another dtype give the same numbers."""
    model, shallow, narrow = build(run_config()), build(run_config("--num-layers", "2")), build(run_config("--bf16"))
    weight = model.layers[1].suffix.mlp.gate_proj.weight
    assert torch.equal(weight, shallow.layers[1].suffix.mlp.gate_proj.weight)
    assert torch.equal(weight.bfloat16(), narrow.layers[1].suffix.mlp.gate_proj.weight)


def test_training_opens_the_closed_branches() -> None:
    """From scratch the expert and the image projector start at zero; gradients reach them within a few steps."""
    model, batch = build(run_config("--fp64")), tiny_batch(run_config().family)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(4):
        gradients(model, batch)
        optimizer.step()
    silent = [n for n, p in model.named_parameters() if p.requires_grad and p.grad.abs().max() == 0]
    assert silent == []


def test_parameter_counts_of_base() -> None:
    with torch.device("meta"):
        model = build_module(Pi05Config())

    def count(*modules: nn.Module) -> int:
        return sum(p.numel() for m in modules for p in m.parameters())

    prefix, suffix = [layer.prefix for layer in model.layers], [layer.suffix for layer in model.layers]
    dense = [m for layer in suffix for m in (layer.input_norm, layer.post_attention_norm)]
    assert count(model.vision_tower) == 412_442_352
    assert count(model.vision_projector) == 2_361_344
    assert count(model.token_embedding) == 526_647_296
    assert (count(*prefix), count(model.prefix_norm)) == (1_981_882_368, 2_048)
    assert (count(*suffix), count(*dense), count(model.suffix_norm)) == (424_783_872, 113_356_800, 3_148_800)
    assert (count(model.action_in_proj), count(model.action_out_proj)) == (33_792, 32_800)
    assert (count(model.time_mlp_in), count(model.time_mlp_out)) == (1_049_600, 1_049_600)
    assert count(model) == 3_353_433_872
    live = sum(p.numel() for p in model.parameters() if p.requires_grad)
    q_proj = model.layers[-1].prefix.attention.q_proj.weight.numel()
    assert live + q_proj == 3_248_572_176  # the reference counts exact zeros as a gradient
    linears = sum(isinstance(m, nn.Linear) for m in model.modules())
    assert linears == 458 - 2  # without the two dead vocabulary heads


@pytest.mark.parametrize(
    ("views", "horizon", "total", "dead"), [(2, 50, 3379.45, 159.7), (3, 50, 4681.5, 219.2), (2, 10, 3345.8, 159.5)]
)
def test_flops_of_base(views: int, horizon: int, total: float, dead: float) -> None:
    options = {"num_views": views, "prompt_length": 200, "action_horizon": horizon}
    everything = model_units(Pi05Config(), skip_dead_compute=False, **options).forward_flops
    assert everything / 1e9 == pytest.approx(total, abs=0.05)
    assert (everything - model_units(Pi05Config(), **options).forward_flops) / 1e9 == pytest.approx(dead, abs=0.05)


def test_dead_work_has_no_backward() -> None:
    """What is computed and never read counts once, the rest three times."""
    config = tiny_config()
    shapes = {"camera_is_present_BV": [2, 2], "tokens_BL": [2, config.max_prompt_length]}
    live, all_of_it = (tiny_model(config, torch.float32, skip_dead_compute=skip) for skip in (True, False))
    forward = [model.flops_per_sample(2, config.max_prompt_length) for model in (live, all_of_it)]
    assert forward[0] < forward[1]
    assert live.training_flops_per_sample(shapes) == 3 * forward[0]
    assert all_of_it.training_flops_per_sample(shapes) == forward[1] + 2 * forward[0]


def test_flops_agree_with_a_counter() -> None:
    """torch's own FLOP counter on the eager backend counts the products that really run."""
    config = tiny_config()
    batch = tiny_batch(config)
    model = tiny_model(config, torch.float32, attention_backend="eager", skip_dead_compute=False)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(batch)
    prefix, horizon = 2 * 4 + config.max_prompt_length, config.action_horizon
    heads = config.num_attention_heads * config.kv_channels
    unread = config.num_layers * 4 * prefix * horizon * heads  # prefix queries on action keys: counted, never computed
    expected = 2 * (model.flops_per_sample(2, config.max_prompt_length) - unread)
    assert counter.get_total_flops() == expected


def test_small_variant_is_about_a_hundred_million() -> None:

    with torch.device("meta"):
        model = build_module(Pi05Config(**VARIANTS["small"]))
    assert 70e6 < sum(p.numel() for p in model.parameters()) < 150e6
