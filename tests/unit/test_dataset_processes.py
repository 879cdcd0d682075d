"""RobotDataset in forked and spawned workers: own decoders, shared columns, flat memory.

Shape legend: N samples, D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_fixture_dataset import CAMERAS, read_code
from torch.utils.data import DataLoader

from megatron_vla.config.data import DataConfig
from megatron_vla.data.action_steps import ActionSteps
from megatron_vla.data.dataset import RawSample, RobotDataset, build_robot_dataset
from megatron_vla.data.episode_table import EpisodeTable, FileSet
from megatron_vla.data.lerobot_columns import Columns


def build(root: Path, cameras: tuple[str, ...] = CAMERAS, **flags: Any) -> RobotDataset:
    return build_robot_dataset(DataConfig(data_path=(str(root),), **flags), 10, cameras)


def assert_paired(sample: RawSample) -> None:
    """The pictures, the action and the sample's own labels name the same moment."""
    assert np.float32(sample.episode_index + sample.frame_index / 1000) == sample.actions_TD[0, 0]
    for i, camera in enumerate(CAMERAS):
        assert read_code(sample.images[camera]) == (i, sample.episode_index, sample.frame_index)


def _one(samples: list[RawSample]) -> RawSample:
    return samples[0]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_V02_decoders_opened_in_the_parent_do_not_break_workers(fixture_dataset: Callable[..., Path], method: str) -> None:
    dataset = build(fixture_dataset(), video_decoder_cache_size=2)
    parent = {i: dataset[i] for i in (0, 50, 97)}
    workers = 2 if method == "fork" else 1
    order = [*range(0, 98, 7), 0, 50, 97]
    loader = DataLoader(dataset, 1, sampler=order, num_workers=workers, collate_fn=_one, multiprocessing_context=method)
    seen = []
    for sample in loader:
        assert_paired(sample)
        seen.append(sample.index)
        if sample.index in parent:
            np.testing.assert_array_equal(sample.images[CAMERAS[0]], parent[sample.index].images[CAMERAS[0]])
        assert_paired(dataset[sample.index])  # the parent goes on reading meanwhile
    assert seen == order


def _count_openings(dataset: RobotDataset, queue: Any) -> None:
    from megatron_vla.data import frame_source

    opened: list[Path] = []
    real = frame_source.open_decoder

    def counting(backend: str, path: Path, fps: float) -> Any:
        opened.append(path)
        return real(backend, path, fps)

    frame_source.open_decoder = counting  # type: ignore[assignment]
    sample = dataset[0]
    queue.put((len(opened), [read_code(sample.images[camera]) for camera in CAMERAS]))


def test_V02_forked_process_never_uses_inherited_handles(fixture_dataset: Callable[..., Path]) -> None:
    """The parent has both files open; their offsets would be shared, so the child opens its own."""
    dataset = build(fixture_dataset())
    dataset[0]
    context = torch.multiprocessing.get_context("fork")
    queue = context.Queue()
    worker = context.Process(target=_count_openings, args=(dataset, queue))
    worker.start()
    assert queue.get(timeout=240) == (2, [(0, 0, 0), (1, 0, 0)])
    worker.join()


def synthetic(num_rows: int) -> RobotDataset:
    """A dataset of low-dimensional columns only."""
    length_E = np.full(num_rows // 250, 250, dtype=np.int64)
    count = len(length_E)
    files = FileSet("/nowhere", "{file_index}", {"file_index": np.arange(1)}, np.zeros(count, dtype=np.int32), {})
    table = EpisodeTable(
        root="/nowhere",
        format="synthetic",
        fps=10.0,
        robot_type=None,
        features={},
        episode_index_E=np.arange(count),
        length_E=length_E,
        data=files,
        data_row_E=np.arange(count) * 250,
        videos={},
        task_texts={0: "go"},
        instructions=("go",),
        instruction_of_E=np.zeros(count, dtype=np.int32),
        stored_from_index_E=None,
        stored_to_index_E=None,
        info={},
    )
    values = {
        "s": np.random.default_rng(0).random((num_rows, 14), dtype=np.float32),
        "a": np.ones((num_rows, 14), dtype=np.float32),
        "task_index": np.zeros(num_rows, dtype=np.int64),
    }
    first_row_E = np.concatenate([[0], np.cumsum(length_E)])
    options = {"state_key": "s", "action_key": "a", "cameras": (), "steps": ActionSteps(8), "backend": "pyav", "cache_size": 1}
    return RobotDataset(table, Columns(values, first_row_E), **options)  # type: ignore[arg-type]


def private_mib() -> float:
    """Memory that only this process has."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024


def _touch_everything(dataset: RobotDataset, queue: Any) -> None:
    before = private_mib()
    total = sum(float(dataset[i].state_D.sum()) for i in range(0, len(dataset), 2501))
    total += float(dataset.state_ND.sum() + dataset.actions_ND.sum())
    queue.put((private_mib() - before, private_mib(), total))


def _in_worker(method: str, subject: RobotDataset) -> tuple[float, float, float]:
    context = torch.multiprocessing.get_context(method)
    queue = context.Queue()
    worker = context.Process(target=_touch_everything, args=(subject, queue))
    worker.start()
    result: tuple[float, float, float] = queue.get(timeout=400)
    worker.join()
    return result


def _expected_sum(dataset: RobotDataset) -> float:
    expected = sum(float(dataset.state_ND[i].sum()) for i in range(0, len(dataset), 2501))
    return expected + float(dataset.state_ND.sum() + dataset.actions_ND.sum())


def test_V09_index_of_a_million_rows_is_shared_with_forked_workers() -> None:
    """112 MB of columns: a forked worker adds little."""
    dataset = synthetic(1_000_000)
    growth, _, total = _in_worker("fork", dataset)
    assert growth < 50
    assert total == pytest.approx(_expected_sum(dataset))


@pytest.mark.slow
def test_V09_index_of_a_million_rows_is_shared_with_spawned_workers() -> None:
    """A spawned worker maps the same memory instead of getting its own copy. (Slow: it imports everything anew.)"""
    dataset = synthetic(1_000_000)
    _, with_large, total = _in_worker("spawn", dataset)
    _, with_small, _ = _in_worker("spawn", synthetic(1_000))
    assert total == pytest.approx(_expected_sum(dataset))
    assert with_large - with_small < 50


def test_V09_memory_is_flat_over_a_thousand_samples(fixture_dataset: Callable[..., Path]) -> None:
    dataset = build(fixture_dataset(), CAMERAS[:1], video_decoder_cache_size=1)
    order = np.random.default_rng(0).integers(0, len(dataset), 1000)
    sizes = []
    for n, i in enumerate(order):
        dataset[int(i)]
        if n % 250 == 249:
            sizes.append(private_mib())
    assert sizes[-1] - sizes[0] < 10
