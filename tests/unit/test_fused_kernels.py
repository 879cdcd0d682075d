"""What the project's kernels share: the switch, the line of report, the launch. Conditions and references: test_<kernel>."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pi05_fixtures import tiny_config, tiny_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_vla.config.optimization import OptimizationConfig
from megatron_vla.kernels import SELECTION, launch
from megatron_vla.kernels.biased_gelu import op as biased_gelu
from megatron_vla.kernels.gated_gelu import op as gated_gelu
from megatron_vla.kernels.joined_gradients import op as joined_gradients
from megatron_vla.kernels.layer_norm import op as layer_norm
from megatron_vla.kernels.masked_softmax import op as masked_softmax
from megatron_vla.kernels.rms_norm import op as rms_norm
from megatron_vla.models.common.feed_forward import FeedForward
from megatron_vla.models.pi05.family import FAMILY
from megatron_vla.optimizations import fused_kernels
from megatron_vla.optimizations.apply import apply_optimizations

BF16 = torch.bfloat16
# Each on a matrix of 6 rows and 1024 columns and a vector of as many, both bf16.
CONDITIONS: dict[str, tuple[Any, Callable[[Tensor, Tensor], bool]]] = {
    "biased_gelu": (biased_gelu, lambda rows, vector: biased_gelu.can_run(rows, rows, vector)),
    "gated_gelu": (gated_gelu, lambda rows, vector: gated_gelu.can_run(rows)),
    "joined_gradients": (joined_gradients, lambda rows, vector: joined_gradients.can_run(rows, vector, (512, 512))),
    "layer_norm": (layer_norm, lambda rows, vector: layer_norm.can_run(rows, vector, vector, rows)),
    "masked_softmax": (
        masked_softmax,
        lambda rows, vector: masked_softmax.can_run(rows.float().unsqueeze(0), None, 1024, BF16),
    ),
    "rms_norm": (rms_norm, lambda rows, vector: rms_norm.can_run(rows, vector, rows)),
}


@contextmanager
def autocast_on_gpus() -> Iterator[None]:
    """`torch.autocast("cuda")` does nothing where there is no GPU."""
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions_and_switch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, can_run = CONDITIONS[name]
    monkeypatch.setattr(op, "IS_BUILT", True)
    assert not can_run(torch.zeros(6, 1024, dtype=BF16), torch.zeros(1024, dtype=BF16)), "on a CPU"
    with FakeTensorMode():
        rows, vector = (torch.empty(*shape, 1024, dtype=BF16, device="cuda") for shape in ((6,), ()))
        assert can_run(rows, vector)
        with autocast_on_gpus():
            # Plain operations give another dtype then.
            assert can_run(rows, vector) is (name not in ("biased_gelu", "layer_norm"))
        if name != "masked_softmax":
            assert not can_run(rows.half(), vector.half())
        monkeypatch.setattr(SELECTION, "enabled", False)
        assert not can_run(rows, vector)
        monkeypatch.setattr(SELECTION, "enabled", True)
        monkeypatch.setattr(op, "IS_BUILT", False)
        assert not can_run(rows, vector)


def test_the_report_is_of_the_layers_as_they_are_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers in FP8 and layers that recompute have a forward of their own."""
    monkeypatch.setattr(SELECTION, "enabled", True)

    def fuses(model: nn.Module, config: OptimizationConfig) -> bool:
        return any(layer.can_fuse_bias for layer in model.modules() if isinstance(layer, FeedForward))

    monkeypatch.setattr(fused_kernels, "KERNELS", (("GELU", "biased_gelu", True, fuses),))
    listed = tmp_path / "fp8.json"
    listed.write_text(json.dumps({"modules": [f"vision_tower.layers.{n}.mlp.fc1" for n in range(2)]}))
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "fp8": {"fp8": "native", "fp8_module_list": str(listed)},
        "recomputed": {"activation_checkpoint_module_patterns": ("vision_tower.layers.*.mlp.fc1",)},
        "recomputed outside": {"activation_checkpoint_module_patterns": ("vision_tower.layers.*",)},
    }
    for name, switches in options.items():
        lines: list[str] = []
        model = tiny_model(tiny_config(vision_ffn_hidden_size=64), dtype=BF16)
        apply_optimizations(model, OptimizationConfig(attention_backend="sdpa", **switches), FAMILY, lines.append)
        found = [line for line in lines if line.startswith("GELU")]
        assert found == (["GELU: the fused kernel"] if name in ("plain", "recomputed outside") else []), (name, lines)


def test_launches_go_to_the_gpu_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [torch.device("cuda:0")]

    @contextmanager
    def guard(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", guard)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=100 + device.index))
    seen: list[tuple[Any, ...]] = []

    def launcher(*arguments: int) -> int:
        seen.append((current[0], *arguments))
        return arguments[0]

    launch(launcher, torch.device("cuda:1"), 0, 7)
    assert seen == [(torch.device("cuda:1"), 0, 7, 101)] and current == [torch.device("cuda:0")]
    with pytest.raises(RuntimeError, match="the kernel launcher was not launched: CUDA error 3"):
        launch(launcher, torch.device("cuda:1"), 3)
