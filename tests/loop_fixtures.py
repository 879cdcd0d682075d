"""Trainings of tools/close_the_loop.py on mock data."""

from __future__ import annotations

from pathlib import Path

from megatron_vla.config.run import RunConfig, parse_args
from tools.close_the_loop import LoopConfig, Training, training_command


def parsed(config: LoopConfig, training: Training) -> RunConfig:
    """The training's configuration, with mock data in place of a dataset that is recorded later."""
    words = [str(word) for word in training_command(config, Path("out"), training)[1:]]
    for flag in ("--data-path", "--data-access", "--camera-map", "--dataset-action-representation", "--tokenizer-model"):
        place = words.index(flag)
        stop = next(i for i in range(place + 1, len(words)) if words[i].startswith("--"))
        del words[place:stop]
    return parse_args([*words, "--mock-data"])
