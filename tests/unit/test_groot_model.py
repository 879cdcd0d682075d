"""GR00T N1.7's own choices: groups, masks, strict options, dropout, precision; each against a plain computation.

Shape legend: as megatron_vla/models/groot_n1_7/batch.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from groot_model_fixtures import gradients, mean_loss, replaced, tiny_batch, tiny_config, tiny_model
from pi05_fixtures import relative_difference
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.config.run import parse_args
from megatron_vla.models.common.dropout import Dropout, draws_in_forward, twice
from megatron_vla.models.common.embodiment import EmbodimentGroups, EmbodimentMlp
from megatron_vla.models.groot_n1_7.assemble import Assembler
from megatron_vla.models.groot_n1_7.batch import GrootN17Batch
from megatron_vla.models.groot_n1_7.build import build
from megatron_vla.models.groot_n1_7.convert import fixed_batch
from megatron_vla.models.groot_n1_7.flops import model_units
from megatron_vla.models.groot_n1_7.metadata import embodiment_groups
from megatron_vla.models.groot_n1_7.model import GrootN17Model
from megatron_vla.models.groot_n1_7.samples import (
    RAW_STATE_STREAM,
    build_mock_source,
    draws,
    num_image_tokens,
    state_is_dropped,
)
from megatron_vla.optimizations.apply import apply_optimizations

FLAGS = ["--model-name", "groot_n1_7", "--model-variant", "tiny", "--mock-data", "--num-workers", "0"]


def loss_of(model: GrootN17Model, **changes: Tensor) -> float:
    return loss_of_batch(model, replaced(tiny_batch(model.config), **changes))


def loss_of_batch(model: GrootN17Model, batch: GrootN17Batch) -> float:
    with torch.no_grad():
        return float(mean_loss(model, batch))


@pytest.mark.parametrize("static", [False, True], ids=["smallest", "static_capacity"])
def test_groups_equal_weights_taken_per_sample(static: bool) -> None:
    embodiment_B = np.array([2, 0, 2, 3, 2])
    sizes = (4, 5) if static else (None, None)
    groups = EmbodimentGroups(*(torch.from_numpy(array) for array in embodiment_groups(embodiment_B, *sizes)))
    assert tuple(groups.sample_GN.shape) == ((4, 5) if static else (3, 3))
    layer = EmbodimentMlp(4, 3, 6, 2).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    values_BSI = torch.randn(5, 2, 3, dtype=torch.float64)
    found = layer(values_BSI, groups)
    own = torch.from_numpy(embodiment_B)
    inner = F.relu(values_BSI @ layer.fc1.weight[own] + layer.fc1.bias[own].unsqueeze(1))
    expected = inner @ layer.fc2.weight[own] + layer.fc2.bias[own].unsqueeze(1)
    assert relative_difference(found, expected) < 1e-12
    weights = list(layer.parameters())
    pairs = zip(*(torch.autograd.grad(out.square().sum(), weights) for out in (found, expected)), strict=True)
    assert max(relative_difference(ours, theirs) for ours, theirs in pairs) < 1e-12


def test_one_embodiment_needs_no_sorting() -> None:
    groups = EmbodimentGroups(*(torch.from_numpy(array) for array in embodiment_groups(np.array([1, 1, 1]))))
    values = torch.randn(3, 2)
    assert groups.is_whole_batch and groups.sort(values).data_ptr() == values.data_ptr()
    with pytest.raises(ValueError, match="2 embodiments, up to 2 samples each, does not fit into 1 groups of 4"):
        embodiment_groups(np.array([0, 1, 1]), 1, 4)


def padded_further(model: GrootN17Model, slots: int) -> float:
    """Loss of the fixed samples with more padding on the left."""
    batch = fixed_batch(model.config)
    before = batch.tokens_BS.shape[1]
    samples = []
    for row in range(batch.size):
        tokens_S = np.full(slots, model.config.padding_token)
        tokens_S[slots - before :] = batch.tokens_BS[row]
        is_valid_S = np.zeros(slots, dtype=bool)
        is_valid_S[slots - before :] = batch.token_is_valid_BS[row]
        fields = {name: tensor[row] for name, tensor in batch.tensors().items() if name.endswith(("BHD", "BTA", "BA", "_B"))}
        patches = slice(0, 16) if row == 0 else slice(16, 40)
        grids = [[1, 4, 4]] if row == 0 else [[1, 2, 4], [1, 4, 4]]
        own = {"tokens_BS": tokens_S, "token_is_valid_BS": is_valid_S, "pixels_PC": batch.pixels_PC[patches]}
        samples.append({**fields, **own, "image_grid_I3": np.array(grids)})
    return loss_of_batch(model, Assembler(model.config)(samples, slots))


def test_padding_matters_as_released_and_not_when_masked() -> None:
    released, strict = tiny_model(), tiny_model(tiny_config(mask_vl_self_attention=True))
    assert abs(padded_further(released, 14) / loss_of(released) - 1) > 1e-6
    assert padded_further(strict, 14) == pytest.approx(loss_of(strict), rel=1e-12)


def test_noise_in_padded_dimensions_matters_as_released_and_not_when_masked() -> None:
    batch = tiny_batch()
    is_real_BA = torch.arange(batch.actions_BTA.shape[2]).expand(batch.size, -1) < 5
    valid_BTA = is_real_BA[:, None].expand_as(batch.actions_BTA)
    other_noise_BTA = torch.where(valid_BTA, batch.noise_BTA, batch.noise_BTA + 1.0)
    masks = {"action_dim_is_valid_BA": is_real_BA, "action_is_valid_BTA": valid_BTA}
    for strict in (False, True):
        model = tiny_model(tiny_config(mask_padded_action_dims=strict))
        assert (loss_of(model, **masks) == loss_of(model, noise_BTA=other_noise_BTA, **masks)) is strict
    garbage_BTA = torch.where(valid_BTA, batch.actions_BTA, float("nan"))
    assert loss_of(model, **masks) == loss_of(model, actions_BTA=garbage_BTA, **masks)


def test_hidden_state_is_not_read() -> None:
    model, batch = tiny_model(), tiny_batch()
    hidden_B = torch.tensor([True, False])
    other_BHD = batch.state_BHD.clone()
    other_BHD[0] += 1.0
    assert loss_of(model, state_BHD=other_BHD) != loss_of(model)
    assert loss_of(model, state_BHD=other_BHD, state_is_dropped_B=hidden_B) == loss_of(model, state_is_dropped_B=hidden_B)


def test_draws_are_pure_and_have_the_released_distribution() -> None:
    config = tiny_config(state_dropout_prob=0.3)
    first, again = draws(config, 1, 2, 3), draws(config, 1, 2, 3)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["noise_BTA"], draws(config, 1, 3, 3)["noise_BTA"])
    many = [draws(config, 5, 0, index) for index in range(4000)]
    times = np.array([d["time_B"] for d in many])
    # u ~ Beta(1.5, 1) has mean 0.6; t = 0.999 (1 - u).
    assert times.mean() == pytest.approx(0.999 * 0.4, abs=0.012) and times.min() >= 0 and times.max() < 0.999
    assert np.mean([d["state_is_dropped_B"] for d in many]) == pytest.approx(0.3, abs=0.03)
    raw = [state_is_dropped(config, RAW_STATE_STREAM, 5, 0, index) for index in range(4000)]
    both = np.mean([a and d["state_is_dropped_B"] for a, d in zip(raw, many, strict=True)])
    assert both == pytest.approx(0.09, abs=0.02)  # independent
    single = replace(config, single_state_dropout=True)
    assert not any(state_is_dropped(single, RAW_STATE_STREAM, 5, 0, index) for index in range(100))


def test_pixels_of_one_frame_equal_the_processors_rows() -> None:
    model, batch = tiny_model(), tiny_batch()
    frame = batch.pixels_PC.double().unflatten(1, (3, 1, 16, 16)).expand(-1, -1, 2, -1, -1)
    rows_PC = (frame / 255 - 0.5) / 0.5
    assert loss_of(model, pixels_PC=rows_PC.flatten(1)) == pytest.approx(loss_of(model), rel=1e-12)


def test_equal_images_take_the_dense_path_with_the_same_result() -> None:
    """Two equal images as a dense batch, and among a smaller third one as padded rows, have the same tokens."""
    model = tiny_model()
    source, _ = build_mock_source(parse_args([*FLAGS, "--vocab-size", "64", "--image-token", "63"]))
    sample = {**source(0, 0), **draws(model.config, 1, 0, 0), "state_is_dropped_B": np.bool_(False)}
    dense = Assembler(model.config).maker
    grids = [(1, 4, 4), (1, 4, 4)]
    pixels_PC = torch.from_numpy(sample["pixels_PC"])
    batches = []
    for images in (grids, [*grids, (1, 2, 2)]):
        vision = {name: torch.from_numpy(array) for name, array in vars(dense.vision(images)).items()}
        rows = torch.cat((pixels_PC, pixels_PC[:4])) if len(images) == 3 else pixels_PC
        batches.append(replaced(tiny_batch(), pixels_PC=rows, **vision))
    plans = [model.vision_tower.plan(batch, torch.float64) for batch in batches]
    assert plans[0].padded is None and plans[1].padded is not None
    with torch.no_grad():
        (tokens, features), (mixed, mixed_features) = (model.vision_tower(batch) for batch in batches)
    assert relative_difference(mixed[:8], tokens) < 1e-12
    assert relative_difference(mixed_features[2][:8], features[2]) < 1e-12


@pytest.mark.parametrize(("image", "padding"), [(63, 0), (5, 0), (63, 5), (5, 60), (30, 34)])
def test_mock_words_are_no_image_tokens(image: int, padding: int) -> None:
    """... wherever the special tokens are in a vocabulary."""
    config = parse_args([*FLAGS, "--vocab-size", "64", "--image-token", str(image), "--padding-token", str(padding)])
    source, _ = build_mock_source(config)
    for index in range(20):
        tokens_S = source(index, 0)["tokens_BS"]
        assert (tokens_S == config.family.image_token).sum() == 2 * num_image_tokens(config.family)
        assert tokens_S.max() < 64
    crowded = parse_args([*FLAGS, "--vocab-size", "32", "--image-token", "15", "--padding-token", "20"])
    with pytest.raises(
        ValueError, match="--image-token 15, --padding-token 20: they leave no 16 tokens in a row of --vocab-size 32"
    ):
        build_mock_source(crowded)


def test_frozen_backbone_has_no_graph_and_is_rounded_once() -> None:
    config = parse_args([*FLAGS])
    model = build(config)
    dtypes = {p.dtype for m in (model.vision_tower.layers, model.text_layers) for p in m.parameters()}
    assert dtypes == {torch.bfloat16, torch.float32} and model.vision_tower.stream_dtype == torch.bfloat16
    assert model.token_embedding.weight.dtype == torch.bfloat16
    assert {p.dtype for p in model.dit_layers.parameters()} == {torch.float32}
    batch = fixed_batch(config.family)
    assert not model.backbone(batch).requires_grad and model(batch).requires_grad
    kept = build(parse_args([*FLAGS, "--frozen-dtype", "as_model"]))
    assert {p.dtype for p in kept.parameters()} == {torch.float32}
    model.eval(), kept.eval()
    assert loss_of_batch(model, batch) == pytest.approx(loss_of_batch(kept, batch), rel=0.02)


@pytest.mark.parametrize("flags", [["--bf16"], ["--autocast-bf16"], ["--autocast-bf16", "--frozen-dtype", "as_model"]])
def test_low_precision_is_near_fp32(flags: list[str]) -> None:
    base = [*FLAGS, "--dropout", "0"]
    exact, rounded = build(parse_args(base)), build(parse_args([*base, *flags]))
    batch = fixed_batch(exact.config)
    loss, expected = mean_loss(rounded, batch), mean_loss(exact, batch).detach()
    assert float(loss.detach()) == pytest.approx(float(expected), rel=0.02) and float(loss.detach()) != float(expected)
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in rounded.parameters() if p.requires_grad)


def test_one_dropout_is_distributed_as_two() -> None:
    torch.manual_seed(0)
    ones = torch.ones(200_000)
    kept = Dropout(twice(0.2))(ones)
    assert float((kept == 0).double().mean()) == pytest.approx(0.36, abs=0.005)
    assert float(kept.max()) == pytest.approx(1 / 0.64)


def test_recomputed_layers_draw_the_same_dropout() -> None:
    batch = tiny_batch()
    config = tiny_config(dropout=0.2)
    results = []
    for patterns in ((), ("dit_layers.*", "vl_layers.*")):
        model = apply_optimizations(
            tiny_model(config), OptimizationConfig(activation_checkpoint_module_patterns=patterns), lambda line: None
        )
        torch.manual_seed(1)
        results.append(gradients(model, batch))
    assert draws_in_forward(model) and not draws_in_forward(tiny_model())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    torch.manual_seed(2)
    assert not torch.equal(gradients(model, batch)["output_proj.weight"], results[0]["output_proj.weight"])


def test_tune_flags() -> None:
    def trained(**flags: bool | int) -> set[str]:
        model = tiny_model(tiny_config(**flags))
        return {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad}

    head = {"state_encoder", "action_encoder", "action_decoder", "action_position_embedding"}
    dit = {"time_mlp_in", "time_mlp_out", "dit_layers", "output_norm", "output_proj"}
    assert trained() == head | dit | {"vl_norm", "vl_layers"}
    assert trained(tune_projector=False, tune_vlln=False) == dit
    assert trained(tune_diffusion_model=False, tune_vlln=False) == head
    everything = trained(tune_llm=True, tune_visual=True)
    assert everything == head | dit | {"vl_norm", "vl_layers", "vision_tower", "token_embedding", "text_layers"}


@pytest.mark.parametrize("flow_draws", [1, 3])
def test_flops_agree_with_a_counter(flow_draws: int) -> None:
    """torch's own FLOP counter on the eager backend counts the products that really run."""
    config = tiny_config(flow_draws=flow_draws)
    model = tiny_model(config, torch.float32, attention_backend="eager")
    source, _ = build_mock_source(
        parse_args([*FLAGS, "--vocab-size", "64", "--image-token", "63", "--max-prompt-length", "40"])
    )
    source = replace(source, family=config)
    batch = Assembler(config)([{**source(i, 0), **draws(config, 1, 0, i)} for i in range(2)])
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(batch)
    units = model_units(config, patches_of_images=[16, 16], num_tokens=batch.tokens_BS.shape[1])
    expected = sum(unit.forward_flops for unit in (units.first, *units.layers, units.last))
    assert counter.get_total_flops() == 2 * expected
    shapes = {name: tuple(tensor.shape) for name, tensor in batch.tensors().items()}
    assert model.training_flops_per_sample(shapes) == sum(u.cost for u in (units.first, *units.layers, units.last))


