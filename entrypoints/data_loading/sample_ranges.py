"""Ranges of samples, the unit in which shards are read: their shapes, and their mixture of sources.

Shards are numbered over the whole data set, samples within their shard.

Aspect-ratio buckets are batch shapes for portraits, landscapes and squares of about equal area,
after NovelAI's "Aspect Ratio Bucketing"
(https://github.com/NovelAI/novelai-aspect-ratio-bucketing), which SDXL was trained with, too. Sides
are pixels, shapes are (height, width).

A mixture has several sources, whose weights decide which samples an epoch has, and in which order.

An epoch has as many samples as all sources together, of each source the share of its weight. A
source is read in *rounds*: each reads all of its samples once, in an order of its own, and an epoch
continues where the one before it stopped. So the samples of a source are read equally often,
whatever its weight. All of this is a pure function of seed and epoch.

An epoch may have several rounds of a small source. The shards of each are numbered as shards of
their own, *copies*, so that a sample gets other noise, crops and captions in each round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sm_train.entrypoints.base.rng import Ints, random_below, seeded_permutation


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


MAX_ASPECT_RATIO = 2.0
"""Longer side over shorter side, at most; images beyond that are cropped."""

Shape = tuple[int, int]


def aspect_shapes(resolution: int) -> tuple[Shape, ...]:
    """Return the shapes of at most ``resolution``² pixels: the square, then from tall to wide.

    Sides are multiples of 64, which an 8 × autoencoder and a U-Net of four levels divide, or of a
    quarter of ``resolution`` if that is less.
    """
    step = min(64, max(1, resolution // 4))
    shapes = set()
    for short in range(step, resolution + 1, step):
        long = resolution * resolution // short // step * step
        if long <= short * MAX_ASPECT_RATIO:
            shapes |= {(short, long), (long, short)}
    square = (resolution, resolution)
    return (square, *sorted(shapes - {square}, key=lambda shape: shape[1] / shape[0]))


def nearest_shape(
    shapes: Sequence[Shape], heights: ArrayLike, widths: ArrayLike
) -> NDArray[np.int16]:
    """Return for each image the number of the shape that crops least of it, int16 (num_images,).

    An image of unknown size (0) counts as a square.
    """
    image_ratios = np.maximum(widths, 1) / np.maximum(heights, 1)
    shape_ratios = np.array([width / height for height, width in shapes])
    order = np.argsort(shape_ratios, kind="stable").astype(np.int16)
    ascending = shape_ratios[order]
    # The nearest is that with the least difference of logarithms, so the limit between neighbors is
    # their geometric mean. Billions of images are compared with it, so no logarithm of each.
    limits = np.sqrt(ascending[1:] * ascending[:-1])
    nearest: NDArray[np.int16] = order[np.searchsorted(limits, image_ratios)]
    return nearest


@dataclass(frozen=True, eq=False)
class SampleShapes:
    """The numbers of the batch shapes of samples, by shard.

    Sample ``i`` of shard ``s`` has the shape ``numbers[first[s] + i]``, less than ``num_shapes``.
    ``first`` is int64 (num_shards,), negative for shards whose shapes were not asked for;
    ``numbers`` is int16 (num_samples,).
    """

    first: Ints
    numbers: NDArray[np.int16]
    num_shapes: int

    def of(self, ranges: SampleRanges) -> NDArray[np.int16]:
        """Return the number of the shape at each position of ``ranges``, int16 (num_samples,)."""
        # The entry of a range's first sample, less the position of that sample.
        offsets = self.first[ranges.shard] + ranges.stop - ranges.ends
        lengths = ranges.stop - ranges.start
        numbers: NDArray[np.int16] = self.numbers[
            np.arange(ranges.num_samples) + np.repeat(offsets, lengths)
        ]
        return numbers


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
