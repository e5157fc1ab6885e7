"""An epoch of the whole data set, and the samples that remain after a change of the topology.

A restarted job may have another number of nodes, or other shards on them. The steps taken until
then form an :class:`EpochSegment`; the ranges that are left after all segments are partitioned
again. That is all that has to be saved for each sample to be read once an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.common.rng import Ints
from sm_train.entrypoints.data.aspect_buckets import SampleShapes
from sm_train.entrypoints.data.batch_schedule import (
    BatchSchedule,
    StreamSchedule,
    longest_schedule_steps,
)
from sm_train.entrypoints.data.mixture import Mixture
from sm_train.entrypoints.data.partition import (
    REPLICATED,
    UNASSIGNED,
    DataTopology,
    NodePartition,
    StreamPartition,
    node_partition,
    stream_partition,
)
from sm_train.entrypoints.data.sample_ranges import SampleRanges, merge, split_shards

BatchShapes = Callable[[DataTopology, Ints], SampleShapes | None]
"""Returns the batch shapes of the samples of shards, which are given by their numbers.

None in a topology whose batches all have the same shape.
"""


def single_batch_shape(_topology: DataTopology, _shards: Ints) -> None:
    """Return :data:`BatchShapes` of a topology whose batches all have the same shape."""


@dataclass(frozen=True, eq=False)
class EpochSegment:
    """The first ``steps`` steps of an epoch, or of the rest of one, under one topology."""

    topology: DataTopology
    steps: int


@dataclass(frozen=True)
class Epoch:
    """Epoch ``number`` of a data set.

    ``shard_sizes`` are the samples of each shard, int64 (num_shards,). Shards are read in ranges
    of ``range_size`` samples. A ``mixture`` chooses the samples of each epoch.
    """

    shard_sizes: Ints
    range_size: int
    seed: int
    number: int
    mixture: Mixture | None = None

    def all_ranges(self, shards: Ints) -> SampleRanges:
        """Return the epoch's read ranges in ``shards``."""
        if self.mixture is None:
            return self.whole_ranges(shards)
        ranges = self.mixture.ranges(self.range_size, self.seed, self.number)
        return ranges.select(np.isin(ranges.shard, shards))

    def whole_ranges(self, shards: Ints) -> SampleRanges:
        """Return the read ranges of ``shards``, whichever of them the epoch has."""
        return split_shards(self.shard_sizes, self.range_size, shards)

    @property
    def _sources(self) -> Ints | None:
        """The source of each shard, int64 (num_shards,); None if there is only one."""
        return None if self.mixture is None else self.mixture.source

    def remaining(
        self, segments: Iterable[EpochSegment], shapes: BatchShapes = single_batch_shape
    ) -> SampleRanges:
        """Return the ranges that no rank has read in ``segments``."""
        ranges = self.all_ranges(np.arange(len(self.shard_sizes)))
        # Each segment partitions what the one before it left, so they are replayed in order.
        for number, segment in enumerate(segments):
            topology = segment.topology
            unread = [ranges.select(topology.owner[ranges.shard] == UNASSIGNED)]
            if topology.streams:
                unread += [
                    schedule.remaining(segment.steps)
                    for schedule in self.stream_schedules(ranges, topology, number)
                ]
                ranges = merge(unread)
                continue
            sample_shapes = shapes(topology, np.unique(ranges.shard))
            for node_rank in range(topology.num_nodes):
                node = self.node_partition(ranges, topology, number, node_rank)
                for local_rank in range(topology.local_world_size):
                    partition = node.rank_partition(local_rank, topology)
                    schedule = BatchSchedule(partition, topology.batch_size, sample_shapes)
                    unread.append(schedule.remaining(segment.steps))
            ranges = merge(unread)
        return ranges

    def stream_schedules(
        self, ranges: SampleRanges, topology: DataTopology, segment: int
    ) -> Iterator[StreamSchedule]:
        """Yield the schedules of all ranks of a topology with a global order."""
        for rank in range(topology.world_size):
            partition = self.stream_partition(ranges, topology, segment, rank)
            yield StreamSchedule(partition, topology.batch_size)

    def stream_partition(
        self, ranges: SampleRanges, topology: DataTopology, segment: int, rank: int
    ) -> StreamPartition:
        """Return what ``rank`` of all nodes reads of ``ranges`` in the global order."""
        seen = ranges.select(topology.owner[ranges.shard] != UNASSIGNED)
        key = (self.seed, self.number, segment)
        return stream_partition(seen, topology, rank, *key, sources=self._sources)

    def node_partition(
        self, ranges: SampleRanges, topology: DataTopology, segment: int, node_rank: int
    ) -> NodePartition:
        """Return the part of ``ranges`` that one node reads in the segment of this number."""
        key = (self.seed, self.number, segment)
        return node_partition(ranges, topology, node_rank, *key, sources=self._sources)


@dataclass(frozen=True)
class EpochSize:
    """The size of an epoch, or of the rest of one; equal on all ranks.

    ``samples`` are read in ``steps`` steps. Ranks with fewer samples than others pad their
    batches with samples that they have read before: ``repeated`` over all ranks. ``unseen``
    samples lie in shards that no node sees. Both are None if samples are drawn at random.
    """

    samples: int
    steps: int
    repeated: int | None
    unseen: int | None


def epoch_size(ranges: SampleRanges, topology: DataTopology) -> EpochSize:
    """Return the size of ``ranges`` under ``topology``; no communication is needed."""
    return _size(topology.owner[ranges.shard], ranges.stop - ranges.start, topology)


def uninterrupted_epoch_size(shard_sizes: Ints, topology: DataTopology) -> EpochSize:
    """Return :func:`epoch_size` of a whole epoch, from the shard sizes alone."""
    return _size(topology.owner, shard_sizes, topology)


def _size(owner: NDArray[np.int16], lengths: Ints, topology: DataTopology) -> EpochSize:
    """Return the size of parts with ``lengths`` samples and these owners, both (num_parts,)."""
    if topology.streams:
        seen = int(lengths[owner != UNASSIGNED].sum())
        read = -(-seen // topology.streams) * topology.streams
        steps = read // (topology.world_size * topology.batch_size)
        return EpochSize(seen, steps, read - seen, int(lengths.sum()) - seen)
    owned = owner >= 0
    node_samples = np.bincount(
        owner[owned], weights=lengths[owned], minlength=topology.num_nodes
    )  # (num_nodes,)
    replicated = int(lengths[owner == REPLICATED].sum())
    for node_rank in range(topology.num_nodes):
        first, stop = topology.replicated_slice(replicated, node_rank)
        node_samples[node_rank] += stop - first
    # All ranks take as many steps as the longest partition of the largest node needs.
    longest = -(-int(node_samples.max()) // topology.local_world_size)
    steps = (
        longest_schedule_steps(longest, topology.batch_size, len(topology.shapes)) if longest else 0
    )
    samples = int(node_samples.sum())
    read = steps * topology.batch_size * topology.local_world_size * topology.num_nodes
    return EpochSize(samples, steps, read - samples, int(lengths.sum()) - samples)
