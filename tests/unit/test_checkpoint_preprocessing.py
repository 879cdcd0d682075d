"""K09: a checkpoint of a robot-data run carries its preprocessing, and a resume uses that and not what lies around now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from preprocess_fixtures import data_flags, write_dataset, write_tokenizer

from megatron_vla.config.run import parse_args
from megatron_vla.data.preprocess import Preprocessor
from megatron_vla.findings import CheckError
from megatron_vla.models.registry import model_family
from megatron_vla.training import session as session_module
from megatron_vla.training.checkpoint_folder import find_latest
from megatron_vla.training.loop import train
from megatron_vla.training.session import training_session

SMALL = ("--image-size", "28", "--num-layers", "2", "--vision-num-layers", "1", "--lr-warmup-iters", "1", "--log-interval", "1")


def run(folder: Path, *flags: str) -> Preprocessor:
    save = str(folder / "checkpoints")
    words = data_flags(folder / "data", folder / "tokenizer.model", *SMALL, "--save", save, "--load", save, *flags)
    with training_session(parse_args(words), model_family("pi05")) as session:
        train(session)
        return session.supply.preprocessor


def as_json(preprocessor: Preprocessor) -> str:
    """Floats round-trip exactly, so equal text means bit-equal statistics."""
    return json.dumps(preprocessor.to_dict(), sort_keys=True)


def test_K09_statistics_and_tokenizer_of_a_resume_come_from_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dataset(tmp_path / "data")
    write_tokenizer(tmp_path)
    used = run(tmp_path, "--train-iters", "2")
    found, _ = find_latest(tmp_path / "checkpoints")
    assert found is not None and found.preprocessor is not None
    assert {p.name for p in found.preprocessor.iterdir()} == {"preprocessing.json", "statistics.json", "tokenizer.model"}
    assert as_json(Preprocessor.load(found.preprocessor)) == as_json(used)
    printed = capsys.readouterr().out
    assert "first batch" in printed and (tmp_path / "checkpoints" / "logs" / "first_batch.png").is_file()
    resumed = run(tmp_path, "--train-iters", "3")
    assert as_json(resumed) == as_json(used)
    assert f"statistics: {found.preprocessor / 'statistics.json'}" in capsys.readouterr().out


def test_D_changed_dataset_is_noticed_on_resume(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data")
    write_tokenizer(tmp_path)
    run(tmp_path, "--train-iters", "2")
    (tmp_path / "exclude.txt").write_text("0\n")
    with pytest.raises(CheckError, match="--exclude-episodes-file: changed since"):
        run(tmp_path, "--train-iters", "3", "--exclude-episodes-file", str(tmp_path / "exclude.txt"))


def test_a_run_compiles_for_no_wider_prompt_than_its_data_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dataset(tmp_path / "data")
    write_tokenizer(tmp_path)
    longest: list[Any] = []
    monkeypatch.setattr(session_module, "warm_up", lambda *arguments: longest.append(arguments[-1]))
    words = data_flags(tmp_path / "data", tmp_path / "tokenizer.model", *SMALL, "--train-iters", "2", "--compile")
    with training_session(parse_args(words), model_family("pi05")) as run:
        assert longest == [run.supply.longest_prompt] and 0 < longest[0] < run.config.family.max_prompt_length
