"""Packs of a run: which samples are in each micro-batch of a rank, and where every stream stands after each step.

A global batch is a fixed number of packs, so the number of its samples varies. Pack g of it comes from stream g, which holds
positions g, g + G, g + 2 G, ... of the order of samples; micro-batch m of rank r is pack m * ranks + r.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_vla.data.packing import Pack, PackLimits, PackStream, SampleSize, StreamState
from megatron_vla.data.sampler import SampleOrder


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
    """Packs of one run on this rank. num_streams: packs of a global batch. size_of: (epoch, sample number) -> size.

    Steps are planned ahead of training, so the states after steps that are not done yet are kept too.
    """

    order: SampleOrder
    limits: PackLimits
    num_streams: int
    size_of: Callable[[int], SampleSize]
    _planned: dict[int, _Step] = field(default_factory=dict)
    _restored: tuple[int, dict[int, StreamState]] | None = None

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
        return self.size_of(self.order.at(position)[1])

    def record(self, iteration: int, states: dict[int, StreamState], packs: list[Pack]) -> None:
        """Called when a step was planned."""
        self._planned[iteration] = _Step(states, packs)

    def window(self, first: int, last: int) -> PackWindow:
        """This rank's packs of steps first ... last."""
        return PackWindow.of([pack for step in range(first, last + 1) for pack in self._planned[step].packs], self.limits)

    def forget_before(self, iteration: int) -> None:
        """Steps before `iteration` will not be asked for again."""
        for step in [step for step in self._planned if step < iteration]:
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


def gathered_state(iteration: int, states_of_ranks: Sequence[dict[int, StreamState]]) -> dict[str, Any]:
    """What a checkpoint keeps, JSON-ready: the state of all streams after step `iteration`."""
    merged = {stream: state for states in states_of_ranks for stream, state in states.items()}
    return {"iteration": iteration, "streams": {str(stream): merged[stream].to_list() for stream in sorted(merged)}}
