"""Recorded demonstrations: what is in the dataset is what the simulator did, step for step, and follows from the seed alone."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from recording_fixtures import CONFIG, FakeEnvironment, play_fakes, play_hopeless_fakes

from megatron_vla.data.frame_source import FrameSource
from megatron_vla.data.metadata import read_metadata
from megatron_vla.evaluation.environments import metaworld, rendering
from megatron_vla.evaluation.environments.interface import TaskSpec
from megatron_vla.evaluation.environments.metaworld import INSTRUCTIONS, USUAL_CAMERAS, MetaWorldEnvironment, task_name
from tools import record_demonstrations as recorder
from tools.record_demonstrations import Episode, Job, attempt_episode, is_reusable, record, simulate


@pytest.fixture(scope="module")
def recorded(gl_backend: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(dataclasses.replace(CONFIG, output=str(tmp_path_factory.mktemp("recorded") / "demonstrations")))


def successful(episodes: Iterable[Episode | None]) -> list[Episode]:
    """Without the failed attempts."""
    return [episode for episode in episodes if episode is not None]


def columns(root: Path) -> dict[str, np.ndarray]:
    """Low-dimensional columns of all frames, float32 [N, D] or int64 [N]."""
    table = pq.read_table(sorted(root.glob("data/*/*.parquet"))[0])
    return {name: np.array(table[name].to_pylist()) for name in ("observation.state", "action", "episode_index", "timestamp")}


@pytest.mark.simulator
def test_dataset_says_what_it_holds(recorded: Path, gl_backend: str) -> None:
    table, findings = read_metadata(recorded)
    assert not findings
    assert table.fps == 20 and table.num_episodes == 2
    assert set(table.cameras) == set(USUAL_CAMERAS)
    assert [table.instruction(e) for e in range(2)] == ["Press a button from the top", "Push and close a window"]
    recording = json.loads((recorded / "meta/recording.json").read_text())
    assert recording["settings"]["fast_rendering"] is True and recording["gl_backend"] == gl_backend
    assert [e["length"] for e in recording["episodes"]] == table.length_E.tolist()
    assert (recorded / "montage.png").stat().st_size > 1000
    assert not recorded.with_name("demonstrations.partial").exists()


@pytest.mark.simulator
@pytest.mark.parametrize("episode", [0, 1])
def test_replaying_the_recorded_actions_gives_the_recorded_pictures(recorded: Path, episode: int) -> None:
    """Frame k, state k and action k belong together: action k, executed, leads to state k + 1; no frame is shifted.

    Pictures are compared as mean absolute grey levels: H.264 with halved colour costs 6 to 7 at 64 pixels.
    """
    row = json.loads((recorded / "meta/recording.json").read_text())["episodes"][episode]
    values = columns(recorded)
    mine = values["episode_index"] == episode
    state_TD, actions_TA = values["observation.state"][mine], values["action"][mine]
    table, _ = read_metadata(recorded)
    source = FrameSource(table, "pyav", 4)
    environment = MetaWorldEnvironment(row["task"], image_size=64, action_repeat=4)
    observation = environment.reset(row["environment_seed"])
    steps = range(len(state_TD))
    decoded = {camera: source.frames(camera, episode, list(steps)).astype(np.float32) for camera in USUAL_CAMERAS}
    for step in steps:
        np.testing.assert_array_equal(state_TD[step], observation["observation.state"])
        for camera, frames in decoded.items():
            distances = np.abs(frames - observation[camera].astype(np.float32)).mean((1, 2, 3))
            assert distances[step] < 10, f"{camera}, step {step}"
            assert distances.argmin() == step or distances[step] - distances.min() < 0.3
        observation, succeeded = environment.step(actions_TA[step])
    environment.close()
    assert succeeded


@pytest.mark.simulator
def test_processes_and_task_order_change_nothing(gl_backend: str) -> None:
    one = {e.task: e for e in simulate(CONFIG)}
    two = {e.task: e for e in simulate(dataclasses.replace(CONFIG, num_processes=2, tasks=CONFIG.tasks[::-1]))}
    assert list(two) == list(one), "the suite's order"
    for task, episode in one.items():
        for camera in USUAL_CAMERAS:
            np.testing.assert_array_equal(episode.images[camera], two[task].images[camera])
        np.testing.assert_array_equal(episode.state_TD, two[task].state_TD)
        np.testing.assert_array_equal(episode.actions_TA, two[task].actions_TA)


@pytest.mark.simulator
def test_seed_decides_goals_and_fast_rendering_decides_looks(gl_backend: str) -> None:
    fast = MetaWorldEnvironment("drawer-open", image_size=64)
    slow = MetaWorldEnvironment("drawer-open", image_size=64, fast_rendering=False)
    first, second, again = (fast.reset(seed) for seed in (1, 2, 1))
    looks = slow.reset(1)
    fast.close()
    slow.close()
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
    assert np.abs(first["observation.images.top"].astype(int) - second["observation.images.top"]).max() > 50
    assert np.abs(first["observation.images.top"].astype(int) - looks["observation.images.top"]).max() > 20
    np.testing.assert_array_equal(first["observation.state"], looks["observation.state"])


@pytest.mark.simulator
def test_existing_recording_is_reused_or_refused(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (recorded / "meta/info.json").stat().st_mtime_ns
    assert record(dataclasses.replace(CONFIG, output=str(recorded), num_processes=2)) == recorded
    assert "reused" in capsys.readouterr().out
    assert (recorded / "meta/info.json").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match=r"seed: 3 there, 4 asked.*--overwrite"):
        record(dataclasses.replace(CONFIG, output=str(recorded), seed=4))
    assert is_reusable(dataclasses.replace(CONFIG, output=str(recorded), cameras=("top", "wrist"))), "the usual ones"
    with pytest.raises(
        ValueError, match=r"cameras: \['observation.images.top', .*wrist'\] there, \['observation.images.behind'\] asked"
    ):
        is_reusable(dataclasses.replace(CONFIG, output=str(recorded), cameras=("behind",)))


def test_recordings_from_before_a_revision_are_refused(recorded: Path, tmp_path: Path) -> None:
    """They tell neither revision nor cameras."""
    content = json.loads((recorded / "meta/recording.json").read_text())
    assert content["settings"].pop("revision") == 3 and len(content["settings"].pop("cameras")) == 2
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/recording.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"recorded with other settings \(revision: 1 there, 3 asked\)"):
        is_reusable(dataclasses.replace(CONFIG, output=str(tmp_path)))


@pytest.mark.simulator
@pytest.mark.parametrize("task", ["reach", "drawer-open", "window-open", "peg-insert-side"])
def test_the_first_observation_shows_this_episode(task: str, gl_backend: str) -> None:
    """Reference: the same scene once more, after MuJoCo has computed where everything is."""
    import mujoco

    environment = MetaWorldEnvironment(task, image_size=64, cameras=tuple(metaworld.CAMERAS))
    for seed in (1, 2):
        first, handle_3 = environment.reset(seed), environment._simulator_observation[4:7].copy()
        mujoco.mj_forward(environment._environment.model, environment._environment.data)
        for camera in metaworld.CAMERAS:
            np.testing.assert_array_equal(first[camera], environment.picture(camera))
        environment.step(np.zeros(4))
        np.testing.assert_allclose(handle_3, environment._simulator_observation[4:7], atol=0.005)
    environment.close()


@pytest.mark.simulator
@pytest.mark.parametrize("task", ["reach", "reach-wall"])
def test_experts_for_reach_bring_their_fingers_to_the_goal(task: str, gl_backend: str) -> None:
    """MetaWorld's own end 4.5 cm beside it, where 5 count as success."""
    environment = MetaWorldEnvironment(task, image_size=32)
    for seed in (1000, 1003):
        environment.reset(seed)
        for _ in range(160):
            _, succeeds = environment.step(environment.expert_action(), render=False)
        scene = environment._environment
        assert succeeds and np.linalg.norm(scene.tcp_center - scene._target_pos) < 0.01
    environment.close()


