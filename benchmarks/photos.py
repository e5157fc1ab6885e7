"""Makes photographs of noise: soft shapes, finer structure and grain, with realistic file sizes."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def photo(side: int, number: int, quality: int = 90) -> bytes:
    """Return a JPEG of ``side``² pixels; it takes 0.25 MB at 768 and 0.45 MB at 1024."""
    rng = np.random.default_rng(number)
    shapes = _noise(rng, side // 48, side, Image.Resampling.BICUBIC).astype(np.int16)
    structure = _noise(rng, side // 6, side, Image.Resampling.BILINEAR).astype(np.int16) - 128
    grain = rng.normal(0, 4, (side, side, 1)).astype(np.int16)
    pixels = np.clip(shapes + structure // 6 + grain, 0, 255).astype(np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "JPEG", quality=quality)
    return content.getvalue()


def _noise(
    rng: np.random.Generator, cells: int, side: int, resampling: Image.Resampling
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return noise of ``cells``² random colors, scaled up: uint8 (side, side, 3)."""
    small = rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((side, side), resampling))
