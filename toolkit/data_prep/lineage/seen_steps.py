"""Computes in which optimizer steps a stage has read a sample, from the records of its attempts.

The exact reader's order is a function of the recorded state, and with aspect buckets or a condition
also of rows of the index, so it is computed again; nothing is read of the shards. Samples drawn at
random may have been read in any step: that is an upper bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from sm_train.entrypoints.base.rng import Ints
from sm_train.entrypoints.data_loading.indexed_shards import IndexedShapes, IndexedShards
from sm_train.entrypoints.data_loading.sample_ranges import Mixture
from sm_train.entrypoints.data_loading.sampler import (
    BatchShapes,
    Sampler,
    SamplerState,
    single_batch_shape,
)
from sm_train.entrypoints.data_loading.shard_catalog import MixedShapes
from sm_train.entrypoints.lineage.data_record import Anchor, ChannelRecord, DataRecord, ShardTable
from sm_train.entrypoints.lineage.replacements import Replacements


@dataclass(frozen=True)
class Place:
    """A sample of a channel: the name of its shard and its number there."""

    channel: str
    shard: str
    sample: int


@dataclass(frozen=True)
class SeenSteps:
    """The steps of a stage that trained on a sample, ascending.

    If they are not exact, the sample was read in some of the steps from the first to the last of
    ``steps``, or in none: ``reason`` says why they are not known. ``until`` is the last step that
    is covered, that of the newest checkpoint.
    """

    steps: tuple[int, ...]
    until: int
    reason: str | None = None

    @property
    def exact(self) -> bool:
        """Whether these are the steps, and no others."""
        return self.reason is None


@dataclass(frozen=True, eq=False)
class Attempt:
    """The record of an attempt, the shards that it names, and the samples that it replaced."""

    record: DataRecord
    shards: Mapping[str, ShardTable] = field(repr=False)
    replacements: Replacements | None = None


@dataclass(frozen=True)
class _Segment:
    """Batches ``first`` to ``stop`` - 1 of an attempt; the one before the first ended ``step``.

    Steps after ``limit`` were repeated later, from an earlier checkpoint.
    """

    first: int
    stop: int
    step: int
    limit: int


FindShards = Callable[[ChannelRecord, ShardTable], IndexedShards | str]
"""Returns the shards of a channel as its index describes them, or why that is not known."""


def seen_steps(
    attempts: Sequence[Attempt],
    place: Place,
    until: int,
    removed: str | None,
    find_shards: FindShards = lambda channel, table: "they had no index",
) -> SeenSteps:
    """Return the steps up to ``until`` of a stage's attempts, oldest first, that read a sample.

    ``removed`` is when the sample was removed, in ISO 8601: attempts that started later skipped it.
    ``find_shards`` is asked where the order depends on rows of the index.
    """
    if any(attempt.record.accumulation is None for attempt in attempts):
        used = any(place.shard in attempt.shards[place.channel].names for attempt in attempts)
        began = removed is None or attempts[0].record.started < removed
        steps = (1, max(1, until)) if used and began else ()
        return SeenSteps(steps, until, "the steps are those of a script's own loop")
    counted: set[int] = set()
    reason = None
    for attempt, segments in zip(attempts, _segments(attempts, until), strict=True):
        if place.shard not in attempt.shards[place.channel].names:
            continue
        problem = _not_covered(attempt, segments)
        order = problem or _order(attempt, place, find_shards)
        if isinstance(order, str):
            reason = order
            if removed is None or attempt.record.started < removed:
                counted |= _all_steps(segments)
            continue
        counted |= set(_exact_steps(attempt, segments, order))
    if reason is not None and counted:
        return SeenSteps((min(counted), max(counted)), until, reason)
    return SeenSteps(tuple(sorted(counted)), until)


@dataclass(frozen=True, eq=False)
class _Order:
    """The order in which an attempt reads the samples of its shards.

    ``numbers`` are those of the sample's shard, several in a mixture, and ``sample`` its number
    among those that are read there; None if it is not selected.
    """

    state: SamplerState
    sizes: Ints
    shapes: BatchShapes
    mixture: Mixture | None
    numbers: tuple[int, ...]
    sample: int | None


def _order(attempt: Attempt, place: Place, find_shards: FindShards) -> _Order | str:
    """Return the order of an attempt that sees the sample's shard, or why it is not known."""
    record = attempt.record
    if record.state is None:
        return f"data.reader: {record.reader} draws samples at random"
    state = SamplerState.from_bytes(record.state)
    tables = [attempt.shards[channel.channel] for channel in record.channels]
    names = [channel.channel for channel in record.channels]
    source = names.index(place.channel)
    needed = [
        number
        for number, channel in enumerate(record.channels)
        if state.topology.shapes or (number == source and channel.where is not None)
    ]
    found = {number: find_shards(record.channels[number], tables[number]) for number in needed}
    option = "data.aspect_buckets" if state.topology.shapes else "data.where"
    for problem in found.values():
        if isinstance(problem, str):
            return f"{option}: the order depends on the index of the shards: {problem}"
    known = {number: each for number, each in found.items() if isinstance(each, IndexedShards)}
    shapes = [IndexedShapes(shards) for shards in known.values()]
    sizes = [table.sizes for table in tables if table.sizes is not None]
    assert len(sizes) == len(tables)  # the exact reader knows them
    number = tables[source].names.index(place.shard)
    sample = _number_among_selected(known.get(source), number, place.sample)
    weights = [channel.weight for channel in record.channels]
    if weights[0] is None:
        chosen = shapes[0] if state.topology.shapes else single_batch_shape
        return _Order(state, sizes[0], chosen, None, (number,), sample)
    mixture = Mixture(tuple(names), tuple(weight or 0.0 for weight in weights), tuple(sizes))
    first = int(mixture.first_shards[source])
    numbers = (first + copy * len(sizes[source]) + number for copy in range(mixture.copies[source]))
    copied = zip(sizes, mixture.copies, strict=True)
    return _Order(
        state,
        np.concatenate([np.tile(each, copies) for each, copies in copied]),
        MixedShapes(mixture, tuple(shapes)) if state.topology.shapes else single_batch_shape,
        mixture,
        tuple(numbers),
        sample,
    )


