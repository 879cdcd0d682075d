"""GR00T N1.7 checkpoints: parameter counts of the released model, conversion both ways, other versions refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from groot_model_fixtures import CASE_NAMES, golden_case, tiny_config
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_vla.models.common.tensor_file import open_tensors, write_tensors
from megatron_vla.models.groot_n1_7.build import build_module
from megatron_vla.models.groot_n1_7.config import VARIANTS, GrootN17Config
from megatron_vla.models.groot_n1_7.convert import CONVERTER
from megatron_vla.models.groot_n1_7.key_map import EMBED_TOKENS, GROOT_N1_7_KEYS, LM_HEAD
from megatron_vla.models.groot_n1_7.released_config import read_released_config

FULL_LAYOUT = tiny_config(
    vision_num_layers=24, vision_deepstack_layers=(5, 11, 17), num_layers=16, vl_num_layers=4, dit_num_layers=32
)


def base_counts() -> dict[str, int]:
    with torch.device("meta"):
        model = build_module(GrootN17Config())
    counts: dict[str, int] = {"total": 0, "trained": 0}
    for name, parameter in model.named_parameters():
        counts["total"] += parameter.numel()
        counts["trained"] += parameter.numel() * parameter.requires_grad
        pieces = name.split(".")
        for depth in (1, 2):
            prefix = ".".join(pieces[:depth])
            counts[prefix] = counts.get(prefix, 0) + parameter.numel()
    return counts


def test_base_has_the_released_parameters() -> None:
    counts = base_counts()
    expected = {
        "total": 3_144_016_000,
        "trained": 1_620_515_968,
        "vision_tower": 406_957_056,
        "vision_tower.patch_embedding": 1_573_888,
        "vision_tower.position_embedding": 2_359_296,
        "vision_tower.layers": 302_309_376,
        "vision_tower.merger": 25_174_016,
        "vision_tower.deepstack_mergers": 75_540_480,
        "token_embedding": 311_164_928,
        "text_layers": 805_376_000,
        "text_norm": 2_048,
        "vl_norm": 4_096,
        "vl_layers": 201_433_088,
        "state_encoder": 54_738_944,
        "action_encoder": 233_127_936,
        "action_decoder": 37_916_800,
        "action_position_embedding": 1_572_864,
        "dit_layers": 1_082_671_104,
        "output_norm": 4_721_664,
        "output_proj": 1_573_888,
    }
    assert {name: counts[name] for name in expected} == expected
    assert counts["time_mlp_in"] + counts["time_mlp_out"] == 2_755_584


def released_checkpoint(folder: Path, config: GrootN17Config) -> dict[str, Tensor]:
    """A random checkpoint in the released layout, sharded, with the tied head; returns its tensors."""
    with torch.device("meta"):
        names = {name: tuple(p.shape) for name, p in build_module(config).named_parameters()}
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, Tensor] = {}
    for ours, shape in names.items():
        located = GROOT_N1_7_KEYS.to_theirs(ours)
        assert located is not None
        part = located.rename.part
        shape = shape if part is None else (shape[0] * part[1], *shape[1:])
        if located.ours not in tensors:
            tensors[located.ours] = torch.randn(shape, generator=generator).to(torch.bfloat16)
    write_tensors(folder, {**tensors, LM_HEAD: tensors[EMBED_TOKENS].clone()}, {"format": "pt"}, 2_000_000)
    return {**tensors, LM_HEAD: tensors[EMBED_TOKENS]}


def test_round_trip_of_a_full_layout_checkpoint(tmp_path: Path) -> None:
    released = released_checkpoint(tmp_path / "released", FULL_LAYOUT)
    assert len(released) == 1030 + 1  # and the tied copy
    assert (tmp_path / "released" / "model.safetensors.index.json").is_file()
    said: list[str] = []
    CONVERTER.to_native(tmp_path / "released", FULL_LAYOUT, tmp_path / "native", report=said.append)
    assert "converted 1126/1126 tensors" in said[0]  # 24 fused projections are three parameters each here, twice (bias)
    CONVERTER.to_released(tmp_path / "native", "released", tmp_path / "back", report=said.append)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert set(back) == set(released)
    for name, tensor in released.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name


def test_sizes_are_read_from_tensors(tmp_path: Path) -> None:
    config = replace(FULL_LAYOUT, max_action_dim=7, num_embodiments=3, vl_num_layers=0)
    released_checkpoint(tmp_path, config)
    sizes = CONVERTER.infer_sizes(CONVERTER.our_shapes(tmp_path))
    assert {name: vars(config)[name] for name in sizes} == sizes
    assert {"num_layers", "dit_num_layers", "vl_num_layers", "num_query_groups", "max_action_dim"} <= set(sizes)


def test_a_wrong_depth_names_its_flag(tmp_path: Path) -> None:
    released_checkpoint(tmp_path, tiny_config(num_layers=5))
    (finding,) = CONVERTER.check_file(tmp_path, tiny_config())
    assert "--num-layers" in finding.fix


def test_older_versions_are_refused(tmp_path: Path) -> None:
    save_file({"backbone.eagle_model.vision_model.x": torch.zeros(1)}, tmp_path / "model.safetensors")
    (finding,) = CONVERTER.check_file(tmp_path, tiny_config())
    assert "N1.5 or N1.6" in finding.what and "N1.7" in finding.what
    with pytest.raises(ValueError, match=r"N1\.5 or N1\.6"):
        CONVERTER.to_native(tmp_path, tiny_config(), tmp_path / "out")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "Gr00tN1d6"}))
    with pytest.raises(ValueError, match=r"N1\.5 and N1\.6 have another"):
        CONVERTER.described_config(tmp_path)


RELEASED_CONFIG = {
    "model_type": "Gr00tN1d7",
    "select_layer": 16,
    "hidden_size": 1024,
    "backbone_embedding_dim": 2048,
    "max_state_dim": 132,
    "max_action_dim": 132,
    "action_horizon": 40,
    "max_num_embodiments": 32,
    "max_seq_len": 1024,
    "num_inference_timesteps": 4,
    "state_dropout_prob": 0.2,
    "diffusion_model_cfg": {
        "num_layers": 32,
        "num_attention_heads": 32,
        "attention_head_dim": 48,
        "dropout": 0.2,
        "norm_type": "ada_norm",
    },
    "vl_self_attention_cfg": {"num_layers": 4, "num_attention_heads": 32, "attention_head_dim": 64},
}


def test_released_configuration_is_the_base_variant() -> None:
    fields = read_released_config(RELEASED_CONFIG)
    assert GrootN17Config(**{**VARIANTS["base"], **fields}) == GrootN17Config()


def test_code_defaults_of_other_releases_are_read() -> None:
    other = {key: value for key, value in RELEASED_CONFIG.items() if key != "vl_self_attention_cfg"}
    other |= {"select_layer": 12, "max_state_dim": 29, "action_horizon": 50, "state_dropout_prob": 0.8}
    other["diffusion_model_cfg"] = {"num_layers": 16, "num_attention_heads": 32, "attention_head_dim": 48}
    config = GrootN17Config(**read_released_config(other))
    assert (config.num_layers, config.dit_num_layers, config.vl_num_layers) == (12, 16, 0)
    assert (config.max_state_dim, config.action_horizon, config.state_dropout_prob) == (29, 50, 0.8)
    with pytest.raises(ValueError, match="reproject_vision is True, this model has False built in"):
        read_released_config({**RELEASED_CONFIG, "reproject_vision": True})


def test_golden_configuration_agrees(tmp_path: Path) -> None:
    case = golden_case(CASE_NAMES[0])
    fields = read_released_config(case.settings)
    assert {name: vars(case.config)[name] for name in fields} == fields
    shapes = CONVERTER.our_shapes(case.weight_files)
    sizes = CONVERTER.infer_sizes(shapes)
    assert {name: vars(case.config)[name] for name in sizes} == sizes
    assert len(open_tensors(case.weight_files).files) == 234
