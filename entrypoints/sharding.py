"""Who reads which samples of an epoch, in which order: pure arithmetic, nothing is read here.

An epoch's samples are cut into *chunks*, runs of neighbouring samples of one shard that are read
at once. Each instance takes the chunks of the shards that it sees, in an order of its own: its
*line*. The line is cut, to a sample, into one equal *part* for each of its processes. A process
goes through its part *window* by window; a window is held in memory and its samples are mixed.
So the place of any sample is computed from its position, and no position costs more than another.

The world may change within an epoch: a restart with other instances, or with the shards dealt
otherwise. What was read until then is a :class:`Segment`, and the chunks that are left over after
all segments are dealt out anew. Nothing else has to be remembered for "once an epoch" to hold.

Shards are numbered over the whole data set. All numbers of samples and steps are exact; a step is
one batch of every process.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.order import Ints, permutation

NOBODY, EVERYBODY = -1, -2
"""Stand in :attr:`World.owner` for a shard that no instance sees, or that all of them share."""

_LINE, _WINDOW, _FILLER = 1, 2, 3  # what a key is for


@dataclass(frozen=True, eq=False)
class Pieces:
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

    def pick(self, which: NDArray[np.bool_] | Ints) -> Pieces:
        return Pieces(self.shard[which], self.start[which], self.stop[which])

    def span(self, first: int, behind: int) -> Pieces:
        """The samples ``first`` to ``behind`` - 1 of all."""
        if first >= behind:
            return self.pick(np.zeros(0, np.int64))
        low, high = np.searchsorted(self.ends, [first, behind - 1], side="right")
        part = self.pick(np.arange(low, high + 1))
        start, stop = part.start.copy(), part.stop.copy()
        stop[-1] -= self.ends[high] - behind
        start[0] += first - (self.ends[low - 1] if low else 0)
        return Pieces(part.shard, start, stop)

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Shard and number in it of the samples at ``positions``."""
        run = np.searchsorted(self.ends, positions, side="right")
        return self.shard[run], self.stop[run] - (self.ends[run] - positions)

    def at(self, positions: Ints) -> Pieces:
        """The samples at ``positions``, which ascend, neighbours joined again."""
        shard, sample = self.locate(positions)
        new = np.ones(len(shard), np.bool_)
        new[1:] = (shard[1:] != shard[:-1]) | (sample[1:] != sample[:-1] + 1)
        first = np.flatnonzero(new)
        last = np.append(first[1:], len(shard)) - 1
        return Pieces(shard[first], sample[first], sample[last] + 1)


def join(parts: Iterable[Pieces]) -> Pieces:
    """All runs of ``parts``, in the order of the data set."""
    pieces = list(parts)
    if not pieces:
        return Pieces(*(np.zeros(0, np.int64) for _ in range(3)))
    shard, start, stop = (
        np.concatenate([getattr(one, name) for one in pieces])
        for name in ("shard", "start", "stop")
    )
    return Pieces(shard, start, stop).pick(np.lexsort((start, shard)))


