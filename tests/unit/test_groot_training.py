"""GR00T on a robot dataset through the training entry: checkpoint and preprocessing, exact resume, changed robots refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from groot_fixtures import MODALITY_CONFIG, data_flags, write_dataset, write_modality_config, write_tokenizer

from megatron_vla.config.run import parse_args
from megatron_vla.data.load_preprocessor import load_preprocessor
from megatron_vla.findings import CheckError
from megatron_vla.models.registry import model_family
from megatron_vla.training.checkpoint_folder import find_latest
from megatron_vla.training.loop import train
from megatron_vla.training.session import training_session

SMALL = ("--lr-warmup-iters", "1", "--log-interval", "1", "--lr-decay-iters", "9", "--augmentation", "groot", "--lr", "1e-3")


def run(folder: Path, save: str, *flags: str) -> dict[str, object]:
    """Train; what the preprocessor of the run says."""
    place = str(folder / save)
    modality = ("--modality-config", str(folder / "modality_config.json"))
    words = data_flags(folder / "robot", folder / "tokenizer.json", *SMALL, *modality, "--save", place, "--load", place, *flags)
    with training_session(parse_args(words), model_family("groot_n1_7")) as session:
        train(session)
        content: dict[str, object] = session.supply.preprocessor.to_dict()
        return content


def losses(folder: Path) -> dict[int, float]:
    """Iteration -> loss, as logged."""
    lines = [json.loads(line) for line in (folder / "logs/metrics.jsonl").read_text().splitlines()]
    return {i: loss for line in lines for i, loss in zip(line["iterations"], line["losses"], strict=True)}


def test_resume_is_exact_and_a_changed_robot_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "robot")
    write_tokenizer(tmp_path)
    write_modality_config(tmp_path)
    run(tmp_path, "whole", "--train-iters", "4")
    used = run(tmp_path, "parts", "--train-iters", "2")
    found, _ = find_latest(tmp_path / "parts")
    assert found is not None and found.preprocessor is not None
    assert load_preprocessor(found.preprocessor).to_dict() == used
    # What lies around now is not what the checkpoint was trained with: it brings its own tokenizer and statistics.
    (tmp_path / "tokenizer.json").write_text("broken")
    assert run(tmp_path, "parts", "--train-iters", "4") == used
    assert f"statistics: {found.preprocessor / 'statistics.json'}" in capsys.readouterr().out
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole") and len(losses(tmp_path / "parts")) == 4
    assert (tmp_path / "whole/logs/first_batch.png").is_file()
    last = json.loads((tmp_path / "whole/logs/metrics.jsonl").read_text().splitlines()[-1])
    # Two prompts and one grid in all: after the first micro-batches everything is known.
    assert 0.5 < last["metadata_hit_rate"] <= 1
    action = {**MODALITY_CONFIG["action"], "delta_indices": [0, 1]}
    write_modality_config(tmp_path, action=action)
    with pytest.raises(CheckError, match="computed on other transforms"):
        run(tmp_path, "parts", "--train-iters", "5")
    write_modality_config(tmp_path)
    with pytest.raises(CheckError, match="--embodiment-id: changed since the checkpoint"):
        run(tmp_path, "parts", "--train-iters", "5", "--embodiment-id", "2")
