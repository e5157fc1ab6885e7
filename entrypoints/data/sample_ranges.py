"""Runs of neighbouring samples: what a reader takes from its shards at once.

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
    """Runs of neighbouring samples, one after another: ``shard[i]``, ``start[i]``:``stop[i]``.

    Three integer arrays of one length; no run is empty.
    """

    shard: Ints
    start: Ints
    stop: Ints

    @cached_property
    def ends(self) -> Ints:
        """For each run, the samples up to and with it."""
        return np.cumsum(self.stop - self.start)

    @property
    def samples(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def pick(self, which: NDArray[np.bool_] | Ints) -> SampleRanges:
        return SampleRanges(self.shard[which], self.start[which], self.stop[which])

    def span(self, first: int, behind: int) -> SampleRanges:
        """The samples ``first`` to ``behind`` - 1 of all."""
        if first >= behind:
            return self.pick(np.zeros(0, np.int64))
        low, high = np.searchsorted(self.ends, [first, behind - 1], side="right")
        part = self.pick(np.arange(low, high + 1))
        start, stop = part.start.copy(), part.stop.copy()
        stop[-1] -= self.ends[high] - behind
        start[0] += first - (self.ends[low - 1] if low else 0)
        return SampleRanges(part.shard, start, stop)

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Shard and number in it of the samples at ``positions``."""
        run = np.searchsorted(self.ends, positions, side="right")
        return self.shard[run], self.stop[run] - (self.ends[run] - positions)

    def at(self, positions: Ints) -> SampleRanges:
        """The samples at ``positions``, which ascend, neighbours joined again."""
        shard, sample = self.locate(positions)
        new = np.ones(len(shard), np.bool_)
        new[1:] = (shard[1:] != shard[:-1]) | (sample[1:] != sample[:-1] + 1)
        first = np.flatnonzero(new)
        last = np.append(first[1:] - 1, len(shard) - 1)[: len(first)]
        return SampleRanges(shard[first], sample[first], sample[last] + 1)


def merge(parts: Iterable[SampleRanges]) -> SampleRanges:
    """All runs of ``parts``, in the order of the data set."""
    pieces = list(parts)
    if not pieces:
        return SampleRanges(*(np.zeros(0, np.int64) for _ in range(3)))
    shard, start, stop = (
        np.concatenate([getattr(one, name) for one in pieces])
        for name in ("shard", "start", "stop")
    )
    return SampleRanges(shard, start, stop).pick(np.lexsort((start, shard)))


def split_shards(samples: Ints, chunk: int, shards: Ints) -> SampleRanges:
    """The chunks of ``shards``, whose numbers of samples are ``samples[shards]``."""
    counts = samples[shards]
    chunks = -(-counts // chunk)
    shard = np.repeat(shards, chunks)
    number = np.arange(int(chunks.sum())) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    start = number * chunk
    return SampleRanges(shard, start, np.minimum(start + chunk, samples[shard]))
