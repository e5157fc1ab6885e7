"""Mixes several sources by weight: which of their samples an epoch has, and in which order.

An epoch has as many samples as all sources together, of each source the share of its weight. A
source is read in *rounds*: each reads all of its samples once, in an order of its own, and an epoch
continues where the one before it stopped. So the samples of a source are read equally often,
whatever its weight. All of this is a pure function of seed and epoch.

An epoch may have several rounds of a small source. The shards of each are numbered as shards of
their own, *copies*, so that a sample gets other noise, crops and captions in each round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from sm_train.entrypoints.common.rng import Ints, random_below, seeded_permutation
from sm_train.entrypoints.data.sample_ranges import SampleRanges, merge, split_shards

_ROUND_KEY, _PHASE_KEY = 1, 2
"""Purposes of random keys. Checkpoints rely on them."""


@dataclass(frozen=True, eq=False)
class Mixture:
    """The sources of a mixture: their channels, weights and samples of each shard.

    ``sizes`` are int64 (num_shards,) for each source.
    """

    channels: tuple[str, ...]
    weights: tuple[float, ...]
    sizes: tuple[Ints, ...]

    @cached_property
    def quotas(self) -> tuple[int, ...]:
        """Samples of each source in an epoch, at least one."""
        total = sum(int(sizes.sum()) for sizes in self.sizes)
        share = total / sum(self.weights)
        return tuple(max(1, round(weight * share)) for weight in self.weights)

    @cached_property
    def copies(self) -> tuple[int, ...]:
        """Copies of the shards of each source: the most rounds that an epoch can touch."""
        return tuple(
            1 - (-quota // max(1, int(sizes.sum())))
            for quota, sizes in zip(self.quotas, self.sizes, strict=True)
        )

    @cached_property
    def source(self) -> Ints:
        """The source of each shard, copies included, int64 (num_shards,)."""
        counts = [
            copies * len(sizes) for copies, sizes in zip(self.copies, self.sizes, strict=True)
        ]
        return np.repeat(np.arange(len(counts)), counts)

    @cached_property
    def original(self) -> Ints:
        """The number of each shard, copies included, in its source, int64 (num_shards,)."""
        return np.concatenate(
            [
                np.tile(np.arange(len(sizes)), copies)
                for copies, sizes in zip(self.copies, self.sizes, strict=True)
            ]
        )

    @cached_property
    def first_shards(self) -> Ints:
        """The number of the first shard of each source, int64 (num_sources,)."""
        return np.searchsorted(self.source, np.arange(len(self.sizes)))

    def channel(self, shard: int) -> str:
        """Return the channel that a shard is in."""
        return self.channels[int(self.source[shard])]

    def ranges(self, range_size: int, seed: int, epoch: int) -> SampleRanges:
        """Return the read ranges of an epoch, sorted by shard and start."""
        parts: list[SampleRanges] = []
        for number, (quota, sizes) in enumerate(zip(self.quotas, self.sizes, strict=True)):
            all_ranges = split_shards(sizes, range_size, np.arange(len(sizes)))
            samples = all_ranges.num_samples
            # Positions first to stop - 1 of the endless sequence of rounds.
            first, stop = epoch * quota, (epoch + 1) * quota
            rounds = range(first // samples, -(-stop // samples))
            for copy, round_number in enumerate(rounds):
                start = max(first - round_number * samples, 0)
                end = min(stop - round_number * samples, samples)
                part = all_ranges
                if end - start < samples:
                    key = (seed, _ROUND_KEY, number, round_number)
                    order = seeded_permutation(len(all_ranges.shard), *key)
                    part = all_ranges.select(order).slice(start, end)
                shift = int(self.first_shards[number]) + copy * len(sizes)
                parts.append(SampleRanges(part.shard + shift, part.start, part.stop))
        return merge(parts)


def spread_sources(order: Ints, sources: Ints, *key: int) -> Ints:
    """Return ``order`` with the sources spread evenly: any part of it has the share of each.

    ``order`` are numbers of ranges, int64 (num_ranges,), and ``sources`` the source of each range.
    The order within a source stays.
    """
    in_order = sources[order]
    places = np.empty(len(order))
    for source in np.unique(in_order).tolist():
        here = np.flatnonzero(in_order == source)
        phase = random_below(2**32, *key, _PHASE_KEY, source) / 2**32
        places[here] = (np.arange(len(here)) + phase) / len(here)
    spread: Ints = order[np.argsort(places, kind="stable")]
    return spread


def cumulative_weights(weights: Sequence[float]) -> Sequence[float]:
    """Return the running sum of ``weights``, scaled to end at 1."""
    total = np.cumsum(weights)
    return list(total / total[-1])
