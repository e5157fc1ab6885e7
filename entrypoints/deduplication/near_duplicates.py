"""Finds images whose perceptual hashes differ in few bits from an earlier one that is kept.

Images are visited in order. One is dropped if its hash differs in at most ``bits`` bits from that
of an image that was kept, and the first such image is named. So whether an image is kept depends on
those before it; yet most of the work is one search that does not (:func:`resolve`):

1. For each hash, find the first earlier hash within ``bits``, whether kept or not.
2. A hash without one is kept. A hash whose first earlier hash is kept by this rule is dropped.
3. The others are near a hash that may be dropped itself, as the frames of a video are. They alone
   are visited in order: halves of the range are compared as a whole (:func:`visit_in_order`).

Memory is proportional to the number of hashes, whatever their distribution. In a dense group only
kept hashes are compared with, and these are far apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sm_train.entrypoints.deduplication.hamming import NONE, Hashes, Positions, Search, is_within

_LEAF_ROWS = 256


@dataclass(frozen=True)
class DistinctHashes:
    """The distinct hashes (m,) of images (n,) in the order of their first images.

    ``firsts`` (m,) is the first image with each hash, ``group`` (n,) the hash of each image.
    """

    in_order: Hashes
    firsts: Positions
    group: Positions

    @classmethod
    def of(cls, hashes: Hashes) -> DistinctHashes:
        """Return the distinct ones of the hashes of images (n,)."""
        distinct, firsts, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        order = np.argsort(firsts)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        return cls(distinct[order], firsts[order], rank[inverse])

    def name_all(self, duplicate_of: Positions) -> Positions:
        """Return the result (n,) of all images from that of the distinct hashes (m,).

        Of images with equal hashes, the first decides for all: it is kept, or all are dropped for
        the same reason.
        """
        is_kept = duplicate_of == NONE
        named = self.firsts.copy()
        named[~is_kept] = self.firsts[duplicate_of[~is_kept]]
        result = named[self.group]
        result[self.firsts[is_kept]] = NONE
        return result


def near_duplicates(hashes: Hashes, bits: int) -> Positions:
    """Return for each hash (n,) the kept one that it duplicates; NONE if it is kept itself."""
    if not len(hashes):
        return np.zeros(0, np.int64)
    distinct = DistinctHashes.of(hashes)
    every = np.ones(len(distinct.in_order), np.bool_)
    earlier = Search(distinct.in_order, every, every, bits).first_earlier()
    return distinct.name_all(resolve(distinct.in_order, earlier, bits))


def resolve(hashes: Hashes, earlier: Positions, bits: int) -> Positions:
    """Return :func:`near_duplicates` of distinct hashes (n,) in order.

    ``earlier`` (n,) is the first earlier hash within ``bits`` of each, or NONE.
    """
    is_root = earlier == NONE
    has_earlier = np.flatnonzero(~is_root)
    result = np.full(len(hashes), NONE)
    by_root = has_earlier[is_root[earlier[has_earlier]]]
    result[by_root] = earlier[by_root]
    open_rows = has_earlier[~is_root[earlier[has_earlier]]]
    if not len(open_rows):
        return result
    is_open = np.zeros(len(hashes), np.bool_)
    is_open[open_rows] = True
    of_root = Search(hashes, is_open, is_root, bits).first_earlier()[open_rows]
    result[open_rows] = of_root
    unrooted = open_rows[of_root == NONE]
    duplicate_of = visit_in_order(hashes[unrooted], bits)
    is_kept = duplicate_of == NONE
    result[unrooted[~is_kept]] = unrooted[duplicate_of[~is_kept]]
    # The others may be near one that was just kept and that is before the root.
    rooted = open_rows[of_root != NONE]
    rows = np.sort(np.concatenate([rooted, unrooted[is_kept]]))
    is_query = result[rows] != NONE
    found = Search(hashes[rows], is_query, ~is_query, bits).first_earlier()
    has_found = found != NONE
    queries = rows[has_found]
    result[queries] = np.minimum(result[queries], rows[found[has_found]])
    return result


def visit_in_order(hashes: Hashes, bits: int) -> Positions:
    """Return :func:`near_duplicates` of distinct hashes (n,), whatever their distribution.

    The first half is decided first. What is near a hash kept in it is dropped as a whole; the rest
    of the second half depends on no hash of the first.
    """
    if len(hashes) <= _LEAF_ROWS:
        return _visit_one_by_one(hashes, bits)
    middle = len(hashes) // 2
    result = np.full(len(hashes), NONE)
    result[:middle] = visit_in_order(hashes[:middle], bits)
    kept = np.flatnonzero(result[:middle] == NONE)
    rows = np.concatenate([kept, np.arange(middle, len(hashes))])
    is_query = rows >= middle
    found = Search(hashes[rows], is_query, ~is_query, bits).first_earlier()[len(kept) :]
    has_found = found != NONE
    result[middle:][has_found] = kept[found[has_found]]
    rest = middle + np.flatnonzero(~has_found)
    inner = visit_in_order(hashes[rest], bits)
    is_dropped = inner != NONE
    result[rest[is_dropped]] = rest[inner[is_dropped]]
    return result


def _visit_one_by_one(hashes: Hashes, bits: int) -> Positions:
    near = is_within(hashes[:, None], hashes[None, :], bits)
    result = np.full(len(hashes), NONE)
    for row in np.flatnonzero(near.sum(axis=1) > 1).tolist():
        if result[row] == NONE:
            later = result[row + 1 :]
            later[near[row, row + 1 :] & (later == NONE)] = row
    return result