@pytest.mark.simulator
def test_further_cameras_are_recorded_when_named_and_change_nothing_else(gl_backend: str) -> None:
    config = dataclasses.replace(CONFIG, tasks=("window-close",), cameras=("behind", "top"))
    (chosen,), (usual,) = list(simulate(config)), list(simulate(dataclasses.replace(config, cameras=())))
    top, behind = "observation.images.top", "observation.images.behind"
    assert list(chosen.images) == [behind, top] and set(usual.images) == set(USUAL_CAMERAS)
    np.testing.assert_array_equal(chosen.images[top], usual.images[top])
    np.testing.assert_array_equal(chosen.actions_TA, usual.actions_TA)
    environment = MetaWorldEnvironment("window-close", image_size=64, action_repeat=4, cameras=(behind,))
    observation = environment.reset(chosen.environment_seed)
    environment.close()
    np.testing.assert_array_equal(observation[behind], chosen.images[behind][0])
    with pytest.raises(ValueError, match="--cameras side: metaworld has top, wrist, behind, each once"):
        recorder.chosen(dataclasses.replace(CONFIG, cameras=("side",)))


@pytest.mark.simulator
def test_a_used_simulator_records_the_same_as_a_new_one(gl_backend: str) -> None:
    config = dataclasses.replace(CONFIG, tasks=("window-close",), noise_fraction=1.0)
    task = recorder.chosen(config)[2][0]
    first, second = successful(recorder.record_episodes(config, Job(task, range(2)), 0))
    recorder.simulator(config).close()
    recorder.simulator.cache_clear()
    (alone,) = successful(recorder.record_episodes(config, Job(task, range(2)), 1))
    recorder.simulator(config).close()
    recorder.simulator.cache_clear()
    np.testing.assert_array_equal(second.actions_TA, alone.actions_TA)
    np.testing.assert_array_equal(second.state_TD, alone.state_TD)
    for camera in USUAL_CAMERAS:
        np.testing.assert_array_equal(second.images[camera], alone.images[camera])
    assert first.environment_seed != second.environment_seed


