"""LIBERO's protocol and what the suite says without the simulator's packages."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from megatron_vla.evaluation.environments import libero_suite
from megatron_vla.evaluation.environments.interface import ENVIRONMENTS, EnvironmentSettings, Trial, environment_backend
from megatron_vla.evaluation.environments.libero_suite import axis_angle, seeded
from megatron_vla.evaluation.environments.libero_tasks import SUITES, WAIT_ACTION, WAIT_STEPS, instruction_of


def test_official_protocol() -> None:
    backend = environment_backend("libero")
    assert backend is libero_suite.BACKEND and ENVIRONMENTS["libero"].endswith("libero_suite")
    horizons = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520}
    assert tuple(SUITES) == backend.suites == tuple(horizons)
    for suite, horizon in horizons.items():
        tasks = backend.tasks(EnvironmentSettings(suite=suite))
        assert len(tasks) == 10 and {t.max_steps for t in tasks} == {horizon} and {t.num_initial_states for t in tasks} == {50}
    assert WAIT_STEPS == 10 and WAIT_ACTION == (0, 0, 0, 0, 0, 0, -1)
    assert backend.fps(EnvironmentSettings(suite="libero_10", action_repeat=2)) == 10
    assert (len(backend.state_names), len(backend.action_names), len(backend.cameras)) == (8, 7, 2)


def test_instructions_leave_the_scene_out() -> None:
    assert instruction_of("KITCHEN_SCENE3_turn_on_the_stove_and_put_the_moka_pot_on_it") == (
        "turn on the stove and put the moka pot on it"
    )
    assert instruction_of("pick_up_the_milk_and_place_it_in_the_basket") == "pick up the milk and place it in the basket"


def test_tasks_by_name_or_number() -> None:
    chosen = libero_suite.tasks(EnvironmentSettings(suite="libero_object", tasks=("7", "0"), action_repeat=2))
    assert [t.instruction.split()[3] for t in chosen] == ["alphabet", "milk"] and chosen[0].max_steps == 140
    with pytest.raises(ValueError, match="LIBERO has libero_spatial"):
        libero_suite.tasks(EnvironmentSettings(suite="libero_90"))
    with pytest.raises(ValueError, match="not in this suite; near: pick_up_the_milk_and"):
        libero_suite.tasks(EnvironmentSettings(suite="libero_object", tasks=("pick_up_milk_and_place_it_in_the_basket",)))


def test_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libero", None)
    monkeypatch.setitem(sys.modules, "libero.libero", None)
    environment = libero_suite.build(EnvironmentSettings(suite="libero_object"))
    with pytest.raises(ValueError, match=r"LIBERO simulator is not installed .* pip install -e '\.\[libero\]'"):
        environment.reset(Trial(task="pick_up_the_milk_and_place_it_in_the_basket", index=0, seed=0))
    with pytest.raises(ValueError, match="this simulator reads pictures"):
        libero_suite.build(EnvironmentSettings(suite="libero_object", options={"camera": 1}))


def test_rotation_is_openpis_axis_times_angle() -> None:
    """Positive angles up to two pi: the hand, which points down, is near pi about x, and may be above it."""
    for angle in (0.3, 3.1, 3.3):
        axis_3 = np.array([0.6, -0.8, 0.0])
        quaternion_4 = np.append(axis_3 * np.sin(angle / 2), np.cos(angle / 2))
        np.testing.assert_allclose(axis_angle(quaternion_4), axis_3 * angle, atol=1e-9)
    assert not axis_angle(np.array([0.0, 0.0, 0.0, 1.0])).any()


def test_seeding_gives_the_process_its_generator_back() -> None:
    np.random.seed(5)
    expected = np.random.random(2)
    np.random.seed(5)
    first = np.random.random()
    with seeded(2**40 + 1):
        inside = np.random.random()
    assert [first, np.random.random()] == list(expected) and inside == np.random.RandomState(1).random_sample()
