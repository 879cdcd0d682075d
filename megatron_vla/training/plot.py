"""Loss curve as a PNG, drawn with Pillow (already a dependency of the image pipeline)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

WIDTH, HEIGHT = 900, 480
LEFT, RIGHT, TOP, BOTTOM = 80, 20, 30, 45
RAW_COLOR, SMOOTH_COLOR, AXIS_COLOR, GRID_COLOR = (170, 190, 225), (30, 80, 170), (60, 60, 60), (228, 228, 228)
NUM_TICKS = 5


def smoothed(values: Sequence[float], span: int) -> list[float]:
    """Trailing mean over `span` values (fewer at the start)."""
    return [math.fsum(values[max(0, i + 1 - span) : i + 1]) / min(span, i + 1) for i in range(len(values))]


def ticks(low: float, high: float, logarithmic: bool) -> list[float]:
    """Round numbers within [low, high]: 1, 2, 5 times powers of ten, or multiples of one of these (about NUM_TICKS)."""
    if logarithmic:
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [digit * 10.0**exponent for exponent in exponents for digit in (1, 2, 5)]
    else:
        rough = (high - low) / NUM_TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough)
        found = [count * step for count in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return [value for value in found if low <= value <= high]


def draw_loss_curve(path: Path, iterations: Sequence[int], losses: Sequence[float]) -> None:
    """Write the curve of finite losses over iterations: every step pale, a trailing mean dark.

    The loss has a logarithmic axis, so that its later part shows, unless a value is zero or below.
    """
    points = [(i, v) for i, v in zip(iterations, losses, strict=True) if math.isfinite(v)]
    if not points:
        return
    steps = [i for i, _ in points]
    values = [v for _, v in points]
    logarithmic = min(values) > 0
    scale = math.log10 if logarithmic else float
    low, high = scale(min(values)), scale(max(values))
    margin = (high - low) * 0.05 or max(abs(high), 1e-12) * 0.05
    low, high = low - margin, high + margin
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)

    def place(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (step - steps[0]) / max(1, steps[-1] - steps[0]) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (scale(value) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return x, y

    for value in ticks(*((10**low, 10**high) if logarithmic else (low, high)), logarithmic):
        _, y = place(steps[0], value)
        draw.line([(LEFT, y), (WIDTH - RIGHT, y)], fill=GRID_COLOR)
        draw.text((8, y - 6), f"{value:.4g}", fill=AXIS_COLOR)
    for step in ticks(steps[0], max(steps[-1], steps[0] + 1), False):
        x, _ = place(step, values[0])
        draw.line([(x, TOP), (x, HEIGHT - BOTTOM)], fill=GRID_COLOR)
        draw.text((x - 12, HEIGHT - BOTTOM + 8), f"{step:.6g}", fill=AXIS_COLOR)
    draw.rectangle([LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM], outline=AXIS_COLOR)
    span = max(1, len(values) // 50)
    means = smoothed(values, span)
    last = f"last {values[-1]:.5g} (mean of {span}: {means[-1]:.5g})"
    draw.text((LEFT, 8), f"training loss: first {values[0]:.5g}, {last}", fill=AXIS_COLOR)
    draw.text((WIDTH // 2 - 25, HEIGHT - 18), "iteration", fill=AXIS_COLOR)
    draw.line([place(s, v) for s, v in zip(steps, values, strict=True)], fill=RAW_COLOR)
    draw.line([place(s, v) for s, v in zip(steps, means, strict=True)], fill=SMOOTH_COLOR, width=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
