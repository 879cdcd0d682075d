"""One failing rank ends the others quickly and by name; timeouts are short after the first step."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from worker_pool import free_port


def _join(rank: int, port: int) -> Any:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    return dist


def _fail(rank: int, port: int, output: str) -> None:
    """Rank 1 raises and lingers with open connections, as a rank that waits for its data workers would."""
    import torch

    from megatron_vla.parallel.failure import ends_all_ranks

    dist = _join(rank, port)
    sys.stderr = open(output, "w", buffering=1)  # noqa: SIM115
    dist.barrier()
    try:
        with ends_all_ranks(rank, 2):
            if rank == 1:
                raise ValueError("sample 7 (episode 3, frame 2): no such file")
            dist.all_reduce(torch.ones(1))
    except ValueError:
        time.sleep(60)


def _time_out(rank: int, port: int, output: str) -> None:
    """With the long timeout rank 0 waits; with the short one it gives up, and says what rank 1 was doing."""
    import torch

    from megatron_vla.config.parallel import ParallelConfig
    from megatron_vla.parallel.failure import ends_all_ranks
    from megatron_vla.parallel.groups import shorten_timeouts

    dist = _join(rank, port)
    group = dist.new_group()
    if rank == 1:
        time.sleep(2)
    dist.all_reduce(torch.ones(1), group=group)
    groups: Any = SimpleNamespace(
        data_parallel_group=group,
        tensor_model_parallel_group=group,
        pipeline_model_parallel_group=group,
        model_parallel_group=group,
    )
    shorten_timeouts(ParallelConfig(distributed_timeout_minutes=1 / 60), groups)
    try:
        with ends_all_ranks(rank, 2) as watch:
            watch.enter("training iteration 7" if rank == 0 else "waiting for data of iteration 7")
            if rank == 1:  # comes too late, but comes
                while not Path(output).with_name("rank0").exists():
                    time.sleep(0.1)
            dist.all_reduce(torch.ones(1), group=group)
        Path(output).write_text("no timeout")
    except RuntimeError as exception:
        notes = " ".join([str(exception), *exception.__notes__])
        Path(output).write_text(notes)
    os._exit(0)


def start(target: Any, folder: Path) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    port = free_port()
    processes = [context.Process(target=target, args=(rank, port, str(folder / f"rank{rank}"))) for rank in range(2)]
    for process in processes:
        process.start()
    return processes


def test_failure_of_one_rank_ends_the_other_with_the_cause_and_P01_short_timeouts(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    failing = start(_fail, tmp_path / "a")
    waiting = start(_time_out, tmp_path / "b")
    failing[0].join(timeout=90)
    assert failing[0].exitcode == 1, "rank 0 hangs although rank 1 failed"
    assert failing[1].is_alive()
    failing[1].kill()
    message = (tmp_path / "a" / "rank0").read_text()
    assert "rank 0 stops: rank 1 failed first: ValueError: sample 7 (episode 3, frame 2): no such file" in message
    for process in waiting:
        process.join(timeout=90)
    # Rank 1 comes to the collective after rank 0, which owns the store, has gone.
    assert [process.exitcode for process in waiting] == [0, 0], "a rank hangs after the store's owner has ended"
    text = (tmp_path / "b" / "rank0").read_text()
    assert "imed out" in text
    assert re.search(r"while training iteration 7; rank 1: waiting for data of iteration 7 for \d+ s", text)
