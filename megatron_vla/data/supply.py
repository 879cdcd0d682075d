"""DataSupply: the micro-batches of one run on one rank, by random access or out of shards that are decoded once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from megatron_vla.config.run import RunConfig
from megatron_vla.data import pack_setup
from megatron_vla.data.augmentation import Augmentation
from megatron_vla.data.batch import Batch
from megatron_vla.data.image import check_image_range
from megatron_vla.data.loader import (
    DrawnSamples,
    LoadedBatch,
    PromptWidth,
    SampleAugmentation,
    SampleSource,
    assembled_batch,
    collate_pack,
    collate_padded,
    load_micro_batches,
    loaded_batch,
    packed_batch,
)
from megatron_vla.data.mixture_shards import MixtureShardOrder
from megatron_vla.data.pack_sampler import Packing, PackLaneSampler, PackSampler, PackWindow
from megatron_vla.data.packed_batch import PackedBatch
from megatron_vla.data.packing import PackLimits, StreamState
from megatron_vla.data.prefetch import ShardStream, in_background
from megatron_vla.data.sampler import GlobalOrder, MicroBatchSampler, SampleOrder
from megatron_vla.data.shard_cache import SampleLayout
from megatron_vla.data.shard_order import LaneOrder, LaneSampler, ShardOrder
from megatron_vla.data.watch import HANDOVER_SECONDS, DataWatch, StageTimes, StatusBoard
from megatron_vla.findings import CheckError, Finding, error
from megatron_vla.parallel.failure import end_all_ranks
from megatron_vla.parallel.groups import world_size_from_environment

if TYPE_CHECKING:
    from megatron_vla.data.mixture_data import MixturePreprocessor
    from megatron_vla.data.preprocess import Preprocessor
    from megatron_vla.models.registry import SampleRules


Collate = Callable[[list[tuple[dict[str, Any], StageTimes]]], LoadedBatch]


class DataSupply:
    """Micro-batches of one run, in an order that depends on the seed only.

    num_samples per epoch; preprocessor (None for mock data); order_hash; findings (the warnings); expected_padded_fraction:
    share of action steps beyond their episode's end that lengths and horizon imply. `order`: not the plain one; a LaneOrder
    decodes once. `views`: names of all image slots. `pack_limits`: micro-batches are packs; then `packing` knows them. `rules`:
    the model family's own. longest_prompt: tokens that no prompt exceeds; None: not known.
    """

    def __init__(
        self,
        config: RunConfig,
        source: SampleSource,
        num_samples: int,
        preprocessor: Preprocessor | MixturePreprocessor | None,
        findings: list[Finding],
        expected_padded_fraction: float,
        order: SampleOrder | None = None,
        views: tuple[str, ...] = (),
        pack_limits: PackLimits | None = None,
        *,
        rules: SampleRules,
        longest_prompt: int | None = None,
    ) -> None:
        self.config = config
        self.longest_prompt = longest_prompt
        self.source = source
        self.num_samples = num_samples
        self.preprocessor = preprocessor
        self.findings = findings
        self.expected_padded_fraction = expected_padded_fraction
        self.order: SampleOrder = order or GlobalOrder(num_samples, config.training.seed, config.data.shuffle)
        self.decodes_once = isinstance(self.order, ShardOrder | MixtureShardOrder)
        # Printed, stored in checkpoints, compared at resume.
        self.order_hash = self.order.order_hash()
        data, family, seed = config.data, config.family, config.training.seed
        self.board = StatusBoard(data.num_workers)
        source.use_board(self.board)
        self.augmentation: SampleAugmentation | None = None
        if data.augmentation != "none":
            self.augmentation = rules.build_augmentation(config, views)
        self._samples = DrawnSamples(
            source,
            seed,
            partial(rules.draws, family),
            self.augmentation,
            augment_here=data.augmentation_device == "cpu",
            board=self.board,
            change=None if rules.change_sample is None else partial(rules.change_sample, family),
        )
        self._watch = DataWatch(self.board, source.where, data.data_stall_timeout_seconds)
        self._assemble = None if rules.build_assembler is None else rules.build_assembler(config)
        self._width = PromptWidth(data.prompt_padding, data.prompt_bucket_size)
        self._open: list[Iterator[Any]] = []
        self.packing: Packing | None = None
        if pack_limits is not None:
            world_size = world_size_from_environment()
            num_streams = config.global_batch_size(world_size) // config.training.micro_batch_size
            self.packing = Packing(self.order, pack_limits, num_streams, source.size_of)

    def start_lines(self) -> list[str]:
        """What will be in host memory, and in packs. Decodes a sample; raises CheckError when it is above a limit."""
        return [self.prefetch_line(), *(pack_setup.preview(self.packing) if self.packing else [])]

    def prefetch_line(self) -> str:
        """The bound on samples that wait in host memory, for the log. Raises CheckError when it is above the limit."""
        data, size = self.config.data, self.config.training.micro_batch_size
        arrays = self._samples[0, 0][0]
        mebibytes = size * sum(np.asarray(array).nbytes for array in arrays.values()) / 2**20
        if self.decodes_once:
            return self._shard_line(cast(LaneOrder, self.order), SampleLayout.of(arrays), mebibytes)
        if not data.num_workers:
            return f"prefetch: none, micro-batches of {mebibytes:.1f} MiB are made when they are needed (--num-workers 0)"
        waiting = data.num_workers * data.prefetch_factor
        return (
            f"prefetch: at most {data.num_workers} workers x {data.prefetch_factor} micro-batches x {mebibytes:.1f} MiB = "
            f"{waiting * mebibytes / 1024:.2f} GiB of host memory per rank (--num-workers, --prefetch-factor)"
        )

    def _shards_ahead(self, num_open: int, slot_bytes: int) -> int:
        """--prefetch-shards, or what keeps every data worker busy within --shard-cache-bytes."""
        data = self.config.data
        if data.prefetch_shards is not None:
            return data.prefetch_shards
        if not data.num_workers:
            return 0
        room = data.shard_cache_bytes // slot_bytes - num_open
        return max(1, min(max(2, data.num_workers), room))

    def _shard_line(self, order: LaneOrder, layout: SampleLayout, batch_mebibytes: float) -> str:
        data, ranks = self.config.data, self.config.data_parallel_size(world_size_from_environment())
        sampler = self.sampler(0, 0, ranks, 1) if self.packing is None else self.pack_sampler(0, 0, ranks, 1, 0)
        assert isinstance(sampler, LaneSampler | PackLaneSampler)
        largest = order.largest_piece
        slot_bytes = layout.slot_bytes(largest)
        num_ahead = self._shards_ahead(sampler.num_open_pieces, slot_bytes)
        needed = (sampler.num_open_pieces + num_ahead) * slot_bytes
        line = (
            f"decode once: {order.num_shards} shards of up to {largest} samples; at most "
            f"({sampler.num_open_pieces} open + {num_ahead} ahead) x {slot_bytes / 2**20:.1f} MiB = "
            f"{needed / 2**30:.2f} GiB of host memory per rank "
            f"(--decode-lanes over {ranks} data-parallel rank(s), --prefetch-shards, --shard-bytes)"
        )
        if data.num_workers and num_ahead:
            waiting = data.prefetch_factor * batch_mebibytes
            line += f", and {data.prefetch_factor} micro-batches that are ready: {waiting:.1f} MiB (--prefetch-factor)"
        if ranks > 1 and not sampler.is_even:
            what = "--global-batch-size" if self.packing is None else "the number of packs per step"
            line += (
                "\nhint: datasets come at random, so the shards at the border of two ranks' lanes are decoded by both"
                if isinstance(order, MixtureShardOrder)
                else f"\nhint: --decode-lanes {order.num_lanes} is no multiple of {ranks} ranks, or {what} no multiple of the "
                "lanes: ranks share shards and decode them more than once"
            )
        if needed > data.shard_cache_bytes:
            smaller = max(1, data.shard_bytes * data.shard_cache_bytes // needed)
            what = f"{line.partition(' (')[0]}... needs {needed} bytes, {data.shard_cache_bytes} are allowed"
            fix = f"use --shard-cache-bytes {needed} or more, --shard-bytes {smaller}, or fewer --decode-lanes"
            raise CheckError([error("--shard-cache-bytes", what, fix)])
        return line

    def sampler(
        self, consumed_samples: int, data_parallel_rank: int, data_parallel_size: int, num_iterations: int
    ) -> MicroBatchSampler:
        """Sample numbers of one rank from `consumed_samples` on."""
        micro_batch_size = self.config.training.micro_batch_size
        global_batch_size = self.config.training.global_batch_size or micro_batch_size * data_parallel_size
        kind: type[Any] = LaneSampler if self.decodes_once else MicroBatchSampler
        sampler: MicroBatchSampler = kind(
            self.order,
            consumed_samples,
            micro_batch_size,
            global_batch_size,
            data_parallel_rank,
            data_parallel_size,
            num_iterations,
        )
        return sampler

    def pack_sampler(
        self,
        consumed_samples: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        num_iterations: int,
        iteration: int,
    ) -> PackSampler:
        """Packs of one rank after `iteration` steps; `consumed_samples` counts when those were no packs."""
        assert self.packing is not None
        place = (iteration, consumed_samples, data_parallel_rank, data_parallel_size, num_iterations)
        if self.decodes_once:
            return PackLaneSampler(self.packing, *place, cast(LaneOrder, self.order))
        return PackSampler(self.packing, *place)

    def iterator(
        self,
        consumed_samples: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        num_iterations: int,
        device_is_cuda: bool,
        iteration: int = 0,
    ) -> Iterator[Any]:
        """Micro-batches of `num_iterations` steps, in order, on the CPU (pinned when `device_is_cuda`).

        `iteration`: steps that were done before, where packs go on from.

        With --augmentation-device gpu the images are on the training device, augmented. Raises SampleError when a sample cannot
        be made, DataStallError and DataWorkerError when it does not come, ValueError when the first batch's images are out of
        range.
        """
        place = (consumed_samples, data_parallel_rank, data_parallel_size, num_iterations)
        sampler = self.sampler(*place) if self.packing is None else self.pack_sampler(*place, iteration)
        num_workers = min(self.config.data.num_workers, len(sampler))
        # One step (a repeated one, to find what was not finite) is not worth decoding whole shards; the samples are the same.
        if isinstance(sampler, LaneSampler | PackLaneSampler) and num_iterations > 1:
            loaded = self._from_shards(sampler, num_workers, device_is_cuda)
        else:
            loaded = self._by_random_access(sampler, num_workers, device_is_cuda)
        # Kept to be closed: workers must not outlive the run.
        batches = self._finished(loaded, device_is_cuda)
        self._open.append(batches)
        return batches

    def first_batch(
        self, consumed_samples: int = 0, data_parallel_rank: int = 0, data_parallel_size: int = 1, iteration: int = 0
    ) -> Any:
        """The first micro-batch, loaded in this process: what `iterator` with the same arguments yields first.

        Of a pack the samples, as a padded batch.
        """
        # In this process and by random access: an error here has a readable traceback, and no shard is decoded for it.
        place = (consumed_samples, data_parallel_rank, data_parallel_size, 1)
        sampler = self.sampler(*place) if self.packing is None else self.pack_sampler(*place, iteration)
        collate = partial(collate_padded, width=self._width, assemble=self._assemble)
        return next(self._finished(self._by_random_access(sampler, 0, False, collate), False))

    def example(self, data_parallel_rank: int = 0, data_parallel_size: int = 1) -> Any:
        """The first micro-batch of the order in the form that `iterator` gives, loaded in this process."""
        place = (0, data_parallel_rank, data_parallel_size, 1)
        sampler = self.sampler(*place) if self.packing is None else self.pack_sampler(*place, 0)
        return next(self._finished(self._by_random_access(sampler, 0, False), False))

    def _by_random_access(
        self, sampler: MicroBatchSampler | PackSampler, num_workers: int, pin_memory: bool, collate: Collate | None = None
    ) -> Iterator[LoadedBatch]:
        if collate is None and self.packing is not None:
            collate = partial(collate_pack, limits=self.packing.limits)
        batches = load_micro_batches(
            self._samples,
            sampler,
            num_workers=num_workers,
            prefetch_factor=self.config.data.prefetch_factor,
            collate=collate or partial(collate_padded, width=self._width, assemble=self._assemble),
            pin_memory=pin_memory,
            watch=self._watch,
        )
        return self._watched(batches, num_workers)

    def _from_shards(self, sampler: LaneSampler | PackLaneSampler, num_workers: int, pin_memory: bool) -> Iterator[LoadedBatch]:
        layout = SampleLayout.of(self._samples[0, 0][0])
        num_ahead = self._shards_ahead(sampler.num_open_pieces, layout.slot_bytes(sampler.order.largest_piece))
        stream = ShardStream(self._samples, sampler, layout, num_workers, num_ahead, self._watch)
        assembled = self._assembled(stream, sampler, pin_memory)
        try:
            if stream.num_workers:
                device = torch.cuda.current_device() if pin_memory else None
                ahead = in_background(assembled, self.config.data.prefetch_factor, device)
                yield from self._watched(ahead, stream.num_workers)
            else:
                yield from self._watched(assembled, 0)
        finally:
            stream.close()

    def _assembled(
        self, stream: ShardStream, sampler: LaneSampler | PackLaneSampler, pin_memory: bool
    ) -> Iterator[LoadedBatch]:
        for loaded in self._packed(stream, sampler) if isinstance(sampler, PackLaneSampler) else self._padded(stream):
            started = time.perf_counter()
            ready = loaded.pin_memory() if pin_memory else loaded
            ready.times.copy_seconds += time.perf_counter() - started
            yield ready

    def _padded(self, stream: ShardStream) -> Iterator[LoadedBatch]:
        for tensors, times in stream:
            started = time.perf_counter()
            loaded = self._from_stacked(tensors, times)
            loaded.times.copy_seconds += time.perf_counter() - started
            yield loaded

    def _from_stacked(self, tensors: dict[str, torch.Tensor], times: StageTimes) -> LoadedBatch:
        if self._assemble is None:
            return loaded_batch(tensors, times, self._width)
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        size = len(next(iter(arrays.values())))
        return assembled_batch([{name: a[i] for name, a in arrays.items()} for i in range(size)], times, self._assemble)

    def _packed(self, stream: ShardStream, sampler: PackLaneSampler) -> Iterator[LoadedBatch]:
        for samples, times in sampler.packed(iter(stream)):
            yield packed_batch(samples, times, sampler.packing.limits)

    def _watched(self, batches: Iterator[LoadedBatch], num_workers: int) -> Iterator[LoadedBatch]:
        """Loading with a thread that ends the run when it takes too long.

        With workers too: this process can hang in the pipe of one that stopped while it handed over a batch.
        """
        with self._watch.ends_stalled_loading(end_all_ranks, HANDOVER_SECONDS if num_workers else 0.0) as load:
            while True:
                load(True)
                loaded = next(batches, None)
                load(False)
                if loaded is None:
                    return
                yield loaded

    def _finished(self, batches: Iterator[LoadedBatch], on_cuda: bool) -> Iterator[Any]:
        """The last steps in the training process: costs, augmentation on the device, the one range check."""
        for number, loaded in enumerate(batches):
            self._watch.add(loaded.times)
            batch = loaded.batch
            # The one range check: every later batch comes from the same code.
            if number == 0 and isinstance(batch, Batch | PackedBatch):
                check_image_range(batch.images_ICYX if isinstance(batch, PackedBatch) else batch.images_BVCHW)
            device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
            if loaded.pending is not None:
                loaded.pending.finish(batch, device)
            if loaded.augmentation_BVP is not None:
                assert isinstance(self.augmentation, Augmentation) and isinstance(batch, Batch | PackedBatch)
                parameters = loaded.augmentation_BVP.to(device, non_blocking=True)
                if isinstance(batch, PackedBatch):
                    images = batch.images_ICYX.to(device, non_blocking=True)
                    batch.images_ICYX = self.augmentation.apply_to_images(images, parameters, batch.image_view_I)
                else:
                    images = batch.images_BVCHW.to(device, non_blocking=True)
                    batch.images_BVCHW = self.augmentation.apply(images, parameters)
            yield batch

    def pack_states(self, iteration: int) -> dict[int, StreamState] | None:
        """What the packs after step `iteration` depend on, of this rank's streams; None without packing."""
        return None if self.packing is None else self.packing.states_after(iteration)

    def restore_packs(self, state: dict[str, Any] | None) -> None:
        """Go on from what a checkpoint has of packs, if anything. Raises ValueError when it does not fit."""
        if self.packing is not None and state is not None:
            self.packing.restore(state)

    def pack_window(self, first: int, last: int) -> PackWindow | None:
        """This rank's packs of steps first ... last, which are done; None without packing. Earlier steps are forgotten."""
        if self.packing is None:
            return None
        window = self.packing.window(first, last)
        self.packing.forget_before(last)
        return window

    def metrics(self) -> dict[str, float]:
        """Since the last call.

        Milliseconds of worker time per sample by stage, cut prompts, decoded frames per sample, memory of the workers in GiB.
        """
        return self._watch.metrics()

    def take_times(self) -> StageTimes:
        """The sums behind `metrics`, since the last call of either."""
        return self._watch.take_times()

    def close(self) -> None:
        """Stop the workers."""
        for batches in self._open:
            batches.close()  # type: ignore[attr-defined]
        self._open.clear()
