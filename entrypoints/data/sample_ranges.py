"""Ranges of consecutive samples: the unit in which shards are read.

Shards are numbered over the whole data set, samples within their shard.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.common.rng import Ints


@dataclass(frozen=True, eq=False)
class SampleRanges:
    """An ordered list of ranges: range ``i`` is samples ``start[i]``:``stop[i]`` of ``shard[i]``.

    All three arrays are int64 (num_ranges,); no range is empty. Laid end to end, the ranges give
    every sample a *position*, 0 to :attr:`num_samples` - 1.
    """

    shard: Ints
    start: Ints
    stop: Ints

    @cached_property
    def ends(self) -> Ints:
        """The position after the last sample of each range, int64 (num_ranges,)."""
        return np.cumsum(self.stop - self.start)

    @property
    def num_samples(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def select(self, which: NDArray[np.bool_] | Ints) -> SampleRanges:
        """Return the ranges that a mask or an array of range numbers selects."""
        return SampleRanges(self.shard[which], self.start[which], self.stop[which])

    def slice(self, first: int, stop: int) -> SampleRanges:
        """Return the samples at positions ``first`` to ``stop`` - 1; cuts ranges where needed."""
        if first >= stop:
            return self.select(np.zeros(0, np.int64))
        # The ranges that hold the first and the last position, found by their ends.
        low, high = np.searchsorted(self.ends, [first, stop - 1], side="right")
        selected = self.select(np.arange(low, high + 1))
        starts, stops = selected.start.copy(), selected.stop.copy()
        stops[-1] -= self.ends[high] - stop
        starts[0] += first - (self.ends[low - 1] if low else 0)
        return SampleRanges(selected.shard, starts, stops)

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return shard and sample number for each position; all arrays are int64 (n,)."""
        which = np.searchsorted(self.ends, positions, side="right")
        # A position lies as far before its range's end as its sample before the range's stop.
        return self.shard[which], self.stop[which] - (self.ends[which] - positions)

    def positions_of(self, shard: int, sample: int) -> Ints:
        """Return the positions of a sample, int64 (n,): one for each range that has it."""
        has = (self.shard == shard) & (self.start <= sample) & (sample < self.stop)
        which = np.flatnonzero(has)
        return self.ends[which] - (self.stop[which] - sample)

    def take(self, positions: Ints) -> SampleRanges:
        """Return the samples at ascending ``positions``, with adjacent ones merged into ranges."""
        shard, sample = self.locate(positions)
        begins = np.ones(len(shard), np.bool_)
        begins[1:] = (shard[1:] != shard[:-1]) | (sample[1:] != sample[:-1] + 1)
        first = np.flatnonzero(begins)
        last = np.append(first[1:] - 1, len(shard) - 1)[: len(first)]
        return SampleRanges(shard[first], sample[first], sample[last] + 1)


def merge(parts: Iterable[SampleRanges]) -> SampleRanges:
    """Return all ranges of ``parts``, sorted by shard and start."""
    groups = list(parts)
    if not groups:
        return SampleRanges(*(np.zeros(0, np.int64) for _ in range(3)))
    shard, start, stop = (
        np.concatenate([getattr(group, name) for group in groups])
        for name in ("shard", "start", "stop")
    )
    return SampleRanges(shard, start, stop).select(np.lexsort((start, shard)))


def split_shards(shard_sizes: Ints, range_size: int, shards: Ints) -> SampleRanges:
    """Split ``shards`` into ranges of ``range_size`` samples; a shard's last may be shorter.

    ``shard_sizes`` covers all shards, int64 (num_shards,); ``shards`` are the numbers of those to
    split. The split is vectorized, because a data set may have millions of ranges.
    """
    sizes = shard_sizes[shards]
    counts = -(-sizes // range_size)  # ranges of each shard
    shard = np.repeat(shards, counts)
    # 0, 1, 2 … within each shard: a running number less the ranges of the shards before.
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number * range_size
    return SampleRanges(shard, start, np.minimum(start + range_size, shard_sizes[shard]))
