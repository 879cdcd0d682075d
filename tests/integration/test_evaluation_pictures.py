"""A checkpoint knows the pictures of its training data: simulators show it the same kind, and what differs is told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from evaluation_fixtures import IMAGE_SIZE, train_checkpoint, training_flags, write_metaworld_like

from megatron_vla.config.evaluation import EvaluationConfig
from megatron_vla.config.run import parse_args
from megatron_vla.data.episode_table import Feature
from megatron_vla.data.load_preprocessor import load_preprocessor
from megatron_vla.data.metadata import read_metadata
from megatron_vla.data.recorded_pictures import RECORDING_FILE, RecordedPictures, recorded_pictures
from megatron_vla.evaluation import closed_loop
from megatron_vla.evaluation.command import main
from megatron_vla.evaluation.environments.libero_suite import BACKEND as LIBERO
from megatron_vla.evaluation.environments.metaworld import USUAL_CAMERAS
from megatron_vla.evaluation.environments.metaworld_suite import BACKEND as METAWORLD
from megatron_vla.evaluation.plan import environment_settings, picture_findings
from megatron_vla.evaluation.policy import open_checkpoint
from megatron_vla.models.registry import model_family
from megatron_vla.training.checkpoint_folder import CheckpointFolder
from megatron_vla.training.preparation import prepare
from tools import record_demonstrations

SQUARE = dict.fromkeys(USUAL_CAMERAS, (112, 112))
RECORDED = RecordedPictures(SQUARE, "metaworld", METAWORLD.revision, fast_rendering=False)


def write_recording(dataset: Path, **settings: Any) -> None:
    """What tools/record_demonstrations.py tells, as far as pictures go."""
    (dataset / RECORDING_FILE).write_text(json.dumps({"settings": settings}))


@pytest.fixture(scope="module", params=["pi05", "groot_n1_7"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CheckpointFolder:
    """Trained on demonstrations of MetaWorld of 32 pixels, rendered with shadows, of an earlier revision."""
    folder = tmp_path_factory.mktemp("pictures")
    dataset = write_metaworld_like(folder / "data")
    write_recording(dataset, environment="metaworld", fast_rendering=False, revision=METAWORLD.revision - 1, image_size=32)
    return open_checkpoint(train_checkpoint(folder, model_name=request.param))


def test_the_checkpoint_keeps_what_the_recording_tells(checkpoint: CheckpointFolder) -> None:
    assert checkpoint.preprocessor is not None
    pictures = load_preprocessor(checkpoint.preprocessor).pictures
    sizes = dict.fromkeys(METAWORLD.cameras, (IMAGE_SIZE, IMAGE_SIZE))
    assert pictures == RecordedPictures(sizes, "metaworld", METAWORLD.revision - 1, fast_rendering=False)
    settings = environment_settings(EvaluationConfig(), METAWORLD, pictures)
    assert (settings.image_size, settings.fast_rendering) == (IMAGE_SIZE, False)


def test_checkpoints_of_before_keep_the_usual_pictures(checkpoint: CheckpointFolder, tmp_path: Path) -> None:
    assert checkpoint.preprocessor is not None
    for file in checkpoint.preprocessor.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = json.loads((tmp_path / "preprocessing.json").read_text())
    assert content.pop("pictures")["fast_rendering"] is False
    (tmp_path / "preprocessing.json").write_text(json.dumps(content))
    pictures = load_preprocessor(tmp_path).pictures
    settings = environment_settings(EvaluationConfig(), METAWORLD, pictures)
    assert pictures is None and (settings.image_size, settings.fast_rendering) == (224, True)
    assert not list(picture_findings(settings, METAWORLD, pictures))


def test_an_evaluation_on_other_pictures_says_so(
    checkpoint: CheckpointFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that differs, with both values, before any simulator starts; what is not given is as in the data."""

    def stop(*_: object) -> str:
        raise ValueError("stop here")

    monkeypatch.setattr(closed_loop, "choose_backend", stop)
    monkeypatch.setattr(closed_loop, "find_spec", lambda name: True)
    arguments = ["--checkpoint", str(checkpoint.path), "--output", str(tmp_path), "--eval-action-repeat", "4"]
    arguments += ["--eval-device", "cpu"]
    with pytest.raises(ValueError, match="stop here"):
        main([*arguments, "--eval-image-size", "224", "--eval-fast-rendering"])
    said = capsys.readouterr().out
    assert "WARNING --eval-image-size 224: renders pictures of 224 pixels; those of the training data have 32" in said
    assert "WARNING --eval-fast-rendering: is on; the training data was recorded with it off" in said
    revision = METAWORLD.revision
    assert f"metaworld is revision {revision} here; the training data was recorded with {revision - 1}" in said
    with pytest.raises(ValueError, match="stop here"):
        main(arguments)
    assert capsys.readouterr().out.count("WARNING") == 1, "the revision, which no flag can change"


