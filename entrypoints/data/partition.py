"""Who reads which samples of an epoch, in which order: pure arithmetic, nothing is read here.

An epoch's samples are cut into *chunks*, runs of neighbouring samples of one shard that are read
at once. Each instance takes the chunks of the shards that it sees, in an order of its own: its
*line*. The line is cut, to a sample, into one equal *part* for each of its processes. A process
goes through its part *window* by window; a window is held in memory and its samples are mixed.
So the place of any sample is computed from its position, and no position costs more than another.

:mod:`~.schedule` makes batches of a part, :mod:`~.epochs` says what happens when the world
changes. All numbers of samples are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.common.rng import Ints, seeded_permutation
from sm_train.entrypoints.data.sample_ranges import SampleRanges, merge

UNASSIGNED, REPLICATED = -1, -2
"""Values of :attr:`DataTopology.owner`: no instance sees the shard; every instance sees it."""

_LINE, _WINDOW, _FILLER = 1, 2, 3  # what a key is for


@dataclass(frozen=True, eq=False)
class DataTopology:
    """Instance ``owner[i]`` reads shard ``i``; each instance runs ``processes``.

    Of the shards that everybody sees each instance reads an equal range of samples. ``batch`` and
    ``window`` are samples of one process. ``shapes`` are the heights and widths of the batches,
    of which each has one; none where all are alike.
    """

    owner: NDArray[np.int16]
    instances: int
    processes: int
    batch: int
    window: int
    shapes: tuple[tuple[int, int], ...] = ()

    def shared_range(self, samples: int, instance: int) -> tuple[int, int]:
        """Which of ``samples`` that everybody sees are read by one instance."""
        return samples * instance // self.instances, samples * (instance + 1) // self.instances

    def same_as(self, other: DataTopology) -> bool:
        """Whether every process would go on with its own samples."""
        return self.numbers() == other.numbers() and np.array_equal(self.owner, other.owner)

    def numbers(self) -> tuple[object, ...]:
        """Everything but the owners."""
        return self.instances, self.processes, self.batch, self.window, self.shapes


@dataclass(frozen=True, eq=False)
class RankPartition:
    """One process's samples, in the order in which it reads them.

    A sample's place in that order is its *slot*: ``window`` slots after one another are a window.
    """

    pieces: SampleRanges
    window: int
    key: tuple[int, ...]

    @property
    def samples(self) -> int:
        return self.pieces.samples

    def locate(self, slots: Ints) -> tuple[Ints, Ints]:
        """Shards and samples at ``slots``."""
        return self.pieces.locate(self.positions(slots))

    def at(self, slots: Ints) -> SampleRanges:
        """The samples at ``slots``, in the order of the data set."""
        return merge([self.pieces.at(np.sort(self.positions(slots)))])

    def behind(self, slot: int) -> SampleRanges:
        """The samples from ``slot`` on: whole windows are not looked into, however many."""
        opened = min(-(-slot // self.window) * self.window, self.samples)
        rest = self.pieces.span(opened, self.samples)
        return merge([self.at(np.arange(min(slot, opened), opened)), rest])

    def slots_of(self, window: int) -> Ints:
        """The slots of one window; the last may be shorter."""
        return np.arange(window * self.window, min((window + 1) * self.window, self.samples))

    def positions(self, slots: Ints) -> Ints:
        """Where the samples at ``slots`` stand among :attr:`pieces`."""
        positions = np.empty_like(slots)
        windows = slots // self.window
        for window in np.unique(windows).tolist():
            first = window * self.window
            length = min(self.window, self.samples - first)
            here = windows == window
            mixed = seeded_permutation(length, *self.key, _WINDOW, window)
            positions[here] = first + mixed[slots[here] - first]
        return positions


@dataclass(frozen=True, eq=False)
class NodePartition:
    """One instance's chunks in the order in which its processes share them."""

    pieces: SampleRanges
    key: tuple[int, ...]

    def part(self, process: int, world: DataTopology) -> RankPartition:
        """The part of one process; those of an instance differ by one sample at most."""
        samples, processes = self.pieces.samples, world.processes
        first, behind = samples * process // processes, samples * (process + 1) // processes
        return RankPartition(self.pieces.span(first, behind), world.window, (*self.key, process))


def node_partition(
    pieces: SampleRanges, world: DataTopology, instance: int, *key: int
) -> NodePartition:
    """The samples of ``pieces`` that one instance reads, in the order that belongs to ``key``."""
    owner = world.owner[pieces.shard]
    shared = pieces.pick(owner == REPLICATED)
    first, behind = world.shared_range(shared.samples, instance)
    own = merge([pieces.pick(owner == instance), shared.span(first, behind)])
    key = (*key, instance)
    return NodePartition(own.pick(seeded_permutation(len(own.shard), *key, _LINE)), key)


def padding_partition(
    pieces: SampleRanges, world: DataTopology, process: int, *key: int
) -> RankPartition:
    """All of ``pieces`` mixed, for a process that has no part of its own in them."""
    key = (*key, process, _FILLER)
    mixed = pieces.pick(seeded_permutation(len(pieces.shard), *key, _LINE))
    return RankPartition(mixed, world.window, key)
