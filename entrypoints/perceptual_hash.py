"""A 64-bit hash that survives scaling and compression: near-duplicates differ in few bits.

The DCT hash of Zauner, "Implementation and Benchmarking of Perceptual Image Hash Functions"
(2010), in the form of the Python package imagehash: grey values of 32 × 32, the 8 × 8 lowest
frequencies of their discrete cosine transform, and for each whether it is above their median.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE, LOWEST = 32, 8

BITS = LOWEST * LOWEST

_ANGLES = np.pi / (2 * SIDE) * np.outer(np.arange(LOWEST), 2 * np.arange(SIDE) + 1)
_COSINES = 2 * np.cos(_ANGLES)  # the type-II transform, of the lowest frequencies alone


def perceptual_hash(grey: NDArray[np.uint8]) -> int:
    """The hash of an image's grey values (H, W), the highest bit for the lowest frequency."""
    small = Image.fromarray(grey).resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    frequencies = _COSINES @ np.asarray(small, np.float64) @ _COSINES.T
    above = frequencies > np.median(frequencies)
    return int.from_bytes(np.packbits(above).tobytes(), "big")


def near_duplicates(hashes: Sequence[int | None], bits: int) -> dict[int, int]:
    """Which images are too like an earlier one that is kept: number → that one's number.

    Two are alike if at most ``bits`` of their hashes differ. In order, the first of its like is
    kept. Cut into ``bits`` + 1 bands, hashes so near agree in one band at least (the pigeonhole
    principle), so only those are compared. None is like nothing.
    """
    bands = bits + 1
    edges = [BITS * band // bands for band in range(bands + 1)]
    kept: list[defaultdict[int, list[int]]] = [defaultdict(list) for _ in range(bands)]
    like: dict[int, int] = {}
    for number, one in enumerate(hashes):
        if one is None:
            continue
        keys = [(one >> low) & ((1 << (high - low)) - 1) for low, high in pairwise(edges)]
        candidates = (
            other for table, key in zip(kept, keys, strict=True) for other in table.get(key, ())
        )
        nearest = min(
            (other for other in candidates if (one ^ (hashes[other] or 0)).bit_count() <= bits),
            default=None,
        )
        if nearest is not None:
            like[number] = nearest
            continue
        for table, key in zip(kept, keys, strict=True):
            table[key].append(number)
    return like
