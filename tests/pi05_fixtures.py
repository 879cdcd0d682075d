"""Golden Pi0.5 cases and small models for tests.

Shape legend: B samples, V views, T action horizon, A padded action dimensions.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_vla.data.batch import Batch
from megatron_vla.models.common.flow_matching import masked_loss
from megatron_vla.models.common.initialization import initialize_parameters, normal, parameter_seed
from megatron_vla.models.common.precision import set_parameter_dtypes
from megatron_vla.models.pi05.build import FP32_PATTERNS, build_module
from megatron_vla.models.pi05.config import VARIANTS, Pi05Config
from megatron_vla.models.pi05.convert import CONVERTER, fixed_batch
from megatron_vla.models.pi05.key_map import PI05_KEYS
from megatron_vla.models.pi05.model import Pi05Model

GOLDEN = Path(__file__).resolve().parents[0] / "golden" / "pi05"
CASE_NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))


@dataclass(frozen=True)
class GoldenCase:
    """One folder of golden files."""

    folder: Path
    settings: dict[str, Any]
    config: Pi05Config

    def tensors(self, stem: str) -> dict[str, Tensor]:
        """All tensors of `stem`.safetensors or of its numbered parts; empty when the case does not have it."""
        files = (*self.folder.glob(f"{stem}.safetensors"), *sorted(self.folder.glob(f"{stem}.[0-9].safetensors")))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    @property
    def weight_files(self) -> list[Path]:
        """The released-layout checkpoint."""
        return [*self.folder.glob("weights.safetensors"), *sorted(self.folder.glob("weights.[0-9].safetensors"))]

    @property
    def numbers(self) -> dict[str, Any]:
        """numbers_fp64.json."""
        return json.loads((self.folder / "numbers_fp64.json").read_text())

    @property
    def action_dim(self) -> int:
        """The robot's own action dimensions."""
        return int(self.settings["action_dim"])


def load_case(folder: Path) -> GoldenCase:
    """A golden case from its folder."""
    settings = json.loads((folder / "config.json").read_text())
    vision, prefix, expert = settings["vision"], settings["vlm"], settings["expert"]
    config = Pi05Config(
        image_size=vision["image_size"],
        patch_size=vision["patch_size"],
        vision_hidden_size=vision["hidden_size"],
        vision_num_layers=vision["num_hidden_layers"],
        vision_num_attention_heads=vision["num_attention_heads"],
        vision_ffn_hidden_size=vision["intermediate_size"],
        num_layers=prefix["depth"],
        hidden_size=prefix["width"],
        ffn_hidden_size=prefix["mlp_dim"],
        expert_hidden_size=expert["width"],
        expert_ffn_hidden_size=expert["mlp_dim"],
        num_attention_heads=prefix["num_heads"],
        num_query_groups=prefix["num_kv_heads"],
        kv_channels=prefix["head_dim"],
        vocab_size=settings["vocab_size"],
        rope_theta=settings["rope_theta"],
        norm_epsilon=settings["rms_norm_eps"],
        time_min_period=settings["time_min_period"],
        time_max_period=settings["time_max_period"],
        max_action_dim=settings["max_action_dim"],
        action_horizon=settings["action_horizon"],
        max_prompt_length=settings["prompt_len"],
        num_inference_steps=settings["inference_steps"],
    )
    return GoldenCase(folder, settings, config)


def golden_case(name: str) -> GoldenCase:
    """A committed golden case by name."""
    return load_case(GOLDEN / name)


def golden_model(case: GoldenCase, dtype: torch.dtype = torch.float64, **options: Any) -> Pi05Model:
    """The case's model with its weights; `options` go to build_module."""
    model = build_module(case.config, **options)
    set_parameter_dtypes(model, dtype, FP32_PATTERNS)
    CONVERTER.load(case.weight_files, model, report=lambda line: None)
    return model


def golden_batch(case: GoldenCase) -> Batch:
    """The case's inputs; the loss is taken over the robot's own action dimensions."""
    inputs = case.tensors("inputs")
    size = inputs["actions"].shape[0]
    dim_is_valid_BA = (torch.arange(case.config.max_action_dim) < case.action_dim).expand(size, -1)
    return Batch(
        images_BVCHW=inputs["images"].transpose(0, 1).contiguous(),
        camera_is_present_BV=inputs["image_masks"].T.contiguous(),
        tokens_BL=inputs["tokens"],
        token_is_valid_BL=inputs["token_mask"],
        actions_BTA=inputs["actions"],
        action_is_valid_BTA=dim_is_valid_BA[:, None].expand_as(inputs["actions"]).contiguous(),
        action_dim_is_valid_BA=dim_is_valid_BA.contiguous(),
        noise_BTA=inputs["noise"],
        time_B=inputs["time"],
        state_BD=torch.zeros(size, case.config.max_action_dim),
        sample_index_B=torch.arange(size),
        epoch_B=torch.zeros(size, dtype=torch.int64),
    )


def tiny_config(**changes: Any) -> Pi05Config:
    """A model of a few thousand parameters."""
    small = {"image_size": 28, "num_layers": 2, "vocab_size": 64, "max_prompt_length": 8, "action_horizon": 4}
    return Pi05Config(**{**VARIANTS["tiny"], **small, **changes})


def tiny_model(config: Pi05Config | None = None, dtype: torch.dtype = torch.float64, **options: Any) -> Pi05Model:
    """A tiny model without a closed branch: every parameter is drawn from N(0, 0.2), so that everything matters."""
    model = build_module(config or tiny_config(), **options)
    set_parameter_dtypes(model, dtype, FP32_PATTERNS)
    initialize_parameters(model, lambda name: normal(0.2), seed=7)
    return model


def tiny_batch(config: Pi05Config | None = None) -> Batch:
    """Two samples: one view absent once, a full and a short prompt."""
    return fixed_batch(config or tiny_config())


def replaced(batch: Batch, **tensors: Tensor) -> Batch:
    """`batch` with some tensors exchanged."""
    return dataclasses.replace(batch, **tensors)


def mean_loss(model: Pi05Model, batch: Batch) -> Tensor:
    """Mean over the valid loss elements."""
    loss_sum, count = masked_loss(model(batch), batch.action_is_valid_BTA)
    return loss_sum / count


def gradients(model: Pi05Model, batch: Batch) -> dict[str, Tensor]:
    """Gradients of `mean_loss` by parameter name; parameters without one are absent."""
    model.zero_grad()
    mean_loss(model, batch).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_close(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, rtol: float = 1e-12, atol: float = 1e-15
) -> None:
    """`atol` is a share of the largest of all expected gradients."""
    assert found.keys() == expected.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=rtol, atol=atol * scale, msg=name)


def our_name(released: str) -> str:
    """This project's name of a released parameter."""
    canonical = PI05_KEYS.canonical(released)
    tie = PI05_KEYS.tie_of(canonical)
    located = PI05_KEYS.to_ours(tie.names[0] if tie else canonical)
    assert located is not None, released
    return located.ours


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest magnitude of `expected`."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    difference = actual.detach().double() - expected.detach().double()
    return float(difference.abs().max() / expected.detach().double().abs().max().clamp(min=1e-300))


def uniform(seed: int, shape: Sequence[int]) -> Tensor:
    """Reproducible numbers in [-1, 1)."""
    generator = torch.Generator().manual_seed(parameter_seed(seed, "test"))
    return torch.rand(tuple(shape), generator=generator) * 2 - 1
