"""Rectangles written by some ranks and read by others, through torch.distributed.checkpoint, in one process."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megatron_vla.training import distributed_checkpoint
from megatron_vla.training.distributed_checkpoint import (
    METADATA_FILE,
    PartReader,
    ReadRequest,
    StorageError,
    files_by_rank,
    num_io_threads,
    write_parts,
)
from megatron_vla.training.tensor_parts import Piece, StoredTensor, flat_range_boxes


@pytest.fixture(scope="module", autouse=True)
def group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def cut_rows(name: str, whole: Tensor, *rows: int) -> StoredTensor:
    """`whole` as pieces that begin at these rows."""
    ends = [*rows[1:], whole.shape[0]]
    pieces = [Piece((a, *(0 for _ in whole.shape[1:])), whole[a:b]) for a, b in zip(rows, ends, strict=True)]
    return StoredTensor(name, tuple(whole.shape), whole.dtype, tuple(pieces))


def test_any_cut_is_read_by_any_other(tmp_path: Path) -> None:
    whole = {
        "a": torch.randn(9, 5),
        "b": torch.arange(24).view(4, 3, 2).to(torch.bfloat16),
        "c": torch.tensor(3, dtype=torch.int64),
    }
    scalar = StoredTensor("c", (), torch.int64, (Piece((), whole["c"]),))
    parts = {"a": cut_rows("a", whole["a"], 0, 2, 3), "b": cut_rows("b", whole["b"], 0, 1), "c": scalar}
    write_parts(tmp_path, parts, None)
    reader = PartReader(tmp_path)
    assert {n: (e.dtype, e.shape) for n, e in reader.entries.items()} == {
        n: (t.dtype, tuple(t.shape)) for n, t in whole.items()
    }
    assert all(torch.equal(reader.read(n), t) and reader.read(n).dtype == t.dtype for n, t in whole.items())
    # A run of the flattened tensor, as a ZeRO rank asks for it, from pieces that were cut by rows.
    flat = torch.full((20,), float("nan"))
    boxes = flat_range_boxes((9, 5), 8, 28)
    pieces = tuple(Piece(b.offsets, r.view(b.sizes)) for b, r in zip(boxes, flat.split([b.volume for b in boxes]), strict=True))
    assert reader.load([ReadRequest("a", StoredTensor("x", (9, 5), torch.float32, pieces))]) == 0.0
    assert torch.equal(flat, whole["a"].reshape(-1)[8:28])
    # One stored tensor may fill several targets.
    twice = [torch.zeros(9, 5), torch.zeros(9, 5, dtype=torch.bfloat16)]
    largest = reader.load([ReadRequest("a", cut_rows("y", t, 0, 4)) for t in twice])
    assert torch.equal(twice[0], whole["a"]) and torch.equal(twice[1], whole["a"].bfloat16())
    assert largest == float((whole["a"] - whole["a"].bfloat16().float()).abs().max())


def test_torchs_own_loader_reads_the_folder(tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    write_parts(tmp_path, {"model.w": cut_rows("model.w", whole, 0, 1, 5)}, None)
    loaded = {"model.w": torch.zeros(6, 4)}
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert torch.equal(loaded["model.w"], whole)


@pytest.mark.parametrize("rows", [(1, 3), (0, 0)], ids=["gap", "overlap"])
def test_gaps_and_overlaps_are_found_when_saving(tmp_path: Path, rows: tuple[int, ...]) -> None:
    whole = torch.randn(6, 4)
    pieces = (Piece((rows[0], 0), whole[rows[0] : 3]), Piece((rows[1], 0), whole[rows[1] :]))
    with pytest.raises(StorageError, match="w"):
        write_parts(tmp_path, {"w": StoredTensor("w", (6, 4), torch.float32, pieces)}, None)
    assert not (tmp_path / METADATA_FILE).exists()


def test_tensor_that_nobody_writes_is_found_when_saving(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no rank writes forgotten"):
        write_parts(
            tmp_path,
            {
                "w": cut_rows("w", torch.zeros(2, 2), 0),
                "forgotten": StoredTensor("forgotten", (3,), torch.float32, ()),
            },
            None,
        )


def test_large_parts_are_written_by_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"model.w{n}": torch.randn(8, 1024) for n in range(5)}
    parts = {name: cut_rows(name, tensor, 0) for name, tensor in tensors.items()}
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert num_io_threads(parts.values()) == 1
    monkeypatch.setattr(distributed_checkpoint, "THREAD_BYTES", 64 << 10)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(16))
    assert num_io_threads(parts.values()) == 3, "160 KiB"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert num_io_threads(parts.values()) == 2, "of 16 cores"
    write_parts(tmp_path, parts, None, num_threads=3)
    assert [path.name for path in files_by_rank(tmp_path)[0]] == ["__0_0.distcp", "__0_1.distcp", "__0_2.distcp"]
    reader = PartReader(tmp_path)
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in tensors.items())

    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    all_read, read = threading.Barrier(5, timeout=60), distributed_checkpoint._read

    def together(*arguments: Any) -> list[Tensor]:
        all_read.wait()
        return read(*arguments)

    targets = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in tensors.items()}
    requests = [ReadRequest(name, cut_rows(name, target, 0, 3)) for name, target in targets.items()]
    with monkeypatch.context() as patch:
        patch.setattr(distributed_checkpoint, "_read", together)
        assert reader.load(requests) == 0.0, "320 KiB"
    assert all(torch.equal(targets[name], tensor.double()) for name, tensor in tensors.items())
    # What the threads round is told by the largest of all.
    rounded = {name: torch.zeros_like(tensor, dtype=torch.bfloat16) for name, tensor in tensors.items()}
    largest = max(float((tensor.bfloat16().double() - tensor.double()).abs().max()) for tensor in tensors.values())
    assert reader.load([ReadRequest(name, cut_rows(name, target, 0)) for name, target in rounded.items()]) == largest
    (tmp_path / "__0_1.distcp").unlink()
    with pytest.raises(ValueError, match=r"__0_1\.distcp"):
        reader.load(requests)


def test_no_thread_writes_checksums_and_torch_keeps_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, bool] = {}
    save, all_save = torch.save, threading.Barrier(3, timeout=60)

    def noted(*arguments: Any, **named: Any) -> None:
        all_save.wait()
        options[threading.current_thread().name] = torch.serialization.get_crc32_options()
        save(*arguments, **named)

    monkeypatch.setattr(torch, "save", noted)
    write_parts(tmp_path, {f"w{n}": cut_rows(f"w{n}", torch.zeros(2, 2), 0) for n in range(3)}, None, num_threads=3)
    assert list(options.values()) == [False] * 3
    assert torch.serialization.get_crc32_options()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_cannot_write_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    another_failed, honest = threading.Event(), os.fsync

    def full_elsewhere(file: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            another_failed.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        assert another_failed.wait(30)
        honest(file)

    monkeypatch.setattr(os, "fsync", full_elsewhere)
    with pytest.raises(StorageError, match="No space left") as failure:
        write_parts(tmp_path, {f"w{n}": cut_rows(f"w{n}", torch.randn(8, 8), 0) for n in range(5)}, None, num_threads=3)
    assert isinstance(failure.value.cause, OSError) and failure.value.cause.errno == errno.ENOSPC
    assert not (tmp_path / METADATA_FILE).exists()


def test_damaged_folders_are_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.metadata: unreadable"):
        PartReader(tmp_path)
    write_parts(tmp_path / "x", {"w": cut_rows("w", torch.zeros(2, 2), 0)}, None)
    reader = PartReader(tmp_path / "x")
    with pytest.raises(ValueError, match="tensor v is missing"):
        reader.read("v")
    (tmp_path / "x" / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match="No such file"):
        reader.read("w")
