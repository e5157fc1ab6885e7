"""Confirms in color that images with near perceptual hashes look alike.

The hash sees 32 × 32 gray values: images that differ in color, or in what is on a plain background,
may have equal hashes. A signature holds the mean colors of 4 × 4 parts of the image. Two are alike
if the colors of each lie between those of neighboring parts of the other, but for a small part of
the contrast: cropped by a few percent, an image has other means along its edges, and none beyond
those of their neighbors.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

PARTS = 4
SIGNATURE_BYTES = 3 * PARTS**2

Signatures = NDArray[np.uint8]
"""Signatures of images, uint8 (num_images, 48); zeros stand for an unknown one."""

_MOST_EXCESS = 0.14
"""Largest distance of colors beyond their neighbors, relative to the contrast of both images.

It is at most 0.121 for copies at half the size, with JPEG quality 40, or cropped by up to 3 % (330
photographs and logos whose hashes differ in at most 3 bits), and 0.159 or more for all but one of
118 pairs of 120 logos with such hashes.
"""

_LEAST_CONTRAST = 2.0
"""Levels of noise, which count as contrast: a plain image has none."""

_PLAIN, _PLAIN_LEVELS = 2.0, 16
"""Contrast below which an image is plain, and the levels to which its color is then rounded: images
of one color have equal hashes, and would otherwise be compared with each other."""

_PAIRS = 2**14
"""Pairs that are compared at a time."""


def signature(rgb: NDArray[np.uint8], height: float, width: float) -> bytes:
    """Return the signature of pixels (h, w, 3).

    ``height`` and ``width`` are the extent of the image in ``rgb``, whose last row and column may
    be partly outside it.
    """
    rows, columns = _means(rgb.shape[0], height), _means(rgb.shape[1], width)
    means = np.einsum("ph,hwc,qw->pqc", rows, rgb.astype(np.float32), columns, optimize=True)
    if _contrast(means.reshape(1, -1, 3))[0] < _PLAIN * SIGNATURE_BYTES**0.5:
        color = means.mean(axis=(0, 1)) // _PLAIN_LEVELS * _PLAIN_LEVELS + _PLAIN_LEVELS / 2
        means = np.broadcast_to(color, means.shape)
    found: bytes = np.clip(np.rint(means), 0, 255).astype(np.uint8).tobytes()
    return found


@lru_cache(maxsize=256)
def _means(pixels: int, extent: float) -> NDArray[np.float32]:
    """Return weights (4, ``pixels``) of the mean of each quarter of ``extent`` pixels."""
    edges = np.linspace(0, extent, PARTS + 1)
    first = np.arange(pixels)
    low, high = edges[:-1, None], edges[1:, None]
    overlap = np.clip(np.minimum(first + 1, high) - np.maximum(first, low), 0, None)
    weights: NDArray[np.float32] = (overlap / overlap.sum(axis=1, keepdims=True)).astype(np.float32)
    return weights


def are_alike(left: Signatures, right: Signatures) -> NDArray[np.bool_]:
    """Return whether the images of each pair look alike, bool (num_pairs,).

    An unknown signature is alike to all.
    """
    parts = [
        _are_alike(left[first : first + _PAIRS], right[first : first + _PAIRS])
        for first in range(0, len(left), _PAIRS)
    ]
    return np.concatenate([np.zeros(0, np.bool_), *parts])


def _are_alike(left: Signatures, right: Signatures) -> NDArray[np.bool_]:
    first, second = (part.reshape(-1, PARTS**2, 3).astype(np.float32) for part in (left, right))
    excess = np.maximum(_excess(first, second), _excess(second, first))
    noise = _LEAST_CONTRAST * SIGNATURE_BYTES**0.5
    contrast = (_contrast(first) + _contrast(second) + noise) / 2
    is_unknown = ~left.any(axis=1) | ~right.any(axis=1)
    alike: NDArray[np.bool_] = is_unknown | (excess <= _MOST_EXCESS * contrast)
    return alike


def _contrast(means: NDArray[Any]) -> NDArray[Any]:
    """Return the norm of each image's (n, 16, 3) differences from its mean color."""
    difference = means - means.mean(axis=1, keepdims=True)
    contrast: NDArray[Any] = np.sqrt((difference**2).sum(axis=(1, 2)))
    return contrast


def _excess(means: NDArray[Any], others: NDArray[Any]) -> NDArray[Any]:
    """Return by how much ``others`` (n, 16, 3) lie beyond the neighbors of their parts."""
    grid = means.reshape(-1, PARTS, PARTS, 3)
    padded = np.pad(grid, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    low, high = grid, grid
    for row in range(3):
        for column in range(3):
            shifted = padded[:, row : row + PARTS, column : column + PARTS]
            low, high = np.minimum(low, shifted), np.maximum(high, shifted)
    values = others.reshape(grid.shape)
    beyond = np.maximum(0, np.maximum(values - high, low - values))
    excess: NDArray[Any] = np.sqrt((beyond**2).sum(axis=(1, 2, 3)))
    return excess
