"""Process groups of one run: torch.distributed, megatron-core's parallel state, and a gloo group for the hosts.

Works under torchrun (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and as a plain single process. NCCL on GPUs,
gloo on CPU. The tensor- and pipeline-parallel ranks come from megatron-core, so a rank's place is what a Megatron user expects
(order tp, dp, pp).
"""

from __future__ import annotations

import math
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.findings import CheckError, Finding, error, raise_errors
from megatron_vla.parallel.cpu import install_cpu_shims
from megatron_vla.parallel.multiprocessors import communicator_config, leave_free, use_all_again
from megatron_vla.parallel.startup import RankPlace, duplicate_device_findings, place_table, self_test


@dataclass(frozen=True)
class ParallelGroups:
    """Where this process stands and whom it talks to.

    `host_group` is a gloo group of all ranks with the long start-up timeout for ever: agreements between hosts (stop signals,
    checkpoint barriers, log windows) that must not touch the accelerator.
    """

    world_size: int
    rank: int
    local_rank: int
    device: torch.device
    data_parallel_rank: int
    data_parallel_size: int
    data_parallel_group: Any
    tensor_model_parallel_rank: int
    tensor_model_parallel_size: int
    tensor_model_parallel_group: Any
    pipeline_model_parallel_rank: int
    pipeline_model_parallel_size: int
    pipeline_model_parallel_group: Any
    model_parallel_group: Any
    host_group: Any

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints and writes."""
        return self.rank == 0


def world_size_from_environment() -> int:
    """Number of processes of this run as the launcher says (1 without a launcher)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _local_device(local_rank: int, world_size: int) -> torch.device:
    """This rank's device, set as the current one before any CUDA call makes a context on GPU 0."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if world_size > 1 and "LOCAL_RANK" not in os.environ:
        raise ValueError(
            "WORLD_SIZE is set but LOCAL_RANK is not: every rank would take GPU 0. Start with torchrun, or set LOCAL_RANK"
        )
    num_devices = torch.cuda.device_count()
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    if local_world_size > num_devices:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise ValueError(
            f"{local_world_size} ranks on host {socket.gethostname()} but {num_devices} visible GPU(s) "
            f"(CUDA_VISIBLE_DEVICES={visible}): two ranks cannot share one GPU. Use torchrun --nproc-per-node {num_devices} "
            "or make more GPUs visible"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def layout_size_findings(parallel: ParallelConfig, world_size: int) -> list[Finding]:
    """Tensor- and pipeline-parallel sizes that cannot fill a world of `world_size` ranks; no process meets another for this."""
    tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    sizes = (("--tensor-model-parallel-size", tensor), ("--pipeline-model-parallel-size", stages))
    bad = [error(flag, f"{size} is not a positive size", f"use {flag} 1 or more") for flag, size in sizes if size < 1]
    if bad or world_size % (tensor * stages) == 0:
        return bad
    working = math.gcd(tensor, world_size)
    working_stages = math.gcd(stages, world_size // working)
    return [
        error(
            "--tensor-model-parallel-size x --pipeline-model-parallel-size",
            f"{tensor} x {stages} = {tensor * stages} does not divide the {world_size} rank(s) of this run",
            f"start a multiple of {tensor * stages} ranks, or use --tensor-model-parallel-size {working} "
            f"--pipeline-model-parallel-size {working_stages}",
        )
    ]


def _join(device: torch.device, rank: int, world_size: int, timeout: timedelta) -> None:
    """torch.distributed.init_process_group, through the launcher's store or, for a single process, through a local one."""
    options: dict[str, Any] = {"timeout": timeout, "rank": rank, "world_size": world_size}
    if device.type == "cuda":
        # device_id binds the communicators to this GPU: barriers and lazy NCCL set-up then never guess a device.
        options |= {"backend": "nccl", "device_id": device}
    else:
        options["backend"] = "gloo"
    if "MASTER_ADDR" in os.environ and "RANK" in os.environ:
        dist.init_process_group(init_method="env://", **options)
    elif world_size == 1:
        dist.init_process_group(store=dist.HashStore(), **options)
    else:
        raise ValueError(f"WORLD_SIZE={world_size} but RANK or MASTER_ADDR is not set: start with torchrun")


