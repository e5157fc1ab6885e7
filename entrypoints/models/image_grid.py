"""Draw labeled images in a grid."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

_MIN_SIDE = 128
"""Pixels; smaller images are enlarged without smoothing to be visible."""
_GAP, _LABEL = 6, 14


def draw_grid(images: Sequence[Image], labels: Sequence[str], columns: int) -> Image:
    """Draw images of one size in rows, each with its label below, truncated to fit."""
    from PIL import Image, ImageDraw, ImageFont

    scale = max(1, math.ceil(_MIN_SIDE / images[0].width))
    width, height = images[0].width * scale, images[0].height * scale
    rows = math.ceil(len(images) / columns)
    cell = (width + _GAP, height + _LABEL + _GAP)
    grid = Image.new("RGB", (columns * cell[0] + _GAP, rows * cell[1] + _GAP), "white")
    pen, font = ImageDraw.Draw(grid), ImageFont.load_default(size=11)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        left = _GAP + number % columns * cell[0]
        top = _GAP + number // columns * cell[1]
        grid.paste(image.resize((width, height), Image.Resampling.NEAREST), (left, top))
        truncated = label
        while truncated and pen.textlength(truncated, font=font) > width:
            truncated = truncated[:-1]
        pen.text((left, top + height), truncated, fill="black", font=font)
    return grid


def png(image: Image) -> bytes:
    """Return the image as a PNG file."""
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()
