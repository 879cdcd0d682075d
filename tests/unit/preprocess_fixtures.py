"""Small stand-ins for preprocessing tests: a tokenizer trained on the spot, an in-memory dataset, statistics."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vla.data.lerobot_writer import CodebaseVersion, LeRobotWriter
from megatron_vla.data.preprocess import Preprocessor, PreprocessSettings
from megatron_vla.data.prompt import SentencePieceTokenizer
from megatron_vla.data.statistics import Statistics
from megatron_vla.data.statistics_pass import StreamTransform, compute_statistics

CAMERAS = ("observation.images.top", "observation.images.wrist")


@cache
def tokenizer_bytes(vocab_size: int = 400) -> bytes:
    """A SentencePiece model with Pi0.5's special ids."""
    import sentencepiece

    lines = [f"Task: pick up the {c} block, State: {i} {255 - i};" for i in range(256) for c in ("red", "green")]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=vocab_size,
        model_type="bpe",
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        byte_fallback=True,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
    )
    return model.getvalue()


def tokenizer() -> SentencePieceTokenizer:
    return SentencePieceTokenizer(tokenizer_bytes())


@dataclass(frozen=True)
class MemorySample:
    index: int
    episode_index: int
    frame_index: int
    images: dict[str, np.ndarray]
    state_D: np.ndarray
    actions_TD: np.ndarray
    action_is_in_episode_T: np.ndarray
    instruction: str


class MemoryDataset:
    """Episodes of random walks; the first pixel of each camera holds (camera, episode, frame)."""

    def __init__(
        self, lengths: tuple[int, ...] = (9, 6, 12), horizon: int = 4, state_dim: int = 5, action_dim: int = 3
    ) -> None:
        generator = np.random.default_rng(0)
        self.horizon = 4
        self.episode_of_N = np.repeat(np.arange(len(lengths)), lengths)
        self.frame_of_N = np.concatenate([np.arange(length) for length in lengths])
        self.state_ND = np.cumsum(generator.normal(size=(sum(lengths), state_dim)), axis=0).astype(np.float32)
        noise = generator.normal(size=(sum(lengths), action_dim))
        self.actions_ND = (self.state_ND[:, :action_dim] + 0.1 * noise).astype(np.float32)

    def __len__(self) -> int:
        return len(self.episode_of_N)

    embodiment: str | None = "memory_arm"

    def fingerprint(self) -> str:
        return f"memory-{self.state_ND.sum():.6f}-{self.actions_ND.sum():.6f}"

    def __getitem__(self, index: int) -> MemorySample:
        last = int(np.flatnonzero(self.episode_of_N == self.episode_of_N[index])[-1])
        rows = index + np.arange(self.horizon)
        images = {}
        for camera, key in enumerate(CAMERAS):
            image = np.random.default_rng([camera, index]).integers(0, 256, (20, 30, 3), dtype=np.uint8)
            image[0, 0] = camera, self.episode_of_N[index], self.frame_of_N[index]
            images[key] = image
        return MemorySample(
            index,
            int(self.episode_of_N[index]),
            int(self.frame_of_N[index]),
            images,
            self.state_ND[index],
            self.actions_ND[np.minimum(rows, last)],
            rows <= last,
            "pick_up the red block\n",
        )


def stream(dataset: MemoryDataset, delta_dims: tuple[int, ...] = ()) -> StreamTransform:
    return StreamTransform(dataset.horizon, delta_dims, "observation.state", "action")


def statistics_of(dataset: MemoryDataset, delta_dims: tuple[int, ...] = ()) -> Statistics:
    return compute_statistics(dataset, stream(dataset, delta_dims), np.arange(len(dataset)), "exact")


def settings(**changes: Any) -> PreprocessSettings:
    values: dict[str, Any] = {
        "views": ("base", "wrist"),
        "camera_keys": CAMERAS,
        "num_images": 3,
        "image_size": 28,
        "image_resize": "pil_bilinear",
        "action_dim": 3,
        "state_dim": 5,
        "max_action_dim": 8,
        "max_state_dim": 8,
        "action_horizon": 4,
        "action_names": ("x", "y", "gripper"),
        "state_names": ("x", "y", "gripper", "a", "b"),
        "delta_action_dims": (0, 1),
        "normalization": "quantile",
        "normalization_variant": "openpi",
        "prompt_state": True,
        "prompt_overflow": "error",
        "max_prompt_length": 100,
        "action_loss": "valid",
    }
    return PreprocessSettings(**{**values, **changes})


def preprocessor(dataset: MemoryDataset, **changes: Any) -> Preprocessor:
    chosen = settings(**changes)
    return Preprocessor(chosen, statistics_of(dataset, chosen.delta_action_dims), tokenizer())


LENGTHS = (9, 6, 14, 11)


def write_dataset(
    root: Path,
    action_dim: int = 3,
    change: Callable[[int, dict[str, np.ndarray]], None] | None = None,
    version: CodebaseVersion = "v3.0",
) -> Path:
    """Four episodes, two PNG cameras, state [5]; `change(episode, columns)` may spoil an episode before it is written."""
    names = ["x", "y", "gripper", *(f"joint_{i}" for i in range(3, action_dim))]
    features: dict[str, Any] = {key: {"dtype": "image", "shape": [16, 24, 3]} for key in CAMERAS}
    features["observation.state"] = {"dtype": "float32", "shape": [5], "names": ["sx", "sy", "sg", "sa", "sb"]}
    features["action"] = {"dtype": "float32", "shape": [action_dim], "names": names[:action_dim]}
    writer = LeRobotWriter(root, fps=10, features=features, codebase_version=version)
    generator = np.random.default_rng(1)
    for episode, length in enumerate(LENGTHS):
        state = np.cumsum(generator.normal(size=(length, 5)), axis=0).astype(np.float32)
        action = np.resize(state[:, :3], (length, 3))[:, np.arange(action_dim) % 3] + 0.1
        columns = {"observation.state": state, "action": action.astype(np.float32)}
        if change is not None:
            change(episode, columns)
        frames = np.zeros((length, 16, 24, 3), dtype=np.uint8)
        frames[..., 0] = episode * 50
        frames[..., 1] = np.arange(length)[:, None, None] * 10
        images = {key: frames + np.uint8(camera * 100) for camera, key in enumerate(CAMERAS)}
        writer.add_episode(columns, images, f"pick up the {('red', 'green')[episode % 2]} block")
    return writer.finalize()


def write_tokenizer(folder: Path) -> Path:
    path = folder / "tokenizer.model"
    path.write_bytes(tokenizer_bytes())
    return path


def data_flags(dataset: Path, tokenizer_model: Path, *more: str) -> list[str]:
    """Flags of a tiny run on `dataset`; later flags win."""
    flags = ["--model-variant", "tiny", "--data-path", str(dataset), "--tokenizer-model", str(tokenizer_model)]
    flags += ["--camera-map", *(f"{view}={key}" for view, key in zip(("base", "wrist"), CAMERAS, strict=True))]
    flags += ["--action-horizon", "4", "--max-prompt-length", "100", "--num-workers", "0", "--micro-batch-size", "4"]
    return [*flags, *more]
