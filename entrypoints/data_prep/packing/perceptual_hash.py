"""Computes a 64-bit hash that survives scaling and compression: near-duplicates differ in few bits.

The DCT hash of Zauner, "Implementation and Benchmarking of Perceptual Image Hash Functions"
(2010), as implemented in the Python package imagehash: scale the image to 32 × 32 grey values, take
the 8 × 8 lowest frequencies of their discrete cosine transform, and set a bit for each one above
their median.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIDE, LOWEST = 32, 8

_ANGLES = np.pi / (2 * SIDE) * np.outer(np.arange(LOWEST), 2 * np.arange(SIDE) + 1)
_COSINES = 2 * np.cos(_ANGLES)
"""The rows (8, 32) of the type-II transform that belong to the lowest frequencies."""


def perceptual_hash(small: NDArray[Any]) -> int:
    """Return the hash of (32, 32) grey values; the highest bit is the lowest frequency."""
    frequencies = _COSINES @ small @ _COSINES.T
    above = frequencies > np.median(frequencies)
    return int.from_bytes(np.packbits(above).tobytes(), "big")


def shrink(grey: NDArray[np.uint8], height: float, width: float) -> NDArray[Any]:
    """Scale grey values to (32, 32), as Pillow's LANCZOS does but four times as fast.

    ``height`` and ``width`` are the extent of the image in ``grey``, whose last row and column may
    be partly outside it: a JPEG decoded at an eighth of its size can end within a pixel.
    """
    rows, columns = grey.shape
    scaled = _lanczos(rows, height) @ (grey.astype(np.float32) @ _lanczos(columns, width).T)
    small: NDArray[Any] = np.clip(np.rint(scaled), 0, 255)
    return small


@lru_cache(maxsize=256)
def _lanczos(pixels: int, extent: float) -> NDArray[np.float32]:
    """Return weights (32, ``pixels``) that scale ``extent`` pixels down like Pillow's LANCZOS."""
    scale = extent / SIDE
    first = np.arange(pixels)
    centres = (np.arange(SIDE) + 0.5) * scale
    distance = (first + 0.5 - centres[:, None]) / max(scale, 1.0)
    weights = np.where(np.abs(distance) < 3, np.sinc(distance) * np.sinc(distance / 3), 0.0)
    # A last pixel that is partly outside the image counts only with the part inside.
    weights *= np.clip(extent - first, 0, 1)
    scaled: NDArray[np.float32] = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    return scaled
