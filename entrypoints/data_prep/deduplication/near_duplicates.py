"""Finds images that are near an earlier one that is kept, by perceptual hash and color.

Images are visited in order. One is dropped if it is near an image that was kept: their hashes
differ in at most ``bits`` bits, and their colors are alike. The first such image is named. So
whether an image is kept depends on those before it; yet most of the work is one search that does
not (:func:`resolve`):

1. For each image, find the first earlier near one, whether kept or not.
2. An image without one is kept. An image whose first earlier one is kept by this rule is dropped.
3. The others are near an image that may be dropped itself, as the frames of a video are. They alone
   are visited in order: halves of the range are compared as a whole (:func:`visit_in_order`).

In a dense group only kept images are compared with, and these are far apart. Memory holds the hash
of each image and some positions; colors are read where they are compared.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.data_prep.deduplication.compared_images import (
    NONE,
    HashDistance,
    Images,
    Positions,
)
from sm_train.entrypoints.data_prep.deduplication.equal_rows import equal_rows
from sm_train.entrypoints.data_prep.deduplication.near_search import PART_ROWS, Search, all_near

_LEAF_ROWS = 256


def equal_images(images: Images) -> tuple[Positions, Positions]:
    """Return the images that equal an earlier one in hash and color, and the first such one."""
    ordered = np.sort(images.hashes)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    rows = np.flatnonzero(np.isin(images.hashes, repeated)).astype(np.int32)
    colors = np.ascontiguousarray(images.signatures[rows]).view(np.uint64)
    equal, firsts = equal_rows(np.column_stack([images.hashes[rows], colors]))
    return rows[equal], rows[firsts]


def distinct_rows(count: int, equal: Positions) -> NDArray[np.bool_]:
    """Return whether each of ``count`` images is none of the ``equal`` ones."""
    is_distinct = np.ones(count, np.bool_)
    is_distinct[equal] = False
    return is_distinct


def near_duplicates(images: Images, bits: int) -> Positions:
    """Return for each image (n,) the kept one that it duplicates; NONE if it is kept itself."""
    equal, firsts = equal_images(images)
    is_distinct = distinct_rows(len(images), equal)
    earlier = Search(images, is_distinct, is_distinct, HashDistance(bits)).first_earlier()
    return resolve(images, earlier, is_distinct, bits, equal=(equal, firsts))


def resolve(
    images: Images,
    earlier: Positions,
    is_distinct: NDArray[np.bool_],
    bits: int,
    *,
    equal: tuple[Positions, Positions],
) -> Positions:
    """Return :func:`near_duplicates`; this changes ``earlier``.

    ``earlier`` (n,) is the first earlier near image of each distinct image, or NONE. The others are
    ``equal`` to one: of equal images, the first decides for all. It is kept, or all are dropped for
    the same reason.
    """
    is_root = is_distinct & (earlier == NONE)
    has_earlier = np.flatnonzero(earlier != NONE).astype(np.int32)
    open_rows = has_earlier[~is_root[earlier[has_earlier]]]
    del has_earlier
    result = earlier
    result[open_rows] = NONE
    if len(open_rows):
        _resolve_open(images, open_rows, is_root, bits, result)
    rows, firsts = equal
    named = result[firsts]
    result[rows] = np.where(named == NONE, firsts, named)
    return result


def _resolve_open(
    images: Images, open_rows: Positions, is_root: NDArray[np.bool_], bits: int, result: Positions
) -> None:
    """Decide the images whose first earlier near one may be dropped itself."""
    is_open = np.zeros(len(images), np.bool_)
    is_open[open_rows] = True
    of_root = Search(images, is_open, is_root, HashDistance(bits)).first_earlier()[open_rows]
    result[open_rows] = of_root
    unrooted = open_rows[of_root == NONE]
    duplicate_of = visit_in_order(images.take(unrooted), bits)
    is_kept = duplicate_of == NONE
    result[unrooted[~is_kept]] = unrooted[duplicate_of[~is_kept]]
    # The others may be near one that was just kept and that is before the root.
    rooted = open_rows[of_root != NONE]
    rows = np.sort(np.concatenate([rooted, unrooted[is_kept]]))
    is_query = result[rows] != NONE
    found = Search(images.take(rows), is_query, ~is_query, HashDistance(bits)).first_earlier()
    has_found = found != NONE
    queries = rows[has_found]
    result[queries] = np.minimum(result[queries], rows[found[has_found]])


def visit_in_order(images: Images, bits: int) -> Positions:
    """Return :func:`near_duplicates` of distinct images (n,), whatever their distribution.

    The first half is decided first. What is near an image kept in it is dropped as a whole; the
    rest of the second half depends on no image of the first.
    """
    if len(images) <= PART_ROWS:
        images = images.loaded()
    if len(images) <= _LEAF_ROWS:
        return _visit_one_by_one(images, bits)
    middle = len(images) // 2
    result = np.full(len(images), NONE, np.int32)
    result[:middle] = visit_in_order(images.take(slice(middle)), bits)
    kept = np.flatnonzero(result[:middle] == NONE).astype(np.int32)
    rows = np.concatenate([kept, np.arange(middle, len(images), dtype=np.int32)])
    is_query = rows >= middle
    found = Search(images.take(rows), is_query, ~is_query, HashDistance(bits)).first_earlier()[
        len(kept) :
    ]
    has_found = found != NONE
    result[middle:][has_found] = kept[found[has_found]]
    rest = middle + np.flatnonzero(~has_found).astype(np.int32)
    inner = visit_in_order(images.take(rest), bits)
    is_dropped = inner != NONE
    result[rest[is_dropped]] = rest[inner[is_dropped]]
    return result


def _visit_one_by_one(images: Images, bits: int) -> Positions:
    near = all_near(images, bits)
    result = np.full(len(images), NONE, np.int32)
    for row in np.flatnonzero(near.sum(axis=1) > 1).tolist():
        if result[row] == NONE:
            later = result[row + 1 :]
            later[near[row, row + 1 :] & (later == NONE)] = row
    return result
