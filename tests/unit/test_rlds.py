"""RLDS datasets: framing and checksums, the mapping, the index, and batches equal to those of the LeRobot version."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from preprocess_fixtures import CAMERAS, data_flags, write_dataset, write_tokenizer
from rlds_fixtures import png, rlds_of, tensor_feature, write_records

from megatron_vla.config.data import DataConfig
from megatron_vla.config.run import parse_args
from megatron_vla.data import tfrecord
from megatron_vla.data.build import build_data
from megatron_vla.data.dataset import RobotDataset, build_robot_dataset
from megatron_vla.data.dataset_check import check_dataset
from megatron_vla.data.metadata import read_metadata
from megatron_vla.data.rlds_mapping import Part
from megatron_vla.findings import CheckError
from megatron_vla.models.pi05.family import FAMILY

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "datasets"
GOLDEN_RLDS = {kind: GOLDEN / f"rlds_{kind}" / "mw_demo" for kind in ("tfrecord", "array_record")}
GOLDEN_MAPPING = json.dumps({"fps": 20, "split": ["train", "val"]})
# Which of LeRobot's golden episodes are the first 20 frames of the demonstrations whose first 12 are in the records.
SAME_DEMONSTRATION = {0: 0, 2: 1}
HORIZON = 4


def opened(path: Path, mapping: str | None, cameras: tuple[str, ...] = CAMERAS, **flags: Any) -> RobotDataset:
    config = DataConfig(data_path=(str(path),), rlds_mapping=mapping, video_backend="pyav", **flags)
    return build_robot_dataset(config, HORIZON, cameras)


@pytest.fixture(scope="module")
def lerobot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("lerobot") / "data")


@pytest.fixture(scope="module")
def rlds(lerobot: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return rlds_of(lerobot, tmp_path_factory.mktemp("rlds"))


def assert_same_samples(one: RobotDataset, other: RobotDataset) -> None:
    assert len(one) == len(other) > 0
    for index in range(len(one)):
        a, b = one[index], other[index]
        assert (a.index, a.episode_index, a.frame_index, a.instruction) == (
            b.index,
            b.episode_index,
            b.frame_index,
            b.instruction,
        )
        for name in ("state_D", "actions_TD", "action_is_in_episode_T"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        assert list(a.images) == list(b.images)
        for camera in a.images:
            np.testing.assert_array_equal(a.images[camera], b.images[camera])


@pytest.mark.parametrize("kind", GOLDEN_RLDS)
def test_golden_records_hold_the_demonstrations_that_lerobot_recorded(kind: str) -> None:
    pytest.importorskip("array_record") if kind == "array_record" else None
    cameras = ("observation.images.image", "observation.images.wrist_image")
    dataset = opened(GOLDEN_RLDS[kind], GOLDEN_MAPPING, cameras)
    reference = opened(GOLDEN / "lerobot_v3.0", None, ())
    assert dataset.table.length_E.tolist() == [12, 12, 12, 12]
    for episode, theirs in SAME_DEMONSTRATION.items():
        for name in ("state_ND", "actions_ND"):
            ours_TD = getattr(dataset, name)[12 * episode : 12 * episode + 12]
            np.testing.assert_array_equal(ours_TD, getattr(reference, name)[20 * theirs : 20 * theirs + 12])
        assert dataset[12 * episode].instruction == reference[20 * theirs].instruction
    for index in (0, 11, 12, 40):
        sample, step = dataset[index], index % 12
        # TensorFlow wrote plain pictures: 10 x step (JPEG) and step (PNG).
        assert np.unique(sample.images[cameras[0]]).tolist() == [10 * step]
        assert np.unique(sample.images[cameras[1]]).tolist() == [step]
        assert sample.images[cameras[0]].shape == (64, 64, 3)


@pytest.mark.parametrize("options", [{}, {"compress": True}, {"file_format": "array_record"}, {"num_files": 1}], ids=str)
def test_D12_the_same_episodes_as_rlds_give_identical_samples(lerobot: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    if "file_format" in options:
        pytest.importorskip("array_record")
    folder, mapping = rlds_of(lerobot, tmp_path, **options)
    ours, reference = opened(folder, mapping), opened(lerobot, None)
    assert_same_samples(ours, reference)
    assert ours.fingerprint() == reference.fingerprint()  # statistics of one are valid for the other
    assert any("GZIP" in finding.what for finding in ours.findings) == options.get("compress", False)


def test_pickled_dataset_reads_on_and_carries_its_columns_once(rlds: tuple[Path, str]) -> None:
    dataset = opened(*rlds)
    expected = dataset[3].images[CAMERAS[0]]
    copy = pickle.loads(pickle.dumps(dataset))
    np.testing.assert_array_equal(copy[3].images[CAMERAS[0]], expected)
    assert copy.table.records.columns is None


def test_excluded_episodes_do_not_shift_the_others(rlds: tuple[Path, str], tmp_path: Path) -> None:
    whole = opened(*rlds)
    (tmp_path / "exclude.txt").write_text("1\n")
    part = opened(*rlds, exclude_episodes_file=str(tmp_path / "exclude.txt"))
    rows = np.flatnonzero(whole.episode_of_N != 1)
    assert len(part) == len(rows)
    for index, row in enumerate(rows):
        np.testing.assert_array_equal(part[index].images[CAMERAS[1]], whole[int(row)].images[CAMERAS[1]])
        np.testing.assert_array_equal(part[index].actions_TD, whole[int(row)].actions_TD)


def test_D14_index_is_cached_only_where_asked_and_made_again_for_changed_files(
    lerobot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mapping = rlds_of(lerobot, tmp_path)
    before = sorted(folder.rglob("*"))
    opened(folder, mapping)
    assert sorted(folder.rglob("*")) == before  # nothing is written beside the data
    reads: list[str] = []
    original = tfrecord.TFRecordFile.records

    def counted(self: tfrecord.TFRecordFile) -> Any:
        reads.append(self.path.name)
        return original(self)

    monkeypatch.setattr(tfrecord.TFRecordFile, "records", counted)
    first = opened(folder, mapping, data_cache_path=str(tmp_path / "cache"))
    assert len(reads) == 2
    second = opened(folder, mapping, data_cache_path=str(tmp_path / "cache"))
    assert len(reads) == 2
    assert_same_samples(first, second)
    path = next(folder.glob("*.tfrecord-00000*"))
    path.write_bytes(path.read_bytes())
    opened(folder, mapping, data_cache_path=str(tmp_path / "cache"))
    assert len(reads) == 4
    opened(folder, json.dumps({**json.loads(mapping), "skip_last_steps": 1}), data_cache_path=str(tmp_path / "cache"))
    assert len(reads) == 6


def test_decode_once_reads_records_too(rlds: tuple[Path, str], tmp_path: Path) -> None:
    folder, mapping = rlds
    flags = data_flags(folder, write_tokenizer(tmp_path), "--rlds-mapping", mapping, "--micro-batch-size", "2")
    plain = build_data(parse_args(flags), FAMILY)
    once = build_data(parse_args([*flags, "--data-access", "decode_once", "--decode-lanes", "2"]), FAMILY)
    seen = []
    for batch in once.iterator(0, 0, 1, once.num_samples // 2, False):
        for place, index in enumerate(batch.sample_index_B.tolist()):
            expected = plain.source(index, 0)
            seen.append(index)
            for field in ("images_BVCHW", "actions_BTA", "state_BD"):
                np.testing.assert_array_equal(getattr(batch, field)[place].numpy(), expected[field])
    assert sorted(seen) == list(range(once.num_samples))
    once.close()


def _damaged(folder: Path, change: Any) -> Path:
    path = sorted(folder.glob("*.tfrecord-*"))[1]
    content = bytearray(path.read_bytes())
    path.write_bytes(bytes(change(content)))
    return path


def _flip(content: bytearray, place: int) -> bytearray:
    content[place] ^= 1
    return content


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda c: c[:-7], "record 1: cut off, 7 of its .* bytes are missing"),
        (lambda c: c[:5], "record 0: cut off in its header at byte 0"),
        (lambda c: _flip(c, 40), "record 0: wrong checksum of its .* bytes"),
        (lambda c: _flip(c, 3), "record 0: wrong checksum of its length at byte 0"),
        (lambda c: c[: 16 + int.from_bytes(c[:8], "little")], "1 records, dataset_info.json says 2"),
    ],
)
def test_D15_damaged_records_are_named(lerobot: Path, tmp_path: Path, change: Any, what: str) -> None:
    folder, mapping = rlds_of(lerobot, tmp_path)
    path = _damaged(folder, change)
    with pytest.raises(CheckError, match=what) as caught:
        opened(folder, mapping)
    assert str(path) in str(caught.value)
    # The tool says the same instead of raising.
    assert any(what.split(":")[0] in str(f) for f in check_dataset(folder, deep=False, rlds_mapping=mapping).findings)


def test_damage_after_the_index_pass_is_found_at_reading(lerobot: Path, tmp_path: Path) -> None:
    folder, mapping = rlds_of(lerobot, tmp_path)
    dataset = opened(folder, mapping)
    path = _damaged(folder, lambda c: _flip(c, len(c) // 2))
    last = len(dataset) - 1
    with pytest.raises(ValueError, match=r"wrong checksum") as caught:
        for index in range(last, -1, -1):
            dataset[index]
    assert str(path) in str(caught.value)


def test_checksum_is_the_published_one() -> None:
    # "123456789" -> 0xE3069283 is CRC-32C's check value (RFC 3720); the mask is TensorFlow's.
    assert tfrecord.checksum_function()(b"123456789") == 0xE3069283
    assert tfrecord.masked(0) == 0xA282EAD8
    assert tfrecord.masked(0xE3069283) == (((0xE3069283 >> 15) | (0xE3069283 << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@pytest.mark.parametrize(("module", "kind"), [("google_crc32c", "tfrecord"), ("array_record", "array_record")])
def test_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch, module: str, kind: str) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == module:
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=r"pip install 'megatron-vla\[data\]'"):
        read_metadata(GOLDEN_RLDS[kind], GOLDEN_MAPPING)


@pytest.mark.parametrize(
    ("mapping", "what"),
    [
        (None, r"do not state their rate .* --rlds-mapping FILE with for example .*\"fps\": 10"),
        ('{"split": "train"}', "fps is None"),
        ('{"fps": 20, "split": "test"}', r"no split 'test' \(there are: train, val\)"),
        ('{"fps": 20, "columns": {"action": "steps/actions"}}', "'steps/actions' is no numeric step feature"),
        ('{"fps": 20, "columns": {"action": [{"source": "steps/action", "slice": [2, 9]}]}}', r"slice \[2, 9\] of the 4"),
        ('{"fps": 20, "columns": {"action": [{"source": "steps/action", "transform": "sqrt"}]}}', "transform 'sqrt'"),
        ('{"fps": 20, "cameras": {"front": "steps/observation/state"}}', "is no RGB image"),
        ('{"fps": 20, "frames": 3}', "unknown entry 'frames'"),
        ("{fps", "no readable JSON"),
    ],
)
def test_wrong_mapping_lists_the_features(mapping: str | None, what: str) -> None:
    with pytest.raises(ValueError, match=what) as caught:
        read_metadata(GOLDEN_RLDS["tfrecord"], mapping)
    assert "steps/observation/wrist_image (image [64, 64, 3])" in str(caught.value)


def test_transforms_are_what_they_say() -> None:
    values_TD = np.array([[0.0, 0.25], [1.0, -1.0], [0.5, 0.0], [0.0, 1.0]], dtype=np.float32)

    def one(**options: Any) -> list[float]:
        column: list[float] = Part("key", slice=(1, 2), **options).apply(values_TD)[:, 0].tolist()
        return column

    assert one() == [0.25, -1.0, 0.0, 1.0]
    assert one(transform="invert") == [0.75, 2.0, 1.0, 0.0]
    assert one(transform="negate") == [-0.25, 1.0, 0.0, -1.0]
    assert one(transform="double_minus_one") == [-0.5, -3.0, -1.0, 1.0]
    assert one(transform="affine", scale=2.0, offset=0.5) == [1.0, -1.5, 0.5, 2.5]
    assert one(transform="binarize", threshold=0.2) == [1.0, 0.0, 0.0, 1.0]
    # The first command opens, so the gripper was closed before; "go on" keeps what was commanded last.
    assert one(transform="hold_last_command") == [1.0, 0.0, 0.0, 1.0]


def test_columns_are_joined_from_parts_and_steps_skipped(tmp_path: Path) -> None:
    length = 6
    pose = np.arange(length * 3, dtype=np.float32).reshape(length, 3)
    grip = np.linspace(0, 1, length, dtype=np.float32)
    values = {
        "steps/action/pose": pose,
        "steps/action/grip": grip,
        "steps/observation/state": pose[:, :2],
        "steps/observation/natural_language_instruction": [b"go"] * length,
        "steps/observation/rgb": [png(np.full((8, 8, 3), 10 * k, dtype=np.uint8)) for k in range(length)],
    }
    leaves = {
        "action/pose": tensor_feature("float32", 3),
        "action/grip": tensor_feature("float32"),
        "observation/state": tensor_feature("float32", 2),
        "observation/natural_language_instruction": {"text": {}},
        "observation/rgb": {"image": {"dtype": "uint8", "shape": {"dimensions": ["8", "8", "3"]}}},
    }
    folder = write_records(tmp_path, [values], leaves, num_files=1)
    parts = ["steps/action/pose", {"source": "steps/action/grip", "transform": "invert"}]
    mapping = json.dumps({"fps": 5, "columns": {"action": parts}, "skip_first_steps": 1, "skip_last_steps": 2})
    dataset = opened(folder, mapping, ("observation.images.rgb",))
    np.testing.assert_array_equal(dataset.actions_ND, np.column_stack([pose, 1 - grip])[1:4])
    assert [int(dataset[i].images["observation.images.rgb"][0, 0, 0]) for i in range(3)] == [10, 20, 30]
    assert dataset.instructions() == ("go",)


def test_unequal_step_counts_are_refused(tmp_path: Path) -> None:
    values = {
        "steps/action": np.zeros((4, 2), dtype=np.float32),
        "steps/observation/state": np.zeros((3, 2), dtype=np.float32),
    }
    leaves = {"action": tensor_feature("float32", 2), "observation/state": tensor_feature("float32", 2)}
    folder = write_records(tmp_path, [values], leaves, num_files=1)
    with pytest.raises(ValueError, match=r"record 0: features have different numbers of steps: .*steps/action 4"):
        read_metadata(folder, '{"fps": 5}')
