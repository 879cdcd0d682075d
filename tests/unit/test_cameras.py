"""Cameras are bound by name."""

from __future__ import annotations

import numpy as np
import pytest
from preprocess_fixtures import MemoryDataset, preprocessor

from megatron_vla.data.cameras import parse_camera_map, suggested_flag


def test_C01_error_lists_both_sides_and_a_ready_flag() -> None:
    cameras, findings = parse_camera_map(["base=observation.images.top"], None, ("cam_a", "cam_b"))
    assert cameras is None
    text = str(findings[0])
    assert "observation.images.top" in text
    assert "cam_a, cam_b" in text
    assert "--camera-map base=cam_a left_wrist=cam_b" in text
    ready = text.split("--camera-map ")[-1].split()
    assert parse_camera_map(ready, None, ("cam_a", "cam_b"))[1] == []


def test_C01_no_map_given() -> None:
    cameras, findings = parse_camera_map([], None, ("cam_a",))
    assert cameras is None
    assert findings[0].fix == "use --camera-map base=cam_a"


def test_wrist_cameras_are_suggested_for_wrist_views() -> None:
    flag = suggested_flag(["observation.images.wrist", "observation.images.top"])
    assert flag == "--camera-map base=observation.images.top left_wrist=observation.images.wrist"
    assert suggested_flag(["wrist"]) == "--camera-map base=wrist"
    four = suggested_flag(["a", "b", "c", "d"])
    assert four == "--camera-map base=a left_wrist=b right_wrist=c view_3=d"


def test_C02_reversed_dict_order_gives_identical_batches() -> None:
    dataset = MemoryDataset()
    processor = preprocessor(dataset)
    sample = dataset[5]
    straight = processor.preprocess_observation(sample.images, sample.state_D, "go")
    turned = dict(reversed(sample.images.items()))
    assert list(turned) != list(sample.images)
    reversed_order = processor.preprocess_observation(turned, sample.state_D, "go")
    np.testing.assert_array_equal(straight["images_BVCHW"], reversed_order["images_BVCHW"])
    # Swapping what the names mean does change the batch, so the test above can fail.
    swapped = preprocessor(dataset, camera_keys=tuple(reversed(processor.settings.camera_keys)))
    assert not np.array_equal(
        straight["images_BVCHW"], swapped.preprocess_observation(sample.images, sample.state_D, "go")["images_BVCHW"]
    )


def test_empty_slots_follow_the_mapped_cameras() -> None:
    cameras, findings = parse_camera_map(["wrist=b", "base=a"], 4, ("a", "b"))
    assert not findings
    assert cameras is not None
    assert cameras.slot_names() == ["wrist", "base", "empty_0", "empty_1"]
    assert cameras.select({"a": 1, "b": 2}) == [2, 1]
    assert parse_camera_map(cameras.to_flag_values(), 4, ("a", "b"))[0] == cameras


@pytest.mark.parametrize(
    ("pairs", "num_images", "text"),
    [
        (["base=a", "wrist=b"], 1, "1 is fewer than the 2 mapped cameras"),
        (["base=a", "base=b"], None, "view base is named twice"),
        (["base=a", "wrist=a"], None, "camera a is named twice"),
        (["a"], None, "'a' is not VIEW=DATASET_KEY"),
        (["base=a,wrist=b"], None, "separate pairs by spaces"),
    ],
)
def test_bad_maps(pairs: list[str], num_images: int | None, text: str) -> None:
    cameras, findings = parse_camera_map(pairs, num_images, ("a", "b"))
    assert cameras is None
    assert any(text in str(finding) for finding in findings)
