"""Samples of a robot dataset, preprocessed: one by one at random, or in storage order, several of an episode at a time.

Shape legend: as data/batch.py; M samples of a piece, n samples of a block (of one episode, decoded together).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import numpy as np

from megatron_vla.data.loader import SampleError
from megatron_vla.data.locator import LocatorIndex
from megatron_vla.data.packing import SampleSize
from megatron_vla.data.watch import Stage, StageTimes, StatusBoard

if TYPE_CHECKING:
    from megatron_vla.data.dataset import RawBlock, RobotDataset

# Frames decoded in a row per camera: bounds the raw pictures in memory, and long enough that switching files costs nothing.
CHUNK_FRAMES = 32
IMAGES_FIELD = "images_BVCHW"


class SamplePreprocessor(Protocol):
    """What a source asks of a family's preprocessor."""

    num_truncated_prompts: int

    def __call__(self, sample: Any, epoch: int) -> dict[str, Any]:
        """Arrays of one training sample."""
        ...


class SizedPreprocessor(SamplePreprocessor, Protocol):
    """One that knows how large a sample will be."""

    def size_of(self, instruction: str, state_D: np.ndarray) -> SampleSize:
        """Images and prompt tokens, without decoding."""
        ...


@runtime_checkable
class BlockPreprocessor(SamplePreprocessor, Protocol):
    """One that makes several samples of an episode at a time, bit-equal to one by one."""

    def room(self, num_samples: int, memory: np.ndarray | None = None) -> np.ndarray:
        """Memory for the pictures of n samples: `memory` where it fits, else new."""
        ...

    def camera_room(self, images_nVCSS: np.ndarray) -> dict[str, np.ndarray]:
        """Camera -> part of that memory that its pictures may be decoded to."""
        ...

    def block(self, raw: RawBlock, epoch: int, images_nVCSS: np.ndarray) -> dict[str, np.ndarray]:
        """Arrays with a dimension of samples in front; pictures in `images_nVCSS`."""
        ...


