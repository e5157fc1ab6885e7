"""Partitioning and shuffling of an epoch: which rank reads which samples, in which order.

This is pure arithmetic; nothing is read here. Three steps lead from an epoch to a rank's order:

1. Shards are split into *read ranges*: consecutive samples of one shard, read at once.
2. Each node takes the ranges of the shards that it sees and shuffles them
   (:class:`NodePartition`). That list is cut, to a sample, into equal parts, one for each of its
   ranks (:class:`RankPartition`).
3. A rank reads its part in *shuffle blocks* of consecutive positions. A block is held in memory
   and its samples are shuffled.

So the sample at any index of a rank's order is computed directly, at the same cost wherever it is.

:mod:`~sm_train.entrypoints.data.batch_schedule` makes batches of a rank's order;
:mod:`~sm_train.entrypoints.data.epoch` handles changes of the topology. All counts are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.common.rng import Ints, seeded_permutation
from sm_train.entrypoints.data.sample_ranges import SampleRanges, merge

UNASSIGNED, REPLICATED = -1, -2
"""Values of :attr:`DataTopology.owner`: no node sees the shard; every node sees it."""

_RANGES_KEY, _BLOCK_KEY, _PADDING_KEY = 1, 2, 3
"""Purposes of random keys, which keep their permutations independent. Checkpoints rely on them."""


@dataclass(frozen=True, eq=False)
class DataTopology:
    """The nodes and ranks that read the data, and the shards that each node reads.

    ``owner`` is int16 (num_shards,): the node rank that reads the shard, :data:`UNASSIGNED`, or
    :data:`REPLICATED`. Each node reads an equal slice of the replicated samples. ``batch_size``
    and ``shuffle_block_size`` are samples of one rank. ``shapes`` are the batch shapes
    (height, width); empty if all batches have the same shape.
    """

    owner: NDArray[np.int16]
    num_nodes: int
    local_world_size: int
    batch_size: int
    shuffle_block_size: int
    shapes: tuple[tuple[int, int], ...] = ()

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
        )


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
            first = block * self.shuffle_block_size
            length = min(self.shuffle_block_size, self.num_samples - first)
            in_block = blocks == block
            order = seeded_permutation(length, *self.key, _BLOCK_KEY, block)
            positions[in_block] = first + order[indices[in_block] - first]
        return positions


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
    ranges: SampleRanges, topology: DataTopology, node_rank: int, *key: int
) -> NodePartition:
    """Return the part of ``ranges`` that one node reads, shuffled by ``key``.

    That is the ranges of the shards that it owns, and its slice of those of replicated shards.
    """
    owner = topology.owner[ranges.shard]  # of each range
    replicated = ranges.select(owner == REPLICATED)
    first, stop = topology.replicated_slice(replicated.num_samples, node_rank)
    node_ranges = merge([ranges.select(owner == node_rank), replicated.slice(first, stop)])
    key = (*key, node_rank)
    order = seeded_permutation(len(node_ranges.shard), *key, _RANGES_KEY)
    return NodePartition(node_ranges.select(order), key)


def padding_partition(
    ranges: SampleRanges, topology: DataTopology, local_rank: int, *key: int
) -> RankPartition:
    """Return all of ``ranges``, shuffled, for a rank that has no samples of its own in them."""
    key = (*key, local_rank, _PADDING_KEY)
    order = seeded_permutation(len(ranges.shard), *key, _RANGES_KEY)
    return RankPartition(ranges.select(order), topology.shuffle_block_size, key)
