"""Save checkpoints: every rank writes its own part, atomically as a whole; in the background with --async-save.

A save is: rank 0 makes a temporary folder; all ranks write their tensors into it; rank 0 adds the small files, seals the
folder under its final name and only then moves the pointer. A process that dies anywhere in between leaves the previous
checkpoint valid. In the background the same happens on a copy in host memory, in a thread with a process group of its own, so
that training's collectives and the writer's never meet.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vla.config.run import RunConfig
from megatron_vla.data.pack_sampler import gathered_state
from megatron_vla.parallel.groups import ParallelGroups
from megatron_vla.training import checkpoint_folder, random_state
from megatron_vla.training.checkpoint import FORMAT, RNG_FILE, TrainState, contents
from megatron_vla.training.distributed_checkpoint import (
    TENSOR_FOLDER,
    StorageError,
    files_by_rank,
    num_io_threads,
    write_parts,
)
from megatron_vla.training.tensor_file import write_tensors
from megatron_vla.training.tensor_parts import Piece, StoredTensor, assign_writers, holdings, only_written
from megatron_vla.version import code_versions

# Network file systems show new files to other hosts with a delay.
SHARED_FOLDER_SECONDS = 30.0


@dataclass(frozen=True)
class Snapshot:
    """Everything of one checkpoint that this rank writes. `random_states` and `state` are None on ranks other than 0."""

    iteration: int
    parts: dict[str, StoredTensor]
    random_states: dict[str, Tensor] | None
    state: dict[str, Any] | None


def _state_json(
    state: TrainState,
    config: RunConfig,
    groups: ParallelGroups,
    order_hash: str,
    packs: dict[str, Any] | None,
    fp8_magnitudes: dict[str, Any],
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "iteration": state.iteration,
        "consumed_samples": state.consumed_samples,
        "empty_slots": state.empty_slots,
        "packing": packs,
        "fp8_magnitudes": fp8_magnitudes,
        "optimizer_step": state.optimizer.param_groups[0]["step"],
        "learning_rate_of_next_step": state.schedule.learning_rate(state.consumed_slots),
        "schedule": dataclasses.asdict(state.schedule),
        "global_batch_size": config.global_batch_size(groups.world_size),
        "world_size": groups.world_size,
        # For people: a checkpoint loads into any layout.
        "layout": {
            "tensor": groups.tensor_model_parallel_size,
            "pipeline": groups.pipeline_model_parallel_size,
            "data": groups.data_parallel_size,
        },
        "order_hash": order_hash,
        "has_average": state.average is not None,
        "versions": code_versions(),
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _write_small_files(temporary: Path, snapshot: Snapshot, config: RunConfig, preprocessor: Any) -> None:
    assert snapshot.random_states is not None
    write_tensors(temporary / RNG_FILE, snapshot.random_states)
    checkpoint_folder.write_text(temporary / checkpoint_folder.CONFIG_FILE, json.dumps(config.to_dict(), indent=1))
    if preprocessor is not None:
        folder = temporary / checkpoint_folder.PREPROCESSOR_FOLDER
        folder.mkdir()
        preprocessor.save(folder)


def _explained(root: Path, iteration: int, cause: BaseException) -> str:
    """The error of a failed save: cause, last valid checkpoint, what to do."""
    problem = cause.cause if isinstance(cause, StorageError) else cause
    advice = "check --save"
    if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(root).free / 2**30 if root.exists() else 0.0
        advice = f"{free:.1f} GiB are free there: make room, use --keep-last, or --save elsewhere"
    intact, _ = checkpoint_folder.find_latest(root)
    last = f"the last checkpoint {intact.path} is intact" if intact else "there is no earlier checkpoint"
    return f"checkpoint of iteration {iteration} could not be written to {root}: {cause}; {last}; {advice}"


class HostCopies:
    """Copies of device tensors in host memory, made fast by page-locked buffers that the next save uses again."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def take(self, parts: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        """`parts` with memory of their own. When this returns the originals may change."""
        copies = {
            name: dataclasses.replace(p, pieces=tuple(self._copy(name, i) for i in p.pieces)) for name, p in parts.items()
        }
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return copies

    def _copy(self, name: str, piece: Piece) -> Piece:
        buffer = self._buffers.get((name, piece.offsets))
        if buffer is None or buffer.shape != piece.tensor.shape or buffer.dtype != piece.tensor.dtype:
            buffer = torch.empty(piece.tensor.shape, dtype=piece.tensor.dtype, pin_memory=piece.tensor.is_cuda)
            self._buffers[name, piece.offsets] = buffer
        buffer.copy_(piece.tensor, non_blocking=True)
        return Piece(piece.offsets, buffer)


class CheckpointSaver:
    """Writes the checkpoints of one run, one at a time. Made, and called, by all ranks together."""

    def __init__(self, config: RunConfig, groups: ParallelGroups, supply: Any):
        assert config.checkpoint.save is not None
        self.config = config
        self.groups = groups
        self.supply = supply
        self.root = Path(config.checkpoint.save)
        self.in_background = config.checkpoint.async_save
        self._group = groups.host_group
        if self.in_background and groups.world_size > 1:
            timeout = timedelta(minutes=config.parallel.distributed_startup_timeout_minutes)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._copies = HostCopies()
        self._mine: set[tuple[str, tuple[int, ...]]] | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._lines: list[str] = []

    def save(self, state: TrainState) -> list[str]:
        """Write SAVE/iter_N, or start to; returns lines to print. Waits for a background save that is still going on.

        Raises RuntimeError on every rank, naming the cause and the last valid checkpoint, when the disk does not take it.
        """
        lines = self.finish()
        start = time.perf_counter()
        snapshot = self._snapshot(state)
        path = checkpoint_folder.iteration_folder(self.root, snapshot.iteration)
        if not self.in_background:
            self._write(snapshot)
            return [*lines, f"saved {path} in {time.perf_counter() - start:.1f} s"]
        copied = time.perf_counter() - start
        # A daemon: a run that fails must not hang in its exit because peers that the writer waits for are gone.
        self._thread = threading.Thread(target=self._write_and_note, args=(snapshot, path), name="checkpoint", daemon=True)
        self._thread.start()
        return [*lines, f"saving {path} in the background (copied to the host in {copied:.1f} s)"]

    def poll(self) -> list[str]:
        """At a step boundary: what to print of a finished background save. Raises what made it fail. Never waits."""
        if self._thread is None or self._thread.is_alive():
            return []
        return self.finish()

    def finish(self) -> list[str]:
        """As `poll`, but waits for the background save."""
        if self._thread is None:
            return []
        self._thread.join()
        self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        lines, self._lines = self._lines, []
        return lines

    def _snapshot(self, state: TrainState) -> Snapshot:
        """This rank's part of the checkpoint: live tensors, or copies of them for a background save."""
        groups = self.groups
        parts = contents(state).all()
        if self._mine is None:
            # A run's layout never changes: who writes what is agreed on once.
            own = holdings(parts, groups.pipeline_model_parallel_rank, groups.tensor_model_parallel_rank)
            everyone: list[Any] = [own] * groups.world_size
            if groups.world_size > 1:
                dist.all_gather_object(everyone, own, group=groups.host_group)
            self._mine = assign_writers(everyone)[groups.rank]
        written = only_written(parts, self._mine)
        random_states = random_state.capture(groups.rank)
        magnitudes = {} if state.fp8_scaling is None else state.fp8_scaling.state()
        mine = random_states, self.supply.pack_states(state.iteration), magnitudes
        gathered: list[Any] | None = [mine] * groups.world_size if groups.is_main else None
        if groups.world_size > 1:
            dist.gather_object(mine, gathered, dst=0, group=groups.host_group)
        held = self._copies.take(written) if self.in_background else written
        if gathered is None:
            return Snapshot(state.iteration, held, None, None)
        # Every rank knows the packs of its own streams; another world size deals all of them anew.
        packs = gathered_state(state.iteration, [states for _, states, _ in gathered]) if mine[1] is not None else None
        # Replicas hold the same magnitudes, pipeline stages those of different layers.
        all_magnitudes = {layer: operands for *_, held_there in gathered for layer, operands in held_there.items()}
        return Snapshot(
            iteration=state.iteration,
            parts=held,
            random_states={n: t for tensors, _, _ in gathered for n, t in tensors.items()},
            state=_state_json(state, self.config, groups, self.supply.order_hash, packs, all_magnitudes),
        )

    def _write_and_note(self, snapshot: Snapshot, path: Path) -> None:
        """Body of the background thread."""
        start = time.perf_counter()
        try:
            self._write(snapshot)
            self._lines = [f"saved {path} in {time.perf_counter() - start:.1f} s in the background"]
        except Exception as exception:  # raised again at the next step boundary
            self._failure = exception

    def _write(self, snapshot: Snapshot) -> None:
        """Everything up to and including the pointer; returns on every rank when the checkpoint is durable."""
        temporary: Path | None = None
        try:
            temporary = self._on_main(lambda: checkpoint_folder.start_temporary(self.root, snapshot.iteration))
            # In the background one thread is enough, and leaves the interpreter to training.
            num_threads = 1 if self.in_background else num_io_threads(snapshot.parts.values())
            write_parts(temporary / TENSOR_FOLDER, snapshot.parts, self._group, num_threads)
            # Doubles as the barrier: nobody exits before the checkpoint is there.
            self._on_main(lambda: self._seal(temporary, snapshot))
        except (OSError, StorageError) as exception:
            message = _explained(self.root, snapshot.iteration, exception)
            if self.groups.is_main and temporary is not None:
                # A full disk must not stay full because of the half-written folder.
                shutil.rmtree(temporary, ignore_errors=True)
            raise RuntimeError(message) from exception

    def _wait_for_parts(self, folder: Path) -> None:
        """What ranks wrote must be visible here: a folder on each host's own disk would make a checkpoint with holes."""
        files = files_by_rank(folder)
        end = time.monotonic() + SHARED_FOLDER_SECONDS
        while missing := [rank for rank, paths in files.items() if not all(path.is_file() for path in paths)]:
            if time.monotonic() > end:
                raise OSError(f"the files of ranks {missing} are not visible to rank 0: --save must be shared by all hosts")
            time.sleep(0.2)

    def _seal(self, temporary: Path, snapshot: Snapshot) -> None:
        assert snapshot.state is not None
        self._wait_for_parts(temporary / TENSOR_FOLDER)
        _write_small_files(temporary, snapshot, self.config, self.supply.preprocessor)
        checkpoint_folder.seal(temporary, snapshot.state)
        checkpoint_folder.point_to(self.root, snapshot.iteration)
        checkpoint_folder.remove_old(self.root, self.config.checkpoint.keep_last, snapshot.iteration)

    def _on_main(self, action: Any) -> Any:
        """Run `action` on rank 0; every rank gets its result, or its exception."""
        outcome: list[Any] = [None, None]
        if self.groups.is_main:
            try:
                outcome = [action(), None]
            except Exception as exception:
                outcome = [None, exception]
        if self.groups.world_size > 1:
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]


def save_checkpoint(state: TrainState, config: RunConfig, groups: ParallelGroups, supply: Any) -> Path:
    """Write one checkpoint now; every rank returns its path when it is durable. Raises as CheckpointSaver.save."""
    checkpoint = dataclasses.replace(config.checkpoint, async_save=False)
    CheckpointSaver(dataclasses.replace(config, checkpoint=checkpoint), groups, supply).save(state)
    return checkpoint_folder.iteration_folder(Path(str(config.checkpoint.save)), state.iteration)
