"""A second CUDA stream for work that does not hold up the first: small kernels fill what large ones leave free.

Autograd runs backward on the streams of forward and puts the waits between them; a captured graph keeps them as branches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """A stream of `device` beside the current one. Devices without streams run everything in order."""

    def __init__(self, device: torch.device):
        # Its kernels are the ones that would otherwise wait for a place.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextmanager
    def beside(self, inputs: Iterable[Tensor]) -> Iterator[None]:
        """Around work on this stream that reads `inputs` of the current one: it starts when what is queued there is done."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        for tensor in inputs:
            # Their memory must not be given away on the current stream while this one still reads it.
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def join(self, outputs: Iterable[Tensor]) -> None:
        """The current stream goes on when everything here is done, and may read `outputs`."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_stream(self._stream)
        for tensor in outputs:
            tensor.record_stream(current)
