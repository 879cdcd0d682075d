"""First-batch report: picture, JSON, text, and its warning."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from preprocess_fixtures import CAMERAS, data_flags, write_dataset, write_tokenizer

from megatron_vla.config.run import parse_args
from megatron_vla.data.build import DataSupply, build_data
from megatron_vla.data.report import CAPTION_HEIGHT, first_batch_report, padding_finding
from megatron_vla.models.registry import model_family

FAMILY = model_family("pi05")


@pytest.fixture(scope="module")
def supply(tmp_path_factory: pytest.TempPathFactory) -> DataSupply:
    folder = tmp_path_factory.mktemp("report")
    flags = data_flags(write_dataset(folder / "data"), write_tokenizer(folder), "--no-shuffle", "--num-images", "3")
    return build_data(parse_args(flags), FAMILY)


def test_C02_picture_shows_every_view_with_its_slot(
    supply: DataSupply, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = supply.first_batch(consumed_samples=4)
    findings = first_batch_report(
        batch,
        supply.preprocessor,
        tmp_path / "logs",
        order_hash=supply.order_hash,
        expected_padded_fraction=supply.expected_padded_fraction,
    )
    assert findings == []
    text = capsys.readouterr().out
    for words in (
        supply.order_hash,
        f"view base <- {CAMERAS[0]} (present 100%)",
        "view empty_0 <- no camera (present 0%)",
        "Task: pick up the red block, State: ",
        "gripper",
        "first_batch.png",
    ):
        assert words in text

    content = json.loads((tmp_path / "logs/first_batch.json").read_text())
    assert content["order_hash"] == supply.order_hash
    assert content["sample_index"] == [4, 5, 6, 7]
    assert [(v["slot"], v["camera"]) for v in content["views"]] == [
        ("base", CAMERAS[0]),
        ("wrist", CAMERAS[1]),
        ("empty_0", "no camera"),
    ]
    assert content["padded_action_fraction"] == pytest.approx(3 / 16)
    assert content["expected_padded_action_fraction"] == pytest.approx(0.15)
    assert content["loss_element_fraction"] == pytest.approx(13 / 16 * 3 / 12)

    # Physical ranges come back through the inverse transforms: they must be the dataset's own.
    dataset = supply.source.dataset  # type: ignore[attr-defined]
    ranges = {(row["feature"], row["dim"]): row for row in content["ranges"]}
    samples = [dataset[i] for i in range(4, 8)]
    for dim in range(5):
        values = np.array([s.state_D[dim] for s in samples])
        assert ranges["state", dim]["physical_min"] == pytest.approx(values.min(), abs=1e-4)
        assert ranges["state", dim]["physical_max"] == pytest.approx(values.max(), abs=1e-4)
    actions = np.concatenate([s.actions_TD for s in samples])
    assert ranges["action", 2]["physical_max"] == pytest.approx(actions[:, 2].max(), abs=1e-4)
    assert ranges["action", 2]["name"] == "gripper"

    picture = np.asarray(Image.open(tmp_path / "logs/first_batch.png"))
    middle = CAPTION_HEIGHT + 80
    # Green encodes the frame (10 per frame), the second camera adds 100, the empty slot is black.
    assert [int(picture[middle, 168 * view + 80, 1]) for view in range(3)] == [40, 140, 0]


def test_mock_batches_are_reported_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model-variant", "tiny", "--mock-data", "--num-workers", "0", "--micro-batch-size", "2"]
    supply = build_data(parse_args(flags), FAMILY)
    first_batch_report(supply.first_batch(), None, tmp_path, order_hash=supply.order_hash)
    assert "view view_1 <- mock" in capsys.readouterr().out
    assert (tmp_path / "first_batch.png").is_file()


def test_D06_far_too_much_padding_is_a_warning() -> None:
    assert padding_finding(0.10, 0.05, 10_000) is None
    finding = padding_finding(0.90, 0.05, 64)
    assert finding is not None
    assert finding.severity == "warning"
    assert "90.0% of the action steps lie beyond" in finding.what
    assert "imply 5.0%" in finding.what
    # Four samples may well all lie at episode ends.
    assert padding_finding(0.25, 0.10, 4) is None
