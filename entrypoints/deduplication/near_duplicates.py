"""Finds images that are near an earlier one that is kept, by perceptual hash and color.

Images are visited in order. One is dropped if it is near an image that was kept: their hashes
differ in at most ``bits`` bits, and their colors are alike. The first such image is named. So
whether an image is kept depends on those before it; yet most of the work is one search that does
not (:func:`resolve`):

1. For each image, find the first earlier near one, whether kept or not.
2. An image without one is kept. An image whose first earlier one is kept by this rule is dropped.
3. The others are near an image that may be dropped itself, as the frames of a video are. They alone
   are visited in order: halves of the range are compared as a whole (:func:`visit_in_order`).

Memory is proportional to the number of images, whatever their distribution. In a dense group only
kept images are compared with, and these are far apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sm_train.entrypoints.deduplication.equal_rows import equal_rows
from sm_train.entrypoints.deduplication.hamming import NONE, Images, Positions, Search

_LEAF_ROWS = 256


@dataclass(frozen=True, eq=False)
class DistinctImages:
    """The images (m,) that differ in hash or color from all earlier ones of images (n,), in order.

    ``firsts`` (m,) are their rows, ``group`` (n,) is the distinct one that each image equals.
    """

    in_order: Images
    firsts: Positions
    group: Positions

    @classmethod
    def of(cls, images: Images) -> DistinctImages:
        """Return the distinct ones of images (n,)."""
        colors = np.ascontiguousarray(images.colors).view(np.uint64)
        equal, first = equal_rows(np.column_stack([images.hashes, colors]))
        first_row = np.arange(len(images))
        first_row[equal] = first
        firsts = np.flatnonzero(first_row == np.arange(len(images)))
        rank = np.zeros(len(images), np.int64)
        rank[firsts] = np.arange(len(firsts))
        return cls(images.take(firsts), firsts, rank[first_row])

    def name_all(self, duplicate_of: Positions) -> Positions:
        """Return the result (n,) of all images from that of the distinct ones (m,).

        Of equal images, the first decides for all: it is kept, or all are dropped for
        the same reason.
        """
        is_kept = duplicate_of == NONE
        named = self.firsts.copy()
        named[~is_kept] = self.firsts[duplicate_of[~is_kept]]
        result = named[self.group]
        result[self.firsts[is_kept]] = NONE
        return result


def near_duplicates(images: Images, bits: int) -> Positions:
    """Return for each image (n,) the kept one that it duplicates; NONE if it is kept itself."""
    if not len(images):
        return np.zeros(0, np.int64)
    distinct = DistinctImages.of(images)
    every = np.ones(len(distinct.in_order), np.bool_)
    earlier = Search(distinct.in_order, every, every, bits).first_earlier()
    return distinct.name_all(resolve(distinct.in_order, earlier, bits))


def resolve(images: Images, earlier: Positions, bits: int) -> Positions:
    """Return :func:`near_duplicates` of distinct images (n,) in order.

    ``earlier`` (n,) is the first earlier near image of each, or NONE.
    """
    is_root = earlier == NONE
    has_earlier = np.flatnonzero(~is_root)
    result = np.full(len(images), NONE)
    by_root = has_earlier[is_root[earlier[has_earlier]]]
    result[by_root] = earlier[by_root]
    open_rows = has_earlier[~is_root[earlier[has_earlier]]]
    if not len(open_rows):
        return result
    is_open = np.zeros(len(images), np.bool_)
    is_open[open_rows] = True
    of_root = Search(images, is_open, is_root, bits).first_earlier()[open_rows]
    result[open_rows] = of_root
    unrooted = open_rows[of_root == NONE]
    duplicate_of = visit_in_order(images.take(unrooted), bits)
    is_kept = duplicate_of == NONE
    result[unrooted[~is_kept]] = unrooted[duplicate_of[~is_kept]]
    # The others may be near one that was just kept and that is before the root.
    rooted = open_rows[of_root != NONE]
    rows = np.sort(np.concatenate([rooted, unrooted[is_kept]]))
    is_query = result[rows] != NONE
    found = Search(images.take(rows), is_query, ~is_query, bits).first_earlier()
    has_found = found != NONE
    queries = rows[has_found]
    result[queries] = np.minimum(result[queries], rows[found[has_found]])
    return result


def visit_in_order(images: Images, bits: int) -> Positions:
    """Return :func:`near_duplicates` of distinct images (n,), whatever their distribution.

    The first half is decided first. What is near an image kept in it is dropped as a whole; the
    rest of the second half depends on no image of the first.
    """
    if len(images) <= _LEAF_ROWS:
        return _visit_one_by_one(images, bits)
    middle = len(images) // 2
    result = np.full(len(images), NONE)
    result[:middle] = visit_in_order(images.take(slice(middle)), bits)
    kept = np.flatnonzero(result[:middle] == NONE)
    rows = np.concatenate([kept, np.arange(middle, len(images))])
    is_query = rows >= middle
    found = Search(images.take(rows), is_query, ~is_query, bits).first_earlier()[len(kept) :]
    has_found = found != NONE
    result[middle:][has_found] = kept[found[has_found]]
    rest = middle + np.flatnonzero(~has_found)
    inner = visit_in_order(images.take(rest), bits)
    is_dropped = inner != NONE
    result[rest[is_dropped]] = rest[inner[is_dropped]]
    return result


def _visit_one_by_one(images: Images, bits: int) -> Positions:
    near = images.all_near(bits)
    result = np.full(len(images), NONE)
    for row in np.flatnonzero(near.sum(axis=1) > 1).tolist():
        if result[row] == NONE:
            later = result[row + 1 :]
            later[near[row, row + 1 :] & (later == NONE)] = row
    return result