class RobotSource:
    """Samples of a robot dataset, preprocessed.

    `rows` maps sample number -> dataset index when samples were left out; `locators` does the same and replaces it when samples
    are read in storage order.
    """

    def __init__(
        self,
        dataset: RobotDataset,
        preprocessor: SamplePreprocessor,
        rows: np.ndarray | None,
        locators: LocatorIndex | None = None,
    ) -> None:
        self.dataset = dataset
        self.preprocessor = preprocessor
        self._blocks = preprocessor if isinstance(preprocessor, BlockPreprocessor) else None
        self.rows = rows if locators is None else None
        self.locators = locators
        self._times = StageTimes()
        self._board: StatusBoard | None = None
        self._first_sample = 0

    def use_board(self, board: StatusBoard, first_sample: int = 0) -> None:
        """See `SampleSource`."""
        self._board, self._first_sample = board, first_sample

    def _note(self, stage: Stage, index: int) -> None:
        if self._board is not None:
            self._board.note(stage, self._first_sample + index)

    def _row(self, index: int) -> int:
        if self.locators is not None:
            return self.locators.dataset_row(index)
        return index if self.rows is None else int(self.rows[index])

    def __call__(self, index: int, epoch: int) -> dict[str, Any]:
        """Raises SampleError naming sample, episode and frame; the cause's own text names file or camera."""
        row = self._row(index)
        if self._blocks is not None:
            index_n, row_n = np.array([index]), np.array([row])
            block = self._block(self._blocks, index_n, row_n, self.dataset.table_row(row), True, epoch, None)
            return {name: array[0] for name, array in block.items()}
        try:
            self._note("decode", index)
            start = time.perf_counter()
            raw = self.dataset[row]
            self._count_reading(time.perf_counter() - start, len(self.dataset.cameras))
            return self._preprocessed(index, raw, epoch)
        except Exception as problem:
            raise SampleError(f"{self.where(index)}: {type(problem).__name__}: {problem}") from problem

    def size_of(self, index: int) -> SampleSize:
        """See `SampleSource`. Raises SampleError."""
        row = self._row(index)
        try:
            # Only families whose batches can be packed get here, and theirs tells sizes.
            preprocessor = cast(SizedPreprocessor, self.preprocessor)
            return preprocessor.size_of(self.dataset.instruction(row), self.dataset.state_ND[row])
        except Exception as problem:
            raise SampleError(f"{self.where(index)}: {type(problem).__name__}: {problem}") from problem

    def in_storage_order(
        self, index_M: np.ndarray, epoch: int, room: Mapping[str, np.ndarray]
    ) -> Iterator[dict[str, np.ndarray]]:
        """Every camera of every episode is decoded in one forward pass. Raises SampleError."""
        assert self.locators is not None, "only built with --data-access decode_once"
        episode_M, row_M = self.locators.dataset_rows(index_M)
        start = 0
        while start < len(index_M):
            stop = start + int(np.argmin(np.append(episode_M[start : start + CHUNK_FRAMES] == episode_M[start], False)))
            visit_start = start == 0 or bool(episode_M[start] != episode_M[start - 1])
            here, episode = slice(start, stop), int(episode_M[start])
            if self._blocks is not None:
                memory = room.get(IMAGES_FIELD)
                pictures = None if memory is None else memory[here]
                yield self._block(self._blocks, index_M[here], row_M[here], episode, visit_start, epoch, pictures)
            else:
                for arrays in self._chunk(index_M[here].tolist(), row_M[here].tolist(), episode, visit_start, epoch):
                    yield {name: np.asarray(value)[None] for name, value in arrays.items()}
            start = stop

    def _block(
        self,
        preprocessor: BlockPreprocessor,
        index_n: np.ndarray,
        row_n: np.ndarray,
        episode: int,
        visit_start: bool,
        epoch: int,
        memory: np.ndarray | None,
    ) -> dict[str, np.ndarray]:
        """Samples of one episode, their pictures in `memory` where it fits."""
        first = int(index_n[0])
        images_nVCSS = preprocessor.room(len(index_n), memory)
        try:
            self._note("decode", first)
            start = time.perf_counter()
            raw = self.dataset.block(episode, row_n, preprocessor.camera_room(images_nVCSS))
            self._count_reading(time.perf_counter() - start, len(self.dataset.cameras) * visit_start)
        except Exception as problem:
            raise SampleError(f"{self.where(first)}: {type(problem).__name__}: {problem}") from problem
        self._note("transform", first)
        start, cut_before = time.perf_counter(), preprocessor.num_truncated_prompts
        try:
            arrays = preprocessor.block(raw, epoch, images_nVCSS)
        except Exception as problem:
            index = self._first_failing(preprocessor, raw, index_n, epoch)
            raise SampleError(f"{self.where(index)}: {type(problem).__name__}: {problem}") from problem
        cut, seconds = preprocessor.num_truncated_prompts - cut_before, time.perf_counter() - start
        self._times.add(StageTimes(num_samples=len(index_n), transform_seconds=seconds, num_truncated_prompts=cut))
        return arrays

    def _first_failing(self, preprocessor: BlockPreprocessor, raw: RawBlock, index_n: np.ndarray, epoch: int) -> int:
        """Number of the sample that makes a block fail."""
        for place, index in enumerate(index_n.tolist()):
            try:
                preprocessor.block(raw.one(place), epoch, preprocessor.room(1))
            except Exception:  # whatever it is, the caller raises the block's own error with this sample's name
                return int(index)
        return int(index_n[0])

    def _chunk(
        self, indices: list[int], rows: list[int], episode: int, visit_start: bool, epoch: int
    ) -> Iterator[dict[str, Any]]:
        """Samples of one episode, close enough together to hold their pictures at once."""
        dataset = self.dataset
        try:
            self._note("decode", indices[0])
            start = time.perf_counter()
            frames = [int(dataset.frame_of_N[row]) for row in rows]
            pictures = list(dataset.pictures(episode, frames))
            self._count_reading(time.perf_counter() - start, len(dataset.cameras) * visit_start)
        except Exception as problem:
            raise SampleError(f"{self.where(indices[0])}: {type(problem).__name__}: {problem}") from problem
        for index, row, images in zip(indices, rows, pictures, strict=True):
            try:
                raw = dataset.raw_sample(row, images)
                yield self._preprocessed(index, raw, epoch)
            except Exception as problem:
                raise SampleError(f"{self.where(index)}: {type(problem).__name__}: {problem}") from problem

    def _count_reading(self, seconds: float, num_visits: int) -> None:
        decode_seconds, num_frames = self.dataset.frames.take_costs()
        read_seconds = max(0.0, seconds - decode_seconds)
        self._times.add(
            StageTimes(
                read_seconds=read_seconds, decode_seconds=decode_seconds, num_decoded_frames=num_frames, num_visits=num_visits
            )
        )

    def _preprocessed(self, index: int, raw: Any, epoch: int) -> dict[str, Any]:
        self._note("transform", index)
        start, cut_before = time.perf_counter(), self.preprocessor.num_truncated_prompts
        arrays = self.preprocessor(raw, epoch)
        cut = self.preprocessor.num_truncated_prompts - cut_before
        seconds = time.perf_counter() - start
        self._times.add(StageTimes(num_samples=1, transform_seconds=seconds, num_truncated_prompts=cut))
        return arrays

    def take_times(self) -> StageTimes:
        """See `SampleSource`."""
        times, self._times = self._times, StageTimes()
        return times

    def where(self, index: int) -> str:
        """See `SampleSource`."""
        dataset, row = self.dataset, self._row(index)
        episode = dataset.table_row(row)
        files = [dataset.table.data.path_of(episode)]
        files += [dataset.table.videos[c].files.path_of(episode) for c in dataset.cameras if c in dataset.table.videos]
        number, frame = int(dataset.table.episode_index_E[episode]), int(dataset.frame_of_N[row])
        return f"sample {row} (episode {number}, frame {frame}, {', '.join(map(str, files))})"
