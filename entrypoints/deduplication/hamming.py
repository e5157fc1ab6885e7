"""Finds, for each of many images, the first earlier one whose 64-bit hash differs in few bits.

A pair with such hashes is near if it is also alike in color (``colors.py``).

Multi-index hashing (Manku, Jain, Das Sarma, "Detecting Near-Duplicates for Web Crawling", WWW 2007)
on whole arrays. The bits are split into blocks. Two hashes that differ in at most ``bits`` bits
differ in at most as many blocks, so they agree in all others: for each choice of blocks to leave
out there is a table, whose key is the bits of the other blocks. Each table is an array that is
sorted by key, and hashes are only compared if they have the same key.

The number of blocks depends on the hashes. More blocks make more tables with longer keys, which
fewer hashes share. A key that many hashes share nevertheless, because their bits are skewed, is
searched with tables of the other bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.deduplication.colors import Signatures, are_alike

HASH_BITS = 64

Hashes = NDArray[np.uint64]
Positions = NDArray[np.int64]

NONE = np.iinfo(np.int64).max
"""Stands for the position of no hash; a minimum ignores it."""

_BRUTE_FORCE_ROWS = 256
"""Up to this number, hashes are compared with each other without tables."""

_MAX_BUCKET_ROWS = 1024
"""Larger groups with one key are searched with tables of their own."""

_SAMPLE_ROWS = 2**14
"""Hashes from which the number of equal keys is estimated."""

_MAX_TABLES = 256

_KEY_BITS = 32
"""Bits of a table's key; the other half of a word is a position."""

_SORT_COST, _PAIR_COST = 25.0, 1.0
"""Relative time to sort a hash into a table and to compare a pair, as benchmarks/deduplicate.py
measured them."""


@dataclass(frozen=True)
class KeyTable:
    """The positions of the bits that make its key, 0 is the lowest."""

    positions: tuple[int, ...]

    @cached_property
    def _parts(self) -> list[tuple[int, Hashes]]:
        """Return the shift of each byte that has bits of the key, and the key's part by its value.

        The parts have shape (256,).
        """
        values = np.arange(256, dtype=np.uint64)
        parts: dict[int, Hashes] = {}
        for target, position in enumerate(self.positions):
            byte, bit = divmod(position, 8)
            part = parts.setdefault(8 * byte, np.zeros(256, np.uint64))
            part |= (values >> np.uint64(bit) & np.uint64(1)) << np.uint64(target)
        return list(parts.items())

    def keys(self, hashes: Hashes) -> Hashes:
        """Return the keys (n,) of hashes (n,), below 2 to the number of positions."""
        keys = np.zeros(len(hashes), np.uint64)
        for shift, part in self._parts:
            keys |= part[(hashes >> np.uint64(shift)) & np.uint64(255)]
        return keys


