"""tools/check_dataset.py: every defect is found, located and listed in one run; healthy datasets pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from check_dataset import main
from make_fixture_dataset import CAMERAS, DEFECTS, edit_info, make_dataset

from megatron_vla.data.dataset_check import CheckSettings, check_dataset, check_dataset_files
from megatron_vla.findings import Finding

HARMLESS = (
    "names_null",
    "image_only",
    "jsonl_quirks",
    "extra_columns",
    "codec_av1",
    "codec_hevc",
    "gop250_start",
    "wide_action",
)


def errors(findings: list[Finding]) -> list[Finding]:
    return [f for f in findings if f.severity == "error"]


@pytest.mark.parametrize("version", ["v2.0", "v2.1", "v3.0"])
def test_healthy_datasets_pass(fixture_dataset: Callable[..., Path], version: str) -> None:
    assert check_dataset_files(fixture_dataset(None, version), deep=True) == []


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_golden_datasets_pass(golden_datasets: dict[str, Path], version: str) -> None:
    assert check_dataset_files(golden_datasets[version], deep=True) == []


@pytest.mark.parametrize("defect", HARMLESS)
def test_harmless_peculiarities_pass(fixture_dataset: Callable[..., Path], defect: str) -> None:
    assert check_dataset_files(fixture_dataset(defect), deep=True) == []


def test_D03_merged_offsets_are_found(fixture_dataset: Callable[..., Path]) -> None:
    checked = check_dataset(fixture_dataset("merged_offsets"), deep=False)
    (found,) = errors(checked.findings)
    assert found.where == f"videos/{CAMERAS[0]}/chunk-000/file-000.mp4"
    assert "episode 1 starts at 0.000 s, before episode 0 ends at 2.300 s" in found.what
    assert checked.bad_episodes == [0, 1]


def test_D05_stale_file_index_is_found(fixture_dataset: Callable[..., Path]) -> None:
    found = errors(check_dataset_files(fixture_dataset("stale_file_index"), deep=False))
    assert any(
        f.where.startswith("data/chunk-000/file-000.parquet") and "81 rows, its episodes need 98" in f.what for f in found
    )
    assert any(f"{CAMERAS[0]}/chunk-000/file-000.mp4" in f.where and "episode 2 starts at" in f.what for f in found)


def test_D06_scrambled_ranges_are_found(fixture_dataset: Callable[..., Path]) -> None:
    (found,) = errors(check_dataset_files(fixture_dataset("scrambled_ranges"), deep=False))
    assert (
        "episodes 1, 2: stored ranges are not the running sum of the lengths (episode 1: from 41, lengths give 23)"
        in found.what
    )


def test_D02_wall_clock_warns_and_lost_frames_are_an_error(tmp_path: Path, fixture_dataset: Callable[..., Path]) -> None:
    found = check_dataset_files(fixture_dataset("wall_clock"), deep=False)
    assert [f.severity for f in found] == ["warning", "warning"]
    root = shutil.copytree(fixture_dataset(), tmp_path / "d")
    path = root / "data/chunk-000/file-001.parquet"
    table = pq.read_table(path)
    seconds = table["timestamp"].to_numpy() * np.where(np.arange(table.num_rows) > 8, 1.8, 1.0)
    position = table.column_names.index("timestamp")
    pq.write_table(table.set_column(position, "timestamp", pa.array(seconds.astype(np.float32))), path)
    (found,) = errors(check_dataset_files(root, deep=False))
    assert "episode 3" in found.where
    assert "of the frames by more than half a frame" in found.what


def test_D15_one_run_lists_every_broken_file(fixture_dataset: Callable[..., Path], tmp_path: Path) -> None:
    for deep in (False, True):
        checked = check_dataset(fixture_dataset("broken_files"), deep=deep)
        assert len(errors(checked.findings)) == 3
        assert checked.bad_episodes == [0, 1, 2]


@pytest.mark.parametrize(
    ("defect", "place", "what", "bad"),
    [
        ("truncated_parquet", "data/chunk-000/file-000.parquet (episodes 0, 1, 2)", "no parquet footer", [0, 1, 2]),
        ("half_mp4", f"videos/{CAMERAS[0]}/chunk-000/file-000.mp4 (episodes 0, 1)", "not readable as video", [0, 1]),
        ("off_by_one", f"videos/{CAMERAS[1]}/chunk-000/file-001.mp4 (episode 3)", "16 frames, episode 3 reach to 17", [3]),
    ],
)
def test_D15_each_broken_file(fixture_dataset: Callable[..., Path], defect: str, place: str, what: str, bad: list[int]) -> None:
    checked = check_dataset(fixture_dataset(defect), deep=False)
    (found,) = errors(checked.findings)
    assert found.where == place
    assert found.what.startswith(what)
    assert checked.bad_episodes == bad
    assert "--exclude-episodes-file" in found.fix


def test_D15_surplus_frame_in_a_v2_clip(tmp_path: Path) -> None:
    """One clip per episode: a frame too many means that rows and pictures were not recorded together."""
    root = make_dataset(tmp_path / "d", "v2.1", lengths=(9, 9))
    path = root / "data/chunk-000/episode_000001.parquet"
    pq.write_table(pq.read_table(path).slice(0, 8), path)
    lines = (
        (root / "meta/episodes.jsonl")
        .read_text()
        .replace('"episode_index": 1, "tasks": ["Pick up the puck"], "length": 9', "@")
    )
    (root / "meta/episodes.jsonl").write_text(
        lines.replace("@", '"episode_index": 1, "tasks": ["Pick up the puck"], "length": 8')
    )
    found = errors(check_dataset_files(root, deep=False))
    assert [f.what for f in found] == ["9 frames, its episodes use 8: rows and frames may be shifted"] * 2


def test_deep_finds_damage_inside_a_file(fixture_dataset: Callable[..., Path], tmp_path: Path) -> None:
    """Pictures overwritten with noise: the container is fine, only decoding finds it."""
    root = shutil.copytree(fixture_dataset("image_only"), tmp_path / "d")
    path = root / "data/chunk-000/file-001.parquet"
    table = pq.read_table(path)
    cells = table[CAMERAS[1]].to_pylist()
    cells[4]["bytes"] = cells[4]["bytes"][:60]
    column = pa.array(cells, table.schema.field(CAMERAS[1]).type)
    pq.write_table(table.set_column(table.column_names.index(CAMERAS[1]), CAMERAS[1], column), path)
    assert check_dataset_files(root, deep=False) == []
    checked = check_dataset(root, deep=True)
    (found,) = checked.findings
    assert f"episode 3, camera '{CAMERAS[1]}', frame 4" in found.what
    assert checked.bad_episodes == [3]


def test_wrong_rate_is_found(fixture_dataset: Callable[..., Path], tmp_path: Path) -> None:
    root = shutil.copytree(fixture_dataset(None, "v2.1"), tmp_path / "d")
    edit_info(root, fps=15)
    found = errors(check_dataset_files(root, deep=False))
    assert any("10 fps, meta/info.json says 15" in f.what for f in found)


def test_N04_nan_is_located(fixture_dataset: Callable[..., Path]) -> None:
    checked = check_dataset(fixture_dataset("nan_state"), deep=False)
    (found,) = errors(checked.findings)
    assert found.what == "1 values are NaN or Inf: episode 2 frame 11 dimension 3 (roll)"
    assert checked.bad_episodes == [2]


@pytest.mark.parametrize(("defect", "said"), [("already_delta", "absolute"), (None, "delta")])
def test_N10_action_representation_mismatch_warns(fixture_dataset: Callable[..., Path], defect: str | None, said: str) -> None:
    truth = "delta" if said == "absolute" else "absolute"
    root = fixture_dataset(defect)
    (found,) = check_dataset_files(root, deep=False, settings=CheckSettings(dataset_action_representation=said))
    assert (found.severity, f"looks {truth}" in found.what) == ("warning", True)
    assert f"--dataset-action-representation {truth}" in found.fix
    assert not check_dataset_files(root, deep=False, settings=CheckSettings(dataset_action_representation=truth))


def test_N11_copied_action_and_idle_frames_are_reported(fixture_dataset: Callable[..., Path]) -> None:
    (copied,) = check_dataset_files(fixture_dataset("copy_action"), deep=False)
    assert "equals observation.state in every frame (max |action - state| 0)" in copied.what
    checked = check_dataset(fixture_dataset("idle"), deep=False)
    (idle,) = checked.findings
    assert "82% of the frames are idle" in idle.what
    assert "--drop-idle-frames" in idle.fix
    assert checked.facts["idle frames"] == "81.6%"


def test_N11_episode_without_motion(tmp_path: Path) -> None:
    def hold(state: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (np.repeat(state[:1], len(state), axis=0) if len(state) == 18 else state), action

    found = check_dataset_files(make_dataset(tmp_path / "d", "v3.0", change=hold), deep=False)
    assert any("no motion at all in 1 of 4 episodes (episode 1)" in f.what for f in found)


def test_C04_instructions_are_counted(fixture_dataset: Callable[..., Path], tmp_path: Path) -> None:
    found = errors(check_dataset_files(fixture_dataset("empty_instruction"), deep=False))
    assert any("episodes 1, 3 (2 of 5) have an empty instruction" in f.what for f in found)
    assert any("episode 4: task_index 77 is not in meta/tasks" in f.what for f in found)
    dummy = make_dataset(tmp_path / "d", "v2.1", lengths=(5, 6), instructions=("dummy",))
    texts = [f.what for f in check_dataset_files(dummy, deep=False)]
    assert "placeholder instructions: 'dummy' (11 frames)" in texts
    assert "all 2 episodes have the same one, 'dummy'" in texts


def test_every_defect_is_known_to_the_checker(fixture_dataset: Callable[..., Path]) -> None:
    """The recipes that must be found are found, the others are silent: no recipe is forgotten."""
    elsewhere = {"float_drift", "many_files", "odd_cameras"}  # healthy files, other tests
    for defect in DEFECTS.keys() - elsewhere - set(HARMLESS):
        assert check_dataset_files(fixture_dataset(defect), deep=False), defect


def test_tool_prints_one_line_per_finding_and_exits_with_one(
    fixture_dataset: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exclude = tmp_path / "exclude.txt"
    status = main(["--data-path", str(fixture_dataset("broken_files")), "--deep", "--write-exclude-list", str(exclude)])
    lines = capsys.readouterr().out.splitlines()
    assert status == 1
    assert sum(line.startswith("ERROR") for line in lines) == 3
    assert lines[-1] == "3 errors, 0 warnings; every frame decoded"
    assert exclude.read_text().splitlines()[1:] == ["0", "1", "2"]
    assert main(["--data-path", str(fixture_dataset())]) == 0


def test_tools_run_as_scripts(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]

    def run(tool: str, *words: str) -> tuple[int, str]:
        command = [sys.executable, str(root / "tools" / tool), *words]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True)
        return done.returncode, done.stdout

    assert run("make_fixture_dataset.py", "--output", str(tmp_path / "d"), "--defect", "merged_offsets")[0] == 0
    status, printed = run("check_dataset.py", "--data-path", str(tmp_path / "d"))
    assert (status, "ERROR videos/" in printed) == (1, True)
    status, printed = run("check_dataset.py", "--data-path", str(tmp_path / "none"))
    assert (status, "no such folder" in printed) == (1, True)
