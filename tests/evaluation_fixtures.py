"""A tiny policy with a simulator's cameras, state and actions, trained for one step, as a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_vla.config.run import parse_args
from megatron_vla.data.lerobot_writer import LeRobotWriter
from megatron_vla.evaluation.environments.interface import EnvironmentBackend, Observation
from megatron_vla.evaluation.environments.metaworld import USUAL_CAMERAS
from megatron_vla.evaluation.environments.metaworld_suite import BACKEND as METAWORLD
from megatron_vla.evaluation.policy import Policy
from megatron_vla.models.common.initialization import initialize_parameters, normal
from megatron_vla.models.registry import model_family
from megatron_vla.training.loop import train
from megatron_vla.training.session import training_session

IMAGE_SIZE = 32
INSTRUCTIONS = ("Open a drawer", "Reach a goal position")


def write_metaworld_like(
    root: Path, fps: int = 20, backend: EnvironmentBackend = METAWORLD, seed: int = 2, state_offset: float = 0.0
) -> Path:
    """Four short episodes with MetaWorld's (or another simulator's) features and random content."""
    num_states, num_actions = len(backend.state_names), len(backend.action_names)
    features: dict[str, Any] = {c: {"dtype": "image", "shape": [IMAGE_SIZE, IMAGE_SIZE, 3]} for c in backend.cameras}
    features["observation.state"] = {"dtype": "float32", "shape": [num_states], "names": list(backend.state_names)}
    features["action"] = {"dtype": "float32", "shape": [num_actions], "names": list(backend.action_names)}
    writer = LeRobotWriter(root, fps=fps, features=features)
    generator = np.random.default_rng(seed)
    for episode in range(4):
        length = 12 + episode
        columns = {
            "observation.state": (state_offset + generator.uniform(-0.3, 1.0, (length, num_states))).astype(np.float32),
            "action": generator.uniform(-1, 1, (length, num_actions)).astype(np.float32),
        }
        frames = generator.integers(0, 256, (2, length, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
        writer.add_episode(columns, dict(zip(backend.cameras, frames, strict=True)), INSTRUCTIONS[episode % 2])
    return writer.finalize()


# A model of each family, small enough for tests. GR00T's chunk of 6 steps is padded to 8, its pictures give 4 tokens each.
MODEL_FLAGS = {
    "pi05": ("--image-size", "28", "--num-layers", "2", "--vision-num-layers", "1", "--action-horizon", "6"),
    "groot_n1_7": (
        *("--image-size", "64", "--action-horizon", "8", "--action-steps", "6", "--embodiment-id", "1"),
        *("--image-token", "5", "--padding-token", "0", "--prompt-bucket-size", "8"),
    ),
}


def write_tokenizer(folder: Path, model_name: str) -> Path:
    """A tokenizer of the family's kind."""
    if model_name == "pi05":
        from tests.unit.preprocess_fixtures import tokenizer_bytes

        path = folder / "tokenizer.model"
        path.write_bytes(tokenizer_bytes())
        return path
    from tests.unit.groot_fixtures import write_tokenizer as write_byte_pair_tokenizer

    return write_byte_pair_tokenizer(folder)


def training_flags(folder: Path, *flags: str, backend: EnvironmentBackend = METAWORLD, model_name: str = "pi05") -> list[str]:
    """A run on `write_metaworld_like` that saves under folder/checkpoints."""
    if not (folder / "data").exists():
        write_metaworld_like(folder / "data", backend=backend)
    top, wrist = backend.cameras
    return [
        *("--model-name", model_name, "--model-variant", "tiny", *MODEL_FLAGS[model_name]),
        *("--data-path", str(folder / "data"), "--tokenizer-model", str(write_tokenizer(folder, model_name))),
        *("--camera-map", f"base={top}", f"left_wrist={wrist}", "--dataset-action-representation", "delta"),
        *("--micro-batch-size", "2", "--train-iters", "1", "--lr-warmup-iters", "0", "--num-workers", "0"),
        *("--save", str(folder / "checkpoints"), "--no-first-batch-report"),
        *flags,
    ]


def train_checkpoint(folder: Path, *flags: str, backend: EnvironmentBackend = METAWORLD, model_name: str = "pi05") -> Path:
    """Train as asked; returns the --save folder."""
    config = parse_args(training_flags(folder, *flags, backend=backend, model_name=model_name))
    with training_session(config, model_family(model_name)) as session:
        train(session)
    return folder / "checkpoints"


def random_observation(seed: int, instruction: str = "Open a drawer") -> Observation:
    """Noise of the right shapes."""
    generator = np.random.default_rng(seed)
    images = {c: generator.integers(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8) for c in USUAL_CAMERAS}
    return Observation(images, generator.uniform(0, 1, 4).astype(np.float32), instruction)


def opened_up(policy: Policy) -> Policy:
    """With large random weights: fresh models start with closed branches or small steps, so that actions are mostly noise."""
    initialize_parameters(policy.module, lambda name: normal(0.2), seed=7)
    return policy


# What trainings read of report.json.
EVALUATION_REPORT: dict[str, Any] = {
    "success": 0.5,
    "interval_95": [0.1, 0.9],
    "trials": 2,
    "errors": 0,
    "times": {"wall_seconds": 3.0},
    "policy_times": {"call_ms_p50": 7.0},
    "tasks": [],
}
