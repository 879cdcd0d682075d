"""Golden GR00T N1.7 cases and small models for tests.

Shape legend: as megatron_vla/models/groot_n1_7/batch.py.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_vla.models.common.flow_matching import masked_loss
from megatron_vla.models.common.initialization import initialize_parameters, normal
from megatron_vla.models.groot_n1_7.assemble import Assembler
from megatron_vla.models.groot_n1_7.batch import GrootN17Batch
from megatron_vla.models.groot_n1_7.build import build_module, set_dtypes
from megatron_vla.models.groot_n1_7.config import VARIANTS, GrootN17Config
from megatron_vla.models.groot_n1_7.convert import CONVERTER, fixed_batch
from megatron_vla.models.groot_n1_7.key_map import GROOT_N1_7_KEYS
from megatron_vla.models.groot_n1_7.model import GrootN17Model

GOLDEN = Path(__file__).resolve().parents[0] / "golden" / "groot_n1_7"
CASE_NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))


def load_stem(folder: Path, stem: str) -> dict[str, Tensor]:
    """All tensors of `stem`.safetensors or of its numbered parts, rows of split tensors joined; empty when there are none."""
    files = (*folder.glob(f"{stem}.safetensors"), *sorted(folder.glob(f"{stem}.[0-9].safetensors")))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for name in {n[:-2] for n in tensors if n.startswith("pixel_values.")}:
        parts = sorted(n for n in tensors if n.startswith(f"{name}."))
        tensors[name] = torch.cat([tensors.pop(part) for part in parts])
    return tensors


@dataclass(frozen=True)
class GoldenCase:
    """One folder of golden files."""

    folder: Path
    settings: dict[str, Any]
    config: GrootN17Config

    def tensors(self, stem: str) -> dict[str, Tensor]:
        """See `load_stem`."""
        return load_stem(self.folder, stem)

    @property
    def weight_files(self) -> list[Path]:
        """The released-layout checkpoint."""
        return [*self.folder.glob("weights.safetensors"), *sorted(self.folder.glob("weights.[0-9].safetensors"))]

    @property
    def numbers(self) -> dict[str, Any]:
        """numbers_fp64.json."""
        return json.loads((self.folder / "numbers_fp64.json").read_text())


def load_case(folder: Path) -> GoldenCase:
    """A golden case from its folder."""
    settings = json.loads((folder / "config.json").read_text())
    vision, text, dit, vl = (settings[name] for name in ("vision", "text", "diffusion_model", "vl_self_attention"))
    config = GrootN17Config(
        image_size=64,
        vision_patch_size=vision["patch_size"],
        vision_temporal_patch_size=vision["temporal_patch_size"],
        vision_spatial_merge_size=vision["spatial_merge_size"],
        vision_hidden_size=vision["hidden_size"],
        vision_num_layers=vision["depth"],
        vision_num_attention_heads=vision["num_heads"],
        vision_ffn_hidden_size=vision["intermediate_size"],
        vision_num_position_embeddings=vision["num_position_embeddings"],
        vision_deepstack_layers=tuple(vision["deepstack_visual_indexes"]),
        num_layers=settings["select_layer"],
        hidden_size=text["hidden_size"],
        num_attention_heads=text["num_attention_heads"],
        num_query_groups=text["num_key_value_heads"],
        kv_channels=text["head_dim"],
        ffn_hidden_size=text["intermediate_size"],
        vocab_size=text["vocab_size"],
        rope_theta=float(text["rope_theta"]),
        mrope_sections=tuple(text["mrope_section"]),
        norm_epsilon=text["rms_norm_eps"],
        image_token=settings["special_ids"]["image"],
        padding_token=settings["special_ids"]["pad"],
        max_prompt_length=64,
        vl_num_layers=vl["num_layers"],
        vl_num_attention_heads=vl["num_attention_heads"],
        vl_ffn_hidden_size=4 * text["hidden_size"],
        dit_num_layers=dit["num_layers"],
        dit_num_attention_heads=dit["num_attention_heads"],
        dit_kv_channels=dit["attention_head_dim"],
        dit_ffn_hidden_size=4 * settings["input_embedding_dim"],
        attend_text_every_n_blocks=dit["attend_text_every_n_blocks"],
        head_hidden_size=settings["hidden_size"],
        num_embodiments=settings["max_num_embodiments"],
        max_state_dim=settings["max_state_dim"],
        state_history_length=settings["state_history_length"],
        max_action_dim=settings["max_action_dim"],
        action_horizon=settings["action_horizon"],
        num_action_positions=settings["max_seq_len"],
        num_timestep_buckets=settings["num_timestep_buckets"],
        num_inference_steps=settings["num_inference_timesteps"],
        dropout=dit["dropout"],
        state_dropout_prob=settings["state_dropout_prob"],
        frozen_dtype="as_model",
    )
    return GoldenCase(folder, settings, config)


def golden_case(name: str) -> GoldenCase:
    """A committed golden case by name."""
    return load_case(GOLDEN / name)


def golden_model(
    case: GoldenCase, dtype: torch.dtype = torch.float64, config: GrootN17Config | None = None, **options: Any
) -> GrootN17Model:
    """The case's model with its weights; `options` go to build_module."""
    model = build_module(case.config if config is None else config, **options)
    set_dtypes(model, dtype)
    CONVERTER.load(case.weight_files, model, report=lambda line: None)
    return model