def initialize(parallel: ParallelConfig, *, quiet: bool = False) -> ParallelGroups:
    """Join the run and build every group. Prints the start-up table on rank 0 (unless `quiet`).

    Raises ValueError or CheckError for a layout that cannot work; the device and layout checks come before any collective.
    """
    world_size = world_size_from_environment()
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    raise_errors(layout_size_findings(parallel, world_size))
    device = _local_device(local_rank, world_size)
    install_cpu_shims()
    # Until the first step is done ranks may lawfully be minutes apart (data checks, weights, compilation).
    startup_timeout = timedelta(minutes=parallel.distributed_startup_timeout_minutes)
    _join(device, rank, world_size, startup_timeout)
    host_group = dist.new_group(backend="gloo", timeout=startup_timeout)
    place = RankPlace.of(rank, local_rank, device)
    places: list[Any] = [None] * world_size
    dist.all_gather_object(places, place, group=host_group)
    # Through gloo and before NCCL: two ranks on one GPU would hang or fail without a word about the cause there.
    findings = duplicate_device_findings(places)
    if findings:
        raise CheckError(findings)
    groups = _build_groups(parallel, rank, local_rank, device, host_group)
    leave_free(parallel, groups.data_parallel_size)
    _connect(groups)
    coordinates: list[Any] = [None] * world_size
    mine = (groups.tensor_model_parallel_rank, groups.pipeline_model_parallel_rank, groups.data_parallel_rank)
    dist.all_gather_object(coordinates, mine, group=host_group)
    bandwidth = self_test(device, world_size)
    if rank == 0 and not quiet:
        print(place_table(places, coordinates, bandwidth), flush=True)
    return groups


@contextmanager
def _communicators_on_first_use() -> Iterator[None]:
    """Groups made meanwhile get their NCCL communicator with their first collective.

    While the default group is bound to a device, each new group gets one at once: megatron-core's 23, most of which nothing
    here ever uses, held 7 GiB of an H200 in a run of one process.
    """
    default = dist.group.WORLD
    assert default is not None, "after init_process_group"
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound


def _connect(groups: ParallelGroups) -> None:
    """NCCL communicators of the groups that layouts use, before the first step: a link that is down shows here, and pipeline
    stages find theirs made whichever of them sends first."""
    if groups.device.type != "cuda":
        return
    members = (
        groups.data_parallel_group,
        groups.tensor_model_parallel_group,
        groups.pipeline_model_parallel_group,
        groups.model_parallel_group,
    )
    # All ranks go through the kinds in this order, so that none waits for one that waits for it.
    for group in (member for member in members if member.size() > 1):
        # What torch.distributed itself calls for bound groups. A communicator that a collective makes would not serve single
        # messages: each pair of interleaved stages would get one of its own.
        group._get_backend(groups.device).eager_connect_single_device(groups.device)


def _build_groups(
    parallel: ParallelConfig, rank: int, local_rank: int, device: torch.device, host_group: Any
) -> ParallelGroups:
    """megatron-core's parallel state, read into one frozen record."""
    with warnings.catch_warnings():
        # The import announces which optional NVIDIA packages are absent; nothing here uses them.
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state

    with _communicators_on_first_use(), communicator_config(parallel) as communicators:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
            context_parallel_size=parallel.context_parallel_size,
            nccl_communicator_config_path=communicators,
            distributed_timeout_minutes=math.ceil(parallel.distributed_startup_timeout_minutes),
            # Host-side agreements go through host_group; megatron-core's gloo twins would double the number of groups.
            create_gloo_process_groups=False,
        )
    return ParallelGroups(
        world_size=dist.get_world_size(),
        rank=rank,
        local_rank=local_rank,
        device=device,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        data_parallel_group=parallel_state.get_data_parallel_group(),
        tensor_model_parallel_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        tensor_model_parallel_group=parallel_state.get_tensor_model_parallel_group(),
        pipeline_model_parallel_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        pipeline_model_parallel_group=parallel_state.get_pipeline_model_parallel_group(),
        model_parallel_group=parallel_state.get_model_parallel_group(),
        host_group=host_group,
    )


def shorten_timeouts(parallel: ParallelConfig, groups: ParallelGroups) -> None:
    """Collective timeouts from long to short; called once, after the first step. `host_group` keeps the long one."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    members = (
        None,
        groups.data_parallel_group,
        groups.tensor_model_parallel_group,
        groups.pipeline_model_parallel_group,
        groups.model_parallel_group,
    )
    for group in members:
        _set_pg_timeout(timeout, group)


def shut_down() -> None:
    """Leave every group; a later `initialize` in the same process starts clean."""
    from megatron.core import parallel_state

    use_all_again()
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
