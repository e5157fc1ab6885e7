"""Searches for each of many images the first earlier one that is near.

A pair is near if its hashes differ in few bits and it is alike in color (``colors.py``). Tables of
hashes (``hamming.py``) divide the images. A group that they do not divide is divided by color
(``color_division.py``). A search of more images than memory should hold runs in parts: images with
equal keys of a table are in the same part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.data_prep.deduplication.color_division import (
    division_cost,
    first_by_color,
    pairs_by_color,
)
from sm_train.entrypoints.data_prep.deduplication.colors import are_alike
from sm_train.entrypoints.data_prep.deduplication.compared_images import (
    NONE,
    HashDistance,
    Images,
    Positions,
)
from sm_train.entrypoints.data_prep.deduplication.equal_rows import part_of
from sm_train.entrypoints.data_prep.deduplication.hamming import (
    KEY_BITS,
    KeyTable,
    choose_tables,
    table_costs,
)

PART_ROWS = 2**21
"""Images of a part of a search: a process needs some hundred megabytes for it."""

_KEY_ROWS = 2**20
"""Hashes whose keys are computed at a time."""

_BRUTE_FORCE_ROWS = 256
"""Up to this number, images are compared with each other without tables."""

_MAX_BUCKET_ROWS = 256
"""Larger groups with one key are searched with tables of their own."""


def rows_of_part(images: Images, table: KeyTable, part: int, parts: int) -> Positions:
    """Return the rows of the images whose key in ``table`` belongs to ``part`` of ``parts``."""
    found = []
    for first in range(0, len(images), _KEY_ROWS):
        keys = table.keys(images.hashes[first : first + _KEY_ROWS])
        found.append(first + np.flatnonzero(part_of(keys, parts) == part).astype(np.int32))
    return np.concatenate([np.zeros(0, np.int32), *found])


def all_near(images: Images, bits: int) -> NDArray[np.bool_]:
    """Return whether each pair of images is near, bool (n, n)."""
    near = HashDistance(bits).is_near(images.hashes[:, None], images.hashes[None, :])
    left, right = np.nonzero(np.triu(near, 1))
    alike = are_alike(images.signatures[left], images.signatures[right])
    near[left, right] = near[right, left] = alike
    return near


@dataclass(frozen=True, eq=False)
class Search:
    """Which images are looked for among which, all in order.

    ``is_query`` and ``is_candidate`` have the shape (n,) of ``images``; an image may be both.
    """

    images: Images
    is_query: NDArray[np.bool_]
    is_candidate: NDArray[np.bool_]
    distance: HashDistance

    def subset(self, rows: Positions) -> Search:
        """Return the search in the images of ``rows``, which ascend; their colors are loaded."""
        images = self.images.take(rows).loaded()
        return Search(images, self.is_query[rows], self.is_candidate[rows], self.distance)

    def first_earlier(self) -> Positions:
        """Return for each query the first earlier candidate that is near; shape (n,).

        It is NONE for queries without one, and for all other images.
        """
        first = np.full(len(self.images), NONE, np.int32)
        if not self.is_query.any() or not self.is_candidate.any():
            return first
        if self.distance.skips_all(self.images.hashes):
            return first
        is_used = self.is_query | self.is_candidate
        used = int(is_used.sum())
        if used > PART_ROWS:
            self._search_parts(is_used, -(-used // PART_ROWS), first)
        elif used < len(is_used):
            rows = np.flatnonzero(is_used).astype(np.int32)
            _lower(first, rows, self.subset(rows).first_earlier())
        elif used <= _BRUTE_FORCE_ROWS:
            return self._compare_all()
        else:
            return self._search_memory()
        return first

    def _search_parts(self, is_used: NDArray[np.bool_], parts: int, first: Positions) -> None:
        for number, table in enumerate(choose_tables(self.images.hashes, self.distance.bits)):
            for part in range(parts):
                rows = rows_of_part(self.images, table, part, parts)
                rows = rows[is_used[rows]]
                found = np.full(len(rows), NONE, np.int32)
                self.subset(rows).search_table(table, found, number)
                _lower(first, rows, found)

    def _search_memory(self) -> Positions:
        search = replace(self, images=self.images.loaded())
        tables, cost = table_costs(search.images.hashes, self.distance.bits)
        count = len(self.images)
        if division_cost(count, pairs_by_color(search.images.signatures)) < cost:
            return first_by_color(search.images, self.is_query, self.is_candidate, self.distance)
        first = np.full(count, NONE, np.int32)
        for number, table in enumerate(tables):
            search.search_table(table, first, number)
        return first

    def search_table(self, table: KeyTable, first: Positions, number: int) -> None:
        """Lower ``first`` (n,) to the first candidate with the same key in ``table``.

        ``number`` is that of the table. Only the first one compares equal hashes.
        """
        if number and not self.distance.skips_equal:
            search = replace(self, distance=replace(self.distance, skips_equal=True))
            search.search_table(table, first, number)
            return
        hashes = self.images.hashes
        n = len(hashes)
        # Sorting the key and the position as one number is twice as fast as argsort, and stable.
        packed = (table.keys(hashes) << np.uint64(KEY_BITS)) | np.arange(n, dtype=np.uint64)
        packed.sort()
        keys = packed >> np.uint64(KEY_BITS)
        rows = (packed & np.uint64(2**KEY_BITS - 1)).astype(np.int32)
        del packed
        starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])).astype(np.int32)
        lengths = np.diff(starts, append=n)
        # One bucket with all images is compared here: its tables would be the same.
        is_large = lengths > _MAX_BUCKET_ROWS if len(starts) > 1 else np.zeros(1, np.bool_)
        for bucket in np.flatnonzero(is_large).tolist():
            members = rows[starts[bucket] : starts[bucket] + lengths[bucket]]
            _lower(first, members, self.subset(members).first_earlier())
        self._search_buckets(rows, np.repeat(starts, lengths), np.repeat(~is_large, lengths), first)

    def _search_buckets(
        self,
        rows: Positions,
        starts: Positions,
        is_small: NDArray[np.bool_],
        first: Positions,
    ) -> None:
        """Lower ``first`` of the queries in small buckets.

        ``rows`` (n,) are sorted by key and position, ``starts`` (n,) is where each one's bucket
        starts, ``is_small`` (n,) whether it is small.
        """
        is_candidate = self.is_candidate[rows]
        # Number of candidates before each row: those of its bucket are a range of all candidates.
        before: Positions = np.cumsum(is_candidate, dtype=np.int32) - is_candidate
        candidates = rows[is_candidate]
        hashes, colors = self.images.hashes, self.images.signatures
        candidate_hashes = hashes[candidates]
        at = np.flatnonzero(is_small & self.is_query[rows] & (before > before[starts]))
        cursor: Positions = before[starts[at]]
        stop, queries = before[at], rows[at]
        wanted = hashes[queries]
        best = first[queries]
        while len(queries):
            candidate = candidates[cursor]
            is_near = self.distance.is_near(candidate_hashes[cursor], wanted)
            is_near &= candidate < best
            pairs = np.flatnonzero(is_near)
            is_near[pairs] = are_alike(colors[candidate[pairs]], colors[queries[pairs]])
            first[queries[is_near]] = candidate[is_near]
            cursor += 1
            # A query ends at its first hit, and at the one that another table has found.
            rest = np.flatnonzero(~is_near & (cursor < stop) & (candidate < best))
            queries, wanted, best = queries[rest], wanted[rest], best[rest]
            cursor, stop = cursor[rest], stop[rest]

    def _compare_all(self) -> Positions:
        is_pair = all_near(self.images.loaded(), self.distance.bits)
        is_pair &= self.is_query[:, None] & self.is_candidate[None, :]
        is_pair &= np.tri(len(self.images), k=-1, dtype=np.bool_)
        return np.where(is_pair.any(axis=1), is_pair.argmax(axis=1), NONE).astype(np.int32)


def _lower(first: Positions, rows: Positions, found: Positions) -> None:
    """Lower ``first`` of ``rows`` (m,) to what was ``found`` for each of them among ``rows``."""
    has_found = found != NONE
    queries = rows[has_found]
    first[queries] = np.minimum(first[queries], rows[found[has_found]])
