"""A forward pass on a fixed input: is a loaded model finite, and does it still compute what it computed before?"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from megatron_vla.data.batch import TensorFields

REFERENCE_FILE = "forward_reference.safetensors"
_OUTPUT = "loss_elements_BTA"


@dataclass(frozen=True)
class ForwardCheck:
    """Loss elements' mean on the fixed input, and the largest relative difference from the reference (None: no reference)."""

    mean: float
    difference: float | None


def check_forward(model: nn.Module, batch: TensorFields, reference: Path | None, tolerance: float) -> ForwardCheck:
    """Run `model` on `batch`, or on the reference file's own batch, and compare with its stored loss elements.

    Raises ValueError when the output is not finite or differs by more than `tolerance` of the largest stored element.
    """
    stored = load_file(reference) if reference is not None else {}
    if stored:
        batch = dataclasses.replace(batch, **{name: stored[name] for name in batch.tensors()})
    with torch.no_grad():
        output = model(batch).double()
    if not bool(output.isfinite().all()):
        raise ValueError("the loaded model gives non-finite loss elements on a fixed input: the checkpoint is damaged")
    mean = float(output.mean())
    if not stored:
        return ForwardCheck(mean, None)
    expected = stored[_OUTPUT].double()
    difference = float((output - expected).abs().max() / expected.abs().max())
    if difference > tolerance:
        raise ValueError(
            f"{reference}: loss elements differ by {difference:.3g} of the largest one (allowed {tolerance:.3g}): the loaded "
            "weights do not compute what the reference was made with; convert again from the original files"
        )
    return ForwardCheck(mean, difference)


def write_reference(model: nn.Module, batch: TensorFields, path: Path) -> None:
    """Store `batch` and the model's loss elements for a later `check_forward`."""
    with torch.no_grad():
        output = model(batch)
    save_file({**{k: v.contiguous() for k, v in batch.tensors().items()}, _OUTPUT: output.contiguous()}, path)
