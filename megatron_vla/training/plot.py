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


def draw_loss_curve(path: Path, iterations: Sequence[int], losses: Sequence[float]) -> None:
    """Write the curve of finite losses over iterations: every step pale, a trailing mean dark."""
    points = [(i, v) for i, v in zip(iterations, losses, strict=True) if math.isfinite(v)]
    if not points:
        return
    steps = [i for i, _ in points]
    values = [v for _, v in points]
    low, high = min(values), max(values)
    margin = (high - low) * 0.05 or max(abs(high), 1e-12) * 0.05
    low, high = low - margin, high + margin
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)

    def place(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (step - steps[0]) / max(1, steps[-1] - steps[0]) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return x, y

    for tick in range(NUM_TICKS + 1):
        share = tick / NUM_TICKS
        step, value = steps[0] + share * (steps[-1] - steps[0]), low + share * (high - low)
        _, y = place(steps[0], value)
        x, _ = place(step, low)
        draw.line([(LEFT, y), (WIDTH - RIGHT, y)], fill=GRID_COLOR)
        draw.text((8, y - 6), f"{value:.4g}", fill=AXIS_COLOR)
        draw.text((x - 12, HEIGHT - BOTTOM + 8), f"{step:.0f}", fill=AXIS_COLOR)
    draw.rectangle([LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM], outline=AXIS_COLOR)
    draw.text((LEFT, 8), f"training loss: first {values[0]:.5g}, last {values[-1]:.5g}", fill=AXIS_COLOR)
    draw.text((WIDTH // 2 - 25, HEIGHT - 18), "iteration", fill=AXIS_COLOR)
    span = max(1, len(values) // 50)
    draw.line([place(s, v) for s, v in zip(steps, values, strict=True)], fill=RAW_COLOR)
    draw.line([place(s, v) for s, v in zip(steps, smoothed(values, span), strict=True)], fill=SMOOTH_COLOR, width=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
