"""Chunks at another rate than the dataset's: brute force, exactness, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from preprocess_fixtures import CAMERAS, MemoryDataset, write_dataset

from megatron_vla.config.data import DataConfig
from megatron_vla.data.action_steps import ActionSteps, action_steps
from megatron_vla.data.dataset import build_robot_dataset
from megatron_vla.data.statistics_pass import StreamTransform, last_rows, transformed_blocks, windows_with_nonfinite
from megatron_vla.findings import CheckError

DATA = MemoryDataset()


def expected(row: int, last: int, offset: float) -> tuple[np.ndarray, bool]:
    low = int(np.floor(offset + 1e-9))
    weight = offset - low
    if abs(weight) < 1e-9:
        return DATA.actions_ND[min(row + low, last)], row + low <= last
    before, after = DATA.actions_ND[min(row + low, last)], DATA.actions_ND[min(row + low + 1, last)]
    return (1 - weight) * before + weight * after, row + low + 1 <= last


@pytest.mark.parametrize(("rate", "resampling"), [(1.0, "exact"), (3.0, "exact"), (2.5, "linear"), (0.4, "linear")])
def test_S06_chunks_equal_brute_force(rate: float, resampling: str) -> None:
    steps = ActionSteps(5, rate, resampling)  # type: ignore[arg-type]
    last = last_rows(DATA)
    rows = np.arange(len(DATA))
    actions_NTD, inside_NT = steps.chunks(DATA.actions_ND, rows, last)
    for row in rows:
        for k in range(5):
            action, is_inside = expected(row, int(last[row]), k * rate)
            np.testing.assert_allclose(actions_NTD[row, k], action, rtol=1e-6, atol=1e-6)
            assert inside_NT[row, k] == is_inside
    lengths = np.diff(np.append(np.flatnonzero(np.diff(DATA.episode_of_N, prepend=-1)), len(DATA)))
    assert steps.padded_share(lengths) == pytest.approx(1 - inside_NT.mean())
    streamed = next(transformed_blocks(DATA, StreamTransform(5, (), "s", "a", rate, resampling), rows))[1]  # type: ignore[arg-type]
    np.testing.assert_array_equal(streamed, actions_NTD)  # statistics see what training sees


def test_nearest_takes_whole_frames() -> None:
    steps = ActionSteps(4, 2.5, "nearest")
    assert steps.offsets_T().tolist() == [0, 3, 5, 8]
    assert steps.reach == 9


def test_whole_frames_are_bit_equal_beside_a_nan() -> None:
    actions = np.array([[1.0], [np.nan], [3.0], [4.0], [5.0]], dtype=np.float32)
    chunk, _ = ActionSteps(3, 1.5, "linear").chunks(actions, np.array([2]), np.array([4]))
    assert chunk[0, :, 0].tolist() == [3.0, 4.5, 5.0]
    chunk, _ = ActionSteps(2, 2.0, "linear").chunks(actions, np.array([0]), np.array([4]))
    assert chunk[0, :, 0].tolist() == [1.0, 3.0]
    columns = MemoryDataset(lengths=(6,))
    columns.actions_ND[5] = np.nan
    assert windows_with_nonfinite(columns, ActionSteps(2, 2.0).reach).tolist() == [False, False, False, True, True, True]


@pytest.mark.parametrize(
    ("flags", "fps", "what"),
    [
        ({"action_fps": 20.0}, 50, r"a step would be 2.5 frames long -> use one of 50, 25, 16.6667"),
        ({"action_fps": 60.0}, 30, r"a step would be 0.5 frames long"),
        ({"action_fps": 0.0}, 30, "above 0"),
        ({"action_fps": 10.0, "dataset_action_representation": "delta"}, 50, "delta actions: skipping some loses motion"),
        ({"action_fps": 10.0, "action_horizon_seconds": 1.0}, 50, "both are set"),
    ],
)
def test_S06_resampling_is_never_silent(flags: dict[str, float], fps: float, what: str) -> None:
    with pytest.raises(CheckError, match=what):
        action_steps(DataConfig(**flags), 8, fps)  # type: ignore[arg-type]


def test_horizon_in_seconds_is_a_rate() -> None:
    assert action_steps(DataConfig(action_horizon_seconds=0.8), 8, 50) == ActionSteps(8, 5.0)
    assert action_steps(DataConfig(action_fps=10.0), 8, 10) == ActionSteps(8)
    assert action_steps(DataConfig(), 8, 50) == ActionSteps(8)
    assert action_steps(DataConfig(action_fps=30.0, action_resampling="linear"), 8, 50) == ActionSteps(8, 5 / 3, "linear")


def test_dataset_uses_the_steps(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data")
    flags = {"data_path": (str(root),), "video_backend": "pyav"}
    plain = build_robot_dataset(DataConfig(**flags), 7, CAMERAS[:1])  # type: ignore[arg-type]
    halved = build_robot_dataset(DataConfig(**flags, action_fps=5.0), 4, CAMERAS[:1])  # type: ignore[arg-type]
    for index in (0, 7, 12):
        np.testing.assert_array_equal(halved[index].actions_TD, plain[index].actions_TD[::2])
        np.testing.assert_array_equal(halved[index].action_is_in_episode_T, plain[index].action_is_in_episode_T[::2])
