"""Tables on the device that tell a kernel over many tensors where they lie and which piece each block takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class BlockMap:
    """Which row (tensor) and which chunk of it each block takes, for tensors of fixed sizes."""

    def __init__(self, sizes: Sequence[int], chunk: int, device: torch.device):
        rows: list[int] = []
        chunks: list[int] = []
        for row, size in enumerate(sizes):
            count = -(-size // chunk)
            rows += [row] * count
            chunks += range(count)
        self.chunk = chunk
        self.num_blocks = len(rows)
        self.row_of_block = torch.tensor(rows, dtype=torch.int32).to(device)
        self.chunk_of_block = torch.tensor(chunks, dtype=torch.int32).to(device)


class AddressTable:
    """Rows of 64-bit words about tensors that may lie elsewhere at every call; sent to the device when an address changed."""

    def __init__(self) -> None:
        self._addresses: tuple[int, ...] = ()
        self._table: Tensor | None = None
        self._captured: list[Tensor] = []

    def of(self, tensors: Sequence[Tensor], words: Callable[[], list[int]]) -> Tensor:
        """The device table; `words` makes it, when these tensors have other addresses than at the last call."""
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        if self._table is not None and addresses == self._addresses:
            return self._table
        host = torch.tensor(words(), dtype=torch.int64).pin_memory()
        self._table = host.to(tensors[0].device, non_blocking=True)
        self._addresses = addresses
        if torch.cuda.is_current_stream_capturing():
            # Every replay copies the host table again.
            self._captured += [host, self._table]
        return self._table
