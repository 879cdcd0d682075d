"""A tiny Pi0.5 with a simulator's cameras, state and actions, trained for one step, as a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_vla.config.run import parse_args
from megatron_vla.data.lerobot_writer import LeRobotWriter
from megatron_vla.evaluation.environments.interface import EnvironmentBackend, Observation
from megatron_vla.evaluation.environments.metaworld import CAMERAS
from megatron_vla.evaluation.environments.metaworld_suite import BACKEND as METAWORLD
from megatron_vla.evaluation.policy import Policy
from megatron_vla.models.common.initialization import initialize_parameters, normal
from megatron_vla.models.registry import model_family
from megatron_vla.training.loop import train
from megatron_vla.training.session import training_session

IMAGE_SIZE = 32
INSTRUCTIONS = ("Open a drawer", "Reach a goal position")


def write_metaworld_like(root: Path, fps: int = 20, backend: EnvironmentBackend = METAWORLD) -> Path:
    """Four short episodes with MetaWorld's (or another simulator's) features and random content."""
    num_states, num_actions = len(backend.state_names), len(backend.action_names)
    features: dict[str, Any] = {c: {"dtype": "image", "shape": [IMAGE_SIZE, IMAGE_SIZE, 3]} for c in backend.cameras}
    features["observation.state"] = {"dtype": "float32", "shape": [num_states], "names": list(backend.state_names)}
    features["action"] = {"dtype": "float32", "shape": [num_actions], "names": list(backend.action_names)}
    writer = LeRobotWriter(root, fps=fps, features=features)
    generator = np.random.default_rng(2)
    for episode in range(4):
        length = 12 + episode
        columns = {
            "observation.state": generator.uniform(-0.3, 1.0, (length, num_states)).astype(np.float32),
            "action": generator.uniform(-1, 1, (length, num_actions)).astype(np.float32),
        }
        frames = generator.integers(0, 256, (2, length, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
        writer.add_episode(columns, dict(zip(backend.cameras, frames, strict=True)), INSTRUCTIONS[episode % 2])
    return writer.finalize()


def training_flags(folder: Path, *flags: str, backend: EnvironmentBackend = METAWORLD) -> list[str]:
    """A run on `write_metaworld_like` that saves under folder/checkpoints."""
    from tests.unit.preprocess_fixtures import tokenizer_bytes

    if not (folder / "data").exists():
        write_metaworld_like(folder / "data", backend=backend)
        (folder / "tokenizer.model").write_bytes(tokenizer_bytes())
    top, wrist = backend.cameras
    return [
        *("--model-variant", "tiny", "--image-size", "28", "--num-layers", "2", "--vision-num-layers", "1"),
        *("--data-path", str(folder / "data"), "--tokenizer-model", str(folder / "tokenizer.model")),
        *("--camera-map", f"base={top}", f"left_wrist={wrist}", "--dataset-action-representation", "delta"),
        *("--micro-batch-size", "2", "--train-iters", "1", "--lr-warmup-iters", "0", "--num-workers", "0"),
        *("--save", str(folder / "checkpoints"), "--no-first-batch-report", "--action-horizon", "6"),
        *flags,
    ]


def train_checkpoint(folder: Path, *flags: str, backend: EnvironmentBackend = METAWORLD) -> Path:
    """Train as asked; returns the --save folder."""
    config = parse_args(training_flags(folder, *flags, backend=backend))
    with training_session(config, model_family("pi05")) as session:
        train(session)
    return folder / "checkpoints"


def random_observation(seed: int, instruction: str = "Open a drawer") -> Observation:
    """Noise of the right shapes."""
    generator = np.random.default_rng(seed)
    images = {c: generator.integers(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8) for c in CAMERAS}
    return Observation(images, generator.uniform(0, 1, 4).astype(np.float32), instruction)


def opened_up(policy: Policy) -> Policy:
    """With large random weights: a fresh Pi0.5 starts with closed branches, so that its actions depend on the noise alone."""
    initialize_parameters(policy.module, lambda name: normal(0.2), seed=7)
    return policy