def test_training_says_so_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recording(write_metaworld_like(tmp_path / "data"), environment="metaworld", fast_rendering=True)
    interval = ("--eval-interval", "1", "--save-interval", "1", "--eval-action-repeat", "4")
    config = parse_args(training_flags(tmp_path, *interval, "--no-eval-fast-rendering"))
    prepare(config, model_family("pi05"), 1)
    told = [line for line in capsys.readouterr().out.splitlines() if "--eval-" in line]
    assert len(told) == 2 and "is off; the training data was recorded with it on" in told[0]
    assert f"{METAWORLD.revision} here; the training data was recorded with 1" in told[1], "recordings that tell no revision"


@pytest.mark.parametrize(
    ("pictures", "size", "fast_rendering"),
    [
        (RECORDED, 112, False),
        (dataclasses.replace(RECORDED, environment="libero"), 112, True),
        (RecordedPictures(SQUARE), 112, True),
        (RecordedPictures(dict.fromkeys(USUAL_CAMERAS, (480, 640))), 224, True),
        (RecordedPictures({USUAL_CAMERAS[0]: (112, 112), USUAL_CAMERAS[1]: (84, 84)}), 224, True),
        (RecordedPictures({}), 224, True),
        (None, 224, True),
    ],
)
def test_defaults_follow_the_data_where_it_tells(pictures: RecordedPictures | None, size: int, fast_rendering: bool) -> None:
    settings = environment_settings(EvaluationConfig(), METAWORLD, pictures)
    assert (settings.image_size, settings.fast_rendering) == (size, fast_rendering)
    assert not list(picture_findings(settings, METAWORLD, pictures))
    given = environment_settings(EvaluationConfig(eval_image_size=64, eval_fast_rendering=True), METAWORLD, pictures)
    assert (given.image_size, given.fast_rendering) == (64, True)


def test_only_the_simulator_of_the_recording_is_compared_with_it() -> None:
    settings = environment_settings(EvaluationConfig(eval_fast_rendering=True), METAWORLD, RECORDED)
    assert len(list(picture_findings(settings, METAWORLD, RECORDED))) == 1
    assert not list(picture_findings(settings, LIBERO, RECORDED))


def test_sizes_come_from_the_metadata_and_foreign_files_say_nothing(tmp_path: Path) -> None:
    table, _ = read_metadata(write_metaworld_like(tmp_path / "data"))
    assert RECORDING_FILE == record_demonstrations.RECORDING_FILE
    sizes = dict.fromkeys(METAWORLD.cameras, (IMAGE_SIZE, IMAGE_SIZE))
    assert recorded_pictures(table, table.cameras) == RecordedPictures(sizes)
    top, wrist = METAWORLD.cameras
    features = table.features | {top: Feature(top, "video", (3, 48, 64)), wrist: Feature(wrist, "video", (0,))}
    assert recorded_pictures(dataclasses.replace(table, features=features), [top, wrist]).sizes == {top: (48, 64)}
    for content in ("no JSON", "[]", '{"settings": 3}', '{"fps": 20}'):
        (tmp_path / "data" / RECORDING_FILE).write_text(content)
        assert recorded_pictures(table, table.cameras) == RecordedPictures(sizes)
