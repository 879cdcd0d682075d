"""Verification of a converted shard: what was written is read back and compared with the source.

Shape legend: T frames of an episode, H height, W width, C colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_vla.data.conversion_source import ConversionSource
from megatron_vla.data.dataset_check_files import check_video_files
from megatron_vla.data.frame_source import FrameSource
from megatron_vla.data.lerobot_columns import load_columns
from megatron_vla.data.metadata import read_metadata
from megatron_vla.findings import raise_errors

# Mean error of a re-decoded picture: codecs lose a few levels, noise a few tens. Another picture is far off.
MAX_MEAN_ERROR = 40.0


def verify_shard(folder: Path, source: ConversionSource, episodes: Sequence[int], verify_frames: int) -> None:
    """Frame counts, every number, and the pairing of pictures and rows of `verify_frames` frames per episode and camera.

    0 frames: all. A re-decoded frame must be like its own source frame, and not more like the one before or after it, as far as
    the codec lets tell them apart. Raises ValueError naming the source episode.
    """
    table, _ = read_metadata(folder)
    lengths = [int(source.length_E[episode]) for episode in episodes]
    if table.length_E.tolist() != lengths:
        raise ValueError(f"{folder}: episode lengths {table.length_E.tolist()}, the source has {lengths}")
    # The same check that training runs at start: containers, lengths, order of the episodes.
    raise_errors(check_video_files(table, table.cameras).findings)
    names = tuple(name for name, feature in source.features.items() if feature["dtype"] != "image")
    columns, broken = load_columns(table, names)
    raise_errors([file.finding for file in broken])
    frames = FrameSource(table, "pyav", cache_size=max(1, len(table.cameras)))
    for row, episode in enumerate(episodes):
        rows = slice(int(columns.first_row_E[row]), int(columns.first_row_E[row + 1]))
        for name, values in source.columns(episode).items():
            # Bit by bit: numbers are copied, never computed, on their way.
            if not np.array_equal(columns.values[name][rows].reshape(values.shape), values, equal_nan=True):
                raise ValueError(f"{source.where(episode)}: column {name} was not written as it is")
        for camera in table.cameras:
            _verify_pictures(frames, camera, row, source, episode, verify_frames)


def _verify_pictures(
    frames: FrameSource, camera: str, row: int, source: ConversionSource, episode: int, verify_frames: int
) -> None:
    length = int(source.length_E[episode])
    count = length if verify_frames == 0 else min(verify_frames, length)
    for k in np.unique(np.linspace(0, length - 1, count).astype(int)).tolist():
        near = [j for j in (k, k - 1, k + 1) if 0 <= j < length]
        # Signed: a difference of uint8 would wrap around.
        decoded_HWC = frames.frames(camera, row, [k])[0].astype(np.int16)
        originals = list(source.frames(camera, episode, near))
        errors = [float(np.abs(decoded_HWC - original).mean()) for original in originals]
        if camera not in frames.table.videos:
            # PNG loses nothing, so a single other level is a fault.
            wrong = errors[0] > 0
        else:
            wrong = errors[0] > MAX_MEAN_ERROR or any(
                is_other(errors[0], error, float(np.abs(originals[0].astype(np.int16) - original).mean()))
                for error, original in zip(errors[1:], originals[1:], strict=True)
            )
        if wrong:
            closest = near[int(np.argmin(errors))]
            raise ValueError(
                f"{source.where(episode)}, camera {camera}, frame {k}: decoded again it differs from the source by "
                f"{errors[0]:.1f} levels on average and is closest to frame {closest} -> raise the quality (--crf), use "
                "--storage image, or another --video-codec"
            )


def is_other(own_error: float, other_error: float, difference: float) -> bool:
    """The picture is the other frame: closer by most of what the two differ, and they differ by more than the codec loses.

    In a scene at rest a codec repeats the frame before, noise and all; that is no wrong pairing.
    """
    return own_error - other_error > difference / 2 and difference > 2 * other_error + 1