def golden_batch(case: GoldenCase) -> GrootN17Batch:
    """The case's inputs."""
    inputs = case.tensors("inputs")
    valid_BTA = inputs["action_mask"].bool()
    samples, first_patch, first_image = [], 0, 0
    for number, sample in enumerate(case.settings["samples"]):
        grids = inputs["image_grid_thw"][first_image : first_image + len(sample["grids"])]
        patches = int(grids.prod(dim=1).sum())
        samples.append(
            {
                "tokens_BS": inputs["input_ids"][number],
                "token_is_valid_BS": inputs["attention_mask"][number].bool(),
                "pixels_PC": inputs["pixel_values"][first_patch : first_patch + patches],
                "image_grid_I3": grids,
                "state_BHD": inputs["state"][number],
                "state_is_dropped_B": np.bool_(False),
                "embodiment_B": inputs["embodiment_id"][number],
                "actions_BTA": inputs["action"][number],
                "action_is_valid_BTA": valid_BTA[number],
                "action_dim_is_valid_BA": valid_BTA[number].any(dim=0),
                "noise_BTA": inputs["noise"][number],
                "time_B": inputs["time"][number],
                "sample_index_B": np.int64(number),
                "epoch_B": np.int64(0),
            }
        )
        first_patch, first_image = first_patch + patches, first_image + len(grids)
    return Assembler(case.config, share_dtype=np.float64)(samples)


def tiny_config(**changes: Any) -> GrootN17Config:
    """A model of a few thousand parameters, without dropout."""
    small = {"vocab_size": 64, "image_token": 63, "max_prompt_length": 40, "action_horizon": 4, "dropout": 0.0}
    return GrootN17Config(**{**VARIANTS["tiny"], **small, **changes})


def tiny_model(config: GrootN17Config | None = None, dtype: torch.dtype = torch.float64, **options: Any) -> GrootN17Model:
    """A tiny model without a closed branch: every parameter is drawn from N(0, 0.2), so that everything matters."""
    model = build_module(config or tiny_config(), **options)
    set_dtypes(model, dtype)
    initialize_parameters(model, lambda name: normal(0.2), seed=7)
    return model


def tiny_batch(config: GrootN17Config | None = None) -> GrootN17Batch:
    """Two samples: images of two sizes, prompts of two lengths, two embodiments."""
    return fixed_batch(config or tiny_config())


def replaced(batch: GrootN17Batch, **tensors: Tensor) -> GrootN17Batch:
    """`batch` with some tensors exchanged."""
    return dataclasses.replace(batch, **tensors)


def mean_loss(model: GrootN17Model, batch: GrootN17Batch) -> Tensor:
    """Mean over the valid loss elements."""
    loss_sum, count = masked_loss(model(batch), batch.action_is_valid_BTA)
    return loss_sum / count


def released_loss(model: GrootN17Model, batch: GrootN17Batch) -> Tensor:
    """The released reduction, whose denominator has 1e-6 added."""
    loss_sum, count = masked_loss(model(batch), batch.action_is_valid_BTA)
    return loss_sum / (count.to(loss_sum.dtype) + 1e-6)


def gradients(model: GrootN17Model, batch: GrootN17Batch) -> dict[str, Tensor]:
    """Gradients of `released_loss` by parameter name; parameters without one are absent."""
    model.zero_grad()
    released_loss(model, batch).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def our_parts(released: str, tensor: Tensor) -> dict[str, Tensor]:
    """This project's parameters that a released tensor holds, by name."""
    located = GROOT_N1_7_KEYS.all_ours(GROOT_N1_7_KEYS.canonical(released))
    assert located, released
    return {found.ours: found.rename.to_ours(tensor) for found in located}


def our_names(released: str) -> list[str]:
    """This project's names of what a released tensor holds."""
    return [found.ours for found in GROOT_N1_7_KEYS.all_ours(GROOT_N1_7_KEYS.canonical(released))]