def cut(samples: Ints, chunk: int, shards: Ints) -> Pieces:
    """The chunks of ``shards``, whose numbers of samples are ``samples[shards]``."""
    counts = samples[shards]
    chunks = -(-counts // chunk)
    shard = np.repeat(shards, chunks)
    number = np.arange(int(chunks.sum())) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    start = number * chunk
    return Pieces(shard, start, np.minimum(start + chunk, samples[shard]))


@dataclass(frozen=True, eq=False)
class World:
    """Instance ``owner[i]`` reads shard ``i``; each instance runs ``processes``.

    Of the shards that everybody sees each instance reads an equal range of samples. ``batch`` and
    ``window`` are samples of one process.
    """

    owner: NDArray[np.int16]
    instances: int
    processes: int
    batch: int
    window: int

    def shared_range(self, samples: int, instance: int) -> tuple[int, int]:
        """Which of ``samples`` that everybody sees are read by one instance."""
        return samples * instance // self.instances, samples * (instance + 1) // self.instances

    def same_as(self, other: World) -> bool:
        """Whether every process would go on with its own samples."""
        numbers = (self.instances, self.processes, self.batch, self.window)
        others = (other.instances, other.processes, other.batch, other.window)
        return numbers == others and np.array_equal(self.owner, other.owner)


@dataclass(frozen=True, eq=False)
class Segment:
    """The first ``steps`` steps that ``world`` made of an epoch, or of what was left of it."""

    world: World
    steps: int


@dataclass(frozen=True, eq=False)
class Part:
    """One process's samples of a segment, in the order in which it reads them."""

    pieces: Pieces
    window: int
    key: tuple[int, ...]

    @property
    def samples(self) -> int:
        return self.pieces.samples

    def window_at(self, number: int) -> tuple[Ints, Ints]:
        """Shards and samples of the ``number``-th window, mixed; the last may be shorter."""
        first = number * self.window
        length = min(self.window, self.samples - first)
        return self.pieces.locate(first + self._mixed(number, length))

    def behind(self, read: int) -> Pieces:
        """The samples that are left when the first ``read`` positions were read."""
        if read >= self.samples:
            return join(())
        number, inside = divmod(read, self.window)
        first = number * self.window
        behind = min(first + self.window, self.samples)
        open_window = first + np.sort(self._mixed(number, behind - first)[inside:])
        return join([self.pieces.at(open_window), self.pieces.span(behind, self.samples)])

    def _mixed(self, number: int, length: int) -> Ints:
        return permutation(length, *self.key, _WINDOW, number)


@dataclass(frozen=True, eq=False)
class Line:
    """One instance's chunks in the order in which its processes share them."""

    pieces: Pieces
    key: tuple[int, ...]

    def part(self, process: int, world: World) -> Part:
        """The part of one process; those of an instance differ by one sample at most."""
        samples, processes = self.pieces.samples, world.processes
        first, behind = samples * process // processes, samples * (process + 1) // processes
        return Part(self.pieces.span(first, behind), world.window, (*self.key, process))

    def filler(self, process: int, world: World) -> Part:
        """The whole line, for a process that has no part of its own in it."""
        return Part(self.pieces, world.window, (*self.key, process, _FILLER))


@dataclass(frozen=True)
class Epoch:
    """One epoch of a data set: ``samples[i]`` samples in shard ``i``, cut into chunks."""

    samples: Ints
    chunk: int
    seed: int
    number: int

    def whole(self, shards: Ints) -> Pieces:
        """All of ``shards``."""
        return cut(self.samples, self.chunk, shards)

    def left(self, segments: Iterable[Segment]) -> Pieces:
        """What no process of ``segments`` has read."""
        pieces = self.whole(np.arange(len(self.samples)))
        for number, segment in enumerate(segments):
            world = segment.world
            read = segment.steps * world.batch
            left = [pieces.pick(world.owner[pieces.shard] == NOBODY)]
            for instance in range(world.instances):
                line = self.line(pieces, world, number, instance)
                for process in range(world.processes):
                    left.append(line.part(process, world).behind(read))
            pieces = join(left)
        return pieces

    def line(self, pieces: Pieces, world: World, segment: int, instance: int) -> Line:
        """The samples of ``pieces`` that one instance reads in the segment of this number."""
        owner = world.owner[pieces.shard]
        shared = pieces.pick(owner == EVERYBODY)
        first, behind = world.shared_range(shared.samples, instance)
        own = join([pieces.pick(owner == instance), shared.span(first, behind)])
        key = (self.seed, self.number, segment, instance)
        return Line(own.pick(permutation(len(own.shard), *key, _LINE)), key)


@dataclass(frozen=True)
class Balance:
    """An epoch, or what is left of it, as all processes agree on it.

    ``samples`` are there to be read and ``steps`` read them. Processes with fewer than others
    fill up with samples of theirs that they have read already: ``repeated`` of all processes
    together. ``unseen`` samples lie in shards that no instance sees.
    """

    samples: int
    steps: int
    repeated: int
    unseen: int


def balance(pieces: Pieces, world: World) -> Balance:
    """How ``pieces`` come out in ``world``: known to all before the first step."""
    owner = world.owner[pieces.shard]
    lengths = pieces.stop - pieces.start
    return _balance(owner, lengths, world)


def whole_balance(samples: Ints, world: World) -> Balance:
    """:func:`balance` of a whole epoch, from the shards' numbers of samples alone."""
    return _balance(world.owner, samples, world)


def _balance(owner: NDArray[np.int16], lengths: Ints, world: World) -> Balance:
    own = owner >= 0
    each = np.bincount(owner[own], weights=lengths[own], minlength=world.instances)
    shared = int(lengths[owner == EVERYBODY].sum())
    for instance in range(world.instances):
        first, behind = world.shared_range(shared, instance)
        each[instance] += behind - first
    largest = -(-int(each.max()) // world.processes)  # the longest part of the fullest instance
    steps = -(-largest // world.batch)
    total = int(each.sum())
    filled = steps * world.batch * world.processes * world.instances
    return Balance(total, steps, filled - total, int(lengths.sum()) - total)
