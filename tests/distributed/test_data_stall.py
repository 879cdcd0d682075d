"""A disk that hangs on one rank ends every rank with the file's name, long before the collective would time out."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path

from worker_pool import free_port

STALL_SECONDS = 1.5


def _run(rank: int, port: int, output: str, in_worker: bool) -> None:
    """Rank 1 never gets its batch: a worker's error is raised, a stuck training process is ended by its watch."""
    import torch
    import torch.distributed as dist

    from megatron_vla.data.watch import DataWatch, StatusBoard
    from megatron_vla.parallel.failure import end_all_ranks, ends_all_ranks

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    sys.stderr = open(output, "w", buffering=1)  # noqa: SIM115
    dist.barrier()
    board = StatusBoard(1)
    watch = DataWatch(board, lambda sample: f"sample {sample} (episode 3, videos/file-007.mp4)", STALL_SECONDS)
    with ends_all_ranks(rank, 2):
        if rank == 0:
            dist.all_reduce(torch.ones(1))
        board.place = 1 if in_worker else 0
        board.note("decode", 41)
        if in_worker:
            time.sleep(STALL_SECONDS)
            raise watch.stalled(STALL_SECONDS)
        with watch.ends_stalled_loading(end_all_ranks) as load:
            load(True)
            time.sleep(60)


def test_P01_a_stall_ends_all_ranks_by_name(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes, outputs = [], []
    # Both cases at once: most of their time is imports.
    for in_worker in (True, False):
        port = free_port()
        for rank in range(2):
            outputs.append(tmp_path / f"{in_worker}{rank}.txt")
            processes.append(context.Process(target=_run, args=(rank, port, str(outputs[-1]), in_worker)))
            processes[-1].start()
    for process in processes:
        process.join(120)
        assert process.exitcode not in (0, None)
    for output in outputs[::2]:
        text = output.read_text()
        assert "rank 1 failed first" in text and "rank 1: no batch for" in text
        assert "decode of sample 41 (episode 3, videos/file-007.mp4)" in text
