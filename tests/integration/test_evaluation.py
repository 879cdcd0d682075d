"""The loop closes: a checkpoint alone acts in MetaWorld, training evaluates its own, replay finds no difference."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from evaluation_fixtures import (
    EVALUATION_REPORT,
    opened_up,
    random_observation,
    train_checkpoint,
    training_flags,
    write_metaworld_like,
)

from megatron_vla.config.run import from_dict, parse_args
from megatron_vla.evaluation import closed_loop, command
from megatron_vla.evaluation.command import DIFFERENT, main
from megatron_vla.evaluation.environments import interface
from megatron_vla.evaluation.environments.interface import Observation
from megatron_vla.evaluation.plan import conditions, environment_settings
from megatron_vla.evaluation.policy import Policy, PolicySettings, load_policy, open_checkpoint
from megatron_vla.evaluation.replay import replay
from megatron_vla.evaluation.results import ResultFolder
from megatron_vla.evaluation.rollout import TrialResult
from megatron_vla.findings import CheckError
from megatron_vla.models.registry import model_family
from megatron_vla.training.checkpoint_folder import BEST_POINTER, best_iteration
from megatron_vla.training.preparation import prepare

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).resolve().parents[2]
# The fixture's dataset has 20 actions a second, MetaWorld 80 control steps.
SMALL = (
    *("--eval-action-repeat", "4", "--eval-image-size", "32", "--eval-max-steps", "6", "--eval-trials-per-task", "2"),
    *("--eval-tasks", "drawer-close", "--eval-inference-steps", "2", "--eval-device", "cpu", "--eval-workers", "1"),
)


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_checkpoint(tmp_path_factory.mktemp("evaluated"), "--ema-decay", "0.5", *SMALL)


@pytest.mark.simulator
def test_metaworld_one_task_two_rollouts(
    save: Path, gl_backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The evaluation flags come from the checkpoint."""
    assert main(["--checkpoint", str(save), "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["trials"] == 2 and report["errors"] == 0 and report["times"]["num_steps"] <= 12
    assert report["policy_times"]["requests"] == 4 and report["policy_times"]["actions_per_s"] > 0
    assert report["versions"]["metaworld"] == "3.1.1" and report["gl_backend"] == gl_backend
    videos = [*(tmp_path / "videos").iterdir(), tmp_path / "montage.gif"]
    assert len(videos) == 2 and all(1000 < v.stat().st_size < 500_000 for v in videos)
    said = capsys.readouterr().out
    assert "averaged weights" in said and f"MUJOCO_GL={gl_backend}" in said and "| drawer-close-v3 |" in said
    # The pointer belongs to evaluations beside their checkpoint.
    assert best_iteration(save) is None


@pytest.mark.simulator
def test_a_policy_sees_through_the_cameras_that_its_map_names(
    save: Path, gl_backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... those and no others are rendered, and trials through different ones are not mixed."""
    top, wrist, behind = (f"observation.images.{name}" for name in ("top", "wrist", "behind"))
    seen: list[set[str]] = []
    renamed = closed_loop.PolicyActor._renamed

    def watched(self: closed_loop.PolicyActor, observation: Observation) -> Observation:
        result = renamed(self, observation)
        seen.append(set(observation.images))
        np.testing.assert_array_equal(result.images[wrist], observation.images[behind])
        return result

    monkeypatch.setattr(closed_loop.PolicyActor, "_renamed", watched)
    flags = ["--checkpoint", str(save), "--output", str(tmp_path), "--eval-trials-per-task", "1"]
    assert main([*flags, "--eval-camera-map", f"{wrist}={behind}"]) == 0
    assert seen and all(cameras == {top, behind} for cameras in seen)
    with pytest.raises(ValueError, match=r"holds another evaluation .camera_map: .*behind.* there, None now"):
        main(flags)


def test_replay_is_bit_equal_and_finds_what_is_not(save: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert main(["--checkpoint", str(save), "--replay", "5", "--output", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "replay.json").read_text())
    assert written["num_samples"] == 5 and written["differing"] == []
    assert {"images_BVCHW", "tokens_BL", "state_BD", "camera_is_present_BV"} <= set(written["fields"])
    # One grey level in one pixel of one camera.
    honest = Policy.preprocess

    def careless(policy: Policy, observation: Observation) -> dict[str, np.ndarray]:
        images = {name: picture.copy() for name, picture in observation.images.items()}
        images["observation.images.wrist"][3, 3, 0] ^= 64
        return honest(policy, dataclasses.replace(observation, images=images))

    monkeypatch.setattr(Policy, "preprocess", careless)
    assert main(["--checkpoint", str(save), "--replay", "2"]) == DIFFERENT


def test_replay_measures_actions_in_physical_units(save: Path) -> None:
    """A model that answers with the recorded actions, has no error; one that is off by a known amount has that one."""
    folder = open_checkpoint(save)
    policy = load_policy(folder, PolicySettings(device="cpu"), report=lambda line: None)
    config = from_dict(folder.config())
    numbers = [0, 53]  # the first and last sample of the fixture
    from megatron_vla.data.build import build_data
    from megatron_vla.training.resume import with_stored_preprocessing

    source = build_data(with_stored_preprocessing(config, folder), policy.family).source
    recorded = torch.stack([torch.as_tensor(source(n, 0)["actions_BTA"]) for n in numbers])
    policy._sampler._sample = lambda batch: recorded  # type: ignore[method-assign]
    exact = replay(policy, folder, config, 2, say=lambda line: None)
    np.testing.assert_allclose(exact.error_D, 0, atol=1e-6)
    policy._sampler._sample = lambda batch: recorded + 0.1  # type: ignore[method-assign]
    off = replay(policy, folder, config, 2, say=lambda line: None)
    unnormalize = policy.preprocessor.action_normalizer.unnormalize
    span = unnormalize(np.full((1, 4), 0.1)) - unnormalize(np.zeros((1, 4)))
    np.testing.assert_allclose(off.error_D, span[0], rtol=1e-4)
    assert (off.spread_D > 0.1).all()


def test_replay_of_held_out_episodes_keeps_the_statistics_of_training(save: Path, tmp_path: Path) -> None:
    """Other episodes are other data, which training with these statistics refuses, far outside of their range even more; here
    what the policy makes of them is what is asked."""
    held_out = write_metaworld_like(tmp_path / "held_out", seed=3, state_offset=5.0)
    folder = open_checkpoint(save)
    policy = load_policy(folder, PolicySettings(device="cpu"), report=quiet)
    middle = policy.preprocessor.action_normalizer.unnormalize(np.zeros((1, 4)))
    policy._sampler._sample = lambda batch: torch.zeros(54, 6, 32)  # type: ignore[method-assign]
    result = replay(policy, folder, from_dict(folder.config()), 54, (str(held_out),), say=quiet)
    assert result.differing == () and result.num_samples == 54
    table = pq.read_table(sorted((held_out / "data").rglob("*.parquet")), columns=["action", "episode_index"])
    actions, episodes = np.stack(table["action"].to_numpy()), table["episode_index"].to_numpy()
    # Each row counts once in every chunk of six that starts at most five rows before it in its episode.
    first = np.array([np.flatnonzero(episodes == e)[0] for e in episodes])
    counts = np.minimum(np.arange(54) - first, 5) + 1
    np.testing.assert_allclose(result.error_D, np.average(np.abs(actions - middle), axis=0, weights=counts), rtol=1e-5)


def quiet(line: str) -> None:
    pass


def test_actions_do_not_depend_on_the_batch_and_follow_the_noise(save: Path) -> None:
    policy = opened_up(
        load_policy(open_checkpoint(save), PolicySettings(device="cpu", max_batch_size=3), report=lambda line: None)
    )
    observations = [random_observation(k, "Open a drawer" if k % 2 else "Reach a goal position") for k in range(7)]
    noise = [policy.noise(1, k, 0) for k in range(7)]
    together = policy.infer(observations, noise)
    assert policy.times.batch_sizes == {3: 2, 1: 1}
    for observation, drawn, chunk in zip(observations, noise, together, strict=True):
        np.testing.assert_allclose(policy.infer([observation], [drawn])[0], chunk, rtol=1e-5, atol=1e-5)
    other = policy.infer(observations[:1], [policy.noise(2, 0, 0)])[0]
    assert np.abs(other - together[0]).max() > 1e-3
    np.testing.assert_array_equal(policy.noise(1, 5, 3), policy.noise(1, 5, 3))


def test_averaged_and_raw_weights_act_differently(save: Path) -> None:
    policies = [
        load_policy(open_checkpoint(save), PolicySettings(device="cpu", weights=w), print) for w in ("average", "raw", "auto")
    ]
    average, raw, auto = (dict(p.module.named_parameters())["action_out_proj.weight"] for p in policies)
    assert not torch.equal(average, raw) and torch.equal(average, auto)


@pytest.mark.slow
def test_compiled_policy_acts_like_the_plain_one(save: Path) -> None:
    plain, fast = (
        opened_up(load_policy(open_checkpoint(save), PolicySettings(device="cpu", num_inference_steps=2, compile=c), print))
        for c in (False, True)
    )
    assert list(plain.module.state_dict()) == list(fast.module.state_dict())
    observations = [random_observation(k) for k in range(3)]
    noise = [plain.noise(0, k, 0) for k in range(3)]
    for one, other in zip(plain.infer(observations, noise), fast.infer(observations, noise), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_checkpoint_and_simulator_that_do_not_fit(save: Path, tmp_path: Path) -> None:
    output = ("--output", str(tmp_path / "x"))
    for flags, message in (
        (
            ("--eval-action-repeat", "1"),
            "the simulator would take 80 -> use --eval-action-repeat 4",
        ),
        (("--eval-tasks", "drawer-shut"), "--eval-tasks drawer-shut: MetaWorld has no such task -> near: drawer"),
        (("--eval-suite", "mt11"), "--eval-suite mt11: MetaWorld has mt10, mt50, mt1"),
        (("--eval-camera-map", "observation.images.top=front"), "needs camera front; metaworld has observation.images.top"),
        (("--eval-camera-map", "top=front"), "--eval-camera-map top: the checkpoint has cameras"),
        (("--eval-replan-interval", "7"), "the chunk has 6 actions"),
        (("--eval-options", "x=1"), "this simulator reads none"),
        (("--eval-trials-per-task", "0"), "--eval-trials-per-task: 0 is too small"),
        (("--eval-inference-steps", "-2"), "--eval-inference-steps: -2 is too small"),
        (("--eval-device", "gpu"), "--eval-device gpu: no such device -> one of cpu"),
        (("--eval-device", "cuda:99"), "--eval-device cuda:99: this machine has no such device"),
        (("--replay", "-5"), "--replay -5"),
        (("--eval-gate", "min_sucess=1"), "--eval-gate: 'min_sucess=1'"),
    ):
        with pytest.raises(ValueError, match=message.replace("(", r"\(")):
            main(["--checkpoint", str(save), *output, *flags])
    with pytest.raises(ValueError, match="no complete checkpoint"):
        main(["--checkpoint", str(tmp_path / "nothing")])
    with pytest.raises(ValueError, match="--checkpoint is not set"):
        main([])


def test_training_refuses_an_evaluation_that_cannot_work(tmp_path: Path) -> None:
    family = model_family("pi05")
    flags = training_flags(tmp_path, "--eval-interval", "2", "--save-interval", "2", *SMALL)
    for more, message in (
        (("--eval-interval", "3"), "3 is no multiple of --save-interval 2"),
        (("--eval-action-repeat", "2"), "use --eval-action-repeat 4"),
        (("--eval-gate", "success=1"), "--eval-gate: 'success=1'"),
        (("--eval-trials-per-task", "0"), "--eval-trials-per-task"),
        (("--eval-tasks", "sweep-everything"), "--eval-tasks sweep-everything"),
    ):
        with pytest.raises(CheckError, match=message):
            prepare(parse_args([*flags, *more]), family, 1)
    # A promoted checkpoint of this folder that was evaluated otherwise: told now, and not by each evaluation after its trials.
    config = parse_args(flags).evaluation
    backend = interface.environment_backend("metaworld")
    described = conditions(config, backend, environment_settings(config, backend), action_horizon=6)
    save = tmp_path / "checkpoints"
    ResultFolder(save / "evaluation/iter_0000002", described).add(TrialResult("drawer-close-v3", 0, 1, None, True, 5, 0.1))
    (save / BEST_POINTER).write_text("2\n")
    gated = (*flags, "--eval-gate", "min_success=0")
    prepare(parse_args(gated), family, 1)
    for more, message in (
        (("--eval-seed", "7"), "--eval-seed: 0 there, 7 now.*give the same flags; or delete that folder"),
        (("--eval-tasks", "reach"), "--eval-tasks: .*'drawer-close'.* there, .*'reach'.* now"),
        (("--eval-replan-interval", "2"), "--eval-replan-interval: 3 there, 2 now"),
    ):
        with pytest.raises(CheckError, match=message):
            prepare(parse_args([*gated, *more]), family, 1)
    with pytest.raises(CheckError, match="evaluates saved checkpoints"):
        prepare(parse_args(["--model-variant", "tiny", "--mock-data", "--train-iters", "1", "--eval-interval", "1"]), family, 1)


def run_training(folder: Path, *flags: str) -> str:
    """Output of pretrain_vla.py under torchrun with two ranks."""
    words = training_flags(folder, *SMALL, "--log-interval", "1", *flags)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "pretrain_vla.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, *launcher, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


@pytest.mark.simulator
@pytest.mark.slow
def test_training_evaluates_gates_and_keeps_the_promoted_checkpoint(tmp_path: Path, gl_backend: str) -> None:
    said = run_training(
        tmp_path,
        *("--train-iters", "4", "--save-interval", "2", "--eval-interval", "2", "--keep-last", "1"),
        *("--eval-gate", "min_success=0", "--eval-trials-per-task", "1"),
    )
    for iteration in (2, 4):
        assert f"evaluation of iteration {iteration}: success " in said
    lines = [json.loads(line) for line in (tmp_path / "checkpoints/logs/metrics.jsonl").read_text().splitlines()]
    found = {line["iteration"]: line["evaluation"] for line in lines if "evaluation" in line}
    assert sorted(found) == [2, 4] and all(f["trials"] == 1 and f["policy/call_ms_p50"] > 0 for f in found.values())
    status = json.loads((tmp_path / "checkpoints/evaluation/status.json").read_text())
    assert [status[i]["status"] for i in ("2", "4")] == ["promoted", "promoted"]
    assert status["4"]["comparison"]["trials"] == 1 and best_iteration(tmp_path / "checkpoints") == 4
    assert not list((tmp_path / "checkpoints").glob("evaluation/*/in_use"))
    resumed = run_training(
        tmp_path,
        *("--train-iters", "6", "--save-interval", "2", "--eval-interval", "2", "--keep-last", "1"),
        *("--load", str(tmp_path / "checkpoints"), "--eval-gate", "min_success=1", "--eval-trials-per-task", "1"),
    )
    assert "resume with changed flag --eval-gate" in resumed and ", rejected (success 0%" in resumed
    assert best_iteration(tmp_path / "checkpoints") == 4
    assert (tmp_path / "checkpoints/iter_0000004").is_dir(), "the promoted checkpoint was deleted by --keep-last"


def test_jobs_run_in_order_and_left_open_ones_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_vla.training import evaluation_jobs

    config = parse_args(training_flags(tmp_path, "--eval-interval", "2", "--save-interval", "1"))
    script = "import sys, pathlib; pathlib.Path(sys.argv[2]).parent.joinpath('ran').open('a').write(sys.argv[2][-1])"
    real = subprocess.Popen
    monkeypatch.setattr(evaluation_jobs.subprocess, "Popen", lambda c, **k: real([c[0], "-c", script, *c[3:]], **k))
    jobs = evaluation_jobs.EvaluationJobs(config)
    save = tmp_path / "checkpoints"
    for iteration in (1, 2, 4):
        jobs.add(iteration)
    assert jobs.poll() == [], "nothing is started before its checkpoint is there"
    for iteration in (2, 4):
        (save / f"iter_{iteration:07d}").mkdir(parents=True)
        (save / f"iter_{iteration:07d}/state.json").write_text("{}")
    # As if killed here: a resumed run finds both.
    resumed = evaluation_jobs.EvaluationJobs(config)
    assert resumed.waiting == [2, 4]
    lines = list(resumed.finish())
    assert (save / "ran").read_text() == "24"
    assert [line for line in lines if "failed with exit status 0" in line] == lines[1::2], "no verdict was written"
    assert not list(save.glob("evaluation/*/in_use"))


def test_results_of_jobs_reach_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_vla.training import evaluation_jobs

    tasks = [{"task": "reach", "success": 0.5}, {"task": "push", "success": None}]
    report = {**EVALUATION_REPORT, "errors": 1, "tasks": tasks}
    script = (
        "import sys, json, pathlib; p = pathlib.Path(sys.argv[2]); f = p.parent / 'evaluation' / p.name; "
        f"(f / 'report.json').write_text(json.dumps({report!r})); "
        "(f / 'verdict.json').write_text(json.dumps({'status': 'promoted', 'reasons': []}))"
    )
    real = subprocess.Popen
    monkeypatch.setattr(evaluation_jobs.subprocess, "Popen", lambda c, **k: real([c[0], "-c", script, *c[3:]], **k))

    class Log:
        said: list[Any] = []

        def evaluation(self, iteration: int, results: dict[str, float]) -> None:
            self.said.append((iteration, results))

        def close(self) -> None:
            self.said.append("closed")

    config = parse_args(training_flags(tmp_path, "--eval-interval", "2", "--save-interval", "2"))
    jobs = evaluation_jobs.EvaluationJobs(config, Log())
    jobs.add(2)
    (tmp_path / "checkpoints/iter_0000002").mkdir(parents=True)
    (tmp_path / "checkpoints/iter_0000002/state.json").write_text("{}")
    assert "success 50% (10% to 90%, 2 trials), promoted" in list(jobs.finish())[-1]
    (iteration, results), closed = Log.said
    assert iteration == 2 and closed == "closed"
    assert results == {
        "success": 0.5,
        "success_interval_low": 0.1,
        "success_interval_high": 0.9,
        "trials": 2,
        "errors": 1,
        "promoted": 1.0,
        "seconds": 3.0,
        "policy/call_ms_p50": 7.0,
        "success/reach": 0.5,
    }


def test_registry_names_known_simulators() -> None:
    with pytest.raises(ValueError, match="known: metaworld, libero, gymnasium, isaac_lab"):
        interface.environment_backend("mujoco")
    assert command.REJECTED == 3
