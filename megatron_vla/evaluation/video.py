"""Videos of trials and the montage: GIF (Pillow) or MP4 (av), each below half a megabyte.

Shape legend: H height, W width.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

MAX_BYTES = 490_000
BORDER = 3
HEADING = 24  # two lines of text
GREEN, RED = (40, 160, 60), (200, 50, 40)
HOLD_LAST = 6  # pictures that the end stays on screen


def with_heading(picture_HWC: np.ndarray, text: str, colour: tuple[int, int, int] | None) -> np.ndarray:
    """The picture under a line of text, in a frame of `colour` (None: white)."""
    from PIL import Image, ImageDraw

    height, width = picture_HWC.shape[:2]
    sheet = Image.new("RGB", (width + 2 * BORDER, height + HEADING + 2 * BORDER), colour or (255, 255, 255))
    draw = ImageDraw.Draw(sheet)
    draw.rectangle((0, 0, width + 2 * BORDER, HEADING), fill=(255, 255, 255))
    lines = textwrap.wrap(text, max(8, width // 6), max_lines=2, placeholder="...")
    draw.multiline_text((BORDER, 0), "\n".join(lines), fill=(0, 0, 0), spacing=0)
    sheet.paste(Image.fromarray(picture_HWC), (BORDER, HEADING + BORDER))
    return np.asarray(sheet)


def finished_film(film: Sequence[np.ndarray], text: str, succeeded: bool) -> list[np.ndarray]:
    """The film with its heading, held at the end in a green or red frame."""
    end = with_heading(film[-1], text, GREEN if succeeded else RED)
    return [with_heading(picture, text, None) for picture in film] + [end] * HOLD_LAST


def montage(films: Sequence[Sequence[np.ndarray]], columns: int) -> list[np.ndarray]:
    """Films side by side, in the size of the first; shorter ones stay on their last picture."""
    height, width = films[0][0].shape[:2]
    films = [[_of_size(picture, height, width) for picture in film] for film in films]
    rows = -(-len(films) // columns)
    sheets = []
    for step in range(max(map(len, films))):
        sheet = np.full((rows * height, columns * width, 3), 255, np.uint8)
        for number, film in enumerate(films):
            top, left = (number // columns) * height, (number % columns) * width
            sheet[top : top + height, left : left + width] = film[min(step, len(film) - 1)]
        sheets.append(sheet)
    return sheets


def _of_size(picture_HWC: np.ndarray, height: int, width: int) -> np.ndarray:
    """A written film may have been made smaller."""
    from PIL import Image

    if picture_HWC.shape[:2] == (height, width):
        return picture_HWC
    return np.asarray(Image.fromarray(picture_HWC).resize((width, height), Image.Resampling.BILINEAR))


def read_video(path: Path, fps: float) -> list[np.ndarray]:
    """Pictures uint8 HWC of what `write_video` wrote, repeated where it left some out, so that they play at `fps`."""
    if path.suffix == ".gif":
        from PIL import Image, ImageSequence

        with Image.open(path) as file:
            # One picture with a longer duration stands for several equal ones.
            shown = [(np.asarray(f.convert("RGB")), f.info.get("duration", 0) / 1e3) for f in ImageSequence.Iterator(file)]
    else:
        import av

        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            seconds = 1 / float(stream.average_rate or fps)
            shown = [(frame.to_ndarray(format="rgb24"), seconds) for frame in container.decode(stream)]
    return [picture for picture, seconds in shown for _ in range(max(1, round(seconds * fps)))]


def _gif(film: Sequence[np.ndarray], fps: float) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    images = [Image.fromarray(picture).quantize(64, dither=Image.Dither.NONE) for picture in film]
    images[0].save(
        buffer, "GIF", save_all=True, append_images=images[1:], duration=max(20, int(1000 / fps)), loop=0, optimize=True
    )
    return buffer.getvalue()


def _mp4(film: Sequence[np.ndarray], fps: float, path: Path) -> bytes:
    from megatron_vla.data.video_encoder import VideoEncoder

    # Half the colour resolution of video needs even sizes.
    height, width = (n - n % 2 for n in film[0].shape[:2])
    encoder = VideoEncoder(path, fps=max(1, round(fps)), codec="h264", gop=48, crf=None, b_frames=0)
    for number, picture in enumerate(film):
        encoder.add(np.ascontiguousarray(picture[:height, :width]), keyframe=number == 0)
    encoder.close()
    content = path.read_bytes()
    path.unlink()
    return content


def _smaller(film: list[np.ndarray], fps: float) -> tuple[list[np.ndarray], float]:
    """Half of the pictures while there are many, then three quarters of the side."""
    from PIL import Image

    if len(film) > 40:
        return [*film[:-1:2], film[-1]], fps / 2
    height, width = (max(16, n * 3 // 4) for n in film[0].shape[:2])
    return [np.asarray(Image.fromarray(p).resize((width, height), Image.Resampling.BILINEAR)) for p in film], fps


def write_video(film: Sequence[np.ndarray], path: Path, fps: float) -> Path:
    """Write the film as .gif or .mp4 by the suffix of `path`, thinned out until it is below MAX_BYTES."""
    pictures = list(film)
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        partial = path.with_name(f".{path.name}.partial{path.suffix}")
        content = _gif(pictures, fps) if path.suffix == ".gif" else _mp4(pictures, fps, partial)
        if len(content) < MAX_BYTES or min(pictures[0].shape[:2]) <= 16:
            break
        pictures, fps = _smaller(pictures, fps)
    path.write_bytes(content)
    return path