def _number_among_selected(shards: IndexedShards | None, number: int, sample: int) -> int | None:
    """Return a sample's number among those of its shard that are read; None if it is not."""
    selected = None if shards is None else shards.selected(number)
    if selected is None:
        return sample
    return int(selected[:sample].sum()) if selected[sample] else None


def _segments(attempts: Sequence[Attempt], until: int) -> list[list[_Segment]]:
    """Return the parts of each attempt between its anchors."""
    # Where any later attempt or rollback begins, what was trained beyond it was dropped.
    limit, all_segments = until, []
    for attempt in reversed(attempts):
        accumulation = attempt.record.accumulation or 1
        segments: list[_Segment] = []
        last = attempt.record.anchors[-1]
        end = last.batches + max(0, limit - last.step) * accumulation
        after = Anchor(end, limit, last.epoch, "")
        for anchor, following in reversed([*pairwise([*attempt.record.anchors, after])]):
            segments.append(_Segment(anchor.batches, following.batches, anchor.step, limit))
            limit = min(limit, anchor.step)
        all_segments.append(segments[::-1])
    return all_segments[::-1]


def _all_steps(segments: Sequence[_Segment]) -> set[int]:
    """Return the first and the last step of an attempt that counts."""
    counted = [segment for segment in segments if segment.step < segment.limit]
    if not counted:
        return set()
    return {counted[0].step + 1, max(segment.limit for segment in counted)}


def _not_covered(attempt: Attempt, segments: Sequence[_Segment]) -> str | None:
    """Return why it is not known which samples took the places of others; None if it is."""
    if attempt.record.state is None:
        return None  # there is no order that they depart from
    accumulation = attempt.record.accumulation or 1
    needed = max(
        min(segment.stop, segment.first + (segment.limit - segment.step) * accumulation)
        for segment in segments
    )
    covered = 0 if attempt.replacements is None else attempt.replacements.batches
    if covered >= needed:
        return None
    return "the samples that took the places of others are not recorded"


def _exact_steps(attempt: Attempt, segments: Sequence[_Segment], order: _Order) -> Iterator[int]:
    record, replacements = attempt.record, attempt.replacements
    assert record.accumulation is not None
    assert replacements is not None  # they are known
    if order.sample is None:
        return
    stop = segments[-1].stop
    # A batch may have the sample on several ranks, and have others instead on some of these.
    read = Counter(_planned_batches(order, order.sample, stop))
    read.update(replacements.used(order.numbers, order.sample).tolist())
    read.subtract(replacements.skipped(order.numbers, order.sample).tolist())
    for batch, times in read.items():
        if times <= 0 or batch >= stop:
            continue
        segment = next(part for part in segments if part.first <= batch < part.stop)
        step = segment.step + (batch - segment.first) // record.accumulation + 1
        if step <= segment.limit:
            yield step


def _planned_batches(order: _Order, sample: int, batches: int) -> Iterator[int]:
    """Yield the numbers of the batches of all ranks that have the sample by the order alone."""
    topology = order.state.topology
    for node_rank in range(topology.num_nodes):
        for local_rank in range(topology.local_world_size):
            sampler = Sampler(
                order.sizes, order.state, node_rank, local_rank, order.shapes, order.mixture
            )
            yield from sampler.batches_of(order.numbers, sample, batches)
