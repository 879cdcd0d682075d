"""Cameras (names in the dataset) bound to views (slots of the model) by name, never by position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_vla.findings import Finding, error

SUGGESTED_VIEWS = ("base", "left_wrist", "right_wrist")  # the order of Pi0.5's released checkpoints


@dataclass(frozen=True)
class CameraMap:
    """`views[i]` is fed from dataset camera `keys[i]`; `num_images - len(views)` empty, masked slots follow.

    A key "" is a view that this dataset of a mixture does not have: an empty, masked slot as well.
    """

    views: tuple[str, ...]
    keys: tuple[str, ...]
    num_images: int

    def slot_names(self) -> list[str]:
        """One name per image slot; empty slots are called empty_0, empty_1, ..."""
        return [*self.views, *(f"empty_{i}" for i in range(self.num_images - len(self.views)))]

    @property
    def is_present(self) -> tuple[bool, ...]:
        """For each image slot, whether a camera feeds it."""
        return (*(bool(key) for key in self.keys), *(False for _ in range(self.num_images - len(self.keys))))

    def arranged(self, views: Sequence[str], num_images: int) -> CameraMap:
        """The same bindings in a layout that several datasets share; views without camera here get the key ""."""
        key_of = dict(zip(self.views, self.keys, strict=True))
        assert set(key_of) <= set(views), "the layout has every view"
        return CameraMap(tuple(views), tuple(key_of.get(view, "") for view in views), num_images)

    def select(self, images: Mapping[str, Any]) -> list[Any]:
        """Values of `images` in view order, whatever order the dict has; None for views without camera.

        Raises ValueError naming both lists and the map.
        """
        # A black picture in place of a missing camera would train and serve without a word.
        missing = [key for key in self.keys if key and key not in images]
        if missing:
            raise ValueError(
                f"camera(s) {', '.join(missing)} are missing; given: {', '.join(images) or 'none'}; "
                f"the camera map is {' '.join(self.to_flag_values())}"
            )
        return [images[key] if key else None for key in self.keys]

    def to_flag_values(self) -> list[str]:
        """Values of --camera-map."""
        return [f"{view}={key}" for view, key in zip(self.views, self.keys, strict=True) if key]


def suggested_flag(camera_keys: Iterable[str]) -> str:
    """A ready --camera-map for these dataset cameras; wrist cameras go to wrist views when their name says so."""
    keys = list(camera_keys)
    # Only a suggestion for people to check: nothing is ever bound by guessing.
    wrist = [key for key in keys if "wrist" in key or "hand" in key.rsplit(".", 1)[-1]]
    rest = [key for key in keys if key not in wrist]
    if not rest:
        wrist, rest = wrist[1:], wrist[:1]
    free_views = [*SUGGESTED_VIEWS, *(f"view_{i}" for i in range(len(SUGGESTED_VIEWS), len(keys)))]
    pairs = [(free_views.pop(0), rest[0])] if rest else []
    pairs += [(free_views.pop(0), key) for key in (*wrist, *rest[1:])]
    return "--camera-map " + " ".join(f"{view}={key}" for view, key in pairs)


def parse_camera_map(
    pairs: Sequence[str], num_images: int | None, dataset_cameras: Sequence[str]
) -> tuple[CameraMap | None, list[Finding]]:
    """(the map, or None with errors) from the values of --camera-map; `dataset_cameras` are the keys that exist."""
    listed = ", ".join(dataset_cameras) or "none"
    ready = suggested_flag(dataset_cameras) if dataset_cameras else "a dataset with camera features"
    if not pairs:
        return None, [error("--camera-map", f"not given; the dataset has cameras {listed}", f"use {ready}")]
    findings: list[Finding] = []
    views, keys = [], []
    for pair in pairs:
        view, separator, key = pair.partition("=")
        # Commas are what other tools use; without this the whole rest would become one camera name.
        if not (view and separator and key) or "," in pair:
            findings.append(error("--camera-map", f"{pair!r} is not VIEW=DATASET_KEY", f"separate pairs by spaces: {ready}"))
            continue
        views.append(view)
        keys.append(key)
    for name, values in (("view", views), ("camera", keys)):
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            findings.append(error("--camera-map", f"{name} {', '.join(twice)} is named twice", f"name each once: {ready}"))
    unknown = [key for key in keys if key not in dataset_cameras]
    if unknown:
        findings.append(
            error("--camera-map", f"asks for camera {', '.join(unknown)}; the dataset has cameras {listed}", f"use {ready}")
        )
    # Slots without camera are pruned unless asked for: each costs 256 tokens.
    slots = len(views) if num_images is None else num_images
    if slots < len(views):
        findings.append(
            error("--num-images", f"{slots} is fewer than the {len(views)} mapped cameras", "raise it, or map fewer cameras")
        )
    if findings:
        return None, findings
    return CameraMap(tuple(views), tuple(keys), slots), []
