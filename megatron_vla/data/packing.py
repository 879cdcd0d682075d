"""Which samples share a pack: streaming best fit into packs of a fixed token budget.

The order of samples is dealt to G streams, position p to stream p mod G, where G is the number of packs of a global batch.
Every stream fills one pack per step, out of a pool of samples that are next in its order. What goes into a pack depends on the
order and on the samples' sizes alone: not on ranks, workers or restarts. So the state of a stream is its place in the order and
its pool, and a stream can go on on any rank of any world size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


class SampleSize(NamedTuple):
    """What a sample needs of a pack: images of cameras that are there, and valid prompt tokens."""

    images: int
    prompt_tokens: int


@dataclass(frozen=True)
class PackLimits:
    """tokens, images, samples: capacity of a pack. image_tokens: of one image. most_images, most_prompt_tokens: of a sample.

    pool_size: samples to choose from. max_wait: packs of its stream that a sample waits at most.
    """

    tokens: int
    images: int
    samples: int
    image_tokens: int
    most_images: int
    most_prompt_tokens: int
    pool_size: int
    max_wait: int

    def tokens_of(self, size: SampleSize) -> int:
        """Prefix tokens of a sample."""
        return size.images * self.image_tokens + size.prompt_tokens

    @property
    def longest_prefix(self) -> int:
        """Tokens of the largest sample that there can be."""
        return self.tokens_of(SampleSize(self.most_images, self.most_prompt_tokens))

    @property
    def fewest_samples(self) -> int:
        """Samples that fit into a pack whatever their sizes; 0 when the largest one does not fit."""
        return min(self.samples, self.tokens // self.longest_prefix, self.images // self.most_images)

    @property
    def shortest_max_wait(self) -> int:
        """The smallest max_wait that can be promised: a pool full of overdue samples fills this many packs."""
        return -(-self.pool_size // self.fewest_samples)

    @property
    def urgent_wait(self) -> int:
        """Packs after which a sample goes ahead of better fitting ones: early enough, even if all of the pool is overdue."""
        # One at least: the pack that a sample comes into the pool for may have no room left.
        return self.max_wait - self.shortest_max_wait + 1


class Waiting(NamedTuple):
    """A sample in the pool: its place in the stream's order, and how many packs the stream had filled when it came in."""

    place: int
    since_pack: int


@dataclass(frozen=True)
class StreamState:
    """Everything that the next packs of a stream depend on. next_place: of the sample that comes into the pool next."""

    num_packs: int = 0
    next_place: int = 0
    pool: tuple[Waiting, ...] = ()

    def to_list(self) -> list[Any]:
        """JSON-ready."""
        return [self.num_packs, self.next_place, [list(waiting) for waiting in self.pool]]

    @staticmethod
    def from_list(values: list[Any]) -> StreamState:
        """Inverse of `to_list`."""
        num_packs, next_place, pool = values
        return StreamState(num_packs, next_place, tuple(Waiting(*waiting) for waiting in pool))


@dataclass(frozen=True)
class Pack:
    """One filled pack. places: of its samples in the stream's order, ascending; waits: packs that each had to wait."""

    places: tuple[int, ...]
    waits: tuple[int, ...]
    num_tokens: int
    num_images: int


class PackStream:
    """Packs of one stream, in order. `size_of(place)` is the size of the sample at a place of the stream's order."""

    def __init__(self, limits: PackLimits, size_of: Callable[[int], SampleSize], state: StreamState | None = None) -> None:
        self._limits = limits
        self._size_of = size_of
        state = state or StreamState()
        # In order of arrival, which keeps ties, and with them everything, deterministic.
        self._pool = {waiting: self._needs(waiting.place) for waiting in state.pool}
        self._next_place = state.next_place
        self._num_packs = state.num_packs

    @property
    def state(self) -> StreamState:
        """After the last pack."""
        return StreamState(self._num_packs, self._next_place, tuple(self._pool))

    def __iter__(self) -> Iterator[Pack]:
        while True:
            yield self.next_pack()

    def next_pack(self) -> Pack:
        """Fill a pack: overdue samples first, oldest first; then always the largest that fits, the older of equals."""
        limits = self._limits
        chosen: list[Waiting] = []
        free_tokens, free_images = limits.tokens, limits.images
        while len(chosen) < limits.samples:
            self._refill()
            best = self._best(free_tokens, free_images)
            if best is None:
                break
            tokens, images = self._pool.pop(best)
            free_tokens, free_images = free_tokens - tokens, free_images - images
            chosen.append(best)
        chosen.sort()
        waits = tuple(self._num_packs - waiting.since_pack for waiting in chosen)
        self._num_packs += 1
        places = tuple(waiting.place for waiting in chosen)
        return Pack(places, waits, limits.tokens - free_tokens, limits.images - free_images)

    def _best(self, free_tokens: int, free_images: int) -> Waiting | None:
        urgent_since = self._num_packs - self._limits.urgent_wait
        best, most = None, -1
        for waiting, (tokens, images) in self._pool.items():
            if tokens > free_tokens or images > free_images:
                continue
            # In order of arrival: the first urgent one is the oldest.
            if waiting.since_pack <= urgent_since:
                return waiting
            if tokens > most:
                best, most = waiting, tokens
        return best

    def _needs(self, place: int) -> tuple[int, int]:
        """(tokens, images) of a sample."""
        size = self._size_of(place)
        return self._limits.tokens_of(size), size.images

    def _refill(self) -> None:
        while len(self._pool) < self._limits.pool_size:
            self._pool[Waiting(self._next_place, self._num_packs)] = self._needs(self._next_place)
            self._next_place += 1
