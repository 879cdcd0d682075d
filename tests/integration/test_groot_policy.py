"""GR00T N1.7 acts through the same policy, server, runner and replay as the other family.

Shape legend: N samples, T steps of a chunk, A padded action dimensions, D the robot's own.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evaluation_fixtures import opened_up, random_observation, train_checkpoint, training_flags

from megatron_vla.config.evaluation import EvaluationConfig
from megatron_vla.config.run import from_dict, parse_args
from megatron_vla.evaluation import sampling
from megatron_vla.evaluation.command import DIFFERENT, main
from megatron_vla.evaluation.environments.gymnasium_suite import BACKEND as GYMNASIUM
from megatron_vla.evaluation.environments.interface import EnvironmentSettings, Observation
from megatron_vla.evaluation.plan import compatibility
from megatron_vla.evaluation.policy import Policy, PolicySettings, load_policy, open_checkpoint
from megatron_vla.evaluation.replay import is_bit_equal, replay, training_samples
from megatron_vla.evaluation.server import ServerConfig, describe
from megatron_vla.findings import CheckError
from megatron_vla.models.registry import model_family
from megatron_vla.training.loop import train
from megatron_vla.training.preparation import prepare
from megatron_vla.training.session import training_session
from tests.unit.groot_fixtures import data_flags, write_dataset, write_modality_config, write_tokenizer
from tests.unit.test_policy_server import client_of, message, serving

FAMILY = model_family("groot_n1_7")
# Prompts of different widths, in buckets of 8.
INSTRUCTIONS = ("Open a drawer", "Reach a goal position that is far away")
SMALL = (
    *("--eval-action-repeat", "4", "--eval-image-size", "32", "--eval-max-steps", "6", "--eval-trials-per-task", "2"),
    *("--eval-tasks", "drawer-close", "--eval-device", "cpu", "--eval-workers", "1"),
)


def quiet(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained with random crops and colours, which the policy must not see."""
    flags = ("--augmentation", "groot", "--frozen-dtype", "as_model", *SMALL)
    return train_checkpoint(tmp_path_factory.mktemp("groot_policy"), *flags, model_name="groot_n1_7")


def loaded(save: Path, **settings: Any) -> Policy:
    return opened_up(load_policy(open_checkpoint(save), PolicySettings(device="cpu", **settings), report=quiet))


@pytest.mark.simulator
@pytest.mark.usefixtures("gl_backend")
def test_metaworld_one_task_two_rollouts(save: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--checkpoint", str(save), "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["trials"], report["errors"]) == (2, 0) and report["times"]["num_steps"] <= 12
    # Half of the robot's six steps, not of the model's eight, are executed before the policy is asked again.
    assert report["policy_times"]["requests"] == 4 and report["evaluation"]["replan_interval"] == 3
    assert report["evaluation"]["policy"]["inference_steps"] == 4
    assert (tmp_path / "montage.gif").stat().st_size < 500_000
    assert "groot_n1_7, iteration 1" in capsys.readouterr().out


