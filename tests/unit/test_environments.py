"""Simulators behind one interface: MetaWorld's tasks, any Gymnasium environment, and Isaac Lab against a fake of its API."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch

from megatron_vla.config.evaluation import EvaluationConfig
from megatron_vla.evaluation.environments import gymnasium_suite, interface, metaworld_suite
from megatron_vla.evaluation.environments.interface import EnvironmentSettings, StackedEnvironment, Trial, build_vector
from megatron_vla.evaluation.rollout import ActRequest, Rollout, RolloutSettings


def trial(task: str, seed: int = 0, index: int = 0) -> Trial:
    return Trial(task=task, index=index, seed=seed)


def test_flag_and_table_name_the_same_simulators() -> None:
    named = get_args(get_type_hints(EvaluationConfig)["eval_environment"])
    assert list(named) == list(interface.ENVIRONMENTS)
    for name in named:
        assert interface.environment_backend(name).name == name


def test_mt10_is_the_official_ten_and_tasks_keep_its_order() -> None:
    metaworld = pytest.importorskip("metaworld.env_dict")
    assert set(metaworld_suite.MT10) == set(metaworld.MT10_V3)
    settings = EnvironmentSettings(suite="mt10", tasks=("window-open", "reach-v3"), action_repeat=4)
    assert [(t.name, t.max_steps) for t in metaworld_suite.tasks(settings)] == [("reach-v3", 125), ("window-open-v3", 125)]
    assert len(metaworld_suite.tasks(EnvironmentSettings(suite="mt50"))) == 50
    with pytest.raises(ValueError, match="mt1 is one task, 0 are chosen"):
        metaworld_suite.tasks(EnvironmentSettings(suite="mt1"))
    with pytest.raises(ValueError, match=r"assembly-v3: not in this suite; near"):
        metaworld_suite.tasks(EnvironmentSettings(suite="mt10", tasks=("assembly",)))
    with pytest.raises(ValueError, match="named twice"):
        metaworld_suite.tasks(EnvironmentSettings(suite="mt10", tasks=("reach", "reach-v3")))


def test_metaworlds_500_control_steps_hold_waiting_and_acting() -> None:
    """The simulator itself refuses the next one, at the first trial that has not succeeded by then."""

    def limit(**changes: int) -> int:
        return metaworld_suite.tasks(EnvironmentSettings(suite="mt10", tasks=("reach",), **changes))[0].max_steps

    assert (limit(), limit(wait_steps=10), limit(wait_steps=5, action_repeat=4)) == (500, 490, 120)
    assert limit(max_steps=120, wait_steps=5, action_repeat=4) == 120 and limit(wait_steps=499) == 1
    for changes, message in (
        ({"max_steps": 501}, "--eval-max-steps 501 after --eval-wait-steps 0.*-> use --eval-max-steps 500 or less"),
        ({"max_steps": 126, "action_repeat": 4}, "125 actions with --eval-action-repeat 4 -> use --eval-max-steps 125"),
        ({"max_steps": 120, "wait_steps": 6, "action_repeat": 4}, "--eval-wait-steps 6.*-> use --eval-max-steps 119 or less"),
        ({"wait_steps": 500}, "--eval-max-steps not set after --eval-wait-steps 500.*-> use --eval-wait-steps 499 or less"),
    ):
        with pytest.raises(ValueError, match=message):
            limit(**changes)


@pytest.mark.simulator
def test_a_metaworld_trial_that_never_succeeds_lasts_as_long_as_its_limit(gl_backend: str) -> None:
    pytest.importorskip("metaworld")
    settings = EnvironmentSettings(suite="mt10", tasks=("reach",), wait_steps=10, action_repeat=4, image_size=16)
    environment = metaworld_suite.build(settings)
    environment.reset(trial("reach-v3", seed=1))
    for _ in range(metaworld_suite.tasks(settings)[0].max_steps):
        environment.step(np.zeros(4, np.float32), render=False)
    with pytest.raises(ValueError, match="must reset the env"):
        environment.step(np.zeros(4, np.float32), render=False)
    environment.close()


BOX = {
    "images": {"observation.images.top": "render"},
    "state": ["position", "velocity/x"],
    "instruction": "Go right",
    "success": "reward>=3",
    "fps": 10,
}


class FakeSpace:
    shape = (1,)
    low, high, dtype = np.array([-1.0]), np.array([1.0]), np.dtype(np.float32)


class FakeGymnasium:
    """Reward is the position; ends by itself at 4."""

    action_space = FakeSpace()

    def reset(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        self.position = float(seed)
        return self.observe(), {}

    def observe(self) -> dict[str, Any]:
        return {"position": np.array([self.position]), "velocity": {"x": np.float64(0.5)}}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        assert action.dtype == np.float32
        self.position += float(action[0])
        return self.observe(), self.position, self.position >= 4, False, {}

    def render(self) -> np.ndarray:
        return np.full((6, 8, 3), int(self.position), np.uint8)

    def close(self) -> None:
        pass


def test_gymnasium_maps_observations_clips_actions_and_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    monkeypatch.setattr(gymnasium, "make", lambda name, **kwargs: FakeGymnasium())
    environment = gymnasium_suite.BACKEND.build(EnvironmentSettings(suite="Line-v0", options=BOX, action_repeat=2))  # type: ignore[misc]
    observation = environment.reset(trial("Line-v0", seed=1))
    np.testing.assert_array_equal(observation.state_D, np.array([1.0, 0.5], np.float32))
    assert observation.images["observation.images.top"].shape == (6, 8, 3) and observation.instruction == "Go right"
    first = environment.step(np.array([9.0], np.float32), render=False)
    assert first.observation.state_D[0] == 3.0 and first.succeeded and not first.ended and not first.observation.images
    second = environment.step(np.array([0.9], np.float32))
    assert second.ended and second.observation.state_D[0] == pytest.approx(4.8)
    assert gymnasium_suite.BACKEND.fps(EnvironmentSettings(suite="Line-v0", options=BOX, action_repeat=2)) == 5
    with pytest.raises(ValueError, match="no scripted expert"):
        environment.expert_action()


def test_gymnasium_says_what_is_missing_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    monkeypatch.setattr(gymnasium, "make", lambda name, **kwargs: FakeGymnasium())
    with pytest.raises(ValueError, match="add --eval-options images="):
        gymnasium_suite.tasks(EnvironmentSettings(suite="Line-v0"))
    with pytest.raises(ValueError, match="--eval-options colour: this simulator reads images, state"):
        gymnasium_suite.tasks(EnvironmentSettings(suite="Line-v0", options={**BOX, "colour": 1}))
    wrong_values = {"images": "pixels", "state": 3, "fps": "fast", "kwargs": 1, "success": "reward>=x"}
    for key, value in wrong_values.items():
        with pytest.raises(ValueError, match=f"--eval-options {key}="):
            gymnasium_suite.tasks(EnvironmentSettings(suite="Line-v0", options={**BOX, key: value}))
    with pytest.raises(ValueError, match="success='maybe'"):
        gymnasium_suite.BACKEND.build(EnvironmentSettings(suite="Line-v0", options={**BOX, "success": "maybe"}))  # type: ignore[misc]
    wrong = gymnasium_suite.BACKEND.build(EnvironmentSettings(suite="Line-v0", options={**BOX, "state": "velocity/y"}))  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"nothing at 'velocity/y' \(x\)"):
        wrong.reset(trial("Line-v0"))


@pytest.mark.simulator
def test_pusht_runs_from_its_preset() -> None:
    pytest.importorskip("gym_pusht")
    settings = EnvironmentSettings(suite="gym_pusht:gym_pusht/PushT-v0")
    environment = gymnasium_suite.BACKEND.build(settings)  # type: ignore[misc]
    name = gymnasium_suite.tasks(settings)[0].name
    one, two, again = (environment.reset(trial(name, seed)) for seed in (1, 2, 1))
    np.testing.assert_array_equal(one.state_D, again.state_D)
    assert np.abs(one.state_D - two.state_D).max() > 1 and one.images["observation.image"].shape == (96, 96, 3)
    goal = one.state_D + np.array([60.0, 0.0], np.float32)
    for _ in range(12):
        result = environment.step(goal)
    # The agent goes to the position that the action names.
    np.testing.assert_allclose(result.observation.state_D, goal, atol=8)
    assert not result.succeeded and environment.picture().dtype == np.uint8
    environment.close()


@pytest.mark.simulator
def test_pusht_runs_in_a_simulator_process() -> None:
    """A real Gymnasium environment through the rollout: the worker imports it, sends pictures and obeys the actions."""
    pytest.importorskip("gym_pusht")
    settings = EnvironmentSettings(suite="gym_pusht:gym_pusht/PushT-v0", max_steps=20)
    tasks = gymnasium_suite.tasks(settings)
    seen: list[np.ndarray] = []

    def act(requests: Sequence[ActRequest]) -> list[np.ndarray]:
        for request in requests:
            assert request.observation.images["observation.image"].shape == (96, 96, 3)
            seen.append(request.observation.state_D)
        return [np.full((10, 2), 256.0, np.float32) for _ in requests]

    rollout = Rollout(gymnasium_suite.BACKEND, settings, tasks, RolloutSettings(replan_interval=10, num_workers=1), act)
    (result,) = rollout.run([trial(tasks[0].name, seed=3)])
    assert (result.error, result.succeeded, result.num_steps) == (None, False, 20) and len(seen) == 2
    # Ten steps of a tenth of a second later the agent is where the actions send it: in the middle.
    assert np.abs(seen[0] - 256).max() > 20
    np.testing.assert_allclose(seen[1], 256, atol=8)


def test_stacked_simulators_step_only_active_slots() -> None:
    class Counting:
        def __init__(self) -> None:
            self.steps = 0

        def step(self, action_A: np.ndarray, render: bool) -> str:
            self.steps += 1
            return f"{action_A[0]:g} {render}"

    simulators = [Counting(), Counting(), Counting()]
    stack = StackedEnvironment(simulators)  # type: ignore[arg-type]
    results = stack.step(np.array([[1.0], [2.0], [3.0]]), np.array([True, False, True]), render=False)
    assert results == ["1 False", None, "3 False"] and [s.steps for s in simulators] == [1, 0, 1]


class FakeIsaacEnvironment:
    """Isaac Lab's documented behaviour: batched tensors, and an automatic reset inside the step that ends an episode."""

    def __init__(self, num_environments: int) -> None:
        self.position = torch.zeros(num_environments)
        self.resets: list[tuple[int, list[int]]] = []
        self.unwrapped, self.termination_manager = self, self
        self.success = torch.zeros(num_environments, dtype=torch.bool)

    def reset(self, seed: int, env_ids: torch.Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
        self.resets.append((seed, env_ids.tolist()))
        self.position[env_ids] = seed / 10
        return self.observe(), {}

    def observe(self) -> dict[str, Any]:
        picture = (self.position[:, None, None, None].expand(-1, 4, 4, 4) / 10).clone()
        return {"policy": {"joints": self.position[:, None].clone(), "front": picture}}

    def step(self, actions: torch.Tensor) -> tuple[Any, ...]:
        self.position += actions[:, 0]
        self.success = self.position >= 3
        ended = self.success | (self.position < 0)
        self.position[ended] = 0.7  # the next episode's start
        return self.observe(), torch.zeros(len(actions)), ended, torch.zeros_like(ended), {"log": {}}

    def get_term(self, name: str) -> torch.Tensor:
        assert name == "reached"
        return self.success

    def close(self) -> None:
        pass


@pytest.fixture
def isaac(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fake isaaclab modules; the list tells in which order they were used."""
    gymnasium = pytest.importorskip("gymnasium")
    order: list[str] = []

    class AppLauncher:
        def __init__(self, **options: Any) -> None:
            assert options == {"headless": True, "enable_cameras": True}
            order.append("app")
            self.app = types.SimpleNamespace(close=lambda: order.append("closed"))

    def parse_env_cfg(task: str, device: str, num_envs: int) -> tuple[str, int]:
        order.append(f"cfg {task} {device}")
        return task, num_envs

    modules = {
        "isaaclab": types.ModuleType("isaaclab"),
        "isaaclab.app": types.SimpleNamespace(AppLauncher=AppLauncher),
        "isaaclab_tasks": types.ModuleType("isaaclab_tasks"),
        "isaaclab_tasks.utils": types.SimpleNamespace(parse_env_cfg=parse_env_cfg),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    monkeypatch.setattr(gymnasium, "make", lambda task, cfg: FakeIsaacEnvironment(cfg[1]))
    return order


ISAAC = EnvironmentSettings(
    suite="Isaac-Lift-v0",
    options={
        "images": {"observation.images.front": "policy/front"},
        "state": "policy/joints",
        "instruction": "Lift the cube",
        "success": "reached",
        "fps": 50,
        "device": "cpu",
    },
)


def test_isaac_lab_is_driven_trial_by_trial_without_mixing_episodes(isaac: list[str]) -> None:
    backend = interface.environment_backend("isaac_lab")
    vector = build_vector(backend, ISAAC, 3)
    assert isaac == ["app", "cfg Isaac-Lift-v0 cpu"]
    simulation: FakeIsaacEnvironment = vector._environment  # type: ignore[attr-defined]
    observations = vector.reset([trial("x", 10), None, trial("x", 20)])
    assert simulation.resets == [(10, [0]), (20, [2])] and observations[1] is None
    assert observations[2] is not None and observations[2].state_D.tolist() == [2.0]
    picture = observations[2].images["observation.images.front"]
    assert picture.shape == (4, 4, 3) and picture.dtype == np.uint8 and picture[0, 0, 0] == 51
    first = vector.step(np.array([[0.5], [99.0], [1.5]]), np.array([True, False, True]))
    assert first[1] is None and first[0] is not None and first[2] is not None
    assert not first[0].succeeded and not first[0].ended and first[0].observation.state_D[0] == 1.5
    assert first[2].succeeded and first[2].ended
    # Inactive slots were not moved by the 99.
    assert simulation.position[1] == 0
    lost = vector.step(np.array([[-2.0], [0.0], [0.0]]), np.array([True, False, False]))
    assert lost[0] is not None and lost[0].ended and not lost[0].succeeded
    assert [p.shape for p in vector.pictures()] == [(4, 4, 3)] * 3
    vector.close()
    assert isaac[-1] == "closed"


def test_isaac_lab_counts_no_success_of_the_next_episode(isaac: list[str]) -> None:
    """With action_repeat the automatic reset falls between two control steps of one action."""
    import dataclasses

    vector = build_vector(interface.environment_backend("isaac_lab"), dataclasses.replace(ISAAC, action_repeat=2), 1)
    vector.reset([trial("x", 1)])
    vector._environment.step = iter_steps(vector._environment)  # type: ignore[attr-defined]
    result = vector.step(np.array([[1.0]]), np.array([True]))[0]
    assert result is not None and result.ended and not result.succeeded


def iter_steps(simulation: FakeIsaacEnvironment) -> Any:
    """First step: the episode fails and is reset. Second: the new episode succeeds."""
    outcomes = iter([(False, True), (True, True)])

    def step(actions: torch.Tensor) -> tuple[Any, ...]:
        success, ended = next(outcomes)
        simulation.success = torch.tensor([success])
        return simulation.observe(), torch.zeros(1), torch.tensor([ended]), torch.tensor([False]), {}

    return step


def test_isaac_lab_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = interface.environment_backend("isaac_lab")
    with pytest.raises(ValueError, match="add --eval-options images="):
        backend.tasks(EnvironmentSettings(suite="Isaac-Lift-v0"))
    monkeypatch.setitem(sys.modules, "isaaclab.app", None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Isaac Lab is not installed"):
        build_vector(backend, ISAAC, 1)
