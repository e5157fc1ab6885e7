"""Finds rows that equal an earlier one: a sort of digests, which can be split into parts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.data_prep.deduplication.compared_images import Positions

Words = NDArray[np.uint64]


def part_of(words: Words, parts: int) -> NDArray[np.uint64]:
    """Return the part (n,) that each value (n,) belongs to; equal values are in the same part.

    The values are multiplied by 2^64 / φ first (Knuth, TAOCP 6.4), so values with skewed bits are
    spread over the parts as well.
    """
    spread: Words = words * np.uint64(0x9E3779B97F4A7C15)
    return (spread >> np.uint64(32)) % np.uint64(parts)


def equal_rows(words: Words) -> tuple[Positions, Positions]:
    """Return the rows of ``words`` (n, w) that equal an earlier one, and the first such row."""
    if not len(words):
        return np.zeros(0, np.int32), np.zeros(0, np.int32)
    # lexsort is stable, so equal rows stay in order.
    order = np.lexsort(words.T).astype(np.int32)
    ordered = words[order]
    is_first = np.concatenate([[True], (ordered[1:] != ordered[:-1]).any(axis=1)])
    firsts = order[is_first][np.cumsum(is_first) - 1]
    return order[~is_first], firsts[~is_first]
