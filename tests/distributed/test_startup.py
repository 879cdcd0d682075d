"""What is refused before ranks meet, and what the start-up table says."""

from __future__ import annotations

import pytest
import torch

from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.findings import CheckError
from megatron_vla.parallel import groups
from megatron_vla.parallel.startup import RankPlace, duplicate_device_findings, place_table


def places(ids: list[str]) -> list[RankPlace]:
    return [
        RankPlace(rank, rank, "node1" if rank < 2 else "node2", 100 + rank, f"cuda:{rank}", i) for rank, i in enumerate(ids)
    ]


def test_P03_two_ranks_on_one_gpu_are_named() -> None:
    assert duplicate_device_findings(places(["a", "b", "a", "b"])) == []  # equal ids on two hosts are two devices
    (finding,) = duplicate_device_findings(places(["a", "a", "b", "c"]))
    assert "host node1" in finding.where and "ranks 0, 1 are on one GPU (a)" in finding.what
    assert "CUDA_VISIBLE_DEVICES" in finding.fix


def test_P03_more_ranks_than_gpus_is_refused_before_any_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 ranks .* 1 visible GPU\(s\) \(CUDA_VISIBLE_DEVICES=0\).*--nproc-per-node 1"):
        groups._local_device(0, 2)
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(ValueError, match="LOCAL_RANK is not: every rank would take GPU 0"):
        groups._local_device(0, 2)


def test_P03_device_comes_from_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert groups._local_device(3, 4) == torch.device("cuda", 3) and chosen == [3]


def test_layout_that_does_not_fill_the_world_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(CheckError, match=r"2 x 1 = 2 does not divide the 3 rank"):
        groups.initialize(ParallelConfig(tensor_model_parallel_size=2))


def test_world_size_without_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match="start with torchrun"):
        groups.initialize(ParallelConfig())


def test_table_shows_every_rank() -> None:
    text = place_table(places(["a", "b"]), [(0, 0, 0), (0, 0, 1)], 2e9)
    lines = text.splitlines()
    assert lines[2].split() == ["1", "node1", "101", "0", "0", "1", "cuda:1"] and lines[-1].endswith("2.00 GB/s")
