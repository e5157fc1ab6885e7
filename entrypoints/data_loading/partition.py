"""Partitioning and shuffling of an epoch: which rank reads which samples, in which order.

This is pure arithmetic; nothing is read here.

If every node sees every shard, the order is *global*: the same samples form the same global batch
whatever the number of ranks (:class:`StreamPartition`). Otherwise three steps lead from an epoch to
a rank's order:

1. Shards are split into *read ranges*: consecutive samples of one shard, read at once.
2. Each node takes the ranges of the shards that it sees and shuffles them
   (:class:`NodePartition`). That list is cut, to a sample, into equal parts, one for each of its
   ranks (:class:`RankPartition`).
3. A rank reads its part in *shuffle blocks* of consecutive positions. A block is held in memory
   and its samples are shuffled.

So the sample at any index of a rank's order is computed directly, at the same cost wherever it is.

:mod:`~sm_train.entrypoints.data_loading.batch_schedule` makes batches of a rank's order, and
:mod:`~sm_train.entrypoints.data_loading.sampler` handles changes of the topology. All counts are
exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.base.rng import Ints, hash64, random_below, seeded_permutation
from sm_train.entrypoints.data_loading.sample_ranges import SampleRanges, merge, spread_sources

UNASSIGNED, REPLICATED = -1, -2
"""Values of :attr:`DataTopology.owner`: no node sees the shard; every node sees it."""

NEARBY_REPLACEMENTS = 16
"""Attempts to replace a bad sample from its own shuffle block before the whole partition."""

_RANGES_KEY, _BLOCK_KEY, _PADDING_KEY, _REPLACEMENT_KEY, _STREAM_KEY, _GLOBAL_KEY = 1, 2, 3, 4, 5, 6
"""Purposes of random keys, which keep their permutations independent. Checkpoints rely on them."""


@dataclass(frozen=True, eq=False)
class DataTopology:
    """The nodes and ranks that read the data, and the shards that each node reads.

    ``owner`` is int16 (num_shards,): the node rank that reads the shard, :data:`UNASSIGNED`, or
    :data:`REPLICATED`. Each node reads an equal slice of the replicated samples. ``batch_size``
    and ``shuffle_block_size`` are samples of one rank. ``shapes`` are the batch shapes
    (height, width); empty if all batches have the same shape.

    ``streams`` is the number of samples in a global batch, of one optimizer step, if the order is
    global, else 0; ``stream_block`` is the number of samples that are shuffled within a stream.
    """

    owner: NDArray[np.int16]
    num_nodes: int
    local_world_size: int
    batch_size: int
    shuffle_block_size: int
    shapes: tuple[tuple[int, int], ...] = ()
    streams: int = 0
    stream_block: int = 1

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.local_world_size

    def replicated_slice(self, num_samples: int, node_rank: int) -> tuple[int, int]:
        """Return the first and the end position of a node's share of the replicated samples."""
        return (
            num_samples * node_rank // self.num_nodes,
            num_samples * (node_rank + 1) // self.num_nodes,
        )

    def equals(self, other: DataTopology) -> bool:
        """Return whether every rank would continue with its own samples under ``other``."""
        return self._sizes() == other._sizes() and np.array_equal(self.owner, other.owner)

    def _sizes(self) -> tuple[object, ...]:
        return (
            self.num_nodes,
            self.local_world_size,
            self.batch_size,
            self.shuffle_block_size,
            self.shapes,
            self.streams,
            self.stream_block,
        )

    def has_order_of(self, other: DataTopology) -> bool:
        """Return whether both read the same global order, if with another number of ranks."""
        same = (self.streams, self.stream_block) == (other.streams, other.stream_block)
        return bool(self.streams) and same and np.array_equal(self.owner, other.owner)


