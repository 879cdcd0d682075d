"""Packs of a run: which samples are in each micro-batch of a rank, and where every stream stands after each step.

A global batch is a fixed number of packs, so the number of its samples varies. Pack g of it comes from stream g, which holds
positions g, g + G, g + 2 G, ... of the order of samples; micro-batch m of rank r is pack m * ranks + r.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from megatron_vla.data.packing import Pack, PackLimits, PackStream, SampleSize, StreamState
from megatron_vla.data.sampler import SampleOrder
from megatron_vla.data.shard_order import LaneOrder
from megatron_vla.data.watch import StageTimes

KNOWN_SIZES = 1 << 16


@dataclass(frozen=True)
class PackWindow:
    """Sums over the packs of some steps: capacity is what they had room for. waits: packs that each sample had to wait."""

    packs: int = 0
    samples: int = 0
    tokens: int = 0
    images: int = 0
    token_capacity: int = 0
    image_capacity: int = 0
    waits: tuple[int, ...] = ()

    @staticmethod
    def of(packs: Sequence[Pack], limits: PackLimits) -> PackWindow:
        """Of these packs."""
        return PackWindow(
            packs=len(packs),
            samples=sum(len(pack.places) for pack in packs),
            tokens=sum(pack.num_tokens for pack in packs),
            images=sum(pack.num_images for pack in packs),
            token_capacity=len(packs) * limits.tokens,
            image_capacity=len(packs) * limits.images,
            waits=tuple(wait for pack in packs for wait in pack.waits),
        )

    def __add__(self, other: PackWindow) -> PackWindow:
        return PackWindow(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def metrics(self) -> dict[str, float]:
        """For the log."""
        return {
            "pack_useful_token_share": self.tokens / max(1, self.token_capacity),
            "pack_image_slot_share": self.images / max(1, self.image_capacity),
            "samples_per_pack": self.samples / max(1, self.packs),
            "pack_wait_p99": float(np.quantile(self.waits or [0], 0.99)),
            "pack_wait_max": float(max(self.waits, default=0)),
        }


@dataclass
class _Step:
    """One planned step of this rank: its streams' states after it, and its packs."""

    states: dict[int, StreamState]
    packs: list[Pack]


