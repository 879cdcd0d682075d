"""Small stand-ins for tests of GR00T's data: a tokenizer trained on the spot, a LeRobot dataset with modality.json, flags."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from megatron_vla.data.groot.tokenizer import BytePairTokenizer, train_tokenizer_bytes
from megatron_vla.data.lerobot_writer import CodebaseVersion, LeRobotWriter

pytest.importorskip("tokenizers")

GOLDEN = Path(__file__).parents[1] / "golden/groot_preprocess"
CAMERAS = ("observation.images.front", "observation.images.wrist")
LENGTHS = (9, 14, 6, 21)
VOCABULARY = 400
MODALITY_JSON: dict[str, Any] = {
    "state": {"pose": {"start": 0, "end": 9}, "gripper": {"start": 9, "end": 10}, "arm": {"start": 10, "end": 12}},
    "action": {
        "pose": {"start": 0, "end": 9},
        "gripper": {"start": 9, "end": 10},
        "arm": {"start": 0, "end": 2, "original_key": "action.arm"},
    },
    "video": {"front": {"original_key": CAMERAS[0]}, "wrist": {"original_key": CAMERAS[1]}},
    "annotation": {"human.task": {"original_key": "task_index"}},
}
MODALITY_CONFIG: dict[str, Any] = {
    "video": {"delta_indices": [0], "modality_keys": ["front", "wrist"]},
    "state": {"delta_indices": [0], "modality_keys": ["pose", "gripper", "arm"]},
    "action": {
        "delta_indices": [0, 1, 2, 3],
        "modality_keys": ["pose", "gripper", "arm"],
        "action_configs": [
            {"rep": "RELATIVE", "type": "EEF", "format": "XYZ_ROT6D", "state_key": None},
            {"rep": "ABSOLUTE", "type": "NON_EEF", "format": "DEFAULT", "state_key": None},
            {"rep": "relative", "type": "non_eef", "format": "default", "state_key": "arm"},
        ],
    },
    "language": {"delta_indices": [0], "modality_keys": ["annotation.human.task"]},
}


@cache
def golden(name: str) -> dict[str, np.ndarray]:
    return load_file(GOLDEN / f"{name}.safetensors")


def golden_json(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text())


@cache
def tokenizer_bytes() -> bytes:
    return train_tokenizer_bytes(["pick up the red block", "pick up the green block", "user\n"], VOCABULARY)


def tokenizer() -> BytePairTokenizer:
    return BytePairTokenizer(tokenizer_bytes())


def write_tokenizer(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    path.write_bytes(tokenizer_bytes())
    return path


def random_poses(generator: np.random.Generator, number: int) -> np.ndarray:
    """float32 [number, 9]: position and two orthonormal rows, moving a little from step to step."""
    rows = np.linalg.qr(np.eye(3) + 0.2 * np.cumsum(generator.normal(size=(number, 3, 3)), axis=0))[0][:, :2]
    position = 0.1 * np.cumsum(generator.normal(size=(number, 3)), axis=0)
    return np.concatenate([position, rows.reshape(number, 6)], axis=1).astype(np.float32)


def write_dataset(
    root: Path,
    modality: dict[str, Any] | None = MODALITY_JSON,
    version: CodebaseVersion = "v2.1",
    size: tuple[int, int] = (40, 48),
) -> Path:
    """Four episodes, two PNG cameras, pose, gripper and arm; the arm's action has a column of its own."""
    features: dict[str, Any] = {key: {"dtype": "image", "shape": [*size, 3]} for key in CAMERAS}
    features["observation.state"] = {"dtype": "float32", "shape": [12], "names": None}
    features["action"] = {"dtype": "float32", "shape": [10], "names": None}
    features["action.arm"] = {"dtype": "float32", "shape": [2], "names": None}
    writer = LeRobotWriter(root, fps=10, features=features, codebase_version=version)
    generator = np.random.default_rng(3)
    for episode, length in enumerate(LENGTHS):
        pose, arm = random_poses(generator, length + 1), np.cumsum(generator.normal(size=(length + 1, 2)), axis=0)
        gripper = (np.arange(length + 1) % 5 > 2).astype(np.float32)[:, None]
        state = np.concatenate([pose[:-1], gripper[:-1], arm[:-1]], axis=1).astype(np.float32)
        columns = {
            "observation.state": state,
            "action": np.concatenate([pose[1:], gripper[1:]], axis=1).astype(np.float32),
            "action.arm": arm[1:].astype(np.float32),
        }
        images = {key: generator.integers(0, 256, (length, *size, 3), dtype=np.uint8) for key in CAMERAS}
        for key in CAMERAS:
            images[key][:, :4, :4] = (10 * np.arange(length) + episode)[:, None, None, None]
        writer.add_episode(columns, images, f"Pick up the {('red', 'green')[episode % 2]} block!")
    folder = writer.finalize()
    if modality is not None:
        (folder / "meta/modality.json").write_text(json.dumps(modality))
    return folder


def write_modality_config(folder: Path, **changes: Any) -> Path:
    path = folder / "modality_config.json"
    path.write_text(json.dumps({**MODALITY_CONFIG, **changes}))
    return path


def data_flags(dataset: Path, tokenizer_model: Path, *more: str) -> list[str]:
    """Flags of a tiny run on `dataset`; later flags win."""
    flags = ["--model-name", "groot_n1_7", "--model-variant", "tiny", "--data-path", str(dataset)]
    flags += ["--tokenizer-model", str(tokenizer_model), "--image-token", "5", "--padding-token", "0"]
    flags += ["--embodiment-id", "1", "--num-workers", "0", "--micro-batch-size", "4", "--image-size", "64"]
    return [*flags, *more]
