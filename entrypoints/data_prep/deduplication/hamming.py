"""Tables of parts of 64-bit hashes, of which one at least unites two that differ in few bits.

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.data_prep.deduplication.color_division import division_cost
from sm_train.entrypoints.data_prep.deduplication.compared_images import HASH_BITS, Hashes

_SAMPLE_ROWS = 2**14
"""Hashes from which the number of equal keys is estimated."""

_MAX_TABLES = 256

KEY_BITS = 32
"""Bits of a table's key; the other half of a word is a position."""

_SORT_COST = 25.0
"""Time to sort a hash into a table, relative to that to compare a pair, by
benchmarks/deduplicate.py."""


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


def choose_tables(hashes: Hashes, bits: int) -> list[KeyTable]:
    """Return the tables that find all pairs of ``hashes`` within ``bits`` at the least cost.

    It is a pure function of the hashes, so all nodes use the same tables.
    """
    return table_costs(hashes, bits)[0]


def table_costs(hashes: Hashes, bits: int) -> tuple[list[KeyTable], float]:
    """Return the tables of :func:`choose_tables`, and their cost for each hash."""
    sample = hashes[:: max(1, len(hashes) // _SAMPLE_ROWS)]
    positions = _by_information(hashes, sample)
    brute_force = [KeyTable(())], len(hashes) / 2
    if len(positions) <= bits:
        return brute_force
    unique, counts = np.unique(sample, return_counts=True)
    best, best_cost = brute_force
    for blocks in range(bits + 1, len(positions) + 1):
        if comb(blocks, bits) > _MAX_TABLES or comb(blocks, bits) * _SORT_COST >= best_cost:
            break
        tables = list(_split(positions, blocks, bits))
        pairs = sum(_equal_fraction(table.keys(unique), counts) for table in tables)
        cost = len(hashes) / 2 * pairs
        cost += len(tables) * _SORT_COST + _equal_hash_cost(counts, len(hashes))
        if cost < best_cost:
            best, best_cost = tables, cost
    return best, best_cost


def _equal_hash_cost(counts: NDArray[np.int64], rows: int) -> float:
    """Return the cost for each of ``rows`` hashes to compare those that are equal.

    ``counts`` are those of equal hashes in a sample. Only the first table compares them, and large
    groups are divided by color.
    """
    scale = rows / counts.sum()
    repeated = counts[counts > 1]
    by_pairs = repeated * scale / 2
    by_color = np.array([division_cost(count * scale) for count in repeated.tolist()])
    return float((repeated * np.minimum(by_pairs, by_color)).sum() / counts.sum())


def _by_information(hashes: Hashes, sample: Hashes) -> list[int]:
    """Return the bits in which the hashes differ, those that are set in half of them first."""
    differing = int(np.bitwise_or.reduce(hashes)) & ~int(np.bitwise_and.reduce(hashes))
    if not len(hashes):
        differing = 0
    positions = [bit for bit in range(HASH_BITS) if differing >> bit & 1]
    bits = np.unpackbits(sample.astype("<u8").view(np.uint8), bitorder="little")
    skew = np.abs(bits.reshape(-1, HASH_BITS).mean(axis=0) - 0.5).tolist()
    return sorted(positions, key=lambda bit: (skew[bit], bit))


def _split(positions: Sequence[int], blocks: int, bits: int) -> Iterator[KeyTable]:
    """Yield a table for each choice of ``bits`` of the blocks to leave out.

    Positions are assigned to the blocks in turn, so each gets the same share of informative bits.
    """
    for left_out in combinations(range(blocks), bits):
        key = [at for number, at in enumerate(positions) if number % blocks not in left_out]
        yield KeyTable(tuple(key[:KEY_BITS]))


def _equal_fraction(keys: Hashes, counts: NDArray[np.int64]) -> float:
    """Return the fraction of all pairs whose keys are equal and whose hashes are not.

    ``keys`` (u,) are those of different hashes, each of which ``counts`` (u,) images have.
    """
    order = np.argsort(keys)
    keys, counts = keys[order], counts[order]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    in_bucket = np.add.reduceat(counts, starts)
    rows = int(counts.sum())
    pairs = (in_bucket**2).sum() - (counts**2).sum()
    return float(pairs / (rows * (rows - 1)))