def test_small_variant_is_about_a_hundred_million() -> None:
    with torch.device("meta"):
        model = GrootN17Model(parse_args(["--model-name", "groot_n1_7", "--model-variant", "small", "--mock-data"]).family)
    assert 70e6 < sum(p.numel() for p in model.parameters()) < 150e6


def test_first_values_of_embodiment_weights_by_their_inputs() -> None:
    """As released all have one deviation; by inputs, noisy actions reach the DiT as large as positions do."""
    words = ["--model-name", "groot_n1_7", "--model-variant", "tiny", "--mock-data"]
    released, narrow = (build(parse_args([*words, *more])) for more in ((), ("--embodiment-init", "fan_in")))
    encoder, other = released.action_encoder, narrow.action_encoder
    for layer in ("fc1", "fc2", "fc3"):
        weight_EIO, plain_EIO = (part.get_submodule(layer).get_parameter("weight") for part in (other, encoder))
        assert float(plain_EIO.detach().std()) == pytest.approx(0.02, rel=0.1)
        assert float(weight_EIO.detach().std()) == pytest.approx(weight_EIO.shape[1] ** -0.5, rel=0.1)
    changed = {n for n, p in released.named_parameters() if not torch.equal(p, narrow.get_parameter(n))}
    assert {n.partition(".")[0] for n in changed} == {"state_encoder", "action_encoder", "action_decoder"}
    assert all(n.endswith(".weight") for n in changed), "biases of all start at zero"