def _count_bits_portably(values: Hashes) -> NDArray[Any]:
    """Count set bits in parallel within each word (Hacker's Delight, figure 5-2)."""
    ones = values - ((values >> np.uint64(1)) & np.uint64(0x5555555555555555))
    twos = np.uint64(0x3333333333333333)
    ones = (ones & twos) + ((ones >> np.uint64(2)) & twos)
    ones = (ones + (ones >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    counted: NDArray[Any] = (ones * np.uint64(0x0101010101010101)) >> np.uint64(56)
    return counted


# NumPy before 2.0, which some of AWS's images have, has no bitwise_count.
count_bits: Callable[[Hashes], NDArray[Any]] = getattr(np, "bitwise_count", _count_bits_portably)


def is_within(left: Hashes, right: Hashes, bits: int) -> NDArray[np.bool_]:
    """Return whether hashes differ in at most ``bits`` bits, with broadcasting."""
    return count_bits(left ^ right) <= bits


def choose_tables(hashes: Hashes, bits: int) -> list[KeyTable]:
    """Return the tables that find all pairs of ``hashes`` within ``bits`` at the least cost.

    It is a pure function of the hashes, so all nodes use the same tables.
    """
    sample = hashes[:: max(1, len(hashes) // _SAMPLE_ROWS)]
    positions = _by_information(hashes, sample)
    if len(positions) <= bits:
        return [KeyTable(())]
    best, best_cost = [KeyTable(())], _PAIR_COST * len(hashes) / 2
    for blocks in range(bits + 1, len(positions) + 1):
        if comb(blocks, bits) > _MAX_TABLES or comb(blocks, bits) * _SORT_COST >= best_cost:
            break
        tables = list(_split(positions, blocks, bits))
        cost = len(tables) * _SORT_COST + _PAIR_COST * len(hashes) / 2 * sum(
            _equal_fraction(table.keys(sample)) for table in tables
        )
        if cost < best_cost:
            best, best_cost = tables, cost
    return best


def _by_information(hashes: Hashes, sample: Hashes) -> list[int]:
    """Return the bits in which the hashes differ, those that are set in half of them first."""
    differing = int(np.bitwise_or.reduce(hashes ^ hashes[0])) if len(hashes) else 0
    positions = [bit for bit in range(HASH_BITS) if differing >> bit & 1]
    skew = {
        bit: abs(float((sample >> np.uint64(bit) & np.uint64(1)).mean()) - 0.5) for bit in positions
    }
    return sorted(positions, key=lambda bit: (skew[bit], bit))


def _split(positions: Sequence[int], blocks: int, bits: int) -> Iterator[KeyTable]:
    """Yield a table for each choice of ``bits`` of the blocks to leave out.

    Positions are assigned to the blocks in turn, so each gets the same share of informative bits.
    """
    for left_out in combinations(range(blocks), bits):
        key = [at for number, at in enumerate(positions) if number % blocks not in left_out]
        yield KeyTable(tuple(key[:_KEY_BITS]))


def _equal_fraction(keys: Hashes) -> float:
    """Return the fraction of all pairs whose keys are equal."""
    keys.sort()
    starts = np.flatnonzero(keys[1:] != keys[:-1]) + 1
    counts = np.diff(starts, prepend=0, append=len(keys))
    pairs = len(keys) * (len(keys) - 1)
    return float((counts * (counts - 1)).sum() / pairs) if pairs else 0.0


@dataclass(frozen=True, eq=False)
class Images:
    """What is compared of images: their hashes (n,) and the signatures (n, 48) of their colors."""

    hashes: Hashes
    colors: Signatures

    def __len__(self) -> int:
        return len(self.hashes)

    def take(self, rows: Positions | NDArray[np.bool_] | slice) -> Images:
        """Return the images in ``rows``."""
        return Images(self.hashes[rows], self.colors[rows])

    def all_near(self, bits: int) -> NDArray[np.bool_]:
        """Return whether each pair of images is near, bool (n, n)."""
        near = is_within(self.hashes[:, None], self.hashes[None, :], bits)
        left, right = np.nonzero(np.triu(near, 1))
        alike = are_alike(self.colors[left], self.colors[right])
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
    bits: int

    def subset(self, rows: Positions) -> Search:
        """Return the search in the images of ``rows``, which ascend."""
        images = self.images.take(rows)
        return Search(images, self.is_query[rows], self.is_candidate[rows], self.bits)

    def first_earlier(self) -> Positions:
        """Return for each query the first earlier candidate that is near; shape (n,).

        It is NONE for queries without one, and for all other images.
        """
        hashes = self.images.hashes
        first = np.full(len(hashes), NONE)
        if not self.is_query.any() or not self.is_candidate.any():
            return first
        if len(hashes) <= _BRUTE_FORCE_ROWS:
            return self._compare_all()
        for table in choose_tables(hashes, self.bits):
            self.search_table(table, first)
        return first

    def search_table(self, table: KeyTable, first: Positions) -> None:
        """Lower ``first`` (n,) to the first candidate with the same key in ``table``."""
        hashes = self.images.hashes
        n = len(hashes)
        # Sorting the key and the position as one number is twice as fast as argsort, and stable.
        packed = (table.keys(hashes) << np.uint64(_KEY_BITS)) | np.arange(n, dtype=np.uint64)
        packed.sort()
        keys = packed >> np.uint64(_KEY_BITS)
        rows = (packed & np.uint64(2**_KEY_BITS - 1)).astype(np.int64)
        del packed
        starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        lengths = np.diff(starts, append=n)
        is_large = lengths > _MAX_BUCKET_ROWS if len(starts) > 1 else np.zeros(1, np.bool_)
        for bucket in np.flatnonzero(is_large).tolist():
            members = rows[starts[bucket] : starts[bucket] + lengths[bucket]]
            found = self.subset(members).first_earlier()
            has_found = found != NONE
            queries = members[has_found]
            first[queries] = np.minimum(first[queries], members[found[has_found]])
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
        before: Positions = np.cumsum(is_candidate) - is_candidate
        candidates = rows[is_candidate]
        hashes, colors = self.images.hashes, self.images.colors
        candidate_hashes = hashes[candidates]
        at = np.flatnonzero(is_small & self.is_query[rows] & (before > before[starts]))
        cursor: Positions = before[starts[at]]
        stop, queries = before[at], rows[at]
        wanted = hashes[queries]
        best = first[queries]
        while len(queries):
            candidate = candidates[cursor]
            is_near = is_within(candidate_hashes[cursor], wanted, self.bits)
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
        is_pair = self.images.all_near(self.bits)
        is_pair &= self.is_query[:, None] & self.is_candidate[None, :]
        is_pair &= np.tri(len(self.images), k=-1, dtype=np.bool_)
        return np.where(is_pair.any(axis=1), is_pair.argmax(axis=1), NONE)
