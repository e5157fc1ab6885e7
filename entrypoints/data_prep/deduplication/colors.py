"""Confirms in color that images with near perceptual hashes look alike.

The hash sees 32 × 32 gray values: images that differ in color, or in what is on a plain background,
may have equal hashes. A signature holds the mean colors of 4 × 4 parts of the image. Two are alike
if the colors of each lie between those of neighboring parts of the other, but for a small part of
the contrast: cropped by a few percent, an image has other means along its edges, and none beyond
those of their neighbors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

PARTS = 4
SIGNATURE_BYTES = 3 * PARTS**2

Signatures = NDArray[np.uint8]
"""Signatures of images, uint8 (num_images, 48)."""

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

_PAIRS = 2**12
"""Pairs that are compared at a time."""

_ROUNDING = 0.01
"""Levels by which a bound may be off in single precision."""


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
    """Return whether the images of each pair look alike, bool (num_pairs,)."""
    parts = [
        are_alike_in(ColorRanges.of(left[rows]), ColorRanges.of(right[rows]))
        for first in range(0, len(left), _PAIRS)
        for rows in [slice(first, first + _PAIRS)]
    ]
    return np.concatenate([np.zeros(0, np.bool_), *parts])


@dataclass(frozen=True, eq=False)
class ColorRanges:
    """Signatures (n, 48), the ranges of each part's neighbors, and contrasts (n,)."""

    values: NDArray[np.int16]
    low: NDArray[np.int16]
    high: NDArray[np.int16]
    contrasts: NDArray[np.float32]

    @classmethod
    def of(cls, signatures: Signatures) -> ColorRanges:
        grid = signatures.reshape(-1, PARTS, PARTS, 3)
        low, high = _of_neighbors(np.minimum, grid), _of_neighbors(np.maximum, grid)
        contrasts = _contrast(signatures.reshape(-1, PARTS**2, 3).astype(np.float32))
        return cls(signatures.astype(np.int16), low, high, contrasts)

    def take(self, rows: Any) -> ColorRanges:
        """Return the ranges of the images in ``rows``."""
        return ColorRanges(self.values[rows], self.low[rows], self.high[rows], self.contrasts[rows])


def are_alike_in(left: ColorRanges, right: ColorRanges) -> NDArray[np.bool_]:
    """Return :func:`are_alike` of pairs (num_pairs,) from their ranges."""
    excess = np.maximum(_excess(left, right), _excess(right, left))
    alike: NDArray[np.bool_] = excess <= _most_excess(left.contrasts, right.contrasts)
    return alike


def _most_excess(left: NDArray[np.float32], right: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the largest excess of images with these contrasts that are alike."""
    noise = _LEAST_CONTRAST * SIGNATURE_BYTES**0.5
    most: NDArray[np.float32] = _MOST_EXCESS * (left + right + noise) / 2
    return most


def _contrast(means: NDArray[Any]) -> NDArray[Any]:
    """Return the norm of each image's (n, 16, 3) differences from its mean color."""
    difference = means - means.mean(axis=1, keepdims=True)
    contrast: NDArray[Any] = np.sqrt((difference**2).sum(axis=(1, 2)))
    return contrast


def _excess(images: ColorRanges, others: ColorRanges) -> NDArray[np.float32]:
    """Return by how much the colors of ``others`` lie beyond the neighbors of their parts."""
    beyond = np.maximum(others.values - images.high, images.low - others.values)
    np.maximum(beyond, 0, out=beyond)
    squares = np.einsum("pv,pv->p", beyond, beyond, dtype=np.float32)
    excess: NDArray[np.float32] = np.sqrt(squares)
    return excess


def _of_neighbors(choose: np.ufunc, grid: Signatures) -> NDArray[np.int16]:
    """Return the least or largest value (n, 48) of each part and those around it."""
    across = grid.copy()
    choose(across[:, :, 1:], grid[:, :, :-1], out=across[:, :, 1:])
    choose(across[:, :, :-1], grid[:, :, 1:], out=across[:, :, :-1])
    along = across.copy()
    choose(along[:, 1:], across[:, :-1], out=along[:, 1:])
    choose(along[:, :-1], across[:, 1:], out=along[:, :-1])
    return along.reshape(len(grid), -1).astype(np.int16)


@dataclass(frozen=True, eq=False)
class ColorBounds:
    """What can be said of images (n,) before they are compared part by part.

    ``extremes`` (n, 6) are the least and the largest value of each channel. Those of two images
    that are alike differ by at most the ``reach`` (n,) of either: the value of a part lies within
    those of its neighbors, but for the excess, and the contrast of one image bounds that of the
    other.
    """

    extremes: NDArray[np.float32]
    contrasts: NDArray[np.float32]
    reach: NDArray[np.float32]

    @classmethod
    def of(cls, signatures: Signatures, contrasts: NDArray[np.float32]) -> ColorBounds:
        channels = signatures.reshape(-1, PARTS**2, 3)
        low, high = channels.min(axis=1), channels.max(axis=1)
        extremes = np.concatenate([low, high], axis=1).astype(np.float32)
        # A part of an image that is alike lies within [low, high], but for the excess E. So its
        # contrast is at most that of values which all lie at the ends, and E. As E is at most
        # e(own, other), linear in both, this bounds the other contrast by the own one.
        spread = (high - low).astype(np.float32)
        ends = PARTS / 2 * np.sqrt((spread**2).sum(axis=1))
        other = (ends + _most_excess(contrasts, np.zeros(1, np.float32))) / (1 - _MOST_EXCESS / 2)
        return cls(extremes, contrasts, _most_excess(contrasts, other) + _ROUNDING)

    def take(self, rows: Any) -> ColorBounds:
        """Return the bounds of the images in ``rows``."""
        return ColorBounds(self.extremes[rows], self.contrasts[rows], self.reach[rows])

    def may_be_alike(self, others: ColorBounds) -> NDArray[np.bool_]:
        """Return whether each image (n,) may be alike to each other one (m,), bool (n, m).

        An extreme that one image lacks is an excess of its own part, in one of two directions.
        """
        left, right = self.extremes, others.extremes
        squares = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1) - 2 * left @ right.T
        most = _most_excess(self.contrasts[:, None], others.contrasts) + _ROUNDING
        may_be: NDArray[np.bool_] = squares <= 2 * most**2
        return may_be