def test_png_recordings_hold_the_exact_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "none")  # as the recorder sets it: taken back afterwards
    monkeypatch.setattr(recorder, "choose_backend", lambda: "none")
    monkeypatch.setattr(recorder, "version", lambda package: "0")
    monkeypatch.setattr(recorder, "record_episodes", play_fakes)
    config = dataclasses.replace(
        CONFIG, tasks=("window-close",), image_size=2, picture_format="png", output=str(tmp_path / "d")
    )
    table, findings = read_metadata(record(config))
    assert not findings and table.num_episodes == 1
    source = FrameSource(table, "pyav", 1)
    for camera in USUAL_CAMERAS:
        frames = source.frames(camera, 0, [0, 3])
        np.testing.assert_array_equal(frames[:, 0, 0, 0], [0, 3])


TASK = TaskSpec(name="door-open-v3", instruction="Open a door with a revolving joint", max_steps=500)


def test_noise_is_executed_and_the_clean_action_recorded() -> None:
    config = dataclasses.replace(CONFIG, noise_fraction=1.0, noise_sigma=0.3, max_steps=800, steps_after_success=100)
    environment = FakeEnvironment(success_step=100)
    episode = attempt_episode(environment, TASK, config, 0, 0)  # type: ignore[arg-type]  # a stand-in
    assert episode is not None and episode.noisy and len(episode.actions_TA) == 200
    np.testing.assert_allclose(episode.actions_TA[:, 0], 0.1 * np.arange(1, 201), rtol=1e-6)
    np.testing.assert_array_equal(episode.state_TD[:, 0], np.arange(200))
    np.testing.assert_array_equal(episode.images["observation.images.top"][:, 0, 0, 0], np.arange(200))
    noise = np.stack(environment.executed) - episode.actions_TA
    assert 0.25 < noise[:, :3].std() < 0.35 and np.abs(noise[:, :3].mean()) < 0.05
    assert not noise[:, 3].any()


def test_held_noise_lasts_and_is_drawn_anew() -> None:
    config = dataclasses.replace(CONFIG, noise_fraction=1.0, noise_hold=10, max_steps=800, steps_after_success=100)
    environment = FakeEnvironment(success_step=100)
    episode = attempt_episode(environment, TASK, config, 0, 0)  # type: ignore[arg-type]  # a stand-in
    assert episode is not None
    held = (np.stack(environment.executed) - episode.actions_TA)[:, :3].reshape(20, 10, 3)
    np.testing.assert_allclose(held, np.repeat(held[:, :1], 10, axis=1), atol=1e-5)
    assert len(np.unique(held[:, 0, 0])) == 20 and 0.2 < held[:, 0].std() < 0.4


def test_hard_tasks_keep_their_share_of_noise() -> None:
    """Failed attempts draw goals and noise anew, but not whether there is noise; the last ones have none."""
    config = dataclasses.replace(CONFIG, noise_fraction=0.5)
    noisy = np.array([
        [attempt_episode(FakeEnvironment(), TASK, config, number, attempt).noisy for attempt in (0, 7, 14, 15, 19)]  # type: ignore
        for number in range(100)
    ])  # fmt: skip
    assert 35 <= noisy[:, 0].sum() <= 65
    assert (noisy[:, :3] == noisy[:, :1]).all() and not noisy[:, 3:].any()