def test_replay_is_bit_equal_and_finds_what_is_not(save: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert main(["--checkpoint", str(save), "--replay", "5", "--output", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "replay.json").read_text())
    assert written["differing"] == [] and len(written["mean_absolute_error"]) == 4
    assert {"pixels_PC", "image_grid_I3", "tokens_BS", "state_BHD", "embodiment_B"} <= set(written["fields"])
    honest = Policy.preprocess

    def careless(policy: Policy, observation: Observation) -> dict[str, Any]:
        arrays = honest(policy, observation)
        pixels_PC = arrays["pixels_PC"].copy()
        pixels_PC[7, 7] ^= 1
        return {**arrays, "pixels_PC": pixels_PC}

    monkeypatch.setattr(Policy, "preprocess", careless)
    assert main(["--checkpoint", str(save), "--replay", "2"]) == DIFFERENT


def test_a_request_makes_the_batch_that_training_would(save: Path) -> None:
    """All tensors, those that are only made when a batch is put together among them; drawn ones aside."""
    policy, folder = loaded(save), open_checkpoint(save)
    config = from_dict(folder.config())
    source, _ = training_samples(policy, folder, config, ())
    assert FAMILY.samples.build_assembler is not None
    assemble = FAMILY.samples.build_assembler(config)
    for number in (0, 30):
        raw, noise_TA = source.dataset[number], policy.noise(0, number, 0)
        served = policy.batch([policy.preprocess(Observation(raw.images, raw.state_D, raw.instruction))], [noise_TA])
        drawn = FAMILY.samples.draws(config.family, 0, 0, number)
        trained = assemble([{**source(number, 0), **drawn, "noise_BTA": noise_TA}]).batch
        unknown = {"actions_BTA", "action_is_valid_BTA", "sample_index_B", "epoch_B", "time_B", "state_is_dropped_B"}
        assert served.tensors().keys() == trained.tensors().keys()
        for name, tensor in trained.tensors().items():
            assert name in unknown or is_bit_equal(served.tensors()[name], tensor), name
        assert not served.tensors()["state_is_dropped_B"].any() and served.tensors()["time_B"].item() == 0


def test_actions_do_not_depend_on_the_batch_and_follow_the_noise(save: Path) -> None:
    """Padding is seen by the released model, so requests of other widths are other batches."""
    policy = loaded(save, max_batch_size=3)
    observations = [random_observation(k, INSTRUCTIONS[k % 2]) for k in range(8)]
    noise = [policy.noise(1, k, 0) for k in range(8)]
    together = policy.infer(observations, noise)
    assert policy.times.batch_sizes == {1: 2, 3: 2} and together[0].shape == (6, 4)
    for observation, drawn, chunk in zip(observations, noise, together, strict=True):
        np.testing.assert_allclose(policy.infer([observation], [drawn])[0], chunk, rtol=1e-4, atol=1e-4)
    other = policy.infer(observations[:1], [policy.noise(2, 0, 0)])[0]
    assert np.abs(other - together[0]).max() > 1e-3
    # Which is no idle care: the same request, padded further, is answered otherwise.
    arrays, noise_TA = policy.preprocess(observations[0]), noise[0]
    wide = policy._sampler(policy.batch([arrays, policy.preprocess(observations[1])], [noise_TA, noise_TA]))[0]
    narrow = policy._sampler(policy.batch([arrays], [noise_TA]))[0]
    assert (wide - narrow).abs().max() > 1e-4


def test_where_padding_is_masked_all_requests_share_a_batch(save: Path, tmp_path: Path) -> None:
    flags = ("--mask-vl-self-attention", "--frozen-dtype", "as_model")
    policy = loaded(train_checkpoint(tmp_path, *flags, model_name="groot_n1_7"))
    observations = [random_observation(k, INSTRUCTIONS[k % 2]) for k in range(4)]
    noise = [policy.noise(1, k, 0) for k in range(4)]
    together = policy.infer(observations, noise)
    assert policy.times.batch_sizes == {4: 1}
    for observation, drawn, chunk in zip(observations, noise, together, strict=True):
        np.testing.assert_allclose(policy.infer([observation], [drawn])[0], chunk, rtol=1e-4, atol=1e-4)


def check_compiled(save: Path) -> None:
    plain, fast = loaded(save, num_inference_steps=2), loaded(save, num_inference_steps=2, compile=True)
    assert list(plain.module.state_dict()) == list(fast.module.state_dict())
    observations = [random_observation(k) for k in range(3)]
    noise = [plain.noise(0, k, 0) for k in range(3)]
    for one, other in zip(plain.infer(observations, noise), fast.infer(observations, noise), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)
    assert fast.times.batch_sizes == {3: 1}, "filled up to four, counted as three"


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_sampling_is_whole_graphs_and_acts_like_the_plain_one(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aot_eager traces as inductor does, without generating code."""
    few = ("--vision-num-layers", "1", "--vision-deepstack-layers", "0", "--num-layers", "1", "--vl-num-layers", "1")
    flags = ("--frozen-dtype", "as_model", *few, "--dit-num-layers", "3")
    save = train_checkpoint(tmp_path, *flags, model_name="groot_n1_7")
    monkeypatch.setattr(sampling.torch, "compile", functools.partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    check_compiled(save)
    torch._dynamo.reset()


def test_openpi_client_is_answered(save: Path) -> None:
    policy = loaded(save, num_inference_steps=2)
    with serving(policy, noise_seed=3) as server:
        client = client_of(server)
        metadata = client.get_server_metadata()
        assert (metadata["action_horizon"], metadata["action_dim"], metadata["image_size"]) == (6, 4, 64)
        assert metadata["embodiment_tag"] == "new_embodiment" and metadata["embodiment_id"] == 1
        assert metadata["cameras"] == ["observation.images.top", "observation.images.wrist"]
        for number in range(1, 6):
            observation = random_observation(number, INSTRUCTIONS[number % 2])
            answer = client.infer(message(observation))["actions"]
            alone = policy.infer([observation], [policy.noise(3, number, 0)])[0]
            np.testing.assert_allclose(answer, alone, rtol=1e-4, atol=1e-4)
            assert answer.shape == (6, 4) and answer.dtype == np.float32


# --- relative actions, poses, frames of the past


def train_on_poses(folder: Path, **modality: Any) -> Path:
    """A checkpoint of a robot with relative poses; returns the --save folder."""
    write_dataset(folder / "robot")
    write_modality_config(folder, **modality)
    flags = ["--modality-config", str(folder / "modality_config.json"), "--train-iters", "1", "--lr-warmup-iters", "0"]
    if "state" in modality:
        flags += ["--state-history-length", str(len(modality["state"]["delta_indices"]))]
    place = ("--save", str(folder / "checkpoints"), "--no-first-batch-report")
    config = parse_args(data_flags(folder / "robot", write_tokenizer(folder), *flags, *place))
    with training_session(config, FAMILY) as session:
        train(session)
    return folder / "checkpoints"


def rotation_of(rows_6: np.ndarray) -> np.ndarray:
    """[3, 3] of its first two rows, made orthonormal one after the other."""
    first = rows_6[:3] / np.linalg.norm(rows_6[:3])
    second = rows_6[3:] - first * (first @ rows_6[3:])
    second = second / np.linalg.norm(second)
    return np.stack([first, second, np.cross(first, second)])


def transform_of(pose_9: np.ndarray) -> np.ndarray:
    """Homogeneous [4, 4] of position and rotation rows."""
    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = rotation_of(pose_9[3:]), pose_9[:3]
    return matrix


def by_hand(model_TA: np.ndarray, state_D: np.ndarray, samples: list[Any], gripper_N: np.ndarray) -> np.ndarray:
    """Physical [T, D] of normalised actions, from nothing but the recorded data: pose, gripper, arm."""
    pieces: list[list[np.ndarray]] = [[] for _ in range(4)]
    for raw in samples:
        start = np.linalg.inv(transform_of(raw.state_D[:9].astype(np.float64)))
        for step in np.flatnonzero(raw.action_is_in_episode_T):
            action = raw.actions_TD[step].astype(np.float64)
            relative = start @ transform_of(action[:9])
            pose = np.concatenate([relative[:3, 3], relative[:2, :3].reshape(6)])
            pieces[step].append(np.concatenate([pose, action[10:] - raw.state_D[10:]]))
    physical = []
    now = transform_of(state_D[:9].astype(np.float64))
    for step, recorded in enumerate(pieces):
        low, high = np.min(recorded, axis=0), np.max(recorded, axis=0)
        wanted = np.clip(model_TA[step, [*range(9), 10, 11]], -1, 1)
        relative = low + (wanted + 1) / 2 * (high - low)
        matrix = now @ transform_of(relative[:9])
        first, last = np.quantile(gripper_N, [0.01, 0.99])
        gripper = first + (np.clip(model_TA[step, 9:10], -1, 1) + 1) / 2 * (last - first)
        pose = np.concatenate([matrix[:3, 3], matrix[:2, :3].reshape(6)])
        physical.append(np.concatenate([pose, gripper, relative[9:] + state_D[10:]]))
    return np.stack(physical)


def test_actions_come_back_in_the_units_of_the_request(tmp_path: Path) -> None:
    """Relative pose, absolute gripper, relative arm, of the state that came with each request."""
    folder = open_checkpoint(train_on_poses(tmp_path))
    policy = load_policy(folder, PolicySettings(device="cpu"), report=quiet)
    assert policy.noise(0, 1, 2).shape == (10, 12) and policy.action_horizon == 4
    source, available = training_samples(policy, folder, from_dict(folder.config()), ())
    samples = [source.dataset[number] for number in range(available)]
    model_NTA = np.random.default_rng(0).uniform(-1.1, 1.1, (2, 10, 12)).astype(np.float32)
    policy._sampler._sample = lambda batch: torch.from_numpy(model_NTA)  # type: ignore[method-assign]
    asked = [samples[3], samples[31]]
    observations = [Observation(raw.images, raw.state_D, "pick up the red block") for raw in asked]
    chunks = policy.infer(observations, [policy.noise(0, k, 0) for k in range(2)])
    gripper_N = np.asarray(source.dataset.actions_ND)[:, 9]
    for chunk, model_TA, raw in zip(chunks, model_NTA, asked, strict=True):
        assert chunk.shape == (4, 12) and chunk.dtype == np.float32
        np.testing.assert_allclose(chunk, by_hand(model_TA, raw.state_D, samples, gripper_N), atol=2e-5)
    assert describe(policy, ServerConfig())["state_keys"] == ["pose", "gripper", "arm"]


def test_replay_of_a_policy_that_sees_the_past(tmp_path: Path) -> None:
    """Two frames a camera and two states reach the model by a client's message; simulators, which show one, are refused."""
    video = {"delta_indices": [-3, 0], "modality_keys": ["front", "wrist"]}
    state = {"delta_indices": [-1, 0], "modality_keys": ["pose", "gripper", "arm"]}
    save = train_on_poses(tmp_path, video=video, state=state)
    policy = load_policy(open_checkpoint(save), PolicySettings(device="cpu"), report=quiet)
    result = replay(policy, open_checkpoint(save), from_dict(open_checkpoint(save).config()), 3, say=quiet)
    assert result.differing == () and "pixels_PC" in result.fields
    with pytest.raises(ValueError, match=r"pictures of the steps \[-3, 0\] .* tools/serve_policy"):
        # A simulator without cameras and widths of its own.
        compatibility(policy.preprocessor.settings, GYMNASIUM, EnvironmentSettings(suite="any"), EvaluationConfig())


# --- mixtures


def mixture_flags(folder: Path, *flags: str) -> list[str]:
    words = training_flags(folder, *flags, model_name="groot_n1_7")
    place = words.index("--data-path") + 1
    return [*words[:place], f"first={folder / 'data'}", f"second={folder / 'data'}", *words[place + 1 :]]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("groot_mixture")
    config = parse_args(mixture_flags(folder, "--data-override", "second:embodiment-id=2"))
    with training_session(config, FAMILY) as session:
        train(session)
    return folder / "checkpoints"


def test_a_dataset_of_a_mixture_acts(mixture: Path) -> None:
    with pytest.raises(ValueError, match=r"--eval-dataset is not set: .* a mixture of first, second"):
        load_policy(open_checkpoint(mixture), PolicySettings(device="cpu"), report=quiet)
    with pytest.raises(ValueError, match="--eval-dataset third"):
        load_policy(open_checkpoint(mixture), PolicySettings(device="cpu", dataset="third"), report=quiet)
    policy = load_policy(open_checkpoint(mixture), PolicySettings(device="cpu", dataset="second"), report=quiet)
    assert policy.preprocess(random_observation(1))["embodiment_B"] == 2
    assert main(["--checkpoint", str(mixture), "--replay", "3", "--eval-dataset", "second"]) == 0


def test_training_on_a_mixture_says_whose_robot_is_evaluated(tmp_path: Path) -> None:
    flags = mixture_flags(tmp_path, "--eval-interval", "2", "--save-interval", "2", *SMALL)
    prepare(parse_args([*flags, "--eval-dataset", "second"]), FAMILY, 1)
    for more, text in (((), "choose one of first, second"), (("--eval-dataset", "x"), "no dataset 'x'")):
        with pytest.raises(CheckError, match=text):
            prepare(parse_args([*flags, *more]), FAMILY, 1)
    one = training_flags(tmp_path, "--eval-interval", "2", "--save-interval", "2", *SMALL, model_name="groot_n1_7")
    with pytest.raises(CheckError, match="there is one dataset only"):
        prepare(parse_args([*one, "--eval-dataset", "data"]), FAMILY, 1)
    with pytest.raises(CheckError, match="use --eval-action-repeat 4"):
        prepare(parse_args([*flags, "--eval-dataset", "first", "--eval-action-repeat", "2"]), FAMILY, 1)
