"""Data supply of one run: everything is checked and built before any process group exists.

Every rank runs this by itself and comes to the same result: low-dimensional columns are cheap to read, so nobody waits for
rank 0.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron_vla.config.run import RunConfig
from megatron_vla.data.batch import Batch
from megatron_vla.data.image import check_image_range
from megatron_vla.data.loader import DrawnSamples, RobotSource, SampleSource, StageTimes, load_micro_batches
from megatron_vla.data.mock import MockSource
from megatron_vla.data.preprocess import Preprocessor
from megatron_vla.data.sampler import GlobalOrder, MicroBatchSampler
from megatron_vla.findings import CheckError, Finding, error


class DataSupply:
    """Micro-batches of one run, in an order that depends on the seed only.

    num_samples per epoch; preprocessor (None for mock data); order_hash; findings (the warnings); expected_padded_fraction:
    share of action steps beyond their episode's end that lengths and horizon imply.
    """

    def __init__(
        self,
        config: RunConfig,
        source: SampleSource,
        num_samples: int,
        preprocessor: Preprocessor | None,
        findings: list[Finding],
        expected_padded_fraction: float,
    ) -> None:
        self.config = config
        self.source = source
        self.num_samples = num_samples
        self.preprocessor = preprocessor
        self.findings = findings
        self.expected_padded_fraction = expected_padded_fraction
        self.order = GlobalOrder(num_samples, config.training.seed, config.data.shuffle)
        # Printed, stored in checkpoints, compared at resume.
        self.order_hash = self.order.order_hash()
        self._samples = DrawnSamples(source, config.training.seed, config.family.action_horizon, config.family.max_action_dim)
        self._times = StageTimes()
        self._open: list[Iterator[Batch]] = []

    def prefetch_line(self) -> str:
        """The bound on micro-batches that wait in host memory, for the log."""
        data, size = self.config.data, self.config.training.micro_batch_size
        arrays = self._samples[0, 0][0].values()
        mebibytes = size * sum(np.asarray(array).nbytes for array in arrays) / 2**20
        waiting = data.num_workers * data.prefetch_factor
        return (
            f"prefetch: at most {data.num_workers} workers x {data.prefetch_factor} micro-batches x {mebibytes:.1f} MiB = "
            f"{waiting * mebibytes / 1024:.2f} GiB of host memory per rank (--num-workers, --prefetch-factor)"
        )

    def sampler(
        self, consumed_samples: int, data_parallel_rank: int, data_parallel_size: int, num_iterations: int
    ) -> MicroBatchSampler:
        """Sample numbers of one rank from `consumed_samples` on."""
        micro_batch_size = self.config.training.micro_batch_size
        global_batch_size = self.config.training.global_batch_size or micro_batch_size * data_parallel_size
        return MicroBatchSampler(
            self.order,
            consumed_samples,
            micro_batch_size,
            global_batch_size,
            data_parallel_rank,
            data_parallel_size,
            num_iterations,
        )

    def iterator(
        self,
        consumed_samples: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        num_iterations: int,
        device_is_cuda: bool,
    ) -> Iterator[Batch]:
        """Micro-batches of `num_iterations` steps, in order, on the CPU (pinned when `device_is_cuda`).

        Raises SampleError when a sample cannot be made, ValueError when the first batch's images are out of range.
        """
        sampler = self.sampler(consumed_samples, data_parallel_rank, data_parallel_size, num_iterations)
        # Kept to be closed: workers must not outlive the run.
        batches = self._batches(sampler, self.config.data.num_workers, device_is_cuda)
        self._open.append(batches)
        return batches

    def first_batch(self, consumed_samples: int = 0, data_parallel_rank: int = 0, data_parallel_size: int = 1) -> Batch:
        """The first micro-batch, loaded in this process: what `iterator` with the same arguments yields first."""
        # In this process, before any worker: an error here has a readable traceback.
        sampler = self.sampler(consumed_samples, data_parallel_rank, data_parallel_size, 1)
        return next(self._batches(sampler, num_workers=0, pin_memory=False))

    def _batches(self, sampler: MicroBatchSampler, num_workers: int, pin_memory: bool) -> Iterator[Batch]:
        data = self.config.data
        batches = load_micro_batches(
            self._samples,
            sampler,
            num_workers=min(num_workers, len(sampler)),
            prefetch_factor=data.prefetch_factor,
            padding=data.prompt_padding,
            bucket_size=data.prompt_bucket_size,
            pin_memory=pin_memory,
            report=self._add_times,
        )
        for number, batch in enumerate(batches):
            # The one range check: every later batch comes from the same code.
            if number == 0:
                check_image_range(batch.images_BVCHW)
            yield batch

    def _add_times(self, times: StageTimes) -> None:
        self._times.add(times)

    def metrics(self) -> dict[str, float]:
        """Since the last call.

        Milliseconds of worker time per sample for reading (with decoding) and transforming; cut prompts.
        """
        times, self._times = self._times, StageTimes()
        samples = max(1, times.num_samples)
        return {
            "data_read_ms": 1e3 * times.read_seconds / samples,
            "data_transform_ms": 1e3 * times.transform_seconds / samples,
            "num_truncated_prompts": float(times.num_truncated_prompts),
        }

    def close(self) -> None:
        """Stop the workers."""
        for batches in self._open:
            batches.close()  # type: ignore[attr-defined]
        self._open.clear()


def build_data(config: RunConfig, family: Any) -> DataSupply:
    """Check the data and build its supply. Raises CheckError with everything that is wrong; prints on rank 0 only."""
    if config.data.mock_data:
        return _build_mock(config)
    # Only here: mock data must run where no video library is installed.
    from megatron_vla.data.robot_data import prepare_robot_data

    quiet = int(os.environ.get("RANK", "0")) != 0
    prepared = prepare_robot_data(config, state_is_model_input="state_BD" in family.batch_fields)
    source = RobotSource(prepared.dataset, prepared.preprocessor, prepared.rows)
    supply = DataSupply(
        config, source, prepared.num_samples, prepared.preprocessor, prepared.findings, prepared.expected_padded_fraction
    )
    if not quiet:
        # The line decodes a sample, so a dataset that cannot be read ends here and not in a worker.
        print("\n".join([*prepared.summary, supply.prefetch_line()]), flush=True)
    return supply


def _build_mock(config: RunConfig) -> DataSupply:
    data, model = config.data, config.family
    num_cameras = data.mock_num_cameras
    num_images = num_cameras if data.num_images is None else data.num_images
    if num_images < num_cameras:
        what = f"{num_images} is fewer than the {num_cameras} cameras of --mock-num-cameras"
        raise CheckError([error("--num-images", what, f"use --num-images {num_cameras} or more")])
    source = MockSource(
        num_samples=data.mock_num_samples,
        num_cameras=num_cameras,
        num_images=num_images,
        image_size=model.image_size,
        prompt_length=min(data.mock_prompt_length, model.max_prompt_length),
        max_prompt_length=model.max_prompt_length,
        vocab_size=model.vocab_size,
        action_horizon=model.action_horizon,
        max_action_dim=model.max_action_dim,
        action_loss=model.action_loss,
        seed=config.training.seed,
    )
    return DataSupply(config, source, data.mock_num_samples, None, [], 0.0)
