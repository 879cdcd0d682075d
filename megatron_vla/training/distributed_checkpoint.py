"""Sharded tensor storage on torch.distributed.checkpoint: every rank writes and reads the rectangles that it holds.

One format for all runs, from one process to many: a folder of `__RANK_N.distcp` files and `.metadata` (torch's own layout, so
torch's tools read it too). Tensors are stored under their global shapes; a reader asks for the rectangles that it needs and
never learns how many ranks wrote them. Single files for evaluation and release are made by tools/convert_checkpoint.py.
`.metadata` is a pickle, as torch defines it: load checkpoints from sources that you trust.
"""

from __future__ import annotations

import io
import logging
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_vla.training.tensor_parts import Piece, StoredTensor

# Inside a checkpoint folder.
TENSOR_FOLDER = "tensors"
METADATA_FILE = ".metadata"

# One thread writes 1 GB/s into memory and reads up to twice as much (two cores), and base Pi0.5 is 40 GB with its optimizer.
# So several threads write, each a file of its own, and several read; small parts, as of many ranks, stay one file.
THREAD_BYTES = 1 << 30
MAX_THREADS = 8


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=piece.tensor.shape)


class _SavePlanner(DefaultSavePlanner):
    """Writes every piece that it is given; the base class checks that pieces do not overlap."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces: dict[tuple[str, torch.Size], Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        """One write item per piece. The plan carries all names that this rank has, written here or elsewhere."""
        items = []
        for name, stored in self.state_dict.items():
            for piece in stored.pieces:
                chunk = _chunk(piece)
                self.pieces[name, chunk.offsets] = piece.tensor
                properties = TensorProperties(dtype=stored.dtype)
                data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(stored.global_shape))
                items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items, planner_data=tuple(self.state_dict))
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """As the base class; a tensor that nobody writes is an error at save time and not when it is missed."""
        plans, metadata = super().create_global_plan(all_plans)
        forgotten = {name for plan in all_plans for name in plan.planner_data} - set(metadata.state_dict_metadata)
        if forgotten:
            raise ValueError(f"no rank writes {', '.join(sorted(forgotten)[:8])}")
        for name, stored in metadata.state_dict_metadata.items():
            entry: Any = stored
            # Pieces do not overlap (the base class looked), so equal volumes mean that they cover the tensor.
            written = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if written != math.prod(entry.size):
                raise ValueError(f"{name}: ranks write {written} of {math.prod(entry.size)} elements")
        # Names were for the coordinator; the ranks need not get them back.
        return [replace(plan, planner_data=None) for plan in plans], metadata

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The memory of one piece."""
        assert write_item.index.offset is not None
        return self.pieces[write_item.index.fqn, write_item.index.offset]


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """torch warns that a single process is a single process; it is meant here. Its plan errors are raised as well as logged."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    finally:
        logger.setLevel(level)


class StorageError(Exception):
    """A write failed on some rank. `cause` is the first failing rank's exception."""

    def __init__(self, rank: int, cause: BaseException):
        super().__init__(f"rank {rank}: {cause}")
        self.rank = rank
        self.cause = cause


def _cuda_stream() -> torch.cuda.Stream | None:
    """The stream that this thread's GPU work is on."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


def _go_on_with(stream: torch.cuda.Stream | None) -> None:
    """A new thread begins on the first GPU's default stream, which waits for nothing that the run's own stream still does."""
    if stream is not None:
        torch.cuda.set_stream(stream)


def num_io_threads(parts: Iterable[StoredTensor]) -> int:
    """Threads that write or read this rank's pieces: one for each GiB, as far as there are cores."""
    num_bytes = sum(piece.tensor.nbytes for stored in parts for piece in stored.pieces)
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MAX_THREADS, cores, math.ceil(num_bytes / THREAD_BYTES)))


class _Writer(dcp.FileSystemWriter):
    """Fails when one of its threads does: torch's prints the error, and describes what the other threads wrote."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """torch's; raises what a thread raised."""
        failures: list[BaseException] = []
        create_stream = self.fs.create_stream
        checksums, cuda_stream = torch.serialization.get_crc32_options(), _cuda_stream()

        @contextmanager
        def watched(*arguments: Any) -> Iterator[io.IOBase]:
            # Entered by every writing thread. torch.save's CRC-32 takes two thirds of a thread's time (0.35 GB/s with it, 0.96
            # without), and torch.load never looks at it.
            _go_on_with(cuda_stream)
            torch.serialization.set_crc32_options(False)
            try:
                with create_stream(*arguments) as stream:
                    yield stream
            except BaseException as failure:
                failures.append(failure)
                raise

        self.fs.create_stream = watched  # type: ignore[method-assign, assignment]
        try:
            done = super().write_data(plan, planner)
        finally:
            self.fs.create_stream = create_stream  # type: ignore[method-assign]
            torch.serialization.set_crc32_options(checksums)
        if failures:
            raise failures[0]
        if (written := len(done.wait())) != len(plan.items):
            raise OSError(f"{len(plan.items) - written} of {len(plan.items)} pieces were not written")
        return done


def write_parts(folder: Path, parts: Mapping[str, StoredTensor], group: Any, num_threads: int = 1) -> None:
    """Write each rank's pieces under `folder`, flushed; collective over `group` (gloo). All ranks return when all are done.

    Raises StorageError on every rank when one of them could not write.
    """
    single = dist.get_world_size(group) == 1
    # Nothing is copied ahead: a single thread does so on the stream where it began, which a background save's thread has on the
    # first GPU (and a context of 500 MiB there, for every rank).
    writer = _Writer(folder, sync_files=True, overwrite=False, thread_count=num_threads, per_thread_copy_ahead=0)
    try:
        with _quiet_torch():
            dcp.save(dict(parts), storage_writer=writer, planner=_SavePlanner(), process_group=group, no_dist=single)
    except CheckpointException as exception:
        rank, (cause, _) = min(exception.failures.items())
        raise StorageError(rank, cause) from cause


