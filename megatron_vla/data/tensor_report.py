"""First-batch report of families whose batches hold no plain images: what every tensor looks like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_vla.data.batch import TensorFields

JSON_NAME = "first_batch.json"


def _described(tensor: Tensor) -> dict[str, Any]:
    wide = tensor.double()
    low, high = (float(wide.min()), float(wide.max())) if tensor.numel() else (0.0, 0.0)
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "min": low, "max": high}


def tensor_report(batch: TensorFields, folder: Path | None, *, order_hash: str) -> None:
    """Print dtype, shape and range of every field; write them to `folder`/first_batch.json when given. CPU batch, one rank."""
    tensors = {name: _described(t) for name, t in batch.tensors().items()}
    lines = [f"first batch: order {order_hash}"]
    for name, about in tensors.items():
        shape = " x ".join(map(str, about["shape"]))
        lines.append(f"  {name:<24} {about['dtype']:<8} {shape:<16} {about['min']:.4g} ... {about['max']:.4g}")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / JSON_NAME).write_text(json.dumps({"order_hash": order_hash, "tensors": tensors}, indent=1) + "\n")
    print("\n".join(lines), flush=True)