@dataclass(frozen=True, eq=False)
class RankPartition:
    """One rank's samples, in the order in which it reads them.

    A sample's position in that order is its *index*. Block ``b`` covers the indices
    ``b * shuffle_block_size`` to ``(b + 1) * shuffle_block_size - 1`` and the same positions of
    ``ranges``, permuted; the last block may be shorter.
    """

    ranges: SampleRanges
    shuffle_block_size: int
    key: tuple[int, ...]

    @property
    def num_samples(self) -> int:
        return self.ranges.num_samples

    def locate(self, indices: Ints) -> tuple[Ints, Ints]:
        """Return shard and sample number for each index; all arrays are int64 (n,)."""
        return self.ranges.locate(self.positions(indices))

    def take(self, indices: Ints) -> SampleRanges:
        """Return the samples at ``indices`` as ranges, sorted by shard and start."""
        return merge([self.ranges.take(np.sort(self.positions(indices)))])

    def remaining_from(self, index: int) -> SampleRanges:
        """Return the samples from ``index`` on, sorted by shard and start.

        A block holds the same samples in whatever order, so only the block that ``index`` lies in
        has to be permuted; the blocks after it are a slice of the ranges.
        """
        size = self.shuffle_block_size
        next_block = min(-(-index // size) * size, self.num_samples)
        whole_blocks = self.ranges.slice(next_block, self.num_samples)
        return merge([self.take(np.arange(min(index, next_block), next_block)), whole_blocks])

    def block_indices(self, block: int) -> Ints:
        """Return the indices in a shuffle block, int64 (block size,)."""
        size = self.shuffle_block_size
        return np.arange(block * size, min((block + 1) * size, self.num_samples))

    def positions(self, indices: Ints) -> Ints:
        """Return the position among :attr:`ranges` for each index, int64 (n,)."""
        positions = np.empty_like(indices)
        blocks = indices // self.shuffle_block_size
        for block in np.unique(blocks).tolist():
            in_block = blocks == block
            first = block * self.shuffle_block_size
            positions[in_block] = self.block_positions(block)[indices[in_block] - first]
        return positions

    def block_positions(self, block: int) -> Ints:
        """Return the positions of a shuffle block in the order of their indices, int64 (n,)."""
        first = block * self.shuffle_block_size
        length = min(self.shuffle_block_size, self.num_samples - first)
        return first + seeded_permutation(length, *self.key, _BLOCK_KEY, block)

    def indices_of(self, shard: int, sample: int) -> Ints:
        """Return the indices of a sample, int64 (n,); none if the rank does not read it."""
        found = []
        for position in self.ranges.positions_of(shard, sample).tolist():
            block = position // self.shuffle_block_size
            within = np.flatnonzero(self.block_positions(block) == position)
            found.append(block * self.shuffle_block_size + within)
        return np.concatenate([np.zeros(0, np.int64), *found])

    def all_positions(self) -> Ints:
        """Return the position for each index of the partition, int64 (num_samples,)."""
        blocks = range(-(-self.num_samples // self.shuffle_block_size))
        return np.concatenate([np.zeros(0, np.int64), *map(self.block_positions, blocks)])

    def replacement(self, index: int, attempt: int) -> tuple[int, int]:
        """Return shard and sample to read instead of the bad sample at ``index``.

        The first :data:`NEARBY_REPLACEMENTS` attempts stay in its shuffle block, whose samples
        lie near in the tars; later ones use the whole partition.
        """
        block = self.block_indices(index // self.shuffle_block_size)
        candidates = block if attempt < NEARBY_REPLACEMENTS else np.arange(self.num_samples)
        chosen = candidates[
            random_below(len(candidates), *self.key, _REPLACEMENT_KEY, index, attempt)
        ]
        shard, sample = self.locate(np.array([chosen]))
        return int(shard[0]), int(sample[0])


@dataclass(frozen=True, eq=False)
class StreamPartition:
    """One rank's samples in a global order, in the order in which it reads them.

    ``ranges`` are those of the whole epoch, shuffled alike on all ranks. They are cut, to a sample,
    into ``num_streams`` equal streams: global batch ``s`` has the ``s``-th sample of every stream,
    so it does not depend on the number of ranks. A rank reads ``count`` neighboring streams from
    ``first`` on, a *slot* for each in every step. Samples are shuffled within blocks of
    ``stream_block`` samples of a stream. Streams that have one sample less than others repeat
    their first one in the last step, after the new samples of the rank.
    """

    ranges: SampleRanges
    num_streams: int
    first: int
    count: int
    stream_block: int
    shuffle_block_size: int
    key: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Steps of the epoch: samples of the longest stream."""
        return -(-self.ranges.num_samples // self.num_streams)

    @property
    def num_samples(self) -> int:
        """Samples that the rank reads, with repeated ones."""
        return self.count * self.depth

    @property
    def num_new(self) -> int:
        """Samples that the rank reads, without repeated ones."""
        return int(self._lengths.sum())

    @cached_property
    def _starts(self) -> Ints:
        """Position of the first sample of each stream, and of the next one, int64 (count + 1,)."""
        streams = np.arange(self.first, self.first + self.count + 1)
        return self.ranges.num_samples * streams // self.num_streams

    @cached_property
    def _lengths(self) -> Ints:
        return np.diff(self._starts)

    @cached_property
    def _last_slots(self) -> Ints:
        """The streams in the order of the last step's slots: those with a new sample first."""
        return np.argsort(self._lengths < self.depth, kind="stable")

    def _place(self, indices: Ints) -> tuple[Ints, Ints]:
        """Return stream (of this rank) and step for each index; all arrays are int64 (n,)."""
        step, slot = np.divmod(indices, self.count)
        return np.where(step == self.depth - 1, self._last_slots[slot], slot), step

    def positions(self, indices: Ints) -> Ints:
        """Return the position among :attr:`ranges` for each index, int64 (n,)."""
        stream, step = self._place(indices)
        is_new = step < self._lengths[stream]
        return self._starts[stream] + np.where(is_new, self._shuffled(stream, step), 0)

    def indices_of(self, shard: int, sample: int) -> Ints:
        """Return the indices of a sample, int64 (n,); none if the rank does not read it."""
        found = []
        for position in self.ranges.positions_of(shard, sample).tolist():
            stream = int(np.searchsorted(self._starts, position, side="right")) - 1
            if not 0 <= stream < self.count:
                continue
            # Its shuffled block, and the last step, in which a short stream repeats a sample.
            block = (position - int(self._starts[stream])) // self.stream_block
            steps = block * self.stream_block + np.arange(self.stream_block)
            steps = np.union1d(steps[steps < self.depth], [self.depth - 1])
            indices = (steps[:, None] * self.count + np.arange(self.count)).ravel()
            found.append(indices[self.positions(indices) == position])
        return np.concatenate([np.zeros(0, np.int64), *found])

    def _shuffled(self, stream: Ints, step: Ints) -> Ints:
        """Return the position within its stream for each step, int64 (n,)."""
        size = self.stream_block
        block, within = np.divmod(step, size)
        # One row of random numbers for each block that occurs; sorting it permutes the block.
        blocks = self.depth // size + 1
        groups, row = np.unique(stream * blocks + block, return_inverse=True)
        of_stream, number = np.divmod(groups, blocks)
        columns = np.arange(size)
        numbers = hash64(
            *self.key,
            _STREAM_KEY,
            (self.first + of_stream).astype(np.uint64)[:, None],
            number.astype(np.uint64)[:, None],
            columns.astype(np.uint64)[None, :],
        )
        left = self._lengths[of_stream] - number * size
        numbers[columns[None, :] >= left[:, None]] = np.iinfo(np.uint64).max
        order = np.argsort(numbers, axis=1, kind="stable")
        positions: Ints = block * size + order[row, within]
        return positions

    def locate(self, indices: Ints) -> tuple[Ints, Ints]:
        """Return shard and sample number for each index; all arrays are int64 (n,)."""
        return self.ranges.locate(self.positions(indices))

    def block_indices(self, block: int) -> Ints:
        """Return the indices that are read together, int64 (block size,)."""
        size = self.shuffle_block_size
        return np.arange(block * size, min((block + 1) * size, self.num_samples))

    def remaining_from(self, index: int) -> SampleRanges:
        """Return the new samples from ``index`` on, sorted by shard and start."""
        step, slot = divmod(index, self.count)
        read = np.full(self.count, step)
        read[self._last_slots[:slot] if step == self.depth - 1 else slice(slot)] += 1
        read = np.minimum(read, self._lengths)
        # Of a block that was read in part, single samples; the blocks after it as they lie.
        next_block = np.minimum(-(-read // self.stream_block) * self.stream_block, self._lengths)
        partial = [np.arange(*pair) for pair in zip(read, next_block, strict=True)]
        streams = np.repeat(np.arange(self.count), next_block - read)
        steps = np.concatenate(partial)
        single = np.sort(self._starts[streams] + self._shuffled(streams, steps))
        whole = [
            self.ranges.slice(int(start), int(stop))
            for start, stop in zip(self._starts[:-1] + next_block, self._starts[1:], strict=True)
        ]
        return merge([self.ranges.take(single), *whole])

    def replacement(self, index: int, attempt: int) -> tuple[int, int]:
        """Return shard and sample to read instead of the bad sample at ``index``.

        The first :data:`NEARBY_REPLACEMENTS` attempts stay near it in its stream; later ones use
        the whole epoch. The choice does not depend on the number of ranks.
        """
        stream, step = (int(value[0]) for value in self._place(np.array([index])))
        first, stop = 0, self.ranges.num_samples
        if attempt < NEARBY_REPLACEMENTS and self._lengths[stream]:
            begin = step // self.stream_block * self.stream_block
            begin = min(begin, int(self._lengths[stream]) - 1)
            first = int(self._starts[stream]) + begin
            stop = min(first + self.stream_block, int(self._starts[stream + 1]))
        key = (*self.key, _REPLACEMENT_KEY, self.first + stream, step, attempt)
        shard, sample = self.ranges.locate(np.array([first + random_below(stop - first, *key)]))
        return int(shard[0]), int(sample[0])


def stream_partition(
    ranges: SampleRanges,
    topology: DataTopology,
    rank: int,
    *key: int,
    sources: Ints | None = None,
) -> StreamPartition:
    """Return what ``rank`` of all nodes reads of ``ranges`` in the global order of ``key``.

    ``sources`` is the source of each shard, int64 (num_shards,).
    """
    order = _shuffled_ranges(ranges, sources, *key, _GLOBAL_KEY)
    count = topology.streams // topology.world_size
    return StreamPartition(
        ranges.select(order),
        topology.streams,
        rank * count,
        count,
        topology.stream_block,
        topology.shuffle_block_size,
        key,
    )


@dataclass(frozen=True, eq=False)
class NodePartition:
    """One node's ranges, shuffled; its ranks share them by position."""

    ranges: SampleRanges
    key: tuple[int, ...]

    def rank_partition(self, local_rank: int, topology: DataTopology) -> RankPartition:
        """Return one rank's part; the parts of a node differ by one sample at most."""
        samples, ranks = self.ranges.num_samples, topology.local_world_size
        first, stop = samples * local_rank // ranks, samples * (local_rank + 1) // ranks
        return RankPartition(
            self.ranges.slice(first, stop), topology.shuffle_block_size, (*self.key, local_rank)
        )


def node_partition(
    ranges: SampleRanges,
    topology: DataTopology,
    node_rank: int,
    *key: int,
    sources: Ints | None = None,
) -> NodePartition:
    """Return the part of ``ranges`` that one node reads, shuffled by ``key``.

    That is the ranges of the shards that it owns, and its slice of those of replicated shards.
    ``sources`` is the source of each shard, int64 (num_shards,).
    """
    owner = topology.owner[ranges.shard]  # of each range
    replicated = ranges.select(owner == REPLICATED)
    if sources is not None and len(replicated.shard):
        # The slices of all nodes have the share of each source.
        whole = np.arange(len(replicated.shard))
        replicated = replicated.select(spread_sources(whole, sources[replicated.shard], *key))
    first, stop = topology.replicated_slice(replicated.num_samples, node_rank)
    node_ranges = merge([ranges.select(owner == node_rank), replicated.slice(first, stop)])
    key = (*key, node_rank)
    order = _shuffled_ranges(node_ranges, sources, *key, _RANGES_KEY)
    return NodePartition(node_ranges.select(order), key)


def _shuffled_ranges(ranges: SampleRanges, sources: Ints | None, *key: int) -> Ints:
    """Return an order of ``ranges``, int64 (num_ranges,), with their sources spread evenly."""
    order = seeded_permutation(len(ranges.shard), *key)
    return order if sources is None else spread_sources(order, sources[ranges.shard], *key)


def padding_partition(
    ranges: SampleRanges, topology: DataTopology, local_rank: int, *key: int
) -> RankPartition:
    """Return all of ``ranges``, shuffled, for a rank that has no samples of its own in them."""
    key = (*key, local_rank, _PADDING_KEY)
    order = seeded_permutation(len(ranges.shard), *key, _RANGES_KEY)
    return RankPartition(ranges.select(order), topology.shuffle_block_size, key)
