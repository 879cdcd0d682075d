"""What the tests of kernels on GPUs share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megatron_vla.kernels import BUILD_COMMAND, load_launcher


def needs_kernel(name: str) -> list[pytest.MarkDecorator]:
    """The marks of a module that tests it."""
    return [
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        pytest.mark.skipif(load_launcher(name) is None, reason=f"kernel not built: {BUILD_COMMAND}"),
    ]


def drawn(*shape: int, seed: int = 0, factor: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers on the GPU, the same ones on every machine."""
    return (factor * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to("cuda", dtype)


def assert_within(found: Tensor, exact: Tensor, *, relative: float, scale: Tensor | float) -> None:
    """`relative` is that of one rounding of the result; before it come fp32 sums of numbers of size `scale`."""
    bound = exact.abs() * relative + scale * 4e-6 + 1e-20
    worst = float(((found.double() - exact).abs() / bound).max())
    assert worst <= 1.0, f"{worst:.2f} times the bound"


def captured(step: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of `step`, which must not wait for the device, and the tensors that replaying it fills."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # libraries find their workspaces
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def with_empty_parameters(model: nn.Module, dtype: torch.dtype, device: str) -> nn.Module:
    """`model` with other parameters of the same shapes; inside FakeTensorMode `device` may be a GPU that is not there."""
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(old.shape, dtype=dtype, device=device)))
    return model
