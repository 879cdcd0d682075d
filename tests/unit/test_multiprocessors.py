"""--data-parallel-sms: what megatron-core, NCCL and cuBLASLt are told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml

from megatron_vla.config.parallel import ParallelConfig
from megatron_vla.parallel import multiprocessors


@pytest.fixture
def gpu() -> Iterator[mock.MagicMock]:
    """As if there were one; collects what torch is told."""
    told = mock.MagicMock()
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch._C, "_set_sm_carveout_experimental", told.carveout),
        mock.patch.object(torch._C, "_get_sm_carveout_experimental", lambda: told.carveout.call_args and 4),
        mock.patch.object(torch.backends.cuda, "preferred_blas_library", told.library),
    ):
        yield told


def test_only_communicators_that_reduce_gradients_are_limited(gpu: mock.MagicMock) -> None:
    with multiprocessors.communicator_config(ParallelConfig(data_parallel_sms=4)) as path:
        assert path is not None
        settings = yaml.safe_load(Path(path).read_text())
    assert settings == {group: {"min_ctas": 1, "max_ctas": 4} for group in ("dp", "dp_cp", "intra_dp_cp")}
    assert not Path(path).exists()
    with multiprocessors.communicator_config(ParallelConfig()) as path:
        assert path is None


def test_without_a_gpu_nothing_is_limited() -> None:
    with multiprocessors.communicator_config(ParallelConfig(data_parallel_sms=4)) as path:
        assert path is None


@pytest.mark.parametrize(("limit", "data_parallel_size", "told"), [(4, 2, True), (4, 1, False), (None, 2, False)])
def test_products_leave_them_free_where_gradients_are_reduced(
    gpu: mock.MagicMock, limit: int | None, data_parallel_size: int, told: bool
) -> None:
    multiprocessors.leave_free(ParallelConfig(data_parallel_sms=limit), data_parallel_size)
    set_up = [mock.call.carveout(4), mock.call.library("cublaslt")]
    undone = [mock.call.carveout(None), mock.call.library("default")]
    assert gpu.mock_calls == (set_up if told else [])
    multiprocessors.use_all_again()
    assert gpu.mock_calls == ([*set_up, *undone] if told else [])
