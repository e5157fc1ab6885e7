"""An epoch of the whole data set, and what is left of it when the world changes within it.

A restart may bring other instances, or shards that are dealt otherwise. What was read until then
is a :class:`EpochSegment`, and the chunks that are left over after all segments are dealt out anew.
Nothing else has to be remembered for "each sample once an epoch" to hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.common.rng import Ints
from sm_train.entrypoints.data.batch_schedule import BatchSchedule, longest_schedule_steps
from sm_train.entrypoints.data.partition import (
    REPLICATED,
    UNASSIGNED,
    DataTopology,
    NodePartition,
    RankPartition,
    node_partition,
)
from sm_train.entrypoints.data.sample_ranges import SampleRanges, merge, split_shards

BatchShapes = Callable[[DataTopology, RankPartition], NDArray[np.int16] | None]
"""The number of the shape of each slot of a part, in a world that has several."""


def single_shape(_world: DataTopology, _part: RankPartition) -> None:
    """:data:`BatchShapes` of a world in which all batches are alike."""


@dataclass(frozen=True, eq=False)
class EpochSegment:
    """The first ``steps`` steps that ``world`` made of an epoch, or of what was left of it."""

    world: DataTopology
    steps: int


@dataclass(frozen=True)
class Epoch:
    """One epoch of a data set: ``samples[i]`` samples in shard ``i``, cut into chunks."""

    samples: Ints
    chunk: int
    seed: int
    number: int

    def whole(self, shards: Ints) -> SampleRanges:
        """All of ``shards``."""
        return split_shards(self.samples, self.chunk, shards)

    def left(
        self, segments: Iterable[EpochSegment], shapes: BatchShapes = single_shape
    ) -> SampleRanges:
        """What no process of ``segments`` has read."""
        pieces = self.whole(np.arange(len(self.samples)))
        for number, segment in enumerate(segments):
            world = segment.world
            left = [pieces.pick(world.owner[pieces.shard] == UNASSIGNED)]
            for instance in range(world.instances):
                line = self.line(pieces, world, number, instance)
                for process in range(world.processes):
                    part = line.part(process, world)
                    schedule = BatchSchedule(part, world.batch, shapes(world, part))
                    left.append(schedule.left(segment.steps))
            pieces = merge(left)
        return pieces

    def line(
        self, pieces: SampleRanges, world: DataTopology, segment: int, instance: int
    ) -> NodePartition:
        """The samples of ``pieces`` that one instance reads in the segment of this number."""
        return node_partition(pieces, world, instance, self.seed, self.number, segment)


@dataclass(frozen=True)
class EpochSize:
    """An epoch, or what is left of it, as all processes agree on it.

    ``samples`` are there to be read and ``steps`` read them. Processes with fewer than others
    fill up with samples of theirs that they have read already: ``repeated`` of all processes
    together. ``unseen`` samples lie in shards that no instance sees.
    """

    samples: int
    steps: int
    repeated: int
    unseen: int


def epoch_size(pieces: SampleRanges, world: DataTopology) -> EpochSize:
    """How ``pieces`` come out in ``world``: known to all before the first step."""
    return _balance(world.owner[pieces.shard], pieces.stop - pieces.start, world)


def uninterrupted_epoch_size(samples: Ints, world: DataTopology) -> EpochSize:
    """:func:`epoch_size` of a whole epoch, from the shards' numbers of samples alone."""
    return _balance(world.owner, samples, world)


def _balance(owner: NDArray[np.int16], lengths: Ints, world: DataTopology) -> EpochSize:
    own = owner >= 0
    each = np.bincount(owner[own], weights=lengths[own], minlength=world.instances)
    shared = int(lengths[owner == REPLICATED].sum())
    for instance in range(world.instances):
        first, behind = world.shared_range(shared, instance)
        each[instance] += behind - first
    largest = -(-int(each.max()) // world.processes)  # the longest part of the fullest instance
    steps = longest_schedule_steps(largest, world.batch, len(world.shapes)) if largest else 0
    total = int(each.sum())
    filled = steps * world.batch * world.processes * world.instances
    return EpochSize(total, steps, filled - total, int(lengths.sum()) - total)
