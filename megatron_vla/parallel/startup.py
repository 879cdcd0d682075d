"""What is looked at when ranks meet: who sits where, whether two share a GPU, and whether they can talk."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_vla.findings import Finding, error

# Large enough to show a dead link on GPUs, small enough to stay under a second on a slow one.
SELF_TEST_BYTES = {"cuda": 64 * 2**20, "cpu": 2**18}


@dataclass(frozen=True)
class RankPlace:
    """One row of the start-up table. `device_id` is unique per physical device (UUID), None for a CPU."""

    rank: int
    local_rank: int
    host: str
    process_id: int
    device: str
    device_id: str | None

    @classmethod
    def of(cls, rank: int, local_rank: int, device: torch.device) -> RankPlace:
        """The row of the calling process."""
        if device.type != "cuda":
            return cls(rank, local_rank, socket.gethostname(), os.getpid(), "cpu", None)
        properties = torch.cuda.get_device_properties(device)
        return cls(rank, local_rank, socket.gethostname(), os.getpid(), f"{device} {properties.name}", str(properties.uuid))


def duplicate_device_findings(places: Sequence[RankPlace]) -> list[Finding]:
    """One error for every physical GPU that two or more ranks hold."""
    holders: dict[tuple[str, str], list[int]] = {}
    for place in places:
        if place.device_id is not None:
            holders.setdefault((place.host, place.device_id), []).append(place.rank)
    return [
        error(
            f"host {host}",
            f"ranks {', '.join(map(str, ranks))} are on one GPU ({device_id})",
            "start at most one rank per GPU; check CUDA_VISIBLE_DEVICES and LOCAL_RANK (torchrun sets LOCAL_RANK)",
        )
        for (host, device_id), ranks in holders.items()
        if len(ranks) > 1
    ]


def self_test(device: torch.device, world_size: int) -> float | None:
    """All-reduce a known tensor over all ranks and compare. Returns bytes per second, None for one rank.

    Raises RuntimeError when the sum is wrong (seen with broken peer-to-peer links).
    """
    if world_size == 1:
        return None
    numel = SELF_TEST_BYTES[device.type] // 4
    values = torch.full((numel,), 1.0 / world_size, device=device)
    dist.all_reduce(values)  # the first one sets connections up; only the second is timed
    values.fill_(1.0)
    float(values[0])
    start = time.perf_counter()
    dist.all_reduce(values)
    float(values[0])  # waits for the device
    seconds = time.perf_counter() - start
    lowest, highest = float(values.min()), float(values.max())
    if lowest != world_size or highest != world_size:
        raise RuntimeError(
            f"all-reduce self-test: expected {world_size} everywhere, found {lowest} to {highest}. "
            "On GPUs try NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 to find the faulty link"
        )
    return numel * 4 / seconds


def place_table(places: Sequence[RankPlace], coordinates: Sequence[tuple[int, int, int]], bandwidth: float | None) -> str:
    """The start-up table as text: rank, host, process, device and (tp, pp, dp)."""
    width = max(len(place.host) for place in places)
    lines = [f"{'rank':>5} {'host':<{width}} {'pid':>8}  tp pp dp  device"]
    for place, (tensor, pipeline, data) in zip(places, coordinates, strict=True):
        lines.append(
            f"{place.rank:>5} {place.host:<{width}} {place.process_id:>8}  {tensor:>2} {pipeline:>2} {data:>2}  {place.device}"
        )
    if bandwidth is not None:
        lines.append(f"all-reduce self-test passed: {bandwidth / 1e9:.2f} GB/s")
    return "\n".join(lines)