def test_recording_stops_some_steps_after_success_and_drops_failures() -> None:
    episode = attempt_episode(FakeEnvironment(), TASK, CONFIG, 0, 0)  # type: ignore[arg-type]
    assert episode is not None and len(episode.actions_TA) == 5 + CONFIG.steps_after_success and not episode.noisy
    assert attempt_episode(FakeEnvironment(success_step=1000), TASK, CONFIG, 0, 0) is None  # type: ignore[arg-type]


def test_hopeless_task_ends_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "record_episodes", play_hopeless_fakes)
    with pytest.raises(ValueError, match=r"window-close-v3, episode 0.*failed 20 times.*--max-steps"):
        list(simulate(dataclasses.replace(CONFIG, tasks=("window-close",))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output": ""}, "--output is not set"),
        ({"image_size": 63}, "--image-size 63"),
        ({"tasks": ("drawer-opne",)}, "near: drawer-open-v3"),
        ({"tasks": ("drawer-open", "drawer-open-v3")}, "named twice"),
        ({"suite": "mt10", "tasks": ("assembly",)}, "--tasks assembly-v3: not in this suite"),
        ({"suite": "mt11"}, "--suite mt11"),
        ({"episodes_per_task": 0}, "--episodes-per-task"),
        ({"noise_fraction": 1.5}, "--noise-fraction 1.5"),
    ],
)
def test_bad_flags_are_named(change: dict[str, object], message: str, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, **{"output": str(tmp_path / "x"), **change})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        record(config)


def test_no_gl_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(rendering, "probe_backend", lambda backend: f"{backend} is missing")
    with pytest.raises(ValueError, match=r"egl is missing.*osmesa is missing.*apt-get install"):
        rendering.choose_backend()


@pytest.mark.parametrize(
    ("visible", "local_rank", "device"),
    [
        ("", None, None),
        ("", "3", "3"),
        ("5", None, "5"),
        ("4, 6", "1", "6"),
        ("4,6", "2", None),
        ("5", "3", "5"),
        ("GPU-8d1b,1", "1", None),
    ],
)
def test_simulators_render_on_the_process_own_gpu(visible: str, local_rank: str | None, device: str | None) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": visible} | ({"LOCAL_RANK": local_rank} if local_rank else {})
    assert rendering.egl_device(environment) == device


@pytest.mark.parametrize("renders", [True, False])
def test_a_gpu_that_does_not_render_is_not_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, renders: bool) -> None:
    for name, value in (("MUJOCO_GL", "egl"), ("CUDA_VISIBLE_DEVICES", "5")):
        monkeypatch.setenv(name, value)
    for name in (rendering.EGL_VENDOR_VARIABLE, rendering.EGL_DEVICE_VARIABLE):
        monkeypatch.setenv(name, "")  # what the calls set is taken back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(rendering, "nvidia_vendor_file", lambda: tmp_path)
    fails = None if renders else "no display"
    monkeypatch.setattr(
        rendering, "probe_backend", lambda backend: fails if rendering.EGL_DEVICE_VARIABLE in os.environ else None
    )
    assert rendering.choose_backend() == "egl"
    assert os.environ.get(rendering.EGL_DEVICE_VARIABLE) == ("5" if renders else None)


def test_every_task_has_an_expert_and_an_instruction() -> None:
    policies = pytest.importorskip("metaworld.policies")
    assert set(INSTRUCTIONS) == set(policies.ENV_POLICY_MAP)
    assert len(set(INSTRUCTIONS.values())) == 50
    assert task_name("drawer-open") == task_name("drawer-open-v3") == "drawer-open-v3"
    assert metaworld.CONTROL_HZ == 80


WATCHED = """
import sys, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import os
from megatron_vla.evaluation.ordered_processes import exit_with_parent

if __name__ == "__main__":
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=exit_with_parent) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        time.sleep(600)
"""


def test_a_killed_recorder_leaves_no_simulators(tmp_path: Path) -> None:
    import psutil

    script = tmp_path / "watched.py"
    script.write_text(WATCHED)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    recorder = subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True)
    assert recorder.stdout is not None
    simulator = psutil.Process(int(recorder.stdout.readline()))
    recorder.kill()
    recorder.wait()
    simulator.wait(timeout=300)
