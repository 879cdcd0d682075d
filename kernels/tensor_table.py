"""Tables on the device that tell a kernel over many tensors where they lie and which piece each block takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

# 2 MiB: tables of up to 21,000 parameters with eight and four words each.
CAPTURE_WORDS = 2**18


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

    def arguments(self) -> tuple[int, int, int, int]:
        """As launchers take them: addresses of rows and chunks by block, number of blocks, elements of a chunk."""
        return self.row_of_block.data_ptr(), self.chunk_of_block.data_ptr(), self.num_blocks, self.chunk


class _CaptureMemory:
    """Device memory for the tables of one captured graph, and what will be written there."""

    def __init__(self, device: torch.device):
        self._memory = torch.empty(CAPTURE_WORDS, dtype=torch.int64, device=device)
        self._words: list[int] = []

    def table(self, words: list[int]) -> Tensor:
        """A piece of the memory. Raises RuntimeError when it is used up."""
        start = len(self._words)
        self._words += words
        if len(self._words) > CAPTURE_WORDS:
            raise RuntimeError(f"the tables of one captured step take more than {CAPTURE_WORDS} words: raise CAPTURE_WORDS")
        return self._memory[start : len(self._words)]

    def write(self) -> None:
        """Send everything, in stream order."""
        if not self._words:
            return
        host = torch.tensor(self._words, dtype=torch.int64).pin_memory()
        self._memory[: len(self._words)].copy_(host, non_blocking=True)


_CAPTURE_MEMORY: ContextVar[_CaptureMemory | None] = ContextVar("memory for the tables of a capture", default=None)


@contextmanager
def tables_of_capture(device: torch.device) -> Iterator[None]:
    """Around the capture of a graph: its tables are allocated before it and written after it.

    Inside, page-locked memory may not be allocated, and device memory would come from the graphs' pool, where the replay of
    another graph may overwrite it.
    """
    if device.type != "cuda":
        yield
        return
    memory = _CaptureMemory(device)
    token = _CAPTURE_MEMORY.set(memory)
    try:
        yield
        memory.write()
    finally:
        _CAPTURE_MEMORY.reset(token)


class AddressTable:
    """Rows of 64-bit words about tensors that may lie elsewhere at every call; sent to the device when an address changed."""

    def __init__(self) -> None:
        self._addresses: tuple[int, ...] = ()
        self._table: Tensor | None = None
        self._captured: list[Tensor] = []

    def of(self, tensors: Sequence[Tensor], words: Callable[[], list[int]]) -> Tensor:
        """The device table; `words` makes it, when these tensors have other addresses than at the last call.

        Raises RuntimeError when it has to be made during a capture outside of `tables_of_capture`.
        """
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        is_capturing = torch.cuda.is_current_stream_capturing()
        if self._table is None or addresses != self._addresses:
            memory = _CAPTURE_MEMORY.get()
            if not is_capturing:
                self._table = torch.tensor(words(), dtype=torch.int64).pin_memory().to(tensors[0].device, non_blocking=True)
            elif memory is not None:
                self._table = memory.table(words())
            else:
                raise RuntimeError("a kernel over many tensors is captured: do it inside tables_of_capture")
            self._addresses = addresses
        if is_capturing:
            # The graph reads it at every replay, when eager calls may long have made another one.
            self._captured.append(self._table)
        return self._table
