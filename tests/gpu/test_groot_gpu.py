"""GR00T N1.7 on a GPU: golden numbers, precisions of the released recipe, no host synchronisation in forward and backward."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the golden cases' reader

from groot_model_fixtures import CASE_NAMES, golden_batch, golden_case, golden_model, gradients, our_parts
from pi05_fixtures import relative_difference

from megatron_vla.models.groot_n1_7.sampling import sample_actions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = torch.device("cuda")


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("dtype", "forward", "backward"),
    [(torch.float64, 1e-9, 1e-9), (torch.float32, 1e-4, 3e-4), (torch.bfloat16, 0.1, 0.3)],
    ids=["fp64", "fp32", "bf16"],
)
@pytest.mark.parametrize("name", CASE_NAMES)
def test_golden_numbers(name: str, dtype: torch.dtype, forward: float, backward: float, backend: Any) -> None:
    case = golden_case(name)
    model = golden_model(case, dtype, attention_backend=backend).to(DEVICE)
    batch = golden_batch(case).to(DEVICE)
    noise_BTA = case.tensors("inputs")["infer_noise"].to(DEVICE)
    with torch.no_grad():
        elements_BTA = torch.where(batch.action_is_valid_BTA, model(batch), 0.0).cpu()
    actions_BTA = sample_actions(model, batch, case.config.num_inference_steps, noise_BTA)
    assert relative_difference(elements_BTA, case.tensors("forward_fp64")["loss_per_element_masked"]) <= forward
    assert relative_difference(actions_BTA.cpu(), case.tensors("infer_fp64")["actions"]) <= forward
    found = gradients(model, batch)
    for released, expected in case.tensors("grads_fp64").items():
        for ours, part in our_parts(released, expected).items():
            assert relative_difference(found[ours].cpu(), part) <= backward, released


@pytest.mark.parametrize("name", CASE_NAMES)
def test_padding_rows_are_as_released_whatever_the_kernel(name: str) -> None:
    """Attention of padding rows is zero, which the loss depends on: kernels disagree about fully masked rows."""
    case = golden_case(name)
    model, batch = golden_model(case, torch.float32).to(DEVICE), golden_batch(case).to(DEVICE)
    features_BSH = model.backbone(batch).cpu()
    assert relative_difference(features_BSH, case.tensors("forward_fp64")["backbone_features"]) <= 1e-4


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast", "autocast_rounded_backbone"])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_forward_and_backward_never_wait_for_the_device(name: str, precision: str) -> None:
    case = golden_case(name)
    config = replace(
        case.config,
        autocast_bf16=precision.startswith("autocast"),
        frozen_dtype="bf16" if precision.endswith("backbone") else "as_model",
        dropout=0.2,
    )
    model = golden_model(case, torch.bfloat16 if precision == "bf16" else torch.float32, config).to(DEVICE)
    batch = golden_batch(case).to(DEVICE)
    found = gradients(model, batch)  # lazy set-up of libraries may synchronise
    assert all(bool(gradient.isfinite().all()) for gradient in found.values())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(model, batch)
        sample_actions(model, batch, 2, batch.noise_BTA)
    finally:
        torch.cuda.set_sync_debug_mode("default")
