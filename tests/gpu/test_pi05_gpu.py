"""Pi0.5 on a GPU: golden numbers, agreement of the attention kernels, no host synchronisation in forward and backward."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))  # the golden cases' reader

from pi05_fixtures import (
    CASE_NAMES,
    golden_batch,
    golden_case,
    golden_model,
    gradients,
    our_name,
    relative_difference,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = torch.device("cuda")


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("dtype", "forward", "backward"),
    [(torch.float64, 1e-9, 1e-9), (torch.float32, 2e-5, 1e-4), (torch.bfloat16, 0.1, 0.2)],
    ids=["fp64", "fp32", "bf16"],
)
@pytest.mark.parametrize("name", CASE_NAMES)
def test_golden_numbers(name: str, dtype: torch.dtype, forward: float, backward: float, backend: Any) -> None:
    case = golden_case(name)
    model = golden_model(case, dtype, attention_backend=backend).to(DEVICE)
    model.mark_dead_parameters()
    batch = golden_batch(case).to(DEVICE)
    with torch.no_grad():
        elements = model(batch).cpu()
        actions = model.sample_actions(batch, case.config.num_inference_steps, case.tensors("inputs")["infer_noise"].to(DEVICE))
    assert relative_difference(elements, case.tensors("forward_fp64")["loss_per_element"]) <= forward
    assert relative_difference(actions.cpu(), case.tensors("infer_fp64")["actions"]) <= forward
    found = gradients(model, batch)
    for released, expected in case.tensors("grads_fp64").items():
        assert relative_difference(found[our_name(released)].cpu(), expected) <= backward, released


@pytest.mark.parametrize("skip_dead", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_forward_and_backward_never_wait_for_the_device(dtype: torch.dtype, skip_dead: bool) -> None:
    case = golden_case("tiny_a")
    model, batch = golden_model(case, dtype, skip_dead_compute=skip_dead).to(DEVICE), golden_batch(case).to(DEVICE)
    gradients(model, batch)  # lazy set-up of libraries may synchronise
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(model, batch)
        model.sample_actions(batch, 2, batch.noise_BTA)
    finally:
        torch.cuda.set_sync_debug_mode("default")