@dataclass
class Packing:
    """Packs of one run on this rank. num_streams: packs of a global batch. size_of: sample number -> size.

    Steps are planned ahead of training, so the states after steps that are not done yet are kept too.
    """

    order: SampleOrder
    limits: PackLimits
    num_streams: int
    size_of: Callable[[int], SampleSize]
    _planned: dict[int, _Step] = field(default_factory=dict)
    _known_size: Callable[[int], SampleSize] = field(init=False)
    _restored: tuple[int, dict[int, StreamState]] | None = None

    def __post_init__(self) -> None:
        # Reading ahead plans the same steps several times.
        self._known_size = functools.lru_cache(KNOWN_SIZES)(self.size_of)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `gathered_state` of a checkpoint. Raises ValueError when it is of another number of packs per step."""
        streams = {int(stream): StreamState.from_list(values) for stream, values in state["streams"].items()}
        if sorted(streams) != list(range(self.num_streams)):
            raise ValueError(
                f"the checkpoint has {len(streams)} packs per step, this run {self.num_streams} (--global-batch-size over "
                "--micro-batch-size): use the same sizes"
            )
        self._restored = int(state["iteration"]), streams

    def states_after(self, iteration: int) -> dict[int, StreamState]:
        """State of each of this rank's streams after step `iteration` (from 1), which was planned and not forgotten."""
        return self._planned[iteration].states

    def stream(self, number: int, iteration: int, consumed_samples: int) -> PackStream:
        """Stream `number` as it is after step `iteration`."""
        state = StreamState(next_place=-(-max(0, consumed_samples - number) // self.num_streams))
        if iteration in self._planned and number in self._planned[iteration].states:
            state = self._planned[iteration].states[number]
        elif self._restored is not None and self._restored[0] == iteration:
            state = self._restored[1][number]
        return PackStream(self.limits, lambda place: self._size(self.position(number, place)), state)

    def position(self, stream: int, place: int) -> int:
        """Position in the order of samples."""
        return place * self.num_streams + stream

    def _size(self, position: int) -> SampleSize:
        return self._known_size(self.order.at(position)[1])

    def record(self, iteration: int, states: dict[int, StreamState], packs: list[Pack]) -> None:
        """Called when a step was planned."""
        self._planned[iteration] = _Step(states, packs)

    def window(self, first: int, last: int) -> PackWindow:
        """This rank's packs of steps first ... last."""
        return PackWindow.of([pack for step in range(first, last + 1) for pack in self._planned[step].packs], self.limits)

    def forget_before(self, iteration: int) -> None:
        """Steps before `iteration` will not be asked for again."""
        # A copy of the keys: another thread may be planning ahead.
        for step in list(self._planned):
            if step < iteration:
                del self._planned[step]


@dataclass(frozen=True)
class PackSampler:
    """Micro-batches of one rank, each the (epoch, sample number) of a pack's samples; iterating twice gives the same twice."""

    packing: Packing
    first_iteration: int
    consumed_samples: int
    data_parallel_rank: int
    data_parallel_size: int
    num_iterations: int

    @property
    def order(self) -> SampleOrder:
        """Of all samples."""
        return self.packing.order

    @property
    def num_microbatches(self) -> int:
        """Packs of this rank per step."""
        return self.packing.num_streams // self.data_parallel_size

    def __len__(self) -> int:
        return self.num_iterations * self.num_microbatches

    def steps(self) -> Iterator[list[tuple[int, Pack]]]:
        """(stream, pack) of each micro-batch of each step."""
        packing, numbers = self.packing, range(self.data_parallel_rank, self.packing.num_streams, self.data_parallel_size)
        streams = {n: packing.stream(n, self.first_iteration, self.consumed_samples) for n in numbers}
        for step in range(self.first_iteration + 1, self.first_iteration + self.num_iterations + 1):
            packs = {number: stream.next_pack() for number, stream in streams.items()}
            packing.record(step, {number: stream.state for number, stream in streams.items()}, list(packs.values()))
            yield list(packs.items())

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for packs in self.steps():
            for stream, pack in packs:
                yield [self.order.at(self.packing.position(stream, place)) for place in pack.places]


@dataclass(frozen=True)
class PackLaneSampler(PackSampler):
    """The same packs out of shards that are decoded once: samples are read in their order and wait until their pack is full."""

    lane_order: LaneOrder

    @property
    def order(self) -> LaneOrder:
        """Of all samples."""
        return self.lane_order

    @property
    def is_even(self) -> bool:
        """Every rank has lanes of its own: its streams meet the same lanes again and again."""
        return self.data_parallel_size == 1 or self.order.has_own_lanes(self.data_parallel_size, self.packing.num_streams)

    @property
    def num_open_pieces(self) -> int:
        """Pieces that this rank reads at a time."""
        lanes = self.order.num_lanes
        return lanes // self.data_parallel_size if self.is_even else lanes

    def positions(self) -> Iterator[np.ndarray]:
        """Global positions of all samples of the packs, ascending, each time as many as are known for sure."""
        known: list[int] = []
        for step, packs in enumerate(self.steps(), start=self.first_iteration + 1):
            for stream, pack in packs:
                for place in pack.places:
                    heapq.heappush(known, self.packing.position(stream, place))
            # What comes into packs later was not seen yet, or waits in a pool.
            first_open = min(
                self.packing.position(stream, min([waiting.place for waiting in state.pool], default=state.next_place))
                for stream, state in self.packing.states_after(step).items()
            )
            ready = []
            while known and known[0] < first_open:
                ready.append(heapq.heappop(known))
            if ready:
                yield np.array(ready, dtype=np.int64)
        if known:
            yield np.array(sorted(known), dtype=np.int64)

    def packed(self, read: Iterator[tuple[dict[str, Tensor], StageTimes]]) -> Iterator[tuple[list[dict[str, Any]], StageTimes]]:
        """Samples of each pack and the costs that fell due; `read`: rows of `positions`, as a ShardReader gives them."""
        waiting: dict[int, dict[str, Any]] = {}
        positions = self.positions()
        for packs in self.steps():
            for stream, pack in packs:
                wanted = [self.packing.position(stream, place) for place in pack.places]
                times = StageTimes()
                while not waiting.keys() >= set(wanted):
                    tensors, costs = next(read)
                    times.add(costs)
                    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
                    for row, position in enumerate(next(positions).tolist()):
                        waiting[position] = {name: array[row] for name, array in arrays.items()}
                yield [waiting.pop(position) for position in wanted], times


def gathered_state(iteration: int, states_of_ranks: Sequence[dict[int, StreamState]]) -> dict[str, Any]:
    """What a checkpoint keeps, JSON-ready: the state of all streams after step `iteration`."""
    merged = {stream: state for states in states_of_ranks for stream, state in states.items()}
    return {"iteration": iteration, "streams": {str(stream): merged[stream].to_list() for stream in sorted(merged)}}