def files_by_rank(folder: Path) -> dict[int, list[Path]]:
    """Files that hold tensors, by the rank that wrote them, as `.metadata` says."""
    files: dict[int, list[Path]] = {}
    for name in sorted({stored.relative_path for stored in dcp.FileSystemReader(folder).read_metadata().storage_data.values()}):
        files.setdefault(int(name.split("_")[2]), []).append(folder / name)
    return files


@dataclass(frozen=True)
class StoredEntry:
    """Dtype and global shape of one stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ReadRequest:
    """Fill the pieces of `target` from the stored tensor `source`."""

    source: str
    target: StoredTensor


class _LoadPlanner(LoadPlanner):
    """Fills rectangles of live tensors; notes the largest change where the stored dtype is another."""

    def __init__(self, requests: Sequence[ReadRequest]):
        self.requests = requests
        self.differences: list[Tensor] = []
        self._pieces: dict[MetadataIndex, Tensor] = {}
        self._waiting: Tensor | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Called first by torch."""
        assert metadata is not None
        self._metadata = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """The stored rectangles that overlap ours; the number of the request is part of the destination's name."""
        items: list[ReadItem] = []
        for number, request in enumerate(self.requests):
            chunks = [_chunk(piece) for piece in request.target.pieces]
            key = f"{number}:{request.source}"
            for chunk, piece in zip(chunks, request.target.pieces, strict=True):
                self._pieces[MetadataIndex(key, chunk.offsets)] = piece.tensor
            stored: Any = self._metadata[request.source]
            for item in create_read_items_for_chunk_list(request.source, stored, chunks):
                items.append(replace(item, dest_index=MetadataIndex(key, item.dest_index.offset)))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Ranks read independently."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Nothing to adjust."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Only tensors are stored."""
        raise ValueError(f"{read_item.storage_index.fqn} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where torch copies to: our memory, or a buffer of the stored dtype whose rounding is then measured."""
        target = self._target(read_item)
        stored: Any = self._metadata[read_item.storage_index.fqn]
        if stored.properties.dtype == target.dtype:
            return target
        self._waiting = torch.empty(target.shape, dtype=stored.properties.dtype)
        return self._waiting

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """After the copy."""
        if self._waiting is None:
            return
        target = self._target(read_item)
        target.copy_(tensor)
        if tensor.numel():
            self.differences.append((target.cpu().double() - tensor.double()).abs().max())
        self._waiting = None

    def _target(self, read_item: ReadItem) -> Tensor:
        target = self._pieces[read_item.dest_index]
        for axis, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(axis, offset, length)
        return target


class _Reader(dcp.FileSystemReader):
    """Knows the metadata, which are read once for all threads and however often tensors are asked for."""

    def __init__(self, folder: Path, metadata: Metadata):
        super().__init__(folder)
        self._known = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is known."""
        return self._known


def _read(folder: Path, metadata: Metadata, requests: Sequence[ReadRequest]) -> list[Tensor]:
    """Fill the requested pieces, in any thread; the largest change of each whose dtype is another."""
    planner = _LoadPlanner(requests)
    # Gradient mode belongs to a thread.
    with torch.no_grad():
        dcp.load({}, storage_reader=_Reader(folder, metadata), planner=planner, no_dist=True)
    return planner.differences


class PartReader:
    """Tensors of one folder that `write_parts` wrote. Each rank reads alone: no communication.

    Raises ValueError when the folder has no readable metadata.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self._metadata = metadata = dcp.FileSystemReader(folder).read_metadata()
        except Exception as exception:
            raise ValueError(f"{folder / METADATA_FILE}: unreadable ({exception})") from exception
        self.entries: dict[str, StoredEntry] = {}
        for name, stored in metadata.state_dict_metadata.items():
            entry: Any = stored
            self.entries[name] = StoredEntry(entry.properties.dtype, tuple(entry.size))

    def load(self, requests: Sequence[ReadRequest]) -> float:
        """Fill every requested piece; returns the largest change by a difference of dtypes (0 when there is none)."""
        # Each holds one stored tensor at a time. One call for a thread's share: torch's calls take milliseconds each.
        count = num_io_threads(request.target for request in requests)
        shares = [share for number in range(count) if (share := requests[number::count])]
        with _quiet_torch(), ThreadPoolExecutor(count, initializer=_go_on_with, initargs=(_cuda_stream(),)) as pool:
            try:
                found = list(pool.map(partial(_read, self.folder, self._metadata), shares))
            except CheckpointException as exception:
                raise ValueError(f"{self.folder}: {min(exception.failures.items())[1][0]}") from exception
        return max((float(difference) for differences in found for difference in differences), default=0.0)

    def read(self, name: str) -> Tensor:
        """One whole tensor on the CPU, in its stored dtype. Raises ValueError naming the folder when it is not there."""
        if name not in self.entries:
            raise ValueError(f"{self.folder}: tensor {name} is missing; the folder is not a checkpoint of this model")
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        piece = Piece(tuple(0 for _ in entry.shape), tensor)
        self.load([ReadRequest(name, StoredTensor(name, entry.shape, entry.dtype, (piece,)))])
        return tensor
