"""What a dataset says of its pictures. Checkpoints keep it, so that simulators can show a policy pictures of the same kind."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_vla.data.episode_table import EpisodeTable

RECORDING_FILE = "meta/recording.json"  # written by tools/record_demonstrations.py
PICTURES_KEY = "pictures"  # in preprocessing.json; absent in checkpoints of before
COLOURS = (1, 3, 4)


@dataclass(frozen=True)
class RecordedPictures:
    """sizes: camera -> (height, width) in pixels, as the dataset's metadata has them.

    The others are known of demonstrations that this project recorded, else None: the simulator, the revision of its adaptation
    here, and whether it rendered without shadows and multisampling.
    """

    sizes: dict[str, tuple[int, int]]
    environment: str | None = None
    revision: int | None = None
    fast_rendering: bool | None = None

    @property
    def side(self) -> int | None:
        """Pixels, where the pictures of all cameras are squares of one size."""
        sides = {side for size in self.sizes.values() for side in size}
        return sides.pop() if len(sides) == 1 else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @staticmethod
    def from_dict(content: Mapping[str, Any] | None) -> RecordedPictures | None:
        """Inverse of `to_dict`; None of None."""
        if content is None:
            return None
        sizes = {camera: (int(height), int(width)) for camera, (height, width) in content["sizes"].items()}
        return RecordedPictures(sizes, content["environment"], content["revision"], content["fast_rendering"])


def recorded_pictures(table: EpisodeTable, cameras: Sequence[str]) -> RecordedPictures:
    """Of `cameras` of a dataset; those whose size the metadata does not tell are left out."""
    sizes: dict[str, tuple[int, int]] = {}
    for camera in cameras:
        shape = table.features[camera].shape
        if len(shape) == 3 and shape[2] in COLOURS:
            sizes[camera] = (shape[0], shape[1])
        elif len(shape) == 3 and shape[0] in COLOURS:  # datasets of before LeRobot v2.1 may have colours first
            sizes[camera] = (shape[1], shape[2])
    settings = _recording_settings(Path(table.root) / RECORDING_FILE)
    # Recordings from before the revision was told are of the first.
    revision = settings.get("revision", 1) if "environment" in settings else None
    return RecordedPictures(sizes, settings.get("environment"), revision, settings.get("fast_rendering"))


def _recording_settings(path: Path) -> Mapping[str, Any]:
    """Empty where this project did not record the dataset; another file of that name says nothing about it."""
    try:
        settings = json.loads(path.read_text())["settings"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return settings if isinstance(settings, dict) else {}
