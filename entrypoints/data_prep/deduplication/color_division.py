"""Divides images by color, where their hashes do not tell them apart.

Recolored vectors and icons on white share a hash, and differ in color. Those of a group are divided
at a value of one extreme of their colors (:class:`ColorBounds`), again and again: images on both
sides of it are alike only if they reach over it. An image above it that does is compared on both
sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.data_prep.deduplication.colors import (
    ColorBounds,
    ColorRanges,
    Signatures,
    are_alike_in,
)
from sm_train.entrypoints.data_prep.deduplication.compared_images import (
    NONE,
    HashDistance,
    Hashes,
    Images,
    Positions,
)

LEAF_ROWS = 128
"""Images that are compared pair by pair; also the largest number of candidates at a time."""

_FIRST_BLOCK, _QUERIES = 16, 512
"""Of a larger group, candidates that are compared first, and queries that are at a time."""

_LARGEST_WORK = 0.85
"""Pairs of both sides, relative to all pairs of a group, with which dividing it saves time."""

_DIVIDED_ROWS = 1024
"""Images of a group from which the value that divides it is chosen."""

_SAMPLE_ROWS = 128
"""Images from which the number of pairs that may be alike is estimated."""


_DIVIDE_COST = 5.0
"""Time to divide a group once, for each image, relative to that to compare a pair of hashes."""


def division_cost(count: float, pairs: float = 0.0) -> float:
    """Return the cost for each of ``count`` images to be compared with the others by color.

    ``pairs`` is the fraction of all pairs that may be alike.
    """
    divisions = max(0.0, log2(count / LEAF_ROWS))
    return _DIVIDE_COST * divisions + (LEAF_ROWS + pairs * count) / 2


def pairs_by_color(signatures: Signatures) -> float:
    """Return the estimated fraction of all pairs that may be alike by their bounds."""
    sample = signatures[:: max(1, len(signatures) // _SAMPLE_ROWS)]
    bounds = ColorBounds.of(sample, ColorRanges.of(sample).contrasts)
    count = len(bounds.reach)
    pairs = bounds.may_be_alike(bounds)
    return float((pairs.sum() - count + 1) / max(1, count * (count - 1)))


@dataclass(frozen=True, eq=False)
class ColoredImages:
    """Images (n,) that are divided: their hashes, and what is known of their colors."""

    hashes: Hashes
    ranges: ColorRanges
    bounds: ColorBounds

    @classmethod
    def of(cls, images: Images) -> ColoredImages:
        ranges = ColorRanges.of(images.signatures)
        bounds = ColorBounds.of(images.signatures, ranges.contrasts)
        return cls(images.hashes, ranges, bounds)


def first_by_color(
    images: Images,
    is_query: NDArray[np.bool_],
    is_candidate: NDArray[np.bool_],
    distance: HashDistance,
) -> Positions:
    """Return for each query (n,) the first earlier candidate that is near; else NONE."""
    colored = ColoredImages.of(images)
    first = np.full(len(images), NONE, np.int32)
    stack = [np.arange(len(images), dtype=np.int32)]
    while stack:
        rows = stack.pop()
        queries, candidates = rows[is_query[rows]], rows[is_candidate[rows]]
        if not len(queries) or not len(candidates) or distance.skips_all(colored.hashes[rows]):
            continue
        sides = _divided(colored.bounds, rows) if len(rows) > LEAF_ROWS else None
        if sides is None:
            _compare(colored, queries, candidates, distance, first)
        else:
            stack.extend(sides)
    return first


def _divided(bounds: ColorBounds, rows: Positions) -> tuple[Positions, Positions] | None:
    """Return the rows on both sides of the best value of an extreme; None if none saves time."""
    sample = bounds.take(rows[:: max(1, len(rows) // _DIVIDED_ROWS)])
    best, chosen = _LARGEST_WORK, None
    for channel, values in enumerate(sample.extremes.T):
        middle = np.partition(values, len(values) // 2)[len(values) // 2]
        # The median may be the largest value, of most images.
        for limit in (middle, middle - 1):
            below, above = (side.mean() for side in _sides(values, sample.reach, limit))
            if below**2 + above**2 < best:
                best, chosen = below**2 + above**2, (channel, limit)
    if chosen is None:
        return None
    is_below, is_above = _sides(bounds.extremes[rows, chosen[0]], bounds.reach[rows], chosen[1])
    if is_below.all() or is_above.all():
        return None
    return rows[is_below], rows[is_above]


def _sides(
    values: NDArray[np.float32], reach: NDArray[np.float32], limit: np.float32
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return whether images are compared below ``limit``, and whether above."""
    is_above = values > limit
    return values - np.where(is_above, reach, 0) <= limit, is_above


def _compare(
    images: ColoredImages,
    queries: Positions,
    candidates: Positions,
    distance: HashDistance,
    first: Positions,
) -> None:
    """Lower ``first`` of the queries by the candidates, both in order.

    A query ends at its first hit, so the first blocks of candidates are small.
    """
    done, size = 0, LEAF_ROWS if len(candidates) <= LEAF_ROWS else _FIRST_BLOCK
    while done < len(candidates):
        block = candidates[done : done + size]
        done, size = done + size, min(2 * size, LEAF_ROWS)
        queries = queries[(queries > block[0]) & (first[queries] > block[0])]
        for begin in range(0, len(queries), _QUERIES):
            wanted = queries[begin : begin + _QUERIES]
            is_pair = distance.is_near(images.hashes[wanted][:, None], images.hashes[block])
            is_pair &= wanted[:, None] > block
            is_pair &= images.bounds.take(wanted).may_be_alike(images.bounds.take(block))
            of, by = np.nonzero(is_pair)
            pairs = wanted[of], block[by]
            alike = are_alike_in(*(images.ranges.take(rows) for rows in pairs))
            # Later hits of a query are larger.
            np.minimum.at(first, pairs[0][alike], pairs[1][alike])
